"""Every causal language model of transformers, tiny and random: does a kvkeep cache serve it?

    python tests/support/sweep_models.py             # all types; writes docs/models.md
    python tests/support/sweep_models.py llama opt   # these; replaces their rows
    python tests/support/sweep_models.py --quick     # without compile and export
    python tests/support/sweep_models.py --missing   # what the page has not

Each type runs in a process of its own, with a time limit. The page is written after each, so that
what was found before an interruption stays.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvkeep import attach, detach
from kvkeep.errors import UnsupportedError
from support.sweep_configs import TYPES, described, model_of
from support.sweep_features import PROGRAMS, Expected, cell, comparisons, features, said
from support.sweep_page import (
    BROKEN,
    FAILS,
    FEATURES,
    KVKEEP,
    NOT_BUILT,
    PAGE,
    REFUSED,
    WORKS,
    WRONG,
    YES,
    Row,
    rows_of,
    written,
)

SECONDS = 600


def row_of(kind: str, names: Collection[str] = FEATURES) -> Row:
    """Build a type, attach it, and compare it with itself unattached and without a cache.

    Args:
        names: of the features that are compared too; the cells of others are empty.
    """
    found = Row(described(kind), WORKS)
    try:
        model = model_of(kind)
    except Exception as error:
        whole = _refused_whole(kind)
        return found._replace(outcome=REFUSED, why=whole) if whole else _not_built(found, error)
    try:
        attach(model)
    except UnsupportedError as error:
        return found._replace(outcome=REFUSED, why=_reason(error))
    except Exception as error:
        return found._replace(outcome=FAILS, why=f"attach: {said(error)}")
    detach(model)
    try:
        expected = Expected(model)
    except Exception as error:
        return found._replace(outcome=NOT_BUILT, why=f"unattached it raises {said(error)}")
    with attach(model) as attachment:
        own = attachment.own
        found = found._replace(attention=cell(own) or KVKEEP)
        for what, compare in comparisons(model, expected):
            fault = _fault(compare)
            if fault and expected.no_cache:
                why = f"{expected.no_cache}; attached, {what}: {fault[1]}"
                return found._replace(outcome=BROKEN, attention="", why=why)
            if fault:
                return found._replace(outcome=fault[0], why=f"{what}: {fault[1]}")
        for feature, compare in features(kind, model, expected, own):
            if feature not in names:
                continue
            try:
                fault = _fault(compare, refusals=True)
            except UnsupportedError as error:
                reason = cell(own) if own and own in str(error) else _reason(error, model)
                found = found._replace(**{feature: reason})
                continue
            if fault:
                return found._replace(outcome=fault[0], why=f"{feature}: {fault[1]}")
            found = found._replace(**{feature: YES})
    return found


def _not_built(found: Row, error: Exception) -> Row:
    return found._replace(outcome=NOT_BUILT, why=said(error))


def _refused_whole(kind: str) -> str:
    """Why a type is refused as its config stands, without weights; empty if it is not."""
    try:
        with torch.device("meta"):
            model = getattr(transformers, TYPES[kind])(CONFIG_MAPPING[kind]())
        attach(model)
    except UnsupportedError as error:
        return _reason(error)
    except Exception:
        return ""
    return ""


def _fault(compare: Callable[[], str], *, refusals: bool = False) -> tuple[str, str] | None:
    """The outcome and the reason if a comparison shows a fault; a refusal is none, where it is
    allowed, and is raised."""
    try:
        difference = compare()
    except Exception as error:
        if refusals and isinstance(error, UnsupportedError):
            raise
        return FAILS, said(error)
    return (WRONG, difference) if difference else None


def _reason(error: UnsupportedError, model: Any = None) -> str:
    """What an error says, without its remedy, and without a model's name."""
    message = re.sub(r"^(?!torch)\w+ cannot [^:;]*: ", "", str(error)).partition("; ")[0]
    if model is not None:
        text = model.config.get_text_config(decoder=True)
        for name in {type(model).__name__, model.config.model_type, text.model_type}:
            message = re.sub(rf"\b{name}\b", "this model", message)
    return cell(message)


# -- one process for each type --------------------------------------------------------------


def sweep(kinds: Mapping[str, Collection[str]]) -> Iterator[tuple[str, Row]]:
    """The rows of some types; see `row_of`.

    Args:
        kinds: the features that are compared, for each type.
    """
    torch._inductor.config.compile_threads = 1  # no processes of its own
    import kvkeep.hf.steps.compiled  # noqa: F401 - once for all, and slow to import

    context = multiprocessing.get_context("fork")
    for kind, names in kinds.items():
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(kind, names, there))
        process.start()
        there.close()
        try:
            found = here.recv() if here.poll(SECONDS) else Row("", NOT_BUILT, why="timed out")
        except EOFError:
            process.join()
            found = Row("", NOT_BUILT, why=f"its process ended with {process.exitcode}")
        process.kill()
        process.join()
        yield kind, found


def _child(kind: str, names: Collection[str], connection: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    connection.send(row_of(kind, names))


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="TYPE")
    parser.add_argument("--quick", action="store_true", help="leave out compile and export")
    parser.add_argument("--missing", action="store_true", help="only what is missing in the page")
    options = parser.parse_args()
    rows = rows_of(PAGE.read_text()) if PAGE.exists() else {}
    kinds = {
        kind: [
            name
            for name in FEATURES
            if not (options.missing and kind in rows and getattr(rows[kind], name))
            and not (options.quick and name in PROGRAMS)
        ]
        for kind in options.kinds or sorted(TYPES)
        if not options.missing or kind not in rows or rows[kind].incomplete
    }
    for kind, found in sweep(kinds):
        if kind in rows and rows[kind].outcome == found.outcome == WORKS:
            kept = {name: getattr(rows[kind], name) for name in FEATURES if name not in kinds[kind]}
            found = found._replace(**kept)
        sys.stdout.write(f"{kind:28} {' | '.join(filter(None, found))}\n")
        sys.stdout.flush()
        rows[kind] = found
        PAGE.write_text(written(rows))


if __name__ == "__main__":
    main()
