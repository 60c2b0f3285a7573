"""Every causal language model of transformers, tiny and random: does a kvkeep cache serve it?

    python tests/support/sweep_models.py            # all types; writes docs/models.md
    python tests/support/sweep_models.py llama opt  # these; replaces their rows

Each type runs in a process of its own, with a time limit.
"""

from __future__ import annotations

import multiprocessing
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvkeep
from kvkeep import Cache, attach, detach, load
from kvkeep.errors import KVKeepError, UnsupportedError

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.sweep_configs import TYPES, model_of

WORKS = "works"
REFUSED = "refused by attach"
FAILS = "fails after attach"
WRONG = "wrong"
BROKEN = "broken without kvkeep"
NOT_BUILT = "not built here"
OUTCOMES = (WORKS, REFUSED, FAILS, WRONG, BROKEN, NOT_BUILT)

KVKEEP, OWN = "kvkeep", "own"
"""Who computes the attention of an attached model."""

YES, NO = "yes", "no"
SECONDS = 180
PROMPT, HALF, NEW = 24, 12, 8
CHUNKS = (5, 1, 11, 7)
PADS = (6, 1, 0)
BUDGET = 12
WINDOW, EVICT, ENCODE = f"window:{BUDGET},sinks=2", f"h2o:{BUDGET}", "keep_all+int8"
DRAFTED = 3
RELATIVE, MOST_RELATIVE = 1e-4, 1e-3
"""Largest difference of logits, as a part of the largest logit; and where transformers' own cache
differs by more than the first, up to which twice its difference is allowed."""


class Row(NamedTuple):
    """What became of a type: an outcome, who computes its attention, which features hold, and the
    reasons for what does not."""

    outcome: str
    attention: str = ""
    window: str = ""
    evict: str = ""
    encode: str = ""
    drafts: str = ""
    save: str = ""
    why: str = ""


# -- what is compared -----------------------------------------------------------------------


def row_of(kind: str) -> Row:
    """Build a type, attach it, and compare it with itself unattached and without a cache."""
    try:
        model = model_of(kind)
    except Exception as error:
        return _refused_whole(kind) or Row(NOT_BUILT, why=_said(error))
    try:
        attach(model)
    except UnsupportedError as error:
        return Row(REFUSED, why=_reason(error))
    except Exception as error:
        return Row(FAILS, why=f"attach: {_said(error)}")
    detach(model)
    try:
        expected = _Expected(model)
    except Exception as error:
        return Row(NOT_BUILT, why=f"unattached it raises {_said(error)}")
    with attach(model) as attachment:
        found = Row(WORKS, KVKEEP if attachment.attention else OWN)
        for what, compare in _comparisons(model, expected):
            difference = _tried(compare)
            if difference and expected.no_cache:
                return Row(BROKEN, why=f"{expected.no_cache}; attached, {what}: {difference[1]}")
            if difference:
                return found._replace(outcome=difference[0], why=f"{what}: {difference[1]}")
        reasons = [attachment.own]
        for feature, compare in _features(model, expected, attachment.own):
            try:
                difference = _tried(compare, refusals=True)
            except UnsupportedError as error:
                found = found._replace(**{feature: NO})
                if not (attachment.own and feature in ("window", "evict")):
                    reasons.append(f"{feature}: {_reason(error)}")
                continue
            if difference:
                return found._replace(outcome=difference[0], why=f"{feature}: {difference[1]}")
            found = found._replace(**{feature: YES})
    return found._replace(why="; ".join(filter(None, reasons)))


def _refused_whole(kind: str) -> Row | None:
    """A type that is refused as its config stands, without weights."""
    try:
        with torch.device("meta"):
            model = getattr(transformers, TYPES[kind])(CONFIG_MAPPING[kind]())
        attach(model)
    except UnsupportedError as error:
        return Row(REFUSED, why=_reason(error))
    except Exception:
        return None
    return None


