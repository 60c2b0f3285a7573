"""Attention that modules of transformers models compute inline, routed to kvkeep.

Such a module does not call the attention function that its config names. While a model is attached,
kvkeep replaces the forwards of these modules by its own, which compute the same results but call
the attention function, as other models do. Calls with another cache, or without a cache, run the
module's own forward.

Linear biases (ALiBi) are not computed here: they belong to the layers of the cache; see
`kvkeep.hf.kinds.biased`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, update_wrapper
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.hf.cache import Cache
from kvkeep.hf.config import unrouted
from kvkeep.hf.forward.experts import gathering
from kvkeep.hf.forward.masks import MaskRequest
from kvkeep.hf.forward.placing import placing
from kvkeep.hf.interface.layers_cache import LayersCache
from kvkeep.hf.kinds.base import Handle, Replaced
from kvkeep.hf.kinds.differential import differential
from kvkeep.hf.kinds.indexed import choosing
from kvkeep.hf.kinds.latent import absorbed
from kvkeep.hf.kinds.rebound import Rebound
from kvkeep.hf.kinds.relative import inkling, inkling2
from kvkeep.hf.kinds.replaced_attention import Attention, Output
from kvkeep.hf.kinds.weighed import weighed

_ACCELERATED = "_old_forward"
"""The attribute in which accelerate keeps a module's original forward, when it moves weights."""


# -- attention modules ------------------------------------------------------------------------


def _bert(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    attention_mask: Any = None,
    sinusoidal_pos: Tensor | None = None,
    **_: Any,
) -> Output:
    width = module.attention_head_size
    shape = (*hidden_states.shape[:-1], -1, width)
    made = (module.query, module.key, module.value)
    q, k, v = (linear(hidden_states).view(shape).transpose(1, 2) for linear in made)
    if sinusoidal_pos is not None:
        if module.rotary_value:
            q, k, v = module.apply_rotary_position_embeddings(sinusoidal_pos, q, k, v)
        else:
            q, k = module.apply_rotary_position_embeddings(sinusoidal_pos, q, k)
    out, weights = attend(q, k, v, attention_mask, width**-0.5, module.dropout)
    return out.flatten(2), weights


def _git(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    attention_mask: Any = None,
    cache: Any = None,
    **_: Any,
) -> Output:
    """GIT passes its cache by position."""
    return _bert(module, attend, hidden_states, attention_mask)


def _big_bird(
    module: Any, attend: Attention, hidden_states: Tensor, attention_mask: Any = None, **_: Any
) -> Output:
    """BigBird replaces the module inside, which knows its layer, when it first uses a cache."""
    attend = attend._replace(place=module.seed)
    out, weights = _bert(module.self, attend, hidden_states, attention_mask)
    return module.output(out, hidden_states), weights


def _bart(
    module: Any, attend: Attention, hidden_states: Tensor, attention_mask: Any = None, **_: Any
) -> Output:
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    made = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (linear(hidden_states).view(shape).transpose(1, 2) for linear in made)
    out, weights = attend(q, k, v, attention_mask, module.scaling, module.dropout)
    return module.out_proj(out.flatten(2)), weights


def _bloom(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Any,
    attention_mask: Any,
    **_: Any,
) -> Output:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    dropout = module.attention_dropout
    out, weights = attend(q, k, v, attention_mask, module.inv_norm_factor, dropout)
    made = nn.functional.dropout(
        module.dense(out.flatten(2)), module.hidden_dropout, module.training
    )
    return residual + made, weights


def _falcon(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    alibi: Any,
    attention_mask: Any,
    position_embeddings: Any = None,
    **_: Any,
) -> Output:
    split = module._split_heads(module.query_key_value(hidden_states))
    q, k, v = (x.transpose(1, 2) for x in split)
    if not module.config.alibi:
        rotate: Any = sys.modules[type(module).__module__].apply_rotary_pos_emb
        q, k = rotate(q, k, *position_embeddings)
    dropout = module.attention_dropout if module.config.alibi else 0.0  # as in Falcon's forward
    out, weights = attend(q, k, v, attention_mask, module.inv_norm_factor, dropout)
    return module.dense(out.flatten(2)), weights


