"""Read and write text files that users name; each failure is one clear line."""

from pathlib import Path

from stretto.ir.errors import TextError

LARGEST_FILE = 256 * 2**20  # bytes


def read_text(path: str | Path) -> str:
    """Read a UTF-8 file of at most `LARGEST_FILE` bytes; raise TextError if that fails."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise TextError(f"{path} is larger than {LARGEST_FILE // 2**20} MiB")
        return data.decode()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TextError(f"{path} is not UTF-8 text") from None


def write_text(path: str | Path, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TextError(f"cannot write {path}: {error.strerror}") from None
