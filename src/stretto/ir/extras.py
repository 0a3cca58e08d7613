"""Packages that only a part of the system needs, by the extra that installs them."""

from importlib import import_module

from stretto.ir.errors import MissingPackageError


def demand(package: str, *, extra: str, what: str) -> None:
    """Refuse, with the way out, where a package is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError:
        raise MissingPackageError(f"{what} needs {package}: pip install 'stretto[{extra}]'") from None
