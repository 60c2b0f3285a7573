"""The old place of `kvkeep.generate`, until kvkeep.serve and kvkeep.finetune import that."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvkeep.generate import Answer as Answer
from kvkeep.generate import Batch as Batch
from kvkeep.generate import Likely as Likely
from kvkeep.generate import NewToken as NewToken
from kvkeep.generate import Processor as Processor
from kvkeep.generate import Reuse as Reuse
from kvkeep.generate import SamplingParams
from kvkeep.generate import generate_many as generate_many


def Sampling(  # noqa: N802
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    processors: Sequence[Processor] = (),
) -> SamplingParams:
    """`SamplingParams` in the old order."""
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        processors=processors,
    )


def Settings(  # noqa: N802
    max_new_tokens: int = 256,
    sampling: SamplingParams | None = None,
    stop: Sequence[str] = (),
    **others: Any,
) -> SamplingParams:
    """`SamplingParams` of which some were an argument."""
    sampling = sampling or SamplingParams()
    return replace(sampling, max_new_tokens=max_new_tokens, stop=stop, **others)
