"""A call of an attached model's `generate()`: its prompt, and the settings in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.blocks.recompute_option import Recompute
from kvkeep.hf.cache import Cache
from kvkeep.hf.generation.continuing import Fed
from kvkeep.hf.kinds.multimodal import holds_tensors
from kvkeep.hf.steps.cuda_graph import Replay
from kvkeep.host import ModelCache, Specs
from kvkeep.host.adapters import learned_tokens, names_adapters

PREFILL_CHUNK = 1024
"""Tokens of a prompt that `generate` feeds at once to a cache with a budget."""


class ReadOptions(TypedDict):
    """How a store reads a prompt; see `kvkeep.PrefixStore.read`."""

    spec: Specs
    namespace: str
    chunk: int | None
    capacity: int | None


class PromptStore(Protocol):
    """The interface of a store that `generate` uses, such as `kvkeep.PrefixStore`."""

    def prefill(
        self, model: PreTrainedModel, tokens: Tensor, **options: Unpack[ReadOptions]
    ) -> ModelCache:
        """A cache that holds all tokens (n,) except the last."""

    def prefill_rows(
        self, model: PreTrainedModel, prompts: Sequence[Tensor], **options: Unpack[ReadOptions]
    ) -> ModelCache | None:
        """A cache with a row for each prompt (n,), which holds the common beginning of all prompts;
        None: it is too short."""

    def learn(
        self, model: PreTrainedModel, tokens: Tensor, cache: ModelCache, *, namespace: str
    ) -> int:
        """Store the tokens (n,) that a cache was fed; returns how many of them are stored."""


@runtime_checkable
class BlockPrompt(Protocol):
    """The interface of a prompt with blocks that `generate` uses, such as
    `kvkeep.blocks.Encoded`."""

    input_ids: Tensor

    def prefill(
        self,
        model: PreTrainedModel,
        *,
        store: Any,
        recompute: Recompute,
        spec: Specs,
        namespace: str,
        capacity: int | None,
    ) -> tuple[ModelCache, Any]:
        """A cache that holds all tokens except the last, and a report."""


@dataclass(frozen=True)
class Settings:
    """The arguments with which a model was attached: see `kvkeep.attach`."""

    spec: Specs
    store: PromptStore | None
    namespace: str
    recompute: Recompute
    prefill_chunk: int | None


@dataclass
class Call:
    """A call of a model's `generate()`.

    Attributes:
        model: the model.
        columns: number of columns of the prompt; 0: it is not given as token ids.
        ids: the prompt's token ids (1, n), if it has one row.
        blocks: the prompt with blocks, if there is one.
        rows: the token ids of all rows, (B, n).
        cache: the cache filled from a store or from blocks.
        recording: the cache that records drafts.
        moved: the cache whose columns differ from those of the token ids, because padding moved.
        again: the cache whose last token must be fed again.
        fed: the tokens that the call will feed, if they are known.
        replay: the call's steps as a CUDA graph, if they can be one.
        adapt: sets the number of threads by the load; see `kvkeep.threads`.
    """

    model: PreTrainedModel
    columns: int
    ids: Tensor | None
    blocks: BlockPrompt | None
    rows: Tensor | None
    cache: Cache | None = None
    recording: Cache | None = None
    moved: Cache | None = None
    again: Cache | None = None
    fed: Fed | None = None
    replay: Replay | None = None
    adapt: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Make the call's cache ordinary again. Called when `generate()` ends, also by an error."""
        if self.replay is not None:
            self.replay.close()


CALL: ContextVar[Call | None] = ContextVar("call", default=None)

_OTHER: ContextVar[tuple[PreTrainedModel, Settings] | None] = ContextVar("other", default=None)

_OF_TEXT = ("attention_mask", "position_ids", "mm_token_type_ids")


@contextmanager
def settings_of_calls(model: PreTrainedModel, settings: Settings) -> Iterator[None]:
    """A context in which calls of an attached model's `generate()` use `settings` instead of the
    arguments of `attach`. Tasks and threads started in the context inherit them."""
    token = _OTHER.set((model, settings))
    try:
        yield
    finally:
        _OTHER.reset(token)


def in_force(model: PreTrainedModel, settings: Settings) -> Settings:
    """The settings of the current call: from `settings_of_calls`, or else from `attach`."""
    other = _OTHER.get()
    return other[1] if other is not None and other[0] is model else settings


def plain_call(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> Call | None:
    """The current call, if its prompt may be read outside of `generate`: one row of token ids, and
    no other input that changes the result."""
    call = CALL.get()
    if call is None or call.ids is None or not is_plain(model, call, model_kwargs):
        return None
    place = model_kwargs.get("position_ids")
    if model_kwargs.get("attention_mask") is not None:  # a mask of ones was removed before
        return None
    return call if place is None or _counts(place, call.ids.shape[1]) else None


def is_plain(model: PreTrainedModel, call: Call, model_kwargs: dict[str, Any]) -> bool:
    """Whether a call is of this model, and its result depends only on token ids, their mask and
    their positions."""
    types = model_kwargs.get("mm_token_type_ids")
    return call.model is model and not (
        brings_tensors(model_kwargs, beside=_OF_TEXT)
        or (types is not None and bool(types.any()))  # 0: a token of text
        or model.training
        or names_adapters(model)
        or learned_tokens(model)
    )


def _counts(place: Tensor, tokens: int) -> bool:
    """Whether positions (B, n), or (parts, B, n), are 0, 1, 2, ..."""
    counted = torch.arange(tokens, device=place.device)
    return place.shape[-1] == tokens and bool((place == counted).all())


def brings_tensors(model_kwargs: dict[str, Any], *, beside: Sequence[str]) -> bool:
    """Whether a call has tensors whose names are not in `beside`, such as images, or features that
    transformers computed from images before it asked for a cache."""
    return any(holds_tensors(x) for name, x in model_kwargs.items() if name not in beside)


def counted(real: Tensor) -> Tensor:
    """Positions of columns, (B, n), as transformers computes them from the mask `real`."""
    return (real.cumsum(dim=1) - 1).masked_fill(real == 0, 0)
