"""Forwards of transformers models that compute tokens of several sequences: side by side in one
row, or, in a compiled step, as rows with one token each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.graph.custom_ops import Ticket, with_readings
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import ATTACHMENT, changing_ropes, decoder_config, decoder_of, is_routed
from kvkeep.hf.forward.placing import Placed, takes_positions
from kvkeep.hf.handover import Handed
from kvkeep.hf.inputs import check_fed
from kvkeep.hf.interface.layers_cache import LayersCache
from kvkeep.hf.interface.model_layers import ModelLayers
from kvkeep.hf.kinds import KeepsStates, kinds_of
from kvkeep.hf.kinds.multimodal import require_counted, why_not_counted
from kvkeep.host import ModelCache, Piece
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.packed import PackedLayer, ReadyTogether
from kvkeep.layer.packed_states import PackedStates
from kvkeep.layer.recurrent import RecurrentStates
from kvkeep.layer.step import StepInputs


def unpackable(model: PreTrainedModel) -> str:
    """Why packed forwards do not support a model, as a clause; empty if they do."""
    text = decoder_config(model.config)
    changing = next(iter(changing_ropes(model.config)), "")
    if changing:
        return (
            f"the frequencies of its rotary embedding ({changing}) depend on the longest text of a "
            "forward"
        )
    if not is_routed(text):
        attachment = getattr(model, ATTACHMENT, None)
        if attachment is None:
            return "kvkeep does not compute its attention; call kvkeep.attach(model)"
        return f"it computes attention itself, because {attachment.own}"
    changes = getattr(decoder_of(model), ATTACHMENT).changes
    takes = takes_positions(model) or any(isinstance(x, Placed) for x in changes)
    if not takes and not any(kind.placeless for kind in kinds_of(model)):
        return "its forward takes no positions"
    for kind in kinds_of(model):
        if reason := kind.unpackable(changes):
            return f"it {reason}"
    return why_not_counted(model)


def require_packable(model: PreTrainedModel, caches: Sequence[ModelCache]) -> None:
    """Raise UnsupportedError, or StateError for a cache that is not the model's, unless
    `LaidCache` can serve a forward of these sequences."""
    if reason := unpackable(model):
        raise UnsupportedError(
            f"{type(model).__name__} cannot compute several sequences in one forward: {reason}; "
            "feed them one by one, as kvkeep.generate.Batch does"
        )
    for cache in caches:
        if not isinstance(cache, Cache):
            raise StateError(
                f"a packed forward through a {type(cache).__name__}; build each sequence's cache "
                "as kvkeep.Cache(model)"
            )
        require_counted(model, cache, "packed forwards")
        if cache.activation is not None:
            raise UnsupportedError(
                "a packed forward cannot start an activated adapter at a token of each sequence; "
                "feed the sequences of the adapter one by one"
            )


def check_packed(model: PreTrainedModel, pieces: Sequence[Piece]) -> None:
    """Check each sequence's next token ids, (n,), as a forward of that sequence alone would.

    Raises:
        ShapeError: an id is outside the vocabulary.
    """
    for piece in pieces:
        check_fed(model, {"input_ids": piece.ids[None]}, piece.cache.fed)


class LaidCache(LayersCache):
    """The `cache` argument of a forward of one row, whose attention the given layers compute.

    Args:
        states: the recurrent states of the sequences in the row.
    """

    handed: Handed | None = None
    """The tag of the last keys given."""

    def __init__(
        self,
        layers: Sequence[AttendingLayer],
        model_layers: ModelLayers,
        states: PackedStates = KeepsStates.packed_states,
    ) -> None:
        super().__init__(layers, model_layers)
        self.packed_states = states

    def tag(self, keys: Tensor, values: Tensor, place: int) -> Handed:
        """Tag new keys and values (1, H, n, D) with their layer."""
        if len(keys) != 1:
            raise ShapeError(
                f"a packed forward has one row, but layer {place} is given {len(keys)}"
            )
        self.require_attended()
        self.handed = super().tag(keys, values, place)
        return self.handed

    def require_attended(self) -> None:
        """Raise UnsupportedError if the last keys that `update` returned did not reach the
        attention function."""
        if self.handed is not None and not self.handed.taken:
            raise UnsupportedError(
                "the model attends to other keys than it gave to the cache, so its sequences "
                "cannot be packed; feed them one by one"
            )


NUMBERS = (1, 2, 4, 8, 12, 16, 24, 32)
"""Batch sizes with a compiled graph. A batch is padded to the next size; padding rows are
discarded."""


def numbers_up_to(sequences: int) -> list[int]:
    """The batch sizes of batches of 1 to `sequences` sequences."""
    few = [number for number in NUMBERS if number < sequences]
    return [*few, *NUMBERS[len(few) :][:1]]


class RowsOf(AttendingLayer):
    """The steps of one layer of several sequences. The inputs have a row for each sequence, then
    padding rows: q (rows, Hq, 1, D).

    Args:
        window: the layer's own sliding window, in tokens; None: no window.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self._layer: PackedLayer | None = None

    def use(self, layer: PackedLayer | None) -> None:
        """Set the layer of the next step's sequences, of one token each; None: no sequences."""
        self._layer = layer

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Zeros, which are not used: the model and the layers know the positions."""
        return torch.zeros(1, n, dtype=torch.int32, device=device)

    def prepare(self) -> ReadyTogether | None:
        """See `LayerCache.prepare`."""
        assert self._layer is not None
        return self._layer.prepared()

    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of all rows: (rows, Hq, 1, Dv); 0 in padding rows."""
        layer = self._layer
        assert layer is not None
        position = layer.next_positions(len(layer), inputs.q.device)
        return self._of_rows(layer.run, inputs._replace(position=position))

    def read(self, inputs: StepInputs) -> Tensor:
        """A reading of all rows; see `run`."""
        assert self._layer is not None
        return self._of_rows(self._layer.read, inputs)

    def _of_rows(self, run: Callable[[StepInputs], Tensor], inputs: StepInputs) -> Tensor:
        assert self._layer is not None
        q, v, count = inputs.q, inputs.v, len(self._layer)
        out = q.new_zeros(len(q), q.shape[1], 1, v.shape[3])
        out[:count] = run(_several(inputs, count)).transpose(0, 2)
        return out


class RowsCache(LayersCache):
    """The `cache` argument of a compiled step of several sequences.

    Args:
        like: any cache of the model.
    """

    def __init__(self, like: Cache) -> None:
        layers = [RowsOf(layer.window) for layer in like.layers]
        pairs = zip(layers, like.layers, strict=True)
        own = [Ticket(ref(layer), one.cursor.readers) for layer, one in pairs]
        super().__init__(layers, like.model_layers, with_readings(own))

    def use(self, layers: Sequence[PackedLayer | None], states: RecurrentStates) -> None:
        """Set the layers of the next step, see `RowsOf.use`, and the states of all rows."""
        self.carried = states
        for own, layer in zip(self.layers, layers, strict=True):
            own.use(layer)


def _several(inputs: StepInputs, count: int) -> StepInputs:
    """The first `count` rows, side by side as the tokens of one row: q (1, Hq, count, D)."""
    q, k, v, bias = (
        None if x is None else x[:count].transpose(0, 2) for x in (*inputs[:3], inputs.bias)
    )
    assert q is not None
    assert k is not None
    assert v is not None
    return inputs._replace(q=q, k=k, v=v, bias=bias)
