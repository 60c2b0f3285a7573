"""The notebooks: they are what their sources give, and they run."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WRITER = runpy.run_path(str(ROOT / "tools" / "notebooks.py"))
NOTEBOOKS = sorted(WRITER["SOURCES"])


def test_all_are_tried():
    found = (path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").iterdir())
    assert sorted(name for name in found if name.endswith(".ipynb")) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_are_what_their_sources_give(name):
    written = (ROOT / name).read_text()
    assert written == WRITER["notebook"](WRITER["SOURCES"][name]), "run `make notebooks`"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_lead_somewhere(name):
    cells = json.loads((ROOT / name).read_text())["cells"]
    text = "".join(
        line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"]
    )
    links = re.findall(r"\]\((?!http)([^()#]+)", text)
    assert links
    for link in links:
        assert (ROOT / "notebooks" / link).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_run(name, tmp_path, monkeypatch):
    """Every cell, in a kernel of this environment; an error in one is raised here."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    book = nbformat.read(ROOT / name, as_version=4)
    client = NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert any(cell.get("outputs") for cell in book.cells)
