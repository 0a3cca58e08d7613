"""The reference has every public name once, and every link and anchor in the documentation leads somewhere."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
MODULES = ("stretto", "stretto.schedules", "stretto.costs", "stretto.layers", "stretto.model", "stretto.moe")
MODULES += ("stretto.weights", "stretto.onegpu")
FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((<[^>]*>|[^)\s]+)(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)


def file_of(module: str) -> Path:
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text())


def names(module: str) -> set[str]:
    """Return the names that a module defines or imports, without importing it: some need PyTorch."""
    found = set()
    for node in ast.walk(tree(module)):
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.alias():
                found.add(node.asname or node.name)
    return found


def public_names(module: str) -> set[str]:
    """Return a module's `__all__`; without one, what it imports `as` itself."""
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    imported = (alias for node in tree(module).body if isinstance(node, ast.ImportFrom) for alias in node.names)
    found = {alias.name for alias in imported if alias.asname == alias.name}
    # The functions of costs are for other rooms; load_costs is in `stretto`.
    return {name for name in found if name[0].isupper() and not name.isupper()} if module == "stretto.costs" else found


def entries() -> list[str]:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]


def exists(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return file_of(name).exists() or (file_of(module).exists() and last in names(module))


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(entries())
    missing = {
        f"{module}.{name}"
        for module in MODULES
        for name in public_names(module)
        if not {f"{module}.{name}", f"stretto.{name}"} & listed  # stretto.Costs is stretto.costs.Costs
    }
    assert missing == set(), "write `::: name` on a page in docs/reference"


def test_every_entry_of_the_reference_exists_once() -> None:
    assert [name for name in entries() if not exists(name)] == []
    assert [name for name, count in Counter(entries()).items() if count > 1] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = Counter(re.findall(r"[\w./-]+\.md\b", (ROOT / "mkdocs.yml").read_text()))
    assert listed == Counter(path.relative_to(ROOT).as_posix() for path in PAGES)


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = path.read_text()
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6} +(.*?)[ #]*$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def links(text: str) -> Iterator[str]:
    for inline, reference in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        yield (inline or reference).strip("<>")


def dead_links(path: Path, text: str) -> list[str]:
    dead = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / unquote(file)).resolve() if file else path
        if link.startswith("/") or not target.exists() or not target.is_relative_to(ROOT):
            dead.append(f"{path.relative_to(ROOT)}: {link} does not exist")
        elif anchor and (target.suffix != ".md" or unquote(anchor) not in anchors(target)):
            dead.append(f"{path.relative_to(ROOT)}: {link} has no such heading")
    return dead


def test_every_link_leads_somewhere() -> None:
    assert [dead for path in PAGES for dead in dead_links(path, path.read_text())] == []


@pytest.mark.parametrize(
    "link",
    [
        "[a](docs/no.md)",
        "[a](docs/design.md#no)",
        "[`a`](#no)",
        "![a](docs/figures/no.png)",
        "[a]: docs/no.md",
        "[a](/docs)",
    ],
)
def test_dead_links_are_found(link: str) -> None:
    readme = ROOT / "README.md"
    assert (
        len(dead_links(readme, f"{link}\n```\n[in code](no.md)\n```\n[fine](docs/design.md#words) `[code](no.md)`"))
        == 1
    )


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What `check` proves\n```\n# code\n```\n## F&B, in µs\n## Words\n## Words ##\n### [Link](x.md): 1.5\n"
    )
    assert anchors(page) == {"what-check-proves", "fb-in-µs", "words", "words-1", "link-15"}
