"""Tiny configs and random models of every causal language model type of transformers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The names of the types, and of their model classes."""

MOST_PARAMETERS = 20_000_000

_WIDTH, _HEADS, _LAYERS = 32, 4, 4

_SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "pad_vocab_size", "text_vocab_size", "unpadded_vocab_size"], 96),
    **dict.fromkeys(
        ["hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim", "word_embed_proj_dim"], _WIDTH
    ),
    **dict.fromkeys(["adapter_in_dim", "adapter_out_dim", "adapter_input_size"], _WIDTH),
    **dict.fromkeys(["embedding_size", "input_embedding_size", "output_embedding_size"], _WIDTH),
    **dict.fromkeys(
        ["intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"],
        48,
    ),
    **dict.fromkeys(["ffn_hidden_size", "dff", "d_inner", "feed_forward_size"], 48),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], _HEADS
    ),
    **dict.fromkeys(
        ["encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"],
        _HEADS,
    ),
    **dict.fromkeys(["num_key_value_heads", "multi_query_group_num"], 2),
    **dict.fromkeys(["head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "d_kv"], 8),
    **dict.fromkeys(["attention_head_dim", "v_head_dim", "swa_v_head_dim", "rotary_dim"], 8),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim"], 8),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "o_lora_rank"], 16),
    "index_n_heads": 16,  # with few, all heads' scores of a token are often 0, and topk meets ties
    "index_topk": 4,
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"], 128
    ),
    **dict.fromkeys(["max_target_positions", "max_source_positions", "seq_length"], 128),
    **dict.fromkeys(
        ["sliding_window", "attention_window_size", "window_size", "attention_chunk_size"], 8
    ),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(
        ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"], 2
    ),
    **dict.fromkeys(
        ["moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"], 24
    ),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "num_shared_experts"], 1),
    **dict.fromkeys(["first_k_dense_replace", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["pad_token_id", "bos_token_id", "decoder_start_token_id"], 1),
    **dict.fromkeys(["mamba_chunk_size", "chunk_size", "linear_head_dim"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
    **dict.fromkeys(["linear_num_heads", "linear_num_value_heads"], 4),
    "linear_num_key_heads": 2,
    "num_codebooks": 1,
    "qk_head_dim": 16,
    "eos_token_id": None,
    "is_decoder": True,
    "tie_word_embeddings": False,
}
"""What every config is told, as far as its class knows the name."""

_COUNTS = {
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    *("encoder_layers", "num_decoder_layers", "num_encoder_layers"),
}
"""Names of the number of layers."""

_KEPT_NONE = {"sliding_window", "q_lora_rank", "n_inner"}
"""Sizes that stay None where a class has None for them."""

_QWEN4 = {
    "ple_layer_ids": [1],
    "eos_token_id": 95,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 1,
    "make_ngram_vocab_size_divisible_by": 1,
}
_DOTS3 = {
    "num_key_value_heads": _HEADS,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    **{f"swa_num_{name}_heads": _HEADS for name in ("attention", "key_value")},
    **{f"swa_{name}_lora_rank": 16 for name in ("q", "kv")},
    **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
}
_SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
_GEMMA4 = {**_SHARED, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
_GEMMA3N = {**_GEMMA4, "laurel_rank": 8}
_ASSISTANT = {
    "num_hidden_layers": _LAYERS,
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": _LAYERS,
}
_ROPES = {
    kind: {"rope_type": "default", "rope_theta": 10_000.0}
    for kind in ("sliding_attention", "full_attention")
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 90},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": _ROPES,
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"mlp_layer_types": ["dense", "sparse"] * 2},
    },
    "dots3_note_text": _DOTS3,
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **{"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma4_unified_assistant": {"text_config": _ASSISTANT},
    "gemma4_unified": {"text_config": _SHARED},
    "gemma4_unified_text": _SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], _LAYERS // 2]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        **{"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 24,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * _LAYERS},
}
"""What single types need beside."""


def config_of(kind: str, layers: int = _LAYERS) -> Any:
    """A tiny config of a type."""
    return _shrunk(CONFIG_MAPPING[kind], _OF_TYPE.get(kind, {}), layers)


_LAYERS_OF = {"linear_attention": "recurrent", "hybrid": "hybrid", "conv": "convolution"}
"""What a layer's type is called in a few words."""


def described(kind: str) -> str:
    """The tiny config of a type in a few words: its layers, heads, widths and experts; empty if
    there is none."""
    try:
        config = config_of(kind)
        text = config.get_text_config(decoder=True)
    except Exception:
        return ""
    parts = _layers_in(text), _heads_in(text), _experts_in(kind, text)
    return "; ".join(filter(None, parts))


