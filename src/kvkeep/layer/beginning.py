"""Fills an empty layer with tokens from another layer, or with given keys and values."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvkeep.checks import check_chunk
from kvkeep.geometry import Geometry
from kvkeep.layer.frozen import FrozenPlanes, FrozenRuns, Run
from kvkeep.layer.history import History
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION, Planes, slot_count


def begin_with(layer: LayerCache, text: LayerCache) -> None:
    """Replace a layer's contents by the tokens of `text`, a layer that keeps all tokens.

    The result equals feeding these tokens in one chunk without settling: the next chunk sees all of
    them, and the policy then chooses among all tokens. If possible, both layers share the slots
    until the policy evicts.
    """
    history = text.history
    layer.cursor.adopt_frozen(history, tuple(_runs_for(layer, text, history)))


def _runs_for(layer: LayerCache, text: LayerCache, history: History) -> Iterator[Run]:
    """The slots of `text` as runs that `layer` can adopt: in the encoding of `layer`, with its
    policy's planes. Sets the centre of `history`, which becomes the history of `layer`; keys in a
    plain tail stay whole until the next step, whose queries the centre needs.

    The rows of `text` must have had no padding. Keys and values are shared if both layers use the
    same encoding and no slot was moved or hidden. The policy sees the decoded keys and values.
    """
    text.freeze()
    frozen: FrozenRuns = text.slots.frozen
    geometry = text.history.geometry
    codecs, centre = text.codecs, text.writer.centre
    whole = layer.slots.late or not layer.key_codec.centre  # keys that do not lack a centre
    alike = codecs == layer.slots.codecs and (centre is None) == whole
    if geometry is None:
        return
    if not alike:
        history.centre = None
    for planes in frozen.placed(codecs.key):
        if not slot_count(planes):  # all slots of the run are hidden
            continue
        position = planes[POSITION][0, 0]
        k, v = codecs.decode(planes, geometry.dtype)
        if centre is not None:
            k = centre.added(k, planes[POSITION])
        yield _run_of(layer, k, v, position, history, planes if alike else None)


def check_tokens(layer: LayerCache, k: Tensor, v: Tensor) -> None:
    """Check that an empty layer can begin with keys and values (B, H, n, D).

    Raises:
        ShapeError: the shapes of keys and values disagree, or a codec does not support a width.
        CapacityError: the storage has no room for n tokens.
        StateError: the tensors require gradients, which the storage or a codec does not propagate.
    """
    check_chunk(k, v, None, None)
    layer.key_codec.planes(k.shape[3], k.dtype)
    layer.value_codec.planes(v.shape[3], v.dtype)
    layer.writer.check_gradients(k, v)
    layer.writer.require(k.shape[2])


def begin_with_tokens(
    layer: LayerCache, k: Tensor, v: Tensor, columns: int, real: Tensor | None = None
) -> None:
    """Replace a layer's contents by copies of keys and values that were computed elsewhere; see
    `begin_with`.

    Args:
        k, v: (B, H, n, D), of the newest n columns; older columns count as evicted.
        columns: number of columns fed, including evicted ones.
        real: bool (B, columns), False for padding; None: no padding.
    """
    n, k, v = k.shape[2], k.clone(), v.clone()
    position = History().next_positions(
        columns, k.device, None if real is None else real.to(k.device)
    )
    history, _ = History().feed(position, len(k), shows_padding=True)
    history.geometry, history.embedded = Geometry.of(k, v), True
    history.floor = 0 if n == columns else columns
    run = _run_of(layer, k, v, position[..., columns - n :], history)
    layer.cursor.adopt_frozen(history, (run,))


def _run_of(
    layer: LayerCache,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    history: History,
    planes: Planes | None = None,
) -> Run:
    """A run of keys and values (B|1, H, n, D) at `position`, (n,) or (B, n), with the planes of the
    layer's policy.

    Args:
        history: the layer's new history. Its first run sets its centre, if the run is encoded with
            one.
        planes: the same keys and values, already encoded; None: encode them.
    """
    coded, late = k, layer.slots.late
    centre = None if planes or late else layer.centring.of_new(k, position, history)
    if centre is not None:
        coded = centre.without(k, position)
        history.centre = centre.held.expand(history.rows, -1, -1, -1).contiguous()
        v = v.expand(coded.shape[0], -1, -1, -1)
    own = layer.writer.own_planes(k, v, position, None if late else coded)
    if planes is None:
        slots = layer.slots.codecs.encode(coded, v)
    else:
        slots = {name: planes[name] for name in planes}
    slots[POSITION] = own.pop(POSITION)
    mine = {name: x.expand(history.rows, *x.shape[1:]).clone() for name, x in own.items()}
    return Run(FrozenPlanes(slots), mine)
