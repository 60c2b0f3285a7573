"""Models that cache a latent, of which all heads' keys and values are projections: DeepSeek's MLA.

A slot's key is the token's latent followed by the rotary part of its keys. Its value is the latent,
which the slot holds only once. For a latent c, a head's key is U c and its value V c. A score
q . (U c) equals (U^T q) . c, and a sum of w (V c) equals V times the sum of w c. So the projections
are applied to the queries and results of the few new tokens, not to the latents of all tokens.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvkeep.choice import is_slow
from kvkeep.errors import ShapeError, SpecError
from kvkeep.hf.handover import Handed, handed_on
from kvkeep.hf.kinds.base import Handle, Kind, Replaced
from kvkeep.host import LayerKind
from kvkeep.policy import Need
from kvkeep.spec import CacheSpec

_EXPAND = "expand_kv"
"""The method by which modules compute keys and values from their cache's result."""


class Latent(Kind):
    """One latent for all heads, in slots of one kv head."""

    def has(self, text: PreTrainedConfig) -> bool:
        return getattr(text, "kv_lora_rank", None) is not None

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Every layer that attends has latents."""
        widths = (int(layer.kv_lora_rank) for layer in text.per_layer_config)
        pairs = zip(layers, widths, strict=True)
        return [one if one is None else replace(one, latent=width) for one, width in pairs]

    def require_specs(self, specs: Sequence[CacheSpec]) -> None:
        """Raise SpecError if a policy's scores were fitted to keys and values of heads."""
        for spec in dict.fromkeys(specs):
            if Need.ROTARY in spec.policy.needs and Need.QUERIES not in spec.policy.needs:
                raise SpecError(
                    f"policy {spec.policy.name} scores a head's keys before their rotation, but "
                    "the model caches a latent, one for all heads; use expected_attention, snapkv "
                    "or h2o"
                )

    def to_slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`k`: the latents; `v`: the rotary parts."""
        if k.shape[:3] != v.shape[:3]:
            raise ShapeError(
                f"latents {tuple(k.shape)} with rotary parts {tuple(v.shape)} of keys; give (B, 1, "
                "n, D) of equal n"
            )
        made = torch.cat([k, v], dim=-1)
        return made, made[..., : k.shape[-1]]

    def from_slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return v, k[..., v.shape[-1] :]


def absorbed(module: nn.Module) -> Handle | None:
    """Let a module of latent attention pass latents tagged by kvkeep to the attention function
    without projecting them; None: it is another module."""
    if not hasattr(module, _EXPAND):
        return None
    return Replaced(module, _EXPAND, partial(_handed_on, getattr(module, _EXPAND), module))


def _handed_on(own: Any, module: nn.Module, latent: Tensor, rotated: Tensor) -> Any:
    """The keys and values of slots, from latents (B, 1, n, R) and rotary parts of keys (B, 1, n,
    D); for a cache that is not kvkeep's, the module's keys and values, from `own`."""
    handed: Handed | None = getattr(latent, "kvkeep", None)
    together: bool = getattr(rotated, "kvkeep", None) is handed
    if handed is None or not together:
        return own(latent, rotated)
    handed.absorbed = AbsorbedProjections(module)
    given = latent, rotated
    return handed_on(given, Latent().to_slots(*given))


class AbsorbedProjections(NamedTuple):
    """The projections of a module's `kv_b_proj`, with its current weights."""

    module: Any

    def queries(self, q: Tensor) -> Tensor:
        """See `Absorbed.queries`."""
        own = self.module
        width = own.qk_nope_head_dim
        plain, rotated = q[..., :width], q[..., width:]
        made = _by_head(plain.transpose(0, 1), self._weight(q)[:, :width])
        return torch.cat([made.transpose(0, 1), rotated], dim=-1)

    def results(self, out: Tensor) -> Tensor:
        """See `Absorbed.results`."""
        weight = self._weight(out)[:, self.module.qk_nope_head_dim :]
        made = _by_head(out.permute(2, 0, 1, 3), weight.transpose(1, 2))
        return made.permute(1, 2, 0, 3).contiguous()

    def _weight(self, like: Tensor) -> Tensor:
        """The matrix of each head, (Hq, D + Dv, R). If `kv_b_proj` is not a plain linear layer, for
        example has an adapter or quantised weights, it is computed by applying it to unit vectors.
        """
        own = self.module
        made = own.kv_b_proj
        plain = type(made) is nn.Linear and type(made.weight) is nn.Parameter
        if plain and made.weight.device == like.device and not _hooked(made):
            weight = made.weight
        else:
            width = own.kv_lora_rank
            weight = made(torch.eye(width, dtype=like.dtype, device=like.device)).T
        heads = (-1, own.qk_nope_head_dim + own.v_head_dim, weight.shape[1])
        return cast(Tensor, weight).view(heads).to(like.dtype)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """Each head's product: (H, B, n, D) times (H, D, E) -> (H, B, n, E)."""
    heads, rows, n, width = x.shape
    folded, dtype = x.reshape(heads, rows * n, width), x.dtype
    if x.is_cpu and is_slow(dtype):
        folded, weight = folded.float(), weight.float()
    return torch.bmm(folded, weight).to(dtype).view(heads, rows, n, weight.shape[2])


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
