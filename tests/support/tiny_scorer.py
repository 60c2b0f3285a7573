"""A scorer of random weights, for tests that read one."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from kvkeep.host import host_of
from kvkeep.host.fingerprint import sampled
from kvkeep.policy.scorer import LEVELS, HeadNetworks, LayerScorer, Scorer


def write(path, model, seed=0):
    """A scorer for a model whose layers are all alike."""
    torch.manual_seed(seed)
    geometries = host_of(model).geometries()
    shares = tuple(i / (LEVELS - 1) for i in range(LEVELS))
    layers = {
        index: LayerScorer(HeadNetworks(g.heads, g.key_width + g.value_width, 2), shares, "")
        for index, g in enumerate(geometries)
    }
    tensors, metadata = Scorer(layers, sampled(model), len(layers)).content()
    save_file(tensors, path, metadata)
    return path
