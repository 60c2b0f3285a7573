"""Fills an empty layer with tokens that another layer holds or that were computed elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvkeep.checks import check_chunk
from kvkeep.geometry import Geometry
from kvkeep.layer.frozen import FrozenPlanes, FrozenRuns, Run
from kvkeep.layer.history import History
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.slots import Codecs
from kvkeep.planes import POSITION, Planes, slot_count


def begin_with(layer: LayerCache, text: LayerCache) -> None:
    """Replace a layer's contents by the tokens of a layer that keeps all.

    The result equals feeding these tokens in one chunk without settling: the next chunk sees all of
    them, and the policy chooses among all. Where possible both layers share the slots until the
    policy evicts.
    """
    layer.adopt_frozen(text.history, tuple(runs_for(layer, text)))


def runs_for(layer: LayerCache, text: LayerCache) -> Iterator[Run]:
    """The slots of `text` as runs that `layer` can adopt: in its encoding, with its policy's
    planes.

    The rows of `text` must have had no padding. Keys and values are shared if both layers encode
    alike and no slot was moved or hidden. The policy sees the decoded keys and values of `text`.
    """
    text.freeze()
    frozen: FrozenRuns = text.slots.frozen
    geometry = text.history.geometry
    codecs = Codecs(text.key_codec, text.value_codec)
    if geometry is None:
        return
    for planes in frozen.placed(codecs.key):
        if not slot_count(planes):  # all of its slots are hidden
            continue
        position = planes[POSITION][0, 0]
        k, v = codecs.decode(planes, geometry.dtype)
        alike = codecs == layer.slots.codecs
        yield _run_of(layer, k, v, position, geometry.rows, planes if alike else None)


def check_tokens(layer: LayerCache, k: Tensor, v: Tensor) -> None:
    """Check that an empty layer can begin with keys and values (B, H, n, D).

    Raises:
        ShapeError: keys and values do not fit each other, or a codec does not support their width.
        CapacityError: the storage has no room for n tokens.
        StateError: the tensors require gradients, which the storage or a codec does not propagate.
    """
    check_chunk(k, v, None, None)
    layer.key_codec.planes(k.shape[3], k.dtype)
    layer.value_codec.planes(v.shape[3], v.dtype)
    layer.check_gradients(k, v)
    layer.require(k.shape[2])


def begin_with_tokens(
    layer: LayerCache, k: Tensor, v: Tensor, columns: int, real: Tensor | None = None
) -> None:
    """Replace a layer's contents by copies of keys and values that were computed elsewhere; see
    `begin_with`.

    Args:
        k, v: (B, H, n, D), of the newest n columns; older columns are evicted already.
        columns: number of columns fed.
        real: bool (B, columns), False for padding; None: no padding.
    """
    n, k, v = k.shape[2], k.clone(), v.clone()
    position = History().next_positions(
        columns, k.device, None if real is None else real.to(k.device)
    )
    history, _ = History().feed(position, len(k), shows_padding=True)
    history.geometry, history.embedded = Geometry.of(k, v), True
    history.floor = 0 if n == columns else columns
    run = _run_of(layer, k, v, position[..., columns - n :], k.shape[0])
    layer.adopt_frozen(history, (run,))


def _run_of(
    layer: LayerCache,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    rows: int,
    planes: Planes | None = None,
) -> Run:
    """A run of keys and values (B|1, H, n, D) at `position`, (n,) or (B, n), with the planes of the
    layer's policy. `planes`: the same keys and values, already encoded; None: encode them."""
    own = layer.own_planes(k, v, position)
    slots = layer.slots.codecs.encode(k, v) if planes is None else {n: planes[n] for n in planes}
    slots[POSITION] = own.pop(POSITION)
    mine = {name: x.expand(rows, *x.shape[1:]).clone() for name, x in own.items()}
    return Run(FrozenPlanes(slots), mine)
