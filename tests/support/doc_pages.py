"""Pages of documentation as blocks: code, the file it is saved as, and the output that the page shows for it."""

import contextlib
import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from stretto.cli.main import app

ROOT = Path(__file__).parent.parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))]
ADDRESSES = "unix:///run/user/1000"
"""Where receivers listen on the pages."""


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    file: str = ""
    """The file that the page says to save it as, in a line before it that ends in "as `name.py`:"."""
    shown: str | None = None
    """The output that the page shows: a block of text right after it, or after one short line that ends in a colon."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def lines(self) -> list[str]:
        """The commands of a block of shell lines, without comments."""
        joined = self.code.replace("\\\n", " ").splitlines()
        return [line for line in joined if shlex.split(line, comments=True)]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    fences = list(re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    ends = [0, *(fence.end() for fence in fences)]
    between = [text[end : fence.start()].strip() for end, fence in zip(ends, fences, strict=False)]
    found = []
    for index, fence in enumerate(fences):
        language, code = fence.groups()
        saved = re.search(r"as `([\w.]+)`:$", between[index])
        shown = None
        if fences[index + 1 :] and fences[index + 1][1] == "text" and re.fullmatch(r"(.{,60}:)?", between[index + 1]):
            shown = fences[index + 1][2]
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, language, code, saved[1] if saved else "", shown))
    return found


def differences(shown: str, printed: str, *, measured: bool = False) -> list[str]:
    """How the output that a page shows differs from what was printed; a line with only "…" stands for any lines.

    Of measured output, only what does not depend on the machine is compared: which lines there are, without numbers,
    units of time, generated text and what is drawn.
    """
    if measured:
        expected, found = (
            {_unmeasured(line) for line in text.splitlines() if line.strip()} for text in (shown, printed)
        )
        missing = [f"not printed: {line}" for line in sorted(expected - found - {"…"})]
        return missing + [f"not shown: {line}" for line in sorted(found - expected) if "…" not in expected]
    pattern = "\n".join(r"(?:.*\n)*?.*" if line == "…" else re.escape(line) for line in shown.splitlines())
    if re.fullmatch(pattern + r"\n?", printed):
        return []
    return [f"the page shows\n{shown}but this was printed\n{printed}"]


def _unmeasured(line: str) -> str:
    line = re.sub(r"(?<=: )(['\"]).*\1", "TEXT", line)
    if drawn := re.fullmatch(r"(\d+(?: \w+)?) +[^ ]*[─·][^ ]*", line):
        return drawn[1]
    line = re.sub(r"\b[0-9a-f]{8}\b|-?\d+(\.\d+)?(e-?\d+)?", "#", line)
    line = re.sub(r"# (µs|ms|s)\b", "# of time", re.sub(r"\bmode \w+", "mode #", line))
    return re.sub(r"\s+", " ", line).strip()


def run_python(block: Block, names: dict[str, Any]) -> str:
    """Run code with these names; return what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(block.code, str(block), "exec", dont_inherit=True), names)
    return output.getvalue()


def parse_command(line: str, *, whole: bool = True) -> None:
    """Raise if the arguments of "stretto …" are none that it takes; if the line is not `whole`, some may be missing."""
    _, *arguments = shlex.split(line, comments=True)
    command: Any = typer.main.get_command(app)
    while arguments and arguments[0] in getattr(command, "commands", {}):
        name, *arguments = arguments
        command = command.commands[name]
    assert not hasattr(command, "commands") or not arguments, f"there is no such command: {line}"
    try:
        command.make_context(command.name, arguments).close()
    except Exception as error:
        if whole or type(error).__name__ != "MissingParameter":
            raise AssertionError(f"{line}: {error}") from error
