"""docs/models.md: what the sweep over transformers' causal language models found, as a page."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import kvkeep
from support.sweep_configs import TYPES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

WORKS = "works"
REFUSED = "refused by attach"
FAILS = "fails after attach"
WRONG = "wrong"
BROKEN = "broken without kvkeep"
NOT_BUILT = "not built here"
OUTCOMES = (WORKS, REFUSED, FAILS, WRONG, BROKEN, NOT_BUILT)

KVKEEP, YES = "kvkeep", "yes"

PROMPT, HALF, NEW = 24, 12, 8
BUDGET, WIDTH = 12, 8
WINDOW, EVICT, ENCODE = f"window:{BUDGET},sinks=2", f"h2o:{BUDGET}", "keep_all+int8"
FIXED = "keep_all@fixed:64"
RELATIVE, MOST_RELATIVE = 1e-4, 1e-3
"""Largest difference of logits, as a part of the largest logit; and where transformers' own cache
differs by more than the first, up to which twice its difference is allowed."""
GRADIENT = 1e-4
"""Largest difference of gradients, as a part of their Euclidean norm."""

_OWN, _NO = "own", "no"
_NEVER = re.compile(rf"(?:{_OWN}|{_NO}) (\d+)")


class Row(NamedTuple):
    """What became of a type. A feature that does not hold has the reason in place of `yes`, and
    so has `attention` if it is the model's own, in place of `kvkeep`."""

    configuration: str
    outcome: str
    attention: str = ""
    window: str = ""
    evict: str = ""
    encode: str = ""
    drafts: str = ""
    save: str = ""
    join: str = ""
    pack: str = ""
    train: str = ""
    compile: str = ""
    export: str = ""
    why: str = ""

    @property
    def features(self) -> tuple[str, ...]:
        """The cells from `window` to `export`."""
        return self[_FIRST:-1]

    @property
    def incomplete(self) -> bool:
        """Whether a feature was not compared, though nothing is wrong before it, or was not as it
        should be."""
        return self.outcome in (FAILS, WRONG) or (self.outcome == WORKS and "" in self.features)


_FIRST = Row._fields.index("window")
FEATURES = Row._fields[_FIRST:-1]
_COLUMNS = ("type", "configuration", "attention", *FEATURES)


def written(rows: dict[str, Row]) -> str:
    """docs/models.md."""
    rows = dict(sorted(rows.items()))
    working = {kind: row for kind, row in rows.items() if row.outcome == WORKS}
    others = {kind: row for kind, row in rows.items() if row.outcome != WORKS}
    reasons = list(
        dict.fromkeys(
            cell
            for row in working.values()
            for cell in (row.attention, *row.features)
            if cell not in ("", KVKEEP, YES)
        )
    )
    number = {reason: str(index) for index, reason in enumerate(reasons, 1)}

    def cells(row: Row) -> list[str]:
        own = row.attention if row.attention == KVKEEP else f"{_OWN} {number[row.attention]}"
        found = [x if x in ("", YES) else f"{_NO} {number[x]}" for x in row.features]
        return [row.configuration, own, *found]

    lines = [
        *_top(rows),
        *_table(_COLUMNS, {kind: cells(row) for kind, row in working.items()}),
        "",
        "## Reasons",
        "",
        *(f"{index}. {reason}" for reason, index in number.items()),
        "",
        "## Types that do not work",
        "",
        *_table(
            ("type", "configuration", "outcome", "reason"),
            {kind: [row.configuration, row.outcome, row.why] for kind, row in others.items()},
        ),
    ]
    return "\n".join(lines) + "\n"


def rows_of(page: str) -> dict[str, Row]:
    """The rows of a page that `written` returned."""
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE))
    found = {}
    for line in page.splitlines():
        kind, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if kind not in TYPES:
            continue
        if len(cells) == len(_COLUMNS) - 1:
            configuration, *rest = [
                reasons[match[1]] if (match := _NEVER.fullmatch(cell)) else cell for cell in cells
            ]
            found[kind] = Row(configuration, WORKS, *rest)
        else:
            configuration, outcome, why = cells
            found[kind] = Row(configuration, outcome, why=why)
    return found


