"""The documentation as a site: what mkdocs.yml and tools/site.py make of the documents."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from shutil import copytree

import pytest

ROOT = Path(__file__).parent.parent
SITE = runpy.run_path(str(ROOT / "tools" / "site.py"))
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?(https?://|//)")


@pytest.mark.parametrize(
    ("page", "link", "made"),
    [
        ("index.md", "![a](docs/measured.svg)", "![a](measured.svg)"),
        ("index.md", "[a](docs/store.md#b-c)", "[a](store.md#b-c)"),
        ("benchmarks.md", "[a](../docs/results.md)", "[a](results.md)"),
        ("results.md", "[`a/`](../benchmarks/README.md)", "[`a/`](benchmarks.md)"),
        ("hosts.md", "[a](../src/kvkeep/host/contract.py)", "[a](reference/hosts.md)"),
        ("reference/index.md", "[a](caches.md)", "[a](caches.md)"),
        ("hosts.md", "see [a](../tests/host).", "see a."),
        ("hosts.md", "[a](../tests/nothing)", "[a](../tests/nothing)"),
        ("index.md", "[a](docs/nothing.md)", "[a](nothing.md)"),
        ("index.md", "[a](https://docs/x.md)", "[a](https://docs/x.md)"),
    ],
)
def test_links_lead_to_pages(page, link, made):
    assert SITE["with_links_to_pages"](link, page) == made


def test_commands():
    text = SITE["command_line"]()
    assert "\b" not in text
    assert "**Example**:\n\n```console\nkvkeep doctor\n```\n" in text
    names = set(re.findall(r"^#+ `(.*)`$", text, re.MULTILINE))
    assert {"kvkeep serve", "kvkeep sessions export", "kvkeep bench op"} <= names
    links = re.findall(r"^\* \[`.*`\]\(#(.*)\): .*[^.]\.$", text, re.MULTILINE)
    assert {name.replace(" ", "-") for name in names} == set(links)
    assert "--max-new-tokens" in text


def build(directory, docs, monkeypatch):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    site = directory / "site"
    build(load_config("mkdocs.yml", docs_dir=str(docs), site_dir=str(site), strict=True))
    return site


@pytest.mark.slow
def test_a_site_loads_nothing_from_elsewhere(tmp_path, monkeypatch):
    site = build(tmp_path, ROOT / "docs", monkeypatch)
    pages = {path.relative_to(site): path.read_text() for path in site.rglob("*.html")}
    assert {Path("index.html"), Path("reference", "caches", "index.html")} <= set(pages)
    assert [str(path) for path, text in pages.items() if LOADED.search(text)] == []


@pytest.mark.slow
def test_broken_links_fail(tmp_path, monkeypatch):
    from mkdocs.exceptions import Abort

    docs = copytree(ROOT / "docs", tmp_path / "docs")
    (docs / "left-out.md").write_text("# A page outside the navigation\n")
    with (docs / "core.md").open("a") as page:
        page.write("\n[a](nothing.md) [b](tutorial.md#nothing) [c](../src/nothing.py)\n")
    with pytest.raises(Abort, match="4 warnings"):
        build(tmp_path, docs, monkeypatch)