class _Expected:
    """What a model gives unattached, without a cache."""

    def __init__(self, model: Any) -> None:
        drawn = torch.Generator().manual_seed(1)
        ids = torch.randint(2, 96, (len(PADS), PROMPT), generator=drawn)
        ids[2, HALF:] = ids[2, :HALF]  # so that there are tokens to draft
        mask = torch.ones_like(ids)
        for row, pads in enumerate(PADS):
            mask[row, :pads] = 0
        self.one = {"input_ids": ids[2:]}
        self.batch = {"input_ids": ids * mask, "attention_mask": mask}
        with torch.no_grad():
            self.logits = model(**self.one, use_cache=False).logits
        if not bool(self.logits.isfinite().all()):
            raise ValueError("its logits are not finite")
        self.near = self._near(model)
        self.texts = [_text(model, x, use_cache=False) for x in (self.one, self.batch)]
        self.no_cache = self.no_drafts = ""
        try:
            if _different_text(_text(model, self.one), self.texts[0]):
                self.no_cache = "transformers' own cache changes its text"
        except Exception as error:
            self.no_cache = f"with transformers' own cache it raises {_said(error)}"
        try:
            _text(model, self.one, prompt_lookup_num_tokens=DRAFTED)
        except Exception as error:
            self.no_drafts = f"unattached it raises {_said(error)}"

    def _near(self, model: Any) -> float:
        """The largest difference of logits that rounding explains."""
        scale = float(self.logits.abs().max())
        try:
            found = _fed(model, DynamicCache(config=model.config), self.one, CHUNKS)
        except Exception:
            return RELATIVE * scale
        twice = 2 * float((found - self.logits).abs().max())
        return twice if RELATIVE * scale < twice <= MOST_RELATIVE * scale else RELATIVE * scale

    def different(self, found: Tensor, expected: Tensor | None = None) -> str:
        """How logits differ from those of the whole prompt, or from others; empty if they do
        not."""
        expected = self.logits if expected is None else expected
        off, scale = float((found - expected).abs().max()), float(expected.abs().max())
        return "" if off <= self.near else f"logits off by {off:.2g} at {scale:.2g}"


Comparison = tuple[str, Callable[[], str]]
"""What is compared, and a function that returns the difference: empty if there is none."""


def _comparisons(model: Any, expected: _Expected) -> Iterator[Comparison]:
    """What must hold for every type that works."""

    def text(inputs: dict[str, Any], greedy: Tensor) -> str:
        cache = Cache(model)
        found = _text(model, inputs, past_key_values=cache)
        assert cache.fed == PROMPT + NEW - 1, "no cache was used"
        return _different_text(found, greedy)

    def logits(*chunks: int) -> str:
        return expected.different(_fed(model, Cache(model), expected.one, chunks))

    yield "logits", logits
    yield "logits in chunks", lambda: logits(*CHUNKS)
    yield "greedy text", lambda: text(expected.one, expected.texts[0])
    yield "padded batch", lambda: text(expected.batch, expected.texts[1])


def _features(model: Any, expected: _Expected, own: str) -> Iterator[Comparison]:
    """What may be refused, with a reason."""

    def window() -> str:
        at_once, chunked = (
            _fed(model, Cache(model, WINDOW), expected.one, chunks)
            for chunks in ((PROMPT,), CHUNKS)
        )
        return expected.different(chunked, at_once)

    def evict() -> str:
        cache = Cache(model, EVICT)
        _text(model, expected.batch, past_key_values=cache)
        return "" if cache.length <= BUDGET else f"{cache.length} slots for {BUDGET}"

    def encode() -> str:
        cache = Cache(model, ENCODE)
        _text(model, expected.batch, past_key_values=cache)
        assert cache.fed == PROMPT + NEW - 1, "no cache was used"
        return ""

    def drafts() -> str:
        if expected.no_drafts:
            raise UnsupportedError(expected.no_drafts)
        drafting = {"prompt_lookup_num_tokens": DRAFTED}
        output = _text(model, expected.one, **drafting, return_dict_in_generate=True)
        assert isinstance(output.past_key_values, Cache), "no kvkeep cache was used"
        if own:
            return _different_text(output.sequences, expected.texts[0])
        drafted, plain = (
            _text(model, expected.one, past_key_values=Cache(model, WINDOW), **options)
            for options in (drafting, {})
        )
        return _different_text(output.sequences, expected.texts[0]) or _different_text(
            drafted, plain
        )

    def save() -> str:
        """A cache that holds half of the prompt, read from a file, and forks of it."""
        cache = Cache(model)
        halves = [{"input_ids": x} for x in expected.one["input_ids"].split(HALF, dim=1)]
        _fed(model, cache, halves[0])
        with TemporaryDirectory() as folder:
            cache.save(Path(folder, "half"))
            loaded = load(Path(folder, "half"), model)
        frozen = cache.freeze()
        caches = [loaded, frozen.fork(), frozen.fork(), cache]
        found = [_fed(model, one, halves[1]) for one in caches]
        differences = [expected.different(x, expected.logits[:, HALF:]) for x in found]
        return next(filter(None, differences), "")

    yield "window", window
    yield "evict", evict
    yield "encode", encode
    yield "drafts", drafts
    yield "save", save


