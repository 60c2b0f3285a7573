"""A page as one HTML file that needs no other: its styles, scripts and data stand in it.

A page's template is an ordinary page of `assets/`: it refers to style sheets and scripts by the
names of their files there, and has an empty `<script type="application/json" id="data">`, which
its scripts read.
"""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvkeep.files.atomic import whole_file, write_all
from kvkeep.page import asset

_OWN = Path(__file__).with_name("assets")

_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.-]+)">')
_SCRIPT = re.compile(r'<script src="([\w.-]+)"></script>')
_DATA = '<script type="application/json" id="data"></script>'
_TITLE = "<title></title>"
_HEAD = '<meta charset="utf-8">'


def _asset(name: str) -> str:
    """The text of a file of this package's `assets/`, or of kvkeep's."""
    own = _OWN / name
    return own.read_text(encoding="utf-8") if own.exists() else asset(name)


def document(template: str, title: str, data: Mapping[str, Any]) -> str:
    """A page as one text of HTML.

    It can load nothing: its policy permits the styles and scripts that stand in it, by their
    hashes, and nothing else. So no text among the data can become code.

    Args:
        template: the name of a page in `assets/`.
        title: as plain text.
        data: JSON values, without NaN or infinities.
    """
    page = _asset(template)
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inlined(kind: str, name: str) -> str:
        text = "\n" + _asset(name)
        hashes[kind].append(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'")
        return f"<{kind}>{text}</{kind}>"

    page = _STYLE.sub(lambda found: inlined("style", found[1]), page)
    page = _SCRIPT.sub(lambda found: inlined("script", found[1]), page)
    allowed = (f"{kind}-src {' '.join(some)}" for kind, some in hashes.items())
    policy = "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"])
    # In a script of data only `<` could end the script, or begin a comment in it.
    escaped = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    for mark, filled in {
        _HEAD: f'{_HEAD}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        _TITLE: f"<title>{html.escape(title)}</title>",
        _DATA: _DATA.replace("></", f">{escaped}</"),
    }.items():
        before, _, after = page.partition(mark)
        page = before + filled + after
    return page


def write(path: Path, page: str) -> None:
    """Write a page to a file: all of it, or, if that fails, nothing.

    Raises:
        OSError: it cannot be written; a file that was there is unchanged.
    """
    with whole_file(path, sync=False) as file:
        write_all(file.fileno(), page.encode())
