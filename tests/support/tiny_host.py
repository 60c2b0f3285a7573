"""A decoder of plain modules, and the host that serves it: a library other than transformers.

Importing this module registers the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvkeep.host import (
    Embedded,
    Host,
    LayerKind,
    LayerShape,
    LayerStep,
    Layerwise,
    ModelCache,
    register,
)
from kvkeep.host.fingerprint import fingerprint_of
from kvkeep.layer.step import StepInputs
from kvkeep.rotary import Rotary

Attend = Callable[[StepInputs], Tensor]
"""Attention of a chunk, (B, Hq, n, D)."""

VOCABULARY, WIDTH, QUERY_HEADS, HEADS = 97, 32, 4, 2
HEAD_WIDTH = WIDTH // QUERY_HEADS


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.rotary = Rotary(10_000.0 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH))
        self.norm, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, QUERY_HEADS * HEAD_WIDTH)
        self.k = nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.v = nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.o = nn.Linear(QUERY_HEADS * HEAD_WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, position: Tensor, attend: Attend) -> Tensor:
        x = self.norm(hidden)
        q, k, v = (
            part(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        at = position[:, None] if position.dim() == 2 else position
        q, k = self.rotary.turn(q, at), self.rotary.turn(k, at)
        out = attend(StepInputs(q, k, v, position, HEAD_WIDTH**-0.5))
        hidden = hidden + self.o(out.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norm_2(hidden))))


class TinyModel(nn.Module):
    """A decoder with one sliding layer (of 24 tokens) and one that sees everything."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block(window) for window in (24, None))
            self.norm = nn.RMSNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, n, V) of whole texts, without a cache."""
        hidden, at = self.embedding(ids), torch.arange(ids.shape[1])
        distance = at[:, None] - at
        for block in self.blocks:
            seen = (distance >= 0) & (distance < (block.window or len(at)))

            def attend(step: StepInputs, seen: Tensor = seen) -> Tensor:
                k, v = (x.repeat_interleave(QUERY_HEADS // HEADS, dim=1) for x in step[1:3])
                scores = (step.q @ k.transpose(-1, -2)) * step.scale
                return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v

            hidden = block(hidden, at, attend)
        return self.head(self.norm(hidden))


class TinyLayerwise(Layerwise):
    """Training's view of a `TinyModel`."""

    model: TinyModel

    def __init__(self, model: TinyModel, ids: Tensor, mask: Tensor | None) -> None:
        super().__init__(model, ids, mask, layers=model.blocks, vocabulary=VOCABULARY)

    def embed(self, columns: slice) -> Embedded:
        return Embedded(self.model.embedding(self.input_ids[:, columns]), [None] * len(self.layers))

    def layer(
        self, index: int, columns: slice, hidden: Tensor, call: Any, step: LayerStep
    ) -> Tensor:
        return self.layers[index](hidden, self.positions(columns), step.run)

    def hidden(self, columns: slice, output: Tensor) -> Tensor:
        return self.model.norm(output)

    def logits(self, columns: slice, output: Tensor) -> Tensor:
        return self.model.head(self.model.norm(output))


class TinyHost(Host):
    """What kvkeep asks of a `TinyModel`."""

    library = "tests"

    @property
    def kinds(self) -> list[LayerKind]:
        return [
            LayerKind(
                "full_attention" if block.window is None else "sliding_attention", block.window
            )
            for block in self.model.blocks
        ]

    def shapes(self) -> list[LayerShape]:
        dtype = self.model.head.weight.dtype
        return [LayerShape(HEADS, HEAD_WIDTH, HEAD_WIDTH, dtype) for _ in self.model.blocks]

    def rotaries(self) -> list[Rotary | None]:
        return [block.rotary for block in self.model.blocks]

    @property
    def context(self) -> int | None:
        return 512

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    def fingerprint(self, tokenizer: Any = None, *, glance: bool = False) -> dict[str, str]:
        return fingerprint_of(self.model, {"config": "tiny"}, tokenizer, glance=glance)

    def forward(
        self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None, last: int = 1
    ) -> Tensor:
        cache.admit(ids.shape[1])
        at = torch.arange(cache.fed, cache.fed + ids.shape[1]) if position is None else position
        hidden = self.model.embedding(ids)
        for block, layer in zip(self.model.blocks, cache.layers, strict=True):
            hidden = block(hidden, at.to(torch.int32), layer.run)
        return self.model.head(self.model.norm(hidden[:, -last:]))

    def layerwise(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Layerwise:
        return TinyLayerwise(self.model, input_ids, attention_mask)


register(TinyModel, TinyHost)
