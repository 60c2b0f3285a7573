"""What a model is fed, looked at before its layers run."""

from __future__ import annotations

import inspect
import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.errors import ShapeError
from kvkeep.hf.config import decoder_config

_told: WeakSet[PreTrainedModel] = WeakSet()
"""Decoders whose limit was passed, which is said once."""


def check_fed(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], columns: int
) -> None:
    """Look at a decoder's arguments, for a cache that was fed `columns` columns. Positions past the
    model's limit are warned of, once for each model.

    Raises:
        ShapeError: no rows, no tokens, or a token that the model does not know (seen on the CPU
            only, for reading it elsewhere would wait for the device).
    """
    given = kwargs
    if args:
        given = inspect.signature(decoder.forward).bind_partial(*args, **kwargs).arguments
    ids: Tensor | None = given.get("input_ids")
    fed: Tensor | None = given.get("inputs_embeds") if ids is None else ids
    if fed is None or fed.dim() < 2:
        return
    if 0 in fed.shape:
        raise ShapeError(
            f"a forward of {fed.shape[0]} rows of {fed.shape[1]} tokens; give at least one of both"
        )
    if ids is not None:
        check_tokens(decoder, ids)
    limit = getattr(decoder_config(decoder.config), "max_position_embeddings", None)
    if limit is not None and columns + fed.shape[1] > limit and decoder not in _told:
        _told.add(decoder)
        warnings.warn(
            f"{columns + fed.shape[1]} tokens are fed to a model made for {limit}; what it "
            "computes for positions past that may be of no use. Feed less, or reset() the cache",
            stacklevel=2,
        )


def check_tokens(model: PreTrainedModel, ids: Tensor) -> None:
    """Token ids, on the CPU, have embeddings.

    Raises:
        ShapeError: some have none.
    """
    embeddings = model.get_input_embeddings()
    known: int | None = getattr(embeddings, "num_embeddings", None)
    if known is None or not ids.is_cpu or ids.is_floating_point():
        return
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= known:
        raise ShapeError(
            f"token id {low if low < 0 else high}: the model knows 0 to {known - 1}; is this "
            "the tokenizer of another model?"
        )
