"""The forwards of drafted tokens, to read the accepted ones again.

Keys and values of rejected tokens are removed by truncation, but a recurrent state is not: it
returns to a copy from before the forward, and the accepted tokens are fed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.errors import RollbackError, StateError, UnsupportedError
from kvkeep.hf.cache_argument import NAMES, as_cache
from kvkeep.hf.config import ATTACHMENT
from kvkeep.hf.inputs import fed_by
from kvkeep.hf.multimodal import media_told, telling

_TOKENS = ("input_ids", "inputs_embeds", "position_ids")
_MASK = "attention_mask"
_SETTINGS = (*NAMES, "use_cache")


@dataclass(frozen=True)
class _Forward:
    """A forward of a decoder: its arguments, what was told of it, and the columns fed before it, of
    which it adds those up to `stop`."""

    decoder: ref[PreTrainedModel]
    inputs: Mapping[str, Any]
    media: bool | None
    start: int
    stop: int

    def run(self, cache: Any) -> None:
        """Feed the first columns, up to `stop`, to the cache again."""
        decoder = self.decoder()
        assert decoder is not None  # see `Forwards.again`
        n = self.stop - self.start
        given = dict(self.inputs)
        for name in _TOKENS:
            if given.get(name) is not None:
                given[name] = given[name].narrow(1 if name != "position_ids" else -1, 0, n)
        if given.get(_MASK) is not None:
            given[_MASK] = given[_MASK][:, : self.stop]
        with telling(self.media):
            decoder(**given, **as_cache(decoder, cache), use_cache=True)


class Forwards:
    """The forwards of a cache since its last crop, in order."""

    def __init__(self) -> None:
        self._all: list[_Forward] = []
        self.marked: list[int] = []  # the columns before which states were marked for them

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(
        self, decoder: PreTrainedModel, inputs: Mapping[str, Any], start: int, *, marks: bool
    ) -> None:
        """Record a forward before it runs. `marks`: the states before it are marked for it.

        Raises:
            UnsupportedError: its inputs cannot be divided by tokens.
        """
        given = {name: x for name, x in inputs.items() if name not in _SETTINGS}
        mask = given.get(_MASK)
        odd = [
            name
            for name, x in given.items()
            if isinstance(x, Tensor) and name not in (*_TOKENS, _MASK)
        ]
        if odd or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
            raise UnsupportedError(
                f"drafted tokens with {odd[0] if odd else _MASK} of their own: the accepted ones "
                "must be read again by recurrent layers, and this input cannot be divided; "
                "generate without drafts"
            )
        fed = fed_by(given)
        assert fed is not None
        self._all = [one for one in self._all if one.start < start]  # others were refused
        stop = start + fed.shape[1]
        self._all.append(_Forward(ref(decoder), given, media_told(), start, stop))
        if marks:
            self.marked.append(start)

    def again(self, columns: int, least: int) -> list[_Forward]:
        """The forwards from the last that began at `least` columns or later, or with the first
        column, up to `columns` columns.

        Raises:
            RollbackError: there is none.
            StateError: the model is not attached any more.
        """
        decoder = self._all[-1].decoder()
        if not hasattr(decoder, ATTACHMENT):
            raise StateError(
                "recurrent layers take drafts back by reading the accepted tokens again, and the "
                "model was detached or deleted since; call kvkeep.attach(model) again, or reset() "
                "the cache"
            )
        found: list[_Forward] = []
        for one in reversed(self._all):
            if one.start <= columns:
                found.insert(0, replace(one, stop=min(one.stop, columns)))
                if one.start >= least or not one.start:
                    return found
        raise RollbackError(
            f"crop to {columns} tokens, but those fed before {self._all[0].start} were kept for "
            "good by an earlier crop; reset() and feed the tokens again"
        )
