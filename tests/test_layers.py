"""The rooms of the package, in reading order; a room imports only itself and rooms above it."""

import ast
from pathlib import Path

import stretto

ROOMS = [
    "ir",
    "layers",
    "memory",
    "schedules",
    "costs",
    "program",
    "timeline",
    "check",
    "simulate",
    "choose",
    "draw",
    "cuda",
    "wire",
    "onegpu_broker",
    "execute",
    "moe",
    "pipeline",
    "onegpu",
    "model",
    "weights",
    "doctor",
    "cli",
]
SOURCE = Path(stretto.__file__).parent


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "stretto" and len(parts) > 1 else None


def test_every_file_is_in_a_room() -> None:
    found = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    assert found == {*ROOMS, "__init__", "__main__"}


def test_rooms_import_only_from_rooms_above() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room not in ROOMS:
            continue
        allowed = set(ROOMS[: ROOMS.index(room) + 1])
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = (
                    [f"stretto.{alias.name}" for alias in node.names]
                    if node.module == "stretto"
                    else [node.module or ""]
                )
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name == "stretto":
                    wrong.append(f"{path.name} imports the package itself")
                if (imported := room_of(name)) and imported not in allowed | (
                    {"__version__"} if room == "cli" else set()
                ):
                    wrong.append(f"{room}/{path.name} imports {name}")
    assert wrong == []


def test_ir_needs_no_numpy() -> None:
    for room in ("ir", "schedules"):
        for path in (SOURCE / room).glob("*.py"):
            assert "numpy" not in path.read_text(), f"{path} is plain data"
