"""The members of a cache under transformers' names, and the removal of rejected drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvkeep import cache as core
from kvkeep.cache import hide_columns
from kvkeep.graph.custom_ops import Traced
from kvkeep.hf.config import base_config, decoder_config, is_routed
from kvkeep.hf.handover import MaskLength
from kvkeep.hf.interface.model_layers import TellsLayers
from kvkeep.hf.kinds import Forwards
from kvkeep.host import ModelCache
from kvkeep.host.cache import token_limit
from kvkeep.host.drafts import require_recordable
from kvkeep.layer.history import Prompt


@contextmanager
def layers_restored(model: Any) -> Iterator[None]:
    """A context after which a model's config has the same number of layers as before. transformers
    changes it while the first layers make drafts, and does not restore it after an error."""
    text = decoder_config(base_config(model))
    before = text.num_hidden_layers
    try:
        yield
    finally:
        if text.num_hidden_layers != before:
            text.num_hidden_layers = before


class TransformersNames(TellsLayers, ModelCache):
    """The members of `Cache` that only transformers' own code uses: its names, and the removal of
    rejected drafts.

    Attributes:
        drafting: whether the cache belongs to a draft model, which makes several forwards before
            each crop.
        prompt: the columns that are no drafts, for the next recording.
    """

    config: PreTrainedConfig
    written_out = False  # whether `generate()` needs a feature that graphs lack, such as dropout
    drafting = False
    prompt = Prompt()
    _feeding: tuple[int, int] | None = None
    """The thread that started the last forward, and the columns fed at the forward's end."""

    fed_since: Forwards  # forwards since recording began, or since the last crop
    _uncropped = False  # whether a forward ran since recording began, or since the last crop
    _fixed: bool
    _traced: list[Traced]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens fed to the model, including padding and evicted tokens; a tensor in a compiled
        graph."""
        if torch.compiler.is_compiling():
            return self._traced[self.model_layers.indices[layer_idx]].fed  # type: ignore[return-value]
        if self.lent is not None:
            return self.fed
        # During a forward, earlier layers have been fed more columns than later layers.
        return self._layers[self.model_layers.indices.get(layer_idx, 0)].cursor.history.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and first column of the keys that `update` will return for this layer."""
        # transformers asks about layer 0 even if it does not attend.
        index = self.model_layers.indices.get(layer_idx, 0)
        layer = self._layers[index] if not self.lent else self.layers[index]
        if torch.compiler.is_compiling():
            kept, fed, length = 0, 0, MaskLength(1)  # a traced symbol cannot be a MaskLength
        else:
            self._end_recording()
            kept, fed = layer.sight.reachable(layer.cursor), layer.cursor.history.columns
            length = MaskLength(kept + query_length)
        length.layer, length.routed = layer, is_routed(self.config)
        length.traced, length.compileable = self._traced[index], self._may_compile(length.routed)
        length.hide = partial(hide_columns, self)
        return length, fed - kept

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The most tokens that fit; -1: no limit."""
        limit = token_limit(self, layer_idx)
        return -1 if limit is None else limit

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """`reorder`, under the name that beam search uses."""
        self.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """`repeat`, under transformers' name."""
        self.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """`select`, under transformers' name."""
        self.select(indices)

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the model with this cache: slots are allocated once, and
        the model is attached. A compiled graph is used with all caches, so while tracing the answer
        depends on the model only."""
        return self._may_compile(is_routed(self.config))

    def _may_compile(self, routed: bool) -> bool:
        if torch.compiler.is_compiling():
            return routed
        return routed and self._fixed and not (self.written_out or self.lent)

    @property
    def is_initialized(self) -> bool:
        return self.fed > 0

    @property
    def is_croppable(self) -> bool:
        decided = is_routed(self.config) or not any(layer.setup.by_token for layer in self.layers)
        # States return to marks, which are made while drafts are recorded.
        return decided and (not self.carried or self.layers[0].record_past)

    @property
    def batch_size(self) -> int:
        return self.rows or -1

    def activate_past_recording(self) -> None:
        """Record drafts: free no slot until the next crop, which may restore it. The columns of
        `prompt` are no drafts and are never removed. Recording ends with `end_recording`, or when
        two forwards run without a crop between them, except for a draft model's cache.

        Raises:
            UnsupportedError: a policy decides after each token, but the model is not attached, or
                is of a kind that computes all drafts before a decision.
        """
        require_recordable(self, attached=is_routed(self.config))
        self.record_drafts(True)

    def end_recording(self) -> None:
        """Undo `activate_past_recording`: all tokens become certain."""
        self.prompt = Prompt()
        self.record_drafts(False)

    def _end_recording(self) -> None:
        if not self._uncropped or self.drafting:
            return
        first, last = self._layers[0].cursor, self._layers[-1].cursor
        if first.history.columns == last.history.columns:
            if first.record_past or last.record_past or self.prompt.columns:
                self.end_recording()
            else:
                self._uncropped = False

    def record_drafts(self, on: bool) -> None:
        """See `ModelCache.record_drafts`. Recording begins with the prompt as `prompt` tells it."""
        self._uncropped = False
        self._forget_forwards()
        for layer in self.layers:
            layer.cursor.prompt = self.prompt
        super().record_drafts(on)
        self.prompt = Prompt()  # for the next recording

    def crop(self, tokens_to_remove: int) -> None:
        """See `kvkeep.cache.Cache.crop`. Assisted generation calls this after every step."""
        removed = -int(tokens_to_remove)
        if removed > 0 and self.fed_since:
            self._replay(self.fed - removed)
            removed = 0
        super().crop(-removed)
        self._forget_forwards()
        self._uncropped, self._feeding = False, None

    def _replay(self, columns: int) -> None:
        """Return to the point after `columns` columns: return to the last mark before it, and feed
        the tokens after the mark again."""
        least = self.fed - min(layer.drafts.rollback_limit for layer in self.layers)
        again = self.fed_since.again(columns, least)
        if again[0].start >= least:
            super().crop(again[0].start - self.fed)
        else:  # tokens of the prompt were evicted, so feed it again
            core.Cache.reset(self)  # keeps the activation
        self._forget_forwards()
        for one in again:
            self._uncropped = False
            if one.start < one.stop:
                with torch.no_grad():
                    one.run(self)

    def _forget_forwards(self) -> None:
        if self.fed_since:
            marked, self.fed_since = self.fed_since.marked, Forwards()
            self.carried.unmark(marked)