def _mpt(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    position_bias: Any,
    attention_mask: Any = None,
    **_: Any,
) -> Output:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    shape = (*hidden_states.shape[:-1], module.n_heads, module.head_dim)
    q, k, v = (x.reshape(shape).transpose(1, 2) for x in mixed.chunk(3, dim=2))
    dropout = module.attn_dropout_p
    out, weights = attend(q, k, v, attention_mask, module.softmax_scale, dropout)
    return module.out_proj(out.flatten(2)), weights


def _jetmoe(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None, Any]:
    """Each expert has its own queries for every kv head. JetMoE's module repeats keys and values;
    here the queries are regrouped instead."""
    shape, top = hidden_states.shape[:-1], module.top_k
    made, router, routed = module.experts.map(hidden_states)
    mixed = (made, *module.kv_proj(hidden_states).chunk(2, dim=-1))
    q, k, v = (x.view(*shape, -1, module.head_dim).transpose(1, 2) for x in mixed)
    q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)
    q = _regrouped(q, top)
    dropout = module.attention_dropout
    out, weights = attend(q, k, v, attention_mask, module.scaling, dropout)
    groups = q.shape[1] // top
    out = _regrouped(out.transpose(1, 2), groups).transpose(1, 2).reshape(*shape, top, -1)
    weights = None if weights is None else _regrouped(weights, groups)
    return module.experts.reduce(out, routed).view(*shape, -1), weights, router