def _top(rows: dict[str, Row]) -> list[str]:
    """What stands above the tables."""
    counts = Counter(row.outcome for row in rows.values())
    own = sum(row.outcome == WORKS and row.attention != KVKEEP for row in rows.values())
    return [
        "# Which models work",
        "",
        *_wrapped(
            "Each causal language model type of transformers was built tiny, with random weights "
            "in float32, attached, and compared with itself unattached and without a cache. It "
            f"works if these agree: the logits of a prompt of {PROMPT} tokens, at once and in "
            f"chunks (within {RELATIVE:g} of the largest logit, or, where transformers' own cache "
            f"differs by more, twice that, up to {MOST_RELATIVE:g}), and the greedy text of one "
            "prompt and of a padded batch. Layers are of the kinds in a type's default config: "
            f"others may be refused. Of {len(rows)} types: "
            + ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOMES if counts[kind])
            + "."
        ),
        "",
        *_wrapped(
            "Written by `python tests/support/sweep_models.py` with kvkeep "
            f"{kvkeep.__version__}, torch {torch.__version__.partition('+')[0]} and transformers "
            f"{transformers.__version__}."
        ),
        "",
        "## Types that work",
        "",
        "`no 3` is no, for the third of the [reasons](#reasons), which is what the error says.",
        "",
        *_item(
            "**configuration**: what was built. `2 full, 2 window 8; 4/2 heads of 8; 4 experts` "
            "is two layers of full attention and two with a sliding window of 8 tokens, 4 query "
            "and 2 kv heads of width 8, and 4 experts."
        ),
        *_item(
            f"**attention**: `{KVKEEP}` computes it, from the slots where they lie; or it is the "
            f"model's `{_OWN}` ({own} types), which gets all keys and values, decoded and in "
            "order, and takes only caches that keep all."
        ),
        *_item(
            f"**window**: `{WINDOW}` runs, and a prompt gives the same at once and in chunks. "
            f"**evict**: `{EVICT}` runs and keeps to its budget. **encode**: `{ENCODE}` runs. The "
            "other windows, policies, storages and codecs are tested on some of these types."
        ),
        *_item(
            "**drafts**: greedy text with prompt lookup is the text without; with `window` too, if "
            "attention is kvkeep's."
        ),
        *_item(
            "**save**: a cache that holds half of the prompt continues the same from a file, and "
            "in two forks."
        ),
        *_item(
            "**join**: after two texts that were fed apart and [joined](blocks.md), the next "
            "tokens have the logits that they have after transformers' own keys and values for "
            "these positions. The texts are shorter than any window."
        ),
        *_item(
            "**pack**: [one forward](batch.md) of several sequences of different lengths gives "
            "each the logits that it gets alone. The greedy texts of a `Batch` are right for all "
            "these types; where there is a no, it computes its answers one by one."
        ),
        *_item(
            "**train**: `kvkeep.train.backward` gives the gradients of plain autograd: with "
            "`keep_all`, in chunks, those of one forward without a cache, and with "
            f"`{WINDOW}` and `{EVICT}` those of all forwards through a cache (float64, within "
            f"{GRADIENT:g})."
        ),
        *_item(
            f"**compile**: the logits of steps in the graph of `attach(compile=True)` are right, "
            f"and with `{WINDOW}` those of steps without a graph. (This and the next with two "
            "layers, if two have all kinds.)"
        ),
        *_item(
            f"**export**: a program with `{FIXED}`, saved and loaded, gives the right logits for a "
            "prompt and for single tokens."
        ),
        "",
    ]


def _table(columns: tuple[str, ...], rows: dict[str, list[str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(f"| {' | '.join([kind, *cells])} |" for kind, cells in rows.items()),
    ]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _item(text: str) -> list[str]:
    return _wrapped(f"- {text}", "  ")
