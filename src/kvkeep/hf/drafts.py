"""Drafts in a cache for transformers: rejected ones are taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvkeep import cache as core
from kvkeep.hf.config import base_config, decoder_config, is_routed
from kvkeep.hf.demands import require_recordable
from kvkeep.hf.kinds import Forwards
from kvkeep.host import ModelCache
from kvkeep.layer.history import Prompt


@contextmanager
def layers_restored(model: Any) -> Iterator[None]:
    """At the end of this context a model's config has the number of layers that it had before.
    transformers changes it for drafts by the first layers, and leaves it so after an error."""
    text = decoder_config(base_config(model))
    before = text.num_hidden_layers
    try:
        yield
    finally:
        if text.num_hidden_layers != before:
            text.num_hidden_layers = before


class RecordsDrafts(ModelCache):
    """The part of a cache for transformers that takes rejected drafts back.

    Attributes:
        drafting: whether the cache is a draft model's: several forwards come before each crop.
        prompt: what will be certain of the text once drafts are recorded.
    """

    config: PreTrainedConfig
    drafting = False
    prompt = Prompt()
    _feeding: tuple[int, int] | None = None
    """The thread that started the last forward, and the columns that are fed when it ends."""

    fed_since: Forwards  # since recording began, or the last crop
    _uncropped = False  # whether a forward came since recording began, or the last crop

    def activate_past_recording(self) -> None:
        """Free no slot until the next crop, which may need it. The columns that `prompt` counts now
        are never taken back. Recording ends with `end_recording`, or when two forwards run without
        a crop between them, except for a draft model's cache.

        Raises:
            UnsupportedError: a policy decides after each token, and the model is not attached, or
                of a kind that computes all drafts before a decision.
        """
        require_recordable(self, routed=is_routed(self.config))
        self._record_past(True)

    def end_recording(self) -> None:
        """Undo `activate_past_recording`; all tokens are certain from now on."""
        self.prompt = Prompt()
        self._record_past(False)

    def _end_recording(self) -> None:
        if not self._uncropped or self.drafting:
            return
        first, last = self._layers[0].cursor, self._layers[-1].cursor
        if first.history.columns == last.history.columns:
            if first.record_past or last.record_past or self.prompt.columns:
                self.end_recording()
            else:
                self._uncropped = False

    def _record_past(self, on: bool) -> None:
        self._uncropped = False
        self._forget_forwards()
        for layer in self.layers:
            cursor, recorded = layer.cursor, layer.cursor.record_past
            cursor.prompt, cursor.record_past = self.prompt, on
            if recorded and not on:
                layer.settle()
        self.prompt = Prompt()  # of the next recording

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
        """Return to the point after `columns` columns: to the last mark before it, from which the
        tokens that follow are read again."""
        least = self.fed - min(layer.rollback_limit for layer in self.layers)
        again = self.fed_since.again(columns, least)
        if again[0].start >= least:
            super().crop(again[0].start - self.fed)
        else:  # of a prompt from which tokens were evicted
            core.Cache.reset(self)  # the activation stays
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
