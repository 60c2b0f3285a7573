"""The Debian Administrator's Handbook as texts to fine-tune on: `python handbook.py DIRECTORY`.

Reads the pages that `apt-get install debian-handbook` installs (or those in `--html`), and writes
train.jsonl, the pages in order except the last sixteenth of the text, and held-out.jsonl, the rest.
"""

import argparse
import json
import re
from html.parser import HTMLParser
from pathlib import Path

NAVIGATION = ("", "Download the ebook", "Prev", "Next", "The Debian Administrator's Handbook")


class Text(HTMLParser):
    """Extracts the text of a page without its navigation, with a line for each paragraph."""

    BLOCKS = frozenset("p div h1 h2 h3 h4 h5 li dt dd pre tr br".split())

    def __init__(self):
        super().__init__()
        self.parts, self.skipped = [], 0

    def handle_starttag(self, tag, attributes):
        if self.skipped or tag in ("head", "script") or ("class", "docnav") in attributes:
            self.skipped += tag not in ("br", "img", "link", "meta", "hr", "input")
        elif tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.skipped = max(0, self.skipped - 1) if self.skipped else 0

    def handle_data(self, data):
        if not self.skipped:
            self.parts.append(data)


def text_of(page: Path) -> str:
    parser = Text()
    parser.feed(page.read_text(encoding="utf-8"))
    text = re.sub(r"[ \t\xa0]+", " ", "".join(parser.parts))
    lines = [line for line in re.split(r"\s*\n\s*", text.strip()) if line not in NAVIGATION]
    return "\n".join(lines)


def pages_of(html: Path) -> list[Path]:
    links = re.findall(r'href="([\w.-]+\.html)', (html / "index.html").read_text(encoding="utf-8"))
    return [html / name for name in dict.fromkeys(links) if (html / name).is_file()]


def main() -> None:
    default = Path("/usr/share/doc/debian-handbook/html/en-US")
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("directory", type=Path)
    options.add_argument("--html", type=Path, default=default)
    given = options.parse_args()
    pages = [text_of(page) for page in pages_of(given.html)]
    left, cut = sum(map(len, pages)) / 16, len(pages)
    while left > 0:
        cut -= 1
        left -= len(pages[cut])
    for name, some in (("train", pages[:cut]), ("held-out", pages[cut:])):
        line = json.dumps({"text": "\n\n".join(some)})
        (given.directory / f"{name}.jsonl").write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
