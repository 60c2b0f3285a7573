"""keep_until: protect the beginning of a prompt from eviction, up to a marker."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError, SpecError
from kvkeep.host.specs import Specs, changed, each
from kvkeep.spec import CacheSpec

Marker = str | Tensor | Sequence[int]
"""The end of a prompt's beginning: a text in the prompt, or token ids."""

_SHOWN = 40  # most characters of a marker in a message


def keep_until(
    spec: Specs,
    ids: Tensor | Sequence[int],
    marker: Marker,
    tokenizer: Any = None,
    *,
    most: float = 0.5,
) -> Specs:
    """A spec that keeps the beginning of one prompt, such as its instructions, through the first
    occurrence of a marker.

    A budget in tokens does not change; the beginning is part of it. A budget that is a share grows
    to hold the beginning if necessary. Specs that keep all tokens do not change. keys_values' cache
    `smart-lastrec` does the same for a window.

    Args:
        spec: a spec with a policy that has the option `keep_to`, possibly inside `adakv` or
            `pyramid`: one for all layers, for each layer, or for each type of layer.
        ids: the prompt's token ids, (n,) or (1, n), from position 0 on.
        marker: a text or token ids. A text may end within a token, which is then kept.
        tokenizer: decodes ids; needed if the marker is a text.
        most: the greatest share of the budget that the beginning may take, above 0 and below 1.

    Returns:
        Specs for the same layers, with `keep_to` set.

    Raises:
        SpecError: the marker is empty or not in the prompt; the beginning takes more than `most` of
            a budget; or no policy evicts, or one has no `keep_to`.
        ShapeError: `ids` holds several prompts, or the marker is a text and there is no tokenizer.
    """
    if not 0 < most < 1:
        raise SpecError(f"most is {most}; give a share of the budget above 0 and below 1")
    ids = torch.as_tensor(ids)
    if ids.dim() != 1 and (ids.dim() != 2 or len(ids) != 1):
        raise ShapeError(f"ids {tuple(ids.shape)}; give the ids of one prompt, (n,) or (1, n)")
    tokens = ids.flatten().tolist()
    stop = _end_of(marker, tokens, tokenizer)
    if not isinstance(spec, str | CacheSpec | Mapping | Sequence) or not spec:
        raise SpecError(f"spec {spec!r}; give text such as 'window:1024', a list or a mapping")
    found = changed(spec, lambda one: _keeping(one, stop, len(tokens), most))
    given = each(spec)
    if not any(one.policy.evicts for one in given):
        raise SpecError(
            f"{given[0]} keeps every token, so there is nothing to protect; give a policy that "
            "evicts, such as window:1024, or no marker"
        )
    return found


def _end_of(marker: Marker, tokens: list[int], tokenizer: Any) -> int:
    """The number of a prompt's tokens through the first occurrence of a marker."""
    wanted = marker if isinstance(marker, str) else torch.as_tensor(marker).flatten().tolist()
    if not len(wanted):
        raise SpecError("the marker is empty; give a text of the prompt, or some of its token ids")
    if isinstance(marker, str):
        stop = _end_of_text(marker, tokens, tokenizer)
    else:
        ends = range(len(wanted), len(tokens) + 1)
        stop = next((end for end in ends if tokens[end - len(wanted) : end] == wanted), None)
    if stop is None:
        text = repr(wanted)
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise SpecError(
            f"the marker {shown} is not in the prompt of {len(tokens)} tokens; give a text as the "
            "chat template and the tokenizer write it"
        )
    return stop


def _end_of_text(text: str, tokens: list[int], tokenizer: Any) -> int | None:
    if tokenizer is None:
        raise ShapeError(
            "the marker is a text, but there is no tokenizer; give a tokenizer, or token ids"
        )
    # The marker may begin and end within tokens, so decoded texts are compared. Each prefix's text
    # begins with the text of a shorter prefix.
    counts = range(1, len(tokens) + 1)
    index = bisect_left(counts, True, key=lambda count: text in tokenizer.decode(tokens[:count]))
    return counts[index] if index < len(counts) else None


def _keeping(spec: CacheSpec, stop: int, prompt: int, most: float) -> CacheSpec:
    """A spec that keeps the first `stop` tokens of a prompt."""
    spec.policy.keeping(0)  # raises if the policy has no `keep_to`
    budget = spec.policy.at(prompt).budget
    if budget is not None and stop > most * budget:
        raise SpecError(
            f"the prompt up to the marker is {stop} tokens, more than {most:.0%} of the {budget} "
            f"that {spec} keeps; use a budget of {ceil(stop / most)} or more, an earlier marker, "
            f"or a greater share (most=), or write keep_to={stop} in the spec"
        )
    return replace(spec, policy=spec.policy.keeping(stop))
