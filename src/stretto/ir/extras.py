"""Optional packages, and the extras that install them."""

from importlib import import_module

from stretto.ir.errors import MissingPackageError


def require(package: str, *, extra: str, what: str) -> None:
    """Raise MissingPackageError, with the command that installs it, if a package is missing."""
    try:
        import_module(package)
    except ModuleNotFoundError:
        raise MissingPackageError(f"{what} needs {package}: pip install 'stretto[{extra}]'") from None
