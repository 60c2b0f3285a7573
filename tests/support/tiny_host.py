"""A small decoder that no model library has, and the host that tells kvkeep about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.geometry import Geometry
from kvkeep.host import (
    Embedded,
    Host,
    LayerKind,
    LayerStep,
    Layerwise,
    ModelCache,
    Narrowed,
    Piece,
    packed,
    register,
)
from kvkeep.host.fingerprint import fingerprint_of
from kvkeep.layer.step import StepInputs
from kvkeep.rotary import Rotary

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q (B, Hq, n, D), k and v (B, H, n, D) -> (B, Hq, n, D)."""

HEADS, QUERY_HEADS, WIDTH = 2, 4, 8


class TinyLayer(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, QUERY_HEADS * WIDTH, bias=False)
        self.k = nn.Linear(width, HEADS * WIDTH, bias=False)
        self.v = nn.Linear(width, HEADS * WIDTH, bias=False)
        self.out = nn.Linear(QUERY_HEADS * WIDTH, width, bias=False)
        self.forth, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, position: Tensor, inv_freq: Tensor, attend: Attend) -> Tensor:
        """x (B, n, width) at positions (n,) or (B, n) -> the same shape."""
        h = self.before(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        angle = position.clamp(min=0)[..., None] * inv_freq
        cos, sin = (torch.cat([f(angle)] * 2, dim=-1) for f in (torch.cos, torch.sin))
        if position.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        q, k = (y * cos + _half_turned(y) * sin for y in (q, k))
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.back(nn.functional.silu(self.forth(self.after(x))))


class TinyModel(nn.Module):
    """A decoder with rotary embeddings and grouped queries; its forward has no cache."""

    def __init__(self, layers: int = 3, vocabulary: int = 61, context: int = 128) -> None:
        super().__init__()
        self.vocabulary, self.context = vocabulary, context
        width = QUERY_HEADS * WIDTH
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(TinyLayer(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        frequencies = 100.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(
        self, ids: Tensor, visible: Tensor | None = None, position: Tensor | None = None
    ) -> Tensor:
        """Logits (B, n, V) of ids (B, n).

        Args:
            visible: bool (n, n), which keys each query sees; None: those up to its own.
            position: (n,); None: 0, 1, 2, ...
        """
        n = ids.shape[1]
        position = torch.arange(n) if position is None else position
        visible = torch.ones(n, n, dtype=torch.bool).tril() if visible is None else visible

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, enable_gqa=True
            )

        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, position, self.inv_freq, attend)
        return self.head(self.norm(x))


def tiny_model(seed: int = 0, **sizes: int) -> TinyModel:
    """A model with random weights, large enough that what a token sees shows in its logits."""
    torch.default_generator.manual_seed(seed)
    model = TinyModel(**sizes).eval()
    for layer in model.layers:
        layer.q.weight.data *= 4
    return model


class TinyHost(Host):
    """What kvkeep asks of a `TinyModel`."""

    library = "tiny"
    model: TinyModel

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._narrowing: tuple[int, Callable[[], Narrowed]] | None = None

    @property
    def kinds(self) -> list[LayerKind]:
        return [LayerKind("full", None)] * len(self.model.layers)

    def geometries(self) -> list[Geometry]:
        dtype = self.model.embedding.weight.dtype
        return [Geometry(1, HEADS, WIDTH, WIDTH, dtype)] * len(self.model.layers)

    def rotaries(self, tokens: int | None = None) -> list[Rotary | None]:
        return [Rotary(self.model.inv_freq)] * len(self.model.layers)

    @property
    def context(self) -> int | None:
        return self.model.context

    @property
    def vocabulary(self) -> int:
        return self.model.vocabulary

    def fingerprint(self, tokenizer: Any = None, *, glance: bool = False) -> dict[str, str]:
        return fingerprint_of(self.model, {}, tokenizer, glance=glance)

    def forward(
        self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None, last: int = 1
    ) -> Tensor:
        n = ids.shape[1]
        cache.admit(n)
        at = cache.layers[0].next_positions(n, ids.device) if position is None else position
        x = self.model.embedding(ids)
        for index, module in enumerate(self.model.layers):
            if self._narrowing is not None and index == self._narrowing[0]:
                chosen = self._narrowing[1]()
                x, at = x[:, chosen.indices], chosen.positions
            x = module(x, at, self.model.inv_freq, attention(cache.layers[index], at))
        return self.model.head(self.model.norm(x[:, -last:]))

    @property
    def unpackable(self) -> str:
        return ""

    def forward_packed(self, pieces: Sequence[Piece]) -> Tensor:
        with packed(pieces, self.device) as tokens:
            x, at = self.model.embedding(tokens.ids), tokens.positions[0]
            for module, layer in zip(self.model.layers, tokens.layers, strict=True):
                x = module(x, at, self.model.inv_freq, attention(layer, at))
            return self.model.head(self.model.norm(x[0, tokens.last]))

    @property
    def narrows(self) -> bool:
        return True

    @contextmanager
    def narrowed(self, first: int, tokens: int, chosen: Callable[[], Narrowed]) -> Iterator[None]:
        self._narrowing = first, chosen
        try:
            yield
        finally:
            self._narrowing = None

    def layerwise(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Layerwise:
        return TinyLayerwise(
            self.model,
            input_ids,
            attention_mask,
            layers=self.model.layers,
            vocabulary=self.vocabulary,
        )


class TinyLayerwise(Layerwise):
    """A `TinyModel` run layer by layer."""

    model: TinyModel

    def embed(self, columns: slice) -> Embedded:
        return Embedded(self.model.embedding(self.input_ids[:, columns]), [()] * len(self.layers))

    def layer(
        self, index: int, columns: slice, hidden: Tensor, call: Any, step: LayerStep
    ) -> Tensor:
        at = self.positions(columns)
        return self.layers[index](hidden, at, self.model.inv_freq, attention(step, at))

    def hidden(self, columns: slice, output: Tensor) -> Tensor:
        return self.model.norm(output)

    def logits(self, columns: slice, output: Tensor) -> Tensor:
        return self.model.head(self.model.norm(output))


def attention(step: LayerStep, position: Tensor) -> Attend:
    """Attention of a chunk at some positions through a step."""
    return lambda q, k, v: step.run(StepInputs(q, k, v, position.to(torch.int32), WIDTH**-0.5))


def _half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


register(TinyModel, TinyHost)
