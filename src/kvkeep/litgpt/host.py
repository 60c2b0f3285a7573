"""LitGPTHost: the host for models of LitGPT."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from litgpt.model import GPT
from torch import Tensor

from kvkeep.context import within
from kvkeep.errors import UnsupportedError
from kvkeep.geometry import Geometry
from kvkeep.host import (
    ChunkStep,
    Embedded,
    Host,
    LayerKind,
    Layerwise,
    ModelCache,
    Narrowed,
    Piece,
    Specs,
    packed,
)
from kvkeep.host.cache import DEFAULT_SPEC
from kvkeep.host.fingerprint import LIBRARY, fingerprint_of
from kvkeep.layer.attending import AttendingLayer
from kvkeep.litgpt.attach import attach, attachment_of, detach
from kvkeep.litgpt.conversion import as_transformers
from kvkeep.litgpt.decoder import (
    NARROWED,
    Forward,
    attentions,
    block,
    embedded,
    is_routed,
    logits,
    require_positions,
    route,
    run,
    running,
    unroute,
)
from kvkeep.rotary import Rotary


class LitGPTHost(Host):
    """A `litgpt.GPT`, with or without LoRA."""

    library = "LitGPT"
    model: GPT

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._config = model.config

    # -- the model --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return str(self._config.name or "GPT")

    @property
    def kinds(self) -> list[LayerKind]:
        config = self._config
        sliding = [
            bool(getattr(module, "apply_sliding_window_attention", False))
            for module in attentions(self.model)
        ]
        return [
            LayerKind("sliding_attention", config.sliding_window_size)
            if slides
            else LayerKind("full_attention", None)
            for slides in sliding
        ]

    def geometries(self) -> list[Geometry]:
        config, dtype = self._config, self.model.transformer.wte.weight.dtype
        if config.latent_attention:
            one = Geometry(1, config.n_head, config.qk_head_dim, config.v_head_dim, dtype)
        else:
            one = Geometry(1, config.n_query_groups, config.head_size, config.head_size, dtype)
        return [one._replace(device=device) for device in self.devices()]

    def rotaries(self, tokens: int | None = None) -> list[Rotary | None]:
        config, cos, sin = self._config, self.model.cos, self.model.sin
        width = config.rope_n_elem
        if config.latent_attention:
            raise UnsupportedError("latent attention rotates the last part of its keys")
        if not width:
            return [None] * config.n_layer
        if width % 2 or len(cos) < 2:
            raise UnsupportedError(f"{width} rotated dimensions of keys, or no second position")
        if cos.dtype.itemsize < torch.float32.itemsize:  # too coarse to derive frequencies
            cos, sin = self.model.rope_cache(device=cos.device)
        # At position 1 the angle is the frequency, which is at most 1.
        angle = torch.atan2(sin[1].double(), cos[1].double())[: width // 2]
        which = config.rope_indices or [None] * config.n_layer
        return [Rotary((angle if at is None else angle[..., at]).float()) for at in which]

    @property
    def context(self) -> int | None:
        return int(self.model.max_seq_length)

    @property
    def vocabulary(self) -> int:
        return int(self._config.padded_vocab_size)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.transformer.wte.weight.device
        return device

    def devices(self) -> list[torch.device]:
        return [next(layer.parameters()).device for layer in self.model.transformer.h]

    def fingerprint(self, tokenizer: Any = None, *, glance: bool = False) -> dict[str, str]:
        described = json.dumps(asdict(self._config), sort_keys=True, default=str)
        parts = {LIBRARY: self.library, "config": described}
        return fingerprint_of(self.model, parts, tokenizer, glance=glance)

    def as_transformers(self, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        return as_transformers(self.model, kind)

    # -- attention through a cache ----------------------------------------------------------

    @property
    def attached(self) -> bool:
        return attachment_of(self.model) is not None

    def attach(
        self, spec: Specs = DEFAULT_SPEC, *, linears: bool = True, compile: bool | None = None
    ) -> AbstractContextManager[object]:
        if compile:
            raise UnsupportedError("steps of a LitGPT model are not compiled; leave out compile")
        return attach(self.model, spec, linears=linears)

    def detach(self) -> None:
        detach(self.model)

    def forward(
        self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None, last: int = 1
    ) -> Tensor:
        return logits(self.model, _fed(self.model, ids, cache, position)[:, -last:])

    def feed(self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None) -> None:
        _fed(self.model, ids, cache, position)

    # -- several sequences in one forward ---------------------------------------------------

    @property
    def unpackable(self) -> str:
        return ""

    def forward_packed(self, pieces: Sequence[Piece]) -> Tensor:
        for piece in pieces:
            require_positions(self.model, piece.cache.fed + len(piece.ids))
        with packed(pieces, self.device) as tokens:
            forward = Forward(tokens.layers, tokens.positions[0].to(torch.int32))
            return logits(self.model, run(self.model, tokens.ids, forward)[0, tokens.last])

    def feed_layers(self, ids: Tensor, position: Tensor, layers: Sequence[AttendingLayer]) -> None:
        require_positions(self.model, int(position[-1]) + 1)
        place = position.to(self.device, torch.int32)
        run(self.model, ids.to(self.device)[None], Forward(layers, place))

    # -- some tokens of a forward -----------------------------------------------------------

    @property
    def narrows(self) -> bool:
        return True

    def narrowed(
        self, first: int, tokens: int, chosen: Callable[[], Narrowed]
    ) -> AbstractContextManager[None]:
        return within(NARROWED, (first, chosen))

    # -- training ---------------------------------------------------------------------------

    def layerwise(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Layerwise:
        require_positions(self.model, input_ids.shape[1])
        return _Layerwise(
            self.model,
            input_ids,
            attention_mask,
            layers=self.model.transformer.h,
            vocabulary=self.vocabulary,
        )


def _fed(model: GPT, ids: Tensor, cache: ModelCache, position: Tensor | None) -> Tensor:
    """Feed ids (B, n) to a cache; return the output of `ln_f`, (B, n, width)."""
    last = cache.fed + ids.shape[1] if position is None else int(position[-1]) + 1
    require_positions(model, last)
    cache.begin(ids.shape[1])
    if position is None:
        position = cache.layers[0].next_positions(ids.shape[1], ids.device)
    return run(model, ids, Forward(cache.layers, position.to(torch.int32)))


class _Layerwise(Layerwise):
    """A `GPT` run layer by layer. Inside the context kvkeep computes its attention."""

    model: GPT
    _routed = False

    def __enter__(self) -> _Layerwise:
        if not is_routed(self.model):
            route(self.model)
            self._routed = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._routed:
            unroute(self.model)
            self._routed = False

    def embed(self, columns: slice) -> Embedded:
        return Embedded(embedded(self.model, self.input_ids[:, columns]), [()] * len(self.layers))

    def layer(
        self, index: int, columns: slice, hidden: Tensor, call: Any, step: ChunkStep
    ) -> Tensor:
        position = self.positions(columns)
        steps: list[Any] = [None] * index + [step]
        with running(self.model, Forward(steps, position)):
            return block(self.model, index, hidden, position)

    def hidden(self, columns: slice, output: Tensor) -> Tensor:
        normed: Tensor = self.model.transformer.ln_f(output)
        return normed

    def logits(self, columns: slice, output: Tensor) -> Tensor:
        return logits(self.model, self.hidden(columns, output))
