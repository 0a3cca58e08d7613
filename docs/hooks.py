"""What `make docs` adds to mkdocs: the site has the repository's own paths, so that relative links work in both."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
ASSETS = ("docs/figures/*", "docs/style.css")
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")  # text, path, anchor
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the repository's pages, and add a page for each source file that they link to."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    paths = {path.relative_to(ROOT).as_posix(): path for pattern in (*PAGES, *ASSETS) for path in ROOT.glob(pattern)}
    for uri, path in sorted(paths.items()):
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    linked = {
        target for uri, path in paths.items() if path.suffix == ".md" for target in _linked(uri, path.read_text())
    }
    for uri in sorted(linked - set(paths)):
        if (ROOT / uri).is_file():
            content = _source_page(uri)
            files.append(File.generated(config, f"{uri}.md", content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def _source_page(uri: str) -> str:
    language = Path(uri).suffix[1:] or "text"
    return f"---\nsearch: {{exclude: true}}\n---\n# {uri}\n\n~~~~~~{language}\n{(ROOT / uri).read_text()}\n~~~~~~\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to source files into links to their pages, and links to folders into text."""
    del config
    if page.file.abs_src_path is None:
        return markdown  # the page of a source file
    folder = posixpath.dirname(page.file.src_uri)

    def relinked(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        uri = posixpath.normpath(posixpath.join(folder, target))
        if files.get_file_from_path(f"{uri}.md"):
            return f"[{text}]({target}.md)"
        return text if (ROOT / uri).is_dir() else match[0]

    parts = FENCE.split(markdown)
    for k in range(0, len(parts), 2):  # every other part is code
        part = LINK.sub(relinked, parts[k])
        # GitHub nests lists from two spaces on, Python-Markdown from four.
        parts[k] = re.sub(r"^ +", lambda spaces: spaces[0] * 2, part, flags=re.MULTILINE)
    return "".join(parts)


def _linked(uri: str, markdown: str) -> Iterator[str]:
    for _, target, _ in LINK.findall("".join(FENCE.split(markdown)[::2])):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(uri), target))


class PublicView(griffe.Extension):
    """Shows the package as its users see it."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Take `stretto.check` for the function, as Python does, and not for the module of the same name."""
        _show_examples(pkg)
        loader.resolve_aliases(implicit=True)  # the modules cannot be found afterwards
        for package in (pkg, pkg["schedules"]):
            for name, member in list(package.members.items()):
                found = member
                while (module := _module(found)) and name in module.members:
                    found = module.members[name]
                if found is not member and not _module(found):
                    package.set_member(name, griffe.Alias(name, found, parent=package))


def _module(of: griffe.Object | griffe.Alias) -> griffe.Module | None:
    if isinstance(of, griffe.Alias):
        of = of.final_target if of.resolved else of
    return of if isinstance(of, griffe.Module) else None


def _show_examples(of: griffe.Object) -> None:
    """Make code of the examples in docstrings: for Markdown, ">>>" is a quotation."""
    if of.docstring:
        of.docstring.value = DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", of.docstring.value)
    for member in of.members.values():
        if isinstance(member, griffe.Object):
            _show_examples(member)
