"""A call of an attached model's `generate()`: its prompt, and the settings in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvkeep.blocks import Encoded
from kvkeep.blocks.recompute_option import Recompute
from kvkeep.context import within
from kvkeep.hf.cache import Cache
from kvkeep.hf.generation.continuing import Fed
from kvkeep.hf.kinds.multimodal import brings_tensors
from kvkeep.hf.steps.cuda_graph import Replay
from kvkeep.host import ModelCache, Specs
from kvkeep.host.adapters import learned_tokens, names_adapters
from kvkeep.store.prefix import ReadOptions

PREFILL_CHUNK = 1024
"""Tokens of a prompt that `generate` feeds at once to a cache with a budget."""


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
    """A call of a model's `generate()`: the token ids of its prompt, (B, n), if it has some, the
    prompt with blocks if there is one, the cache from a store or blocks, if any, the cache that
    records drafts, if any, the cache whose columns are others than those of the token ids, if any,
    and the cache whose last token is fed again, if any.
    `fed` are the tokens that the call feeds, if they are known; `replay` are its steps as a CUDA
    graph, if they may be. `adapt` sets the number of threads by the load, see `kvkeep.threads`."""

    model: PreTrainedModel
    rows: Tensor | None
    blocks: Encoded | None
    cache: Cache | None = None
    recording: Cache | None = None
    moved: Cache | None = None
    again: Cache | None = None
    fed: Fed | None = None
    replay: Replay | None = None
    adapt: Callable[[], None] = lambda: None

    @property
    def columns(self) -> int:
        """The columns of the prompt; 0 if it has no token ids."""
        return 0 if self.rows is None else self.rows.shape[1]

    @property
    def ids(self) -> Tensor | None:
        """The token ids, (1, n), of a prompt of one row."""
        return self.rows if self.rows is not None and len(self.rows) == 1 else None

    def close(self) -> None:
        """Make the call's cache ordinary again. Called when `generate()` ends, also by an error."""
        if self.replay is not None:
            self.replay.close()


CALL: ContextVar[Call | None] = ContextVar("call", default=None)

_OTHER: ContextVar[tuple[PreTrainedModel, Settings] | None] = ContextVar("other", default=None)

_OF_TEXT = ("attention_mask", "position_ids", "mm_token_type_ids")


def settings_of_calls(model: PreTrainedModel, settings: Settings) -> AbstractContextManager[None]:
    """A context in which calls of an attached model's `generate()` use `settings` in place of the
    settings of `attach`. Tasks and threads started in the context inherit them."""
    return within(_OTHER, (model, settings))


def in_force(model: PreTrainedModel, settings: Settings) -> Settings:
    """The settings of the current call: from `settings_of_calls`, or else from `attach`."""
    other = _OTHER.get()
    return other[1] if other is not None and other[0] is model else settings


@dataclass(frozen=True)
class Start:
    """A call of `generate()` that is about to read its prompt.

    Args:
        config, inputs: its generation config, and the arguments of the model's forwards; both may
            change.
        mode: the way of generating.
        columns: the most columns that its cache will hold.
    """

    model: PreTrainedModel
    settings: Settings
    config: Any
    inputs: dict[str, Any]
    mode: Any
    columns: int

    @property
    def call(self) -> Call | None:
        """The current call; None: it is another model's."""
        call = CALL.get()
        return call if call is not None and call.model is self.model else None

    @cached_property
    def learned(self) -> int:
        """Tokens that PEFT learned and puts before the prompt."""
        return learned_tokens(self.model)

    @property
    def drafted(self) -> bool:
        """Whether the model verifies drafts."""
        return bool(self.mode == GenerationMode.ASSISTED_GENERATION)

    @property
    def drafting(self) -> bool:
        """Whether the model drafts for another one."""
        return bool(self.config.is_assistant)

    @property
    def several(self) -> int:
        """Rows of the cache for each prompt."""
        return int(max(self.config.num_beams, self.config.num_return_sequences))

    @property
    def is_plain(self) -> bool:
        """Whether nothing but token ids, their mask and their positions changes the result."""
        types = self.inputs.get("mm_token_type_ids")
        return self.call is not None and not (
            brings_tensors(self.inputs, beside=_OF_TEXT)
            or (types is not None and bool(types.any()))  # 0: a token of text
            or self.model.training
            or names_adapters(self.model)
            or self.learned
        )

    @property
    def plain_ids(self) -> Tensor | None:
        """The token ids, (1, n), of a prompt that may be read outside of `generate`: one row, with
        nothing else that changes the result."""
        ids = None if self.call is None else self.call.ids
        if ids is None or not self.is_plain:
            return None
        if self.inputs.get("attention_mask") is not None:  # a mask of ones was removed before
            return None
        place = self.inputs.get("position_ids")
        return ids if place is None or _counts(place, ids.shape[1]) else None


def _counts(place: Tensor, tokens: int) -> bool:
    """Whether positions (B, n), or (parts, B, n), are 0, 1, 2, ..."""
    counted = torch.arange(tokens, device=place.device)
    return place.shape[-1] == tokens and bool((place == counted).all())


def counted(real: Tensor) -> Tensor:
    """Positions of columns, (B, n), as transformers computes them from the mask `real`."""
    return (real.cumsum(dim=1) - 1).masked_fill(real == 0, 0)
