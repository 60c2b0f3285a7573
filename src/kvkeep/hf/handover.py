"""What a cache gives to the mask function and the attention function of an attached model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.graph.custom_ops import Traced
from kvkeep.layer.layer import LayerCache


class MaskLength(int):
    """The key length of a mask request, carrying the layer it is for to the mask function."""

    layer: LayerCache
    traced: Traced
    routed: bool
    compileable: bool


@dataclass(eq=False)
class Handed:
    """What `update` tags new keys and values with: the layer whose step the attention function
    runs on them, once. `versions` are the tensors' own, where torch counts them."""

    layer: LayerCache
    traced: Traced
    versions: tuple[int, int] | None = None
    taken: bool = False
    weights: bool = False
    """Whether attention is to return its weights."""


def hand_over(k: Tensor, v: Tensor, layer: LayerCache, traced: Traced) -> Handed:
    """Tag new keys and values, (B, H, n, D) each, as those of one step of a layer."""
    handed = Handed(layer, traced)
    if not torch.compiler.is_compiling() and not (k.is_inference() or v.is_inference()):
        handed.versions = k._version, v._version
    k.kvkeep = v.kvkeep = handed  # type: ignore[attr-defined]
    return handed