def _regrouped(x: Tensor, outer: int) -> Tensor:
    """x (B, heads, ...), whose heads form `outer` groups, with heads reordered: the first of each
    group, then the second of each group, and so on."""
    grouped = x.reshape(len(x), outer, x.shape[1] // outer, *x.shape[2:])
    return grouped.transpose(1, 2).flatten(1, 2)


def _neox(
    module: Any, attend: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Any = None
) -> Output:
    out, weights = attend(q, k, v, mask, 1 / module.norm_factor, module.attention_dropout)
    return out.transpose(1, 2), weights


def _neo(
    module: Any, attend: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Any = None
) -> Output:
    asked: MaskRequest | None = getattr(mask, "kvkeep", None)
    if module.attention_type == "local" and asked is not None:  # GPT-Neo makes one mask for all
        mask = mask.view_as(mask)
        mask.kvkeep = asked._replace(window=module.config.window_size)
    out, weights = attend(q, k, v, mask, 1.0, module.attn_dropout)
    return out.transpose(1, 2), weights


# -- decoders that change the result of the mask function -------------------------------------


class _Unchanged:
    """A mask that a decoder cannot convert to another dtype."""

    def __init__(self, mask: Any) -> None:
        self._mask = mask

    def to(self, dtype: torch.dtype) -> Any:
        """The mask."""
        return self._mask


def _falcon_decoder(source: Any) -> dict[str, Any]:
    return {"build_alibi_tensor": lambda *_, **__: None}


def _git_decoder(source: Any) -> dict[str, Any]:
    """GIT takes every text for the caption of an image: it widens masks by the columns of an image,
    and asks for masks in which the tokens of images see each other."""

    def mask(cache: Any, inputs_embeds: Tensor, attention_mask: Any = None, **request: Any) -> Any:
        columns = cache.get_seq_length() + inputs_embeds.shape[1]
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, -columns:]
        groups = request.pop("block_sequence_ids")
        if not torch.compiler.is_compiling() and bool((groups >= 0).any()):
            request["block_sequence_ids"] = groups
        given = {"cache": cache, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
        return source.create_causal_mask(**given, **request)

    return {"create_causal_mask": mask}


def _inkling2_decoder(source: Any) -> dict[str, Any]:
    return {"get_relative_distance": lambda *_, **__: None}


def _mpt_decoder(source: Any) -> dict[str, Any]:
    return {
        "create_causal_mask": lambda **request: _Unchanged(source.create_causal_mask(**request))
    }


# -- attaching --------------------------------------------------------------------------------

_FORWARDS: dict[str, Callable[..., Any]] = {
    "BigBirdAttention": _big_bird,
    "DiffLlamaAttention": differential,
    "DogeAttention": weighed,
    "GitSelfAttention": _git,
    "InklingAttention": inkling,
    **dict.fromkeys(("Inkling2SlidingAttention", "Inkling2FullAttention"), inkling2),
    **dict.fromkeys(("Inkling2LoopSlidingAttention", "Inkling2LoopFullAttention"), inkling2),
    "MegatronBertSelfAttention": _bert,
    "RemBertSelfAttention": _bert,
    "RoFormerSelfAttention": _bert,
    "MvpAttention": _bart,
    "TrOCRAttention": _bart,
    "XGLMAttention": _bart,
    "BloomAttention": _bloom,
    "JetMoeAttention": _jetmoe,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
}
_CORES = {"GPTNeoXJapaneseAttention": _neox, "GPTNeoSelfAttention": _neo}
"""Replacements of a method `_attn`, which a module calls with its cache's result."""

_DECODERS = {
    "FalconModel": _falcon_decoder,
    "GitModel": _git_decoder,
    "Inkling2LoopTextModel": _inkling2_decoder,
    "Inkling2TextModel": _inkling2_decoder,
    "MptModel": _mpt_decoder,
}


def is_inline(decoder: PreTrainedModel) -> bool:
    """Whether the decoder has modules with inline attention that kvkeep can replace."""
    return any(_known(module) in {*_FORWARDS, *_CORES} for module in decoder.modules())


def route_inline(decoder: PreTrainedModel, name: str) -> Sequence[Handle]:
    """Let the attention implementation `name` compute a decoder's inline attention.

    Returns:
        The changes, which `detach` removes.
    """
    return list(_changes(decoder, name))


def _known(module: nn.Module) -> str:
    """The name of a module's class, if it comes with transformers; otherwise empty, because a class
    of the same name may compute something else."""
    kind = type(module)
    return kind.__name__ if kind.__module__.startswith("transformers.models.") else ""


def _changes(decoder: PreTrainedModel, name: str) -> Iterator[Handle]:
    for module in decoder.modules():
        known, place = _known(module), "forward"
        if known in _FORWARDS:
            place = _ACCELERATED if _ACCELERATED in vars(module) else place
            own = getattr(module, place)
            if "config" in vars(module):  # its own forward branches on the config's implementation
                module.config = cast(Any, unrouted(vars(module)["config"]))
            forward = partial(_forward, own, _FORWARDS[known], name, module)
            yield Replaced(module, place, update_wrapper(forward, own))
        elif known in _DECODERS:
            rebound = Rebound.of(type(module), _DECODERS[known])
            forward = partial(_decoded, module.forward, rebound, module)
            yield Replaced(module, place, update_wrapper(forward, module.forward))
        elif known == "BloomModel":
            own = module.build_alibi_tensor
            yield Replaced(module, "build_alibi_tensor", partial(_alibi, own))
        elif known in _CORES:
            own = module._attn
            yield Replaced(module, "_attn", partial(_core, own, _CORES[known], name, module))
        elif known:
            found = (change(module) for change in (absorbed, choosing, gathering, placing))
            yield from filter(None, found)


def _forward(own: Any, run: Any, name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    cache = _cache_of_kvkeep(*args, *kwargs.values())
    if cache is None:
        return own(*args, **kwargs)
    return run(module, Attention(name, module, cache), *args, **kwargs)


def _decoded(own: Any, rebound: Rebound, module: Any, *args: Any, **kwargs: Any) -> Any:
    of_kvkeep = _cache_of_kvkeep(*args, *kwargs.values())
    run = own if of_kvkeep is None else partial(rebound.forward, module)
    return run(*args, **kwargs)


def _cache_of_kvkeep(*given: Any) -> Cache | LayersCache | None:
    """The cache among the arguments of a forward, if it is kvkeep's."""
    return next((x for x in given if isinstance(x, (Cache, LayersCache))), None)


def _alibi(own: Any, mask: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Bloom's bias; None if positions are given instead of a mask, see `masks`."""
    return own(mask, *args, **kwargs) if mask.dim() == 2 else None


def _core(
    own: Any, run: Any, name: str, module: Any, q: Tensor, k: Tensor, v: Tensor, *mask: Any
) -> Output:
    given = partial(run, module, Attention(name, module)) if hasattr(k, "kvkeep") else own
    found: Output = given(q, k, v, *mask)
    return found