def _fed(model: Any, cache: Any, inputs: dict[str, Any], chunks: tuple[int, ...] = ()) -> Tensor:
    """The logits of a text that is read in chunks, or at once."""
    ids = inputs["input_ids"]
    parts = ids.split(list(chunks or ids.shape[1:]), dim=1)
    with torch.no_grad():
        return torch.cat([model(x, past_key_values=cache, use_cache=True).logits for x in parts], 1)


def _text(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    given = dict.fromkeys(("pad_token_id", "decoder_start_token_id", "num_beams"), 1)
    options = given | {"use_cache": True, "num_return_sequences": 1} | options
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


def _tried(compare: Callable[[], str], *, refusals: bool = False) -> tuple[str, str] | None:
    """The outcome and the reason if a comparison shows a fault; a refusal is none, where it is
    allowed, and is raised."""
    try:
        difference = compare()
    except Exception as error:
        if refusals and isinstance(error, UnsupportedError):
            raise
        return FAILS, _said(error)
    return (WRONG, difference) if difference else None


def _different_text(found: Tensor, expected: Tensor) -> str:
    return "" if found.equal(expected) else "another text"


def _reason(error: UnsupportedError) -> str:
    message = str(error)
    if message.startswith("kvkeep cannot"):
        message = message.partition(": ")[2]
    return _cell(message.partition("; ")[0])


def _said(error: BaseException) -> str:
    name = "" if isinstance(error, KVKeepError) else f"{type(error).__name__}: "
    return _cell(f"{name}{error}")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:200].rstrip()


# -- one process for each type --------------------------------------------------------------


def sweep(kinds: list[str]) -> Iterator[tuple[str, Row]]:
    """The rows of some types."""
    context = multiprocessing.get_context("fork")
    for kind in kinds:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(kind, there))
        process.start()
        there.close()
        try:
            found = here.recv() if here.poll(SECONDS) else Row(NOT_BUILT, why="timed out")
        except EOFError:
            process.join()
            found = Row(NOT_BUILT, why=f"its process ended with {process.exitcode}")
        process.kill()
        process.join()
        yield kind, found


def _child(kind: str, connection: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    connection.send(row_of(kind))


# -- the table ------------------------------------------------------------------------------

TABLE = Path(__file__).parents[2] / "docs" / "models.md"


def written(rows: dict[str, Row]) -> str:
    """docs/models.md."""
    counts = Counter(found.outcome for found in rows.values())
    own = sum(found.outcome == WORKS and found.attention == OWN for found in rows.values())
    lines = [
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
        "The columns:",
        "",
        *_item(
            f"**attention**: `{KVKEEP}` computes it, from the slots where they lie; or it is the "
            f"model's `{OWN}` ({own} types), which gets all keys and values, decoded and in order, "
            "and takes only caches that keep all. The last column says why."
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
        "",
        *_wrapped(
            "Written by `python tests/support/sweep_models.py` with kvkeep "
            f"{kvkeep.__version__}, torch {torch.__version__.partition('+')[0]} and transformers "
            f"{transformers.__version__}."
        ),
        "",
        "| type | " + " | ".join(Row._fields) + " |",
        "|---" * (1 + len(Row._fields)) + "|",
    ]
    lines += [f"| {kind} | {' | '.join(found)} |" for kind, found in sorted(rows.items())]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _item(text: str) -> list[str]:
    return _wrapped(f"- {text}", "  ")


def rows_of(text: str) -> dict[str, Row]:
    """The rows of a table that `written` returned."""
    lines = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {kind: Row(*found) for kind, *found in cells if kind in TYPES}


def main(kinds: list[str]) -> None:
    rows = rows_of(TABLE.read_text()) if kinds and TABLE.exists() else {}
    for kind, found in sweep(kinds or sorted(TYPES)):
        sys.stdout.write(f"{kind:28} {' '.join(filter(None, found))}\n")
        sys.stdout.flush()
        rows[kind] = found
    TABLE.write_text(written(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