def _layers_in(text: Any) -> str:
    count, window = _of(text, "num_hidden_layers"), _of(text, "sliding_window")
    chunk = _of(text, "attention_chunk_size")
    usual = "chunked" if chunk else "sliding" if window else "full"
    if not isinstance(_of(text, "num_attention_heads"), int):
        usual = "layers"
    named = (_of(text, name) for name in ("layer_types", "attention_layers", "attn_layers"))
    names = next(filter(None, named), [usual] * (count or 0))
    sizes = {"sliding": f"window {window}", "chunked": f"chunked {chunk}"}
    found = Counter(_LAYERS_OF.get(name, name.removesuffix("_attention")) for name in names)
    layers = [f"{n} {sizes.get(name, name).replace('_', ' ')}" for name, n in found.items()]
    shared = _of(text, "num_kv_shared_layers")
    return ", ".join([*layers, *([f"{shared} of them share"] if shared else [])])


def _heads_in(text: Any) -> str:
    heads, latent = _of(text, "num_attention_heads"), _of(text, "kv_lora_rank")
    if not isinstance(heads, int):
        return ""
    if isinstance(latent, int):
        return f"{heads} heads, latent {latent}+{_of(text, 'qk_rope_head_dim')}"
    kv, width = _of(text, "num_key_value_heads"), _of(text, "head_dim")
    if _of(text, "multi_query") and not _of(text, "new_decoder_architecture"):
        kv = 1
    width = width if isinstance(width, int) else _of(text, "hidden_size") // heads
    return f"{heads}/{kv if isinstance(kv, int) else heads} heads of {width}"


def _experts_in(kind: str, text: Any) -> str:
    """Configs name experts also where their models have none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    found = [count for count in (_of(text, name) for name in names) if isinstance(count, int)]
    try:
        with torch.device("meta"):
            model = _class_of(kind)(_own_config(kind))
        held = any("expert" in name for name, _ in model.named_parameters())
    except Exception:
        held = True
    return f"{max(found)} experts" if held and max(found, default=0) > 1 else ""


def _shrunk(config_class: Any, own: dict[str, Any], count: int) -> Any:
    usual, own = _usual(config_class, own), dict(own)
    if "layer_types" in own:
        own["layer_types"] = own["layer_types"][:count]
    known = usual.to_dict()
    names = set(known) | set(getattr(config_class, "attribute_map", {}))
    sizes = {}
    for name, size in (_SIZES | dict.fromkeys(_COUNTS, count)).items():
        if name not in names:
            continue
        value = _of(usual, name)
        if value is None and name in _KEPT_NONE:
            continue
        if isinstance(value, (list, tuple)):
            continue
        sizes[name] = size
    heads = _of(usual, "num_attention_heads")
    if isinstance(heads, int) and _of(usual, "num_key_value_heads") == heads:
        sizes["num_key_value_heads"] = _HEADS
    for name in usual.sub_configs:
        part = _of(usual, name)
        if isinstance(part, transformers.PreTrainedConfig):
            sizes[name] = _shrunk(type(part), own.pop(name, {}), count).to_dict()
    sizes |= own
    tiny = config_class(**sizes)
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or []))
    missing = set(kinds) - set(getattr(tiny, "layer_types", None) or kinds)
    if missing and "layer_types" not in own:
        tiny = config_class(**sizes, layer_types=(kinds * count)[:count])
    return tiny


def _usual(config_class: Any, own: dict[str, Any]) -> Any:
    """A config of a class, as it is if nothing is said, or else of a type's own numbers."""
    try:
        return config_class()
    except Exception:
        return config_class(**own)


def _of(config: Any, name: str) -> Any:
    """None also where layers differ in it."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _class_of(kind: str) -> Any:
    return getattr(transformers, TYPES[kind])


def _own_config(kind: str, layers: int = _LAYERS) -> Any:
    """The config that the class of a type takes: it may be a part of the type's config."""
    config = config_of(kind, layers)
    for name in config.sub_configs:
        if type(getattr(config, name, None)) is _class_of(kind).config_class:
            return getattr(config, name)
    return config


def model_of(kind: str, layers: int = _LAYERS) -> Any:
    """A tiny model of a type, with weights large enough that its attention and its text vary."""
    torch.manual_seed(0)
    model_class, config = _class_of(kind), _own_config(kind, layers)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"its smallest model here has {parameters:,} parameters")
    model = model_class(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 1.5 * min(weight.shape[-2:]) ** -0.5)
            elif "sink" in key or "bias" in key or "lambda" in key:
                weight.normal_(0.0, 0.5)
    return model


_LEAST = dict.fromkeys(["gemma3n_text", "gemma4_text", "gpt_neo", "recurrent_gemma", "zamba2"], 4)
_LEAST |= {"doge": 4}  # whose later layers have larger biases
_LEAST |= {"hy_v4": 3, "zamba": 3}


def few_layers(kind: str) -> Any:
    """A tiny model of a type, of as few layers as have all kinds of its layers."""
    return model_of(kind, _LEAST.get(kind, 2))
