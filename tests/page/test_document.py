"""Pages of one file: complete, inert whatever the data say, and written whole or not at all."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from kvkeep_lab.page.document import document, write

TEMPLATES = ["eval.html", "inspect.html"]
HOSTILE = "</script><script>alert(1)</script><!-- <script> & \"'\u2028\ud800"


class Read(HTMLParser):
    """Tags with their attributes, and the texts of titles and scripts, as a browser sees them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("title", "script", "style"):
            self.texts.append([tag, ""])

    def handle_data(self, data):
        if self.texts and self.cdata_elem in (self.texts[-1][0], None):
            self.texts[-1][1] += data

    def of(self, tag):
        return [text for name, text in self.texts if name == tag]


@pytest.mark.parametrize("template", TEMPLATES)
def test_data_and_title_stay_text(template):
    usual = Read(document(template, "", {}))
    page = document(template, HOSTILE.replace("\ud800", ""), {"text": HOSTILE})
    found = Read(page)
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in usual.tags]
    assert found.of("title")[0].strip().startswith(HOSTILE[:20])
    assert json.loads(found.of("script")[0]) == {"text": HOSTILE}
    assert "<!--" not in found.of("script")[0]  # after it, `<script>` hides the script's end


@pytest.mark.parametrize("template", TEMPLATES)
def test_nothing_is_loaded(template):
    page = document(template, "title", {})
    for _, attributes in Read(page).tags:
        assert not {"src", "href", "srcset", "style"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    assert set(re.findall(r"https?:[^\s\"']*", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bfetch\(|\bimport\(", page)


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "page.html"
    write(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write(file, "new \ud800")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]
