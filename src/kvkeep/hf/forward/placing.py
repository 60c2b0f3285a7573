"""Positions of tokens for models that compute them from the number of columns in a cache.

Some decoders (BART, Whisper) take no positions, but their module that embeds positions does. In a
packed forward, kvkeep gives the positions to that module. Positions of other decoders (RoBERTa)
begin after the padding token's id.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.context import within
from kvkeep.hf.config import decoder_of
from kvkeep.hf.kinds.base import Handle, Replaced

_PLACED: ContextVar[Tensor | None] = ContextVar("placed", default=None)
_first: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


class Placed(Replaced):
    """A module that embeds the positions of the context `placed`."""


def placed(positions: Tensor) -> AbstractContextManager[None]:
    """Within this context, modules that count positions by themselves embed these, int64 (1, n)."""
    return within(_PLACED, positions[0])


def placing(module: nn.Module) -> Handle | None:
    """Let a module that embeds positions embed those of its context; None: it is another module, or
    one whose first argument is the positions, which its model takes (XGLM)."""
    if not type(module).__name__.endswith("PositionalEmbedding"):
        return None
    if "position_ids" not in _parameters(type(module).forward)[2:]:
        return None
    return Placed(module, "forward", partial(_forward, module.forward))


def _forward(own: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        positions = _PLACED.get()
        return own(*args, **kwargs if positions is None else kwargs | {"position_ids": positions})
    # In a graph, the number of columns in the cache is a tensor.
    names = _parameters(type(own.__self__).forward)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    text = given[names[0]]
    if given.get("position_ids") is None and text is not None:
        whole = isinstance(text, Tensor)  # otherwise its shape
        device = text.device if whole else own.__self__.weight.device
        count = text.shape[1] if whole else text[1]
        start = given.get("cache_length", 0)
        given["position_ids"] = torch.arange(count, device=device) + start
    return own(**given)


def takes_positions(module: nn.Module) -> bool:
    """Whether a module's forward takes positions."""
    return "position_ids" in _parameters(type(module).forward)


@cache
def _parameters(forward: Callable[..., Any]) -> list[str]:  # cached for packed forwards
    return [*inspect.signature(forward).parameters]


def first_position(model: PreTrainedModel) -> int:
    """The position of the first token of a text: 0, or the padding token's id + 1."""
    known = _first.get(model)
    if known is None:
        name = "create_position_ids_from_input_ids"
        parts: list[Any] = [x for x in decoder_of(model).modules() if hasattr(x, name)]
        known = _first[model] = max((int(part.padding_idx) + 1 for part in parts), default=0)
    return known


def as_counted(model: PreTrainedModel, position: Tensor) -> Tensor:
    """The positions of tokens, any shape, as the model's forward takes them, int64."""
    return position.to(torch.int64) + first_position(model)
