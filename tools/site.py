"""Hooks of mkdocs: pages from files outside docs/, their links, and the command line's reference.

A link is written for whoever reads the file where it lies, and is changed here to lead to the page
that is made of the file it names.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from textwrap import dedent
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click
from typer.main import get_command

import kvkeep
from kvkeep.cli.app import app
from kvkeep.cli.errors import summary

ROOT = Path(__file__).parent.parent
EXAMPLES = "examples"
COMMANDS = "reference/command-line.md"

_EXAMPLES = re.compile(r"^\x08\n(Examples?):\n((?: +kvkeep .*\n)+)", re.MULTILINE)
"""The end of a command's help, whose line breaks click keeps."""

_INCLUDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "src/kvkeep/host/contract.py": "reference/hosts.md",
    EXAMPLES: "examples.md",
}
"""File or directory of the repository -> the page that is made of it, or describes it."""

_SOURCES = {page: file for file, page in _INCLUDED.items() if file.endswith(".md")}

_EACH = re.compile(r"^::: each of (\S+)$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()#\s]+)(#[^()\s]*)?\)")
_NAME = re.compile(r"<code>(kvkeep(?:\.\w+)+)</code>")
_LINKED = re.compile(r"<a\b.*?</a>|<h\d\b.*?</h\d>|<pre\b.*?</pre>", re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    """Show the package's version at the foot of every page."""
    config.copyright = f"kvkeep {kvkeep.__version__}, Apache-2.0"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that do not lie in docs/."""
    texts = {page: (ROOT / file).read_text() for page, file in _SOURCES.items()}
    texts |= {_INCLUDED[EXAMPLES]: examples(), COMMANDS: command_line()}
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add the registered classes, and let links lead to pages instead of files."""
    markdown = with_each_part(markdown)
    written = page.file.src_uri not in (_INCLUDED[EXAMPLES], COMMANDS)
    return with_links_to_pages(markdown, page.file.src_uri) if written else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link public names in text to their reference, where they have one."""
    pieces, end = [], 0
    for kept in _LINKED.finditer(html):
        pieces += [_named(html[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join([*pieces, _named(html[end:])])


def _named(html: str) -> str:
    return _NAME.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)


def with_each_part(markdown: str) -> str:
    """The text of a page: `::: each of PACKAGE` becomes a directive for each of its `PARTS`."""

    def directives(found: re.Match[str]) -> str:
        kinds = (part.kind for part in import_module(found[1]).PARTS.values())
        options = "    options: {members: false, inherited_members: false}"
        return "\n\n".join(f"::: {found[1]}.{kind}\n{options}" for kind in kinds)

    return _EACH.sub(directives, markdown)


def with_links_to_pages(markdown: str, page: str) -> str:
    """The text of a page, by its path on the site, with links to the site's other pages. A link to
    a file that is no page becomes its label; one to nothing is left for mkdocs to report."""
    folder = PurePosixPath(_SOURCES.get(page, f"docs/{page}")).parent

    def changed(link: re.Match[str]) -> str:
        image, label, target, anchor = link.groups(default="")
        path = normpath(f"{folder}/{target}")
        found = _INCLUDED.get(path, path.removeprefix("docs/"))
        if found != path:
            return f"{image}[{label}]({relpath(found, PurePosixPath(page).parent)}{anchor})"
        return label if (ROOT / path).exists() else link[0]

    return _LINK.sub(changed, markdown)


def examples() -> str:
    """A page with each program of examples/."""
    text = "# Examples\n\nComplete programs, which the tests run.\n"
    for file in sorted((ROOT / EXAMPLES).glob("*.py")):
        text += f"\n## {file.stem}\n\n```python\n{file.read_text()}```\n"
    return text


def command_line() -> str:
    """A page with the help of every command."""
    command = get_command(app)
    with command.make_context("kvkeep", [], resilient_parsing=True) as context:
        text = get_docs_for_click(obj=command, ctx=context, name="kvkeep")
    text = _with_whole_sentences(text, command, "kvkeep")
    text = _EXAMPLES.sub(
        lambda found: f"**{found[1]}**:\n\n```console\n{dedent(found[2])}```\n", text
    )
    return text.replace("# `kvkeep`", "# Command line", 1)


def _with_whole_sentences(text: str, group: Any, name: str) -> str:
    """Lists of commands with links, and with all of the paragraph that typer cuts off."""
    for command in group.commands.values():
        path = f"{name} {command.name}"
        link = f"* [`{command.name}`](#{path.replace(' ', '-')})"
        cut = f"* `{command.name}`: {command.get_short_help_str()}\n"
        text = text.replace(cut, f"{link}: {summary(command)}\n", 1)
        if hasattr(command, "commands"):
            text = _with_whole_sentences(text, command, path)
    return text
