"""Checks a model's inputs before its layers run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.hf.config import decoder_config

_warned: WeakSet[PreTrainedModel] = WeakSet()
"""Decoders for which a warning about positions past their limit was issued."""


def arguments_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a forward by name."""
    if not args:
        return kwargs
    given: dict[str, Any] = dict(
        inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    )
    rest: dict[str, Any] = given.pop("kwargs", {})
    return given | rest


def fed_by(given: Mapping[str, Any]) -> Tensor | None:
    """The token ids (B, n) or embeddings (B, n, width) among the arguments of a forward."""
    ids: Tensor | None = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


_DIMENSIONS = {"inputs": 2, "input_ids": 2, "attention_mask": 2, "inputs_embeds": 3}
"""The fewest dimensions of an argument with rows, by name."""


def check_rows(given: Mapping[str, Any]) -> None:
    """Check that the tensors among the arguments of a forward, or of `generate`, have rows.

    Raises:
        ShapeError: an argument is a list, or lacks the dimension of rows.
    """
    for name, least in _DIMENSIONS.items():
        x = given.get(name)
        if isinstance(x, list):
            raise ShapeError(f"{name} is a list; give a tensor (B, n), such as torch.tensor([ids])")
        if isinstance(x, Tensor) and x.dim() < least:
            one, shape = ("ids", "(B, n)") if least == 2 else ("embeds", "(B, n, width)")
            one = "mask" if name == "attention_mask" else one
            raise ShapeError(
                f"{name} has the shape {tuple(x.shape)}, without rows; give {shape}: for one text, "
                f"{one}[None]"
            )


def check_fed(decoder: PreTrainedModel, given: Mapping[str, Any], columns: int) -> None:
    """Check a decoder's arguments by name, for a cache that was fed `columns` columns. Warns once
    per model about positions past the model's limit.

    Raises:
        ShapeError: there are no rows or no tokens, or a token id is outside the vocabulary (checked
            on the CPU only, since reading ids would synchronise other devices).
    """
    ids, fed = given.get("input_ids"), fed_by(given)
    if fed is None or fed.dim() < 2:
        return
    if 0 in fed.shape:
        raise ShapeError(
            f"a forward of {fed.shape[0]} rows of {fed.shape[1]} tokens; give at least one row and "
            "one token"
        )
    if ids is not None:
        check_tokens(decoder, ids)
    limit = getattr(decoder_config(decoder.config), "max_position_embeddings", None)
    if limit is not None and columns + fed.shape[1] > limit and decoder not in _warned:
        _warned.add(decoder)
        warnings.warn(
            f"{columns + fed.shape[1]} tokens are fed to a model made for {limit}; its output at "
            "later positions may be useless. Feed fewer tokens, or reset() the cache",
            stacklevel=2,
        )


def check_mask(decoder: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Check the mask of a forward whose attention kvkeep computes.

    Raises:
        UnsupportedError: the mask has four axes, and kvkeep did not make it.
    """
    mask = given.get("attention_mask")
    for one in mask.values() if isinstance(mask, Mapping) else (mask,):
        if isinstance(one, Tensor) and one.dim() == 4 and one.dtype != torch.int32:
            raise UnsupportedError(
                f"a mask {tuple(one.shape)} of four axes for {type(decoder).__name__}, which "
                "kvkeep's attention does not support; give a mask (B, columns), or use the cache "
                "with kvkeep.detach(model)"
            )


def check_tokens(model: PreTrainedModel, ids: Tensor) -> None:
    """Check that token ids are within the vocabulary; ids on other devices are not checked.

    Raises:
        ShapeError: an id is outside the vocabulary.
    """
    embeddings = model.get_input_embeddings()
    known: int | None = getattr(embeddings, "num_embeddings", None)
    if known is None or not ids.is_cpu or ids.is_floating_point():
        return
    least, most = torch.aminmax(ids)
    low, high = int(least), int(most)
    if low < 0 or high >= known:
        raise ShapeError(
            f"token id {low if low < 0 else high}: the model's vocabulary has 0 to {known - 1}; "
            "use this model's own tokenizer"
        )


def argument_names(model: Any) -> frozenset[str]:
    """The names of the arguments of a model's forward."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return frozenset(inspect.signature(model.forward).parameters)
