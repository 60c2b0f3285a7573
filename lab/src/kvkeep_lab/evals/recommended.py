"""The cache specs that cost a model least on a text, for the bytes that they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvkeep.errors import KVKeepError
from kvkeep.host import LayerKind, host_of, load_model
from kvkeep.host.progress import Progress, silent
from kvkeep_lab.evals.run import BASELINE, evaluate

CODECS = ("int8", "int8/int4", "int4", "int4/int3", "int3", "int3/int2")
POLICIES = ("h2o", "kvzip")
SHARES = ("50%", "25%", "10%")


def candidates(kinds: Sequence[LayerKind]) -> list[str]:
    """Specs to try for layers of these kinds. Policies evict coded tokens only: a share of plain
    tokens takes as many bytes as a larger share of coded ones, or all, which lose less. If some of
    the layers have a window, the windows' layers, which are bounded anyway, also stay in 8 bits
    while all other layers are encoded or evict."""
    kept = [f"keep_all+{codec}" for codec in CODECS]
    specs = [*kept, *(f"{policy}:{share}+int4" for share in SHARES for policy in POLICIES)]
    windowed = {kind.name: kind.window is not None for kind in kinds}
    if len(set(windowed.values())) < 2:
        return specs
    for one in list(specs):
        each = {name: "keep_all+int8" if bounded else one for name, bounded in windowed.items()}
        specs.append(";".join(f"{name}={spec}" for name, spec in each.items()))
    return specs


def front(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that lose less (`kl`) than every other row of at most their `bytes`, by bytes."""
    found: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["bytes"], row["kl"])):
        if not found or row["kl"] < found[-1]["kl"]:
            found.append(row)
    return found


def recommend(
    model: str | None = None,
    *,
    specs: Sequence[str] = (),
    adapter: str | None = None,
    dtype: str = "auto",
    context: int = 2000,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Load a model, and evaluate specs on a text without tasks.

    Args:
        specs: specs to try; none: `candidates`, less those that the model cannot have.
        model, adapter, dtype: see `kvkeep.host.load_model`.
        context, progress, options: see `kvkeep_lab.evals.run.evaluate`.

    Returns:
        What `evaluate` does, with the `front` of its rows and the full cache's.
    """
    loaded, tokenizer = load_model(model, dtype, progress=progress, adapter=adapter)
    host = host_of(loaded)
    tried = list(specs) or [one for one in candidates(host.kinds) if _fits(host, one, context)]
    options |= {"contexts": [context], "tasks": [], "read_once": True, "progress": progress}
    found = evaluate(loaded, tokenizer, tried, **options)
    full = found["baseline"][0]
    rows = [full, *(row for row in found["rows"] if row["spec"] != BASELINE)]
    return {"model": model, "adapter": adapter, "dtype": dtype, **found, "front": front(rows)}


def _fits(host: Any, spec: str, context: int) -> bool:
    with suppress(KVKeepError):
        host.new_cache(spec, capacity=context)
        return True
    return False


__all__ = ["recommend"]
