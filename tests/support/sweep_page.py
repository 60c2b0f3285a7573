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
BUDGET = 12
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
    """The page's beginning, up to the first table."""
    counts = Counter(row.outcome for row in rows.values())
    own = sum(row.outcome == WORKS and row.attention != KVKEEP for row in rows.values())
    return [
        "# Which models work",
        "",
        *_wrapped(
            "For each causal language model type of transformers, a tiny model with random weights "
            "in float32 was attached, and compared with itself unattached and without a cache. It "
            f"works if the results agree: the logits of a prompt of {PROMPT} tokens, at once and "
            f"in chunks (within {RELATIVE:g} of the largest logit, or, if transformers' own cache "
            f"differs by more, within twice its difference, up to {MOST_RELATIVE:g}), and the "
            "greedy text of one prompt and of a padded batch, or of each of its rows alone, if the "
            "model's text depends on padding. Only the kinds of layers in a type's "
            f"default config were tested; other kinds may be refused. Of {len(rows)} types: "
            + ", ".join(f"{kind} {counts[kind]}" for kind in OUTCOMES if counts[kind])
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
        "`no 3` means no, for the third of the [reasons](#reasons), which are the errors' texts.",
        "",
        *_item(
            "**configuration**: the tiny model. `2 full, 2 window 8; 4/2 heads of 8; 4 experts` "
            "means two layers with full attention and two with a sliding window of 8 tokens, 4 "
            "query and 2 kv heads of width 8, and 4 experts."
        ),
        *_item(
            f"**attention**: computed by `{KVKEEP}`, which reads the slots in place; or by the "
            f"model's `{_OWN}` code ({own} types), which gets all keys and values, decoded and in "
            "order, and works only with caches that keep all tokens."
        ),
        *_item(
            f"**window**: `{WINDOW}` runs, and a prompt gives the same result at once and in "
            f"chunks. **evict**: `{EVICT}` runs and keeps its budget. **encode**: `{ENCODE}` runs. "
            "Other windows, policies, storages and codecs are tested with some of these types."
        ),
        *_item(
            "**drafts**: greedy text is the same with and without prompt lookup; also with "
            "`window`, if attention is kvkeep's."
        ),
        *_item(
            "**save**: a cache with half of the prompt continues in the same way from a file and "
            "in two forks."
        ),
        *_item(
            "**join**: after two texts that were fed separately and [joined](blocks.md), the next "
            "tokens have the same logits as with keys and values that transformers computed for "
            "these positions; in models that add positions to their embeddings, each text keeps "
            "its own positions, from 0 on. The texts are longer than windows; in models with "
            "chunked attention, they are shorter than a chunk."
        ),
        *_item(
            "**pack**: in [one forward](batch.md) of several sequences of different lengths, each "
            "sequence has the same logits as alone. The greedy texts of a `Batch` are right for "
            "all these types; for types with no, a `Batch` computes its answers one by one."
        ),
        *_item(
            "**train**: `kvkeep.train.backward` computes the same gradients as plain autograd: "
            "with `keep_all`, in chunks, as one forward without a cache, and with "
            f"`{WINDOW}` and `{EVICT}` as all forwards with a cache (float64, within "
            f"{GRADIENT:g})."
        ),
        *_item(
            f"**compile**: with `attach(compile=True)` the logits of steps are right, and with "
            f"`{WINDOW}` the same as uncompiled. (This and `export` were tested with two layers, "
            "if two layers have all kinds.)"
        ),
        *_item(
            f"**export**: a program with `{FIXED}`, saved and loaded, computes the right logits "
            "for a prompt and for single tokens."
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
