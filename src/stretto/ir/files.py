"""Read and write text files that users name; each failure is one clear line."""

from pathlib import Path

from stretto.ir.errors import TextError

LARGEST_FILE = 256 * 2**20  # bytes


def read_text(path: str | Path) -> str:
    """Read a UTF-8 file of at most `LARGEST_FILE` bytes, without a byte order mark; raise TextError if that fails."""
    try:
        with file_path(path).open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise TextError(f"{path} is larger than {LARGEST_FILE // 2**20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise TextError(f"{path} is not UTF-8 text") from None


def write_text(path: str | Path, text: str) -> None:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise TextError(f"cannot write {path}: a name in it is not valid text") from None
    try:
        file_path(path).write_bytes(data)
    except OSError as error:
        raise TextError(f"cannot write {path}: {error.strerror}") from None


def file_path(path: str | Path) -> Path:
    """Return a path; raise TextError if a file cannot have it."""
    if not isinstance(path, str | Path) or "\0" in str(path):
        raise TextError(f"{path!r:.80} is not the path of a file")
    return Path(path)
