"""Every causal language model of transformers, tiny and random: does a kvkeep cache serve it?

    python tests/support/sweep_models.py            # all types; writes docs/models.md
    python tests/support/sweep_models.py llama opt  # these; replaces their rows

Each type runs in a process of its own, with a time limit.
"""

from __future__ import annotations

import multiprocessing
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvkeep
from kvkeep import Cache, attach, detach
from kvkeep.errors import KVKeepError, UnsupportedError

WORKS = "works"
REFUSED = "refused by attach"
FAILS = "fails after attach"
WRONG = "wrong"
NOT_BUILT = "not built here"
KINDS = (WORKS, REFUSED, FAILS, WRONG, NOT_BUILT)

TYPES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SECONDS = 180
PROMPT, NEW = 24, 8
CHUNKS = (5, 1, 11, 7)
PADS = (6, 1, 0)
MOST_PARAMETERS = 20_000_000
RELATIVE = 1e-4
"""Largest difference of logits, as a part of the largest logit."""


class Outcome(NamedTuple):
    """What became of a type, and why."""

    kind: str
    reason: str = ""


# -- tiny configs ---------------------------------------------------------------------------

_WIDTH, _HEADS, _LAYERS = 32, 4, 4

_SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "pad_vocab_size", "text_vocab_size"], 96),
    **dict.fromkeys(
        ["hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim", "word_embed_proj_dim"], _WIDTH
    ),
    **dict.fromkeys(["embedding_size", "input_embedding_size", "output_embedding_size"], _WIDTH),
    **dict.fromkeys(
        ["intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"],
        48,
    ),
    **dict.fromkeys(["ffn_hidden_size", "dff", "d_inner", "feed_forward_size"], 48),
    **dict.fromkeys(
        ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], _LAYERS
    ),
    **dict.fromkeys(["encoder_layers", "num_decoder_layers", "num_encoder_layers"], _LAYERS),
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
    **dict.fromkeys(["index_n_heads", "index_topk"], 4),
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
    "qk_head_dim": 16,
    "eos_token_id": None,
    "is_decoder": True,
    "tie_word_embeddings": False,
}
"""What every config is told, as far as its class knows the name."""

_KEPT_NONE = {"sliding_window", "q_lora_rank", "n_inner"}
"""Sizes that stay None where a class has None for them."""

_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 1,
    "make_ngram_vocab_size_divisible_by": 1,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
_GEMMA4 = {**_SHARED, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
_GEMMA3N = {**_GEMMA4, "laurel_rank": 8}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 90},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "gemma3n_text": _GEMMA3N,
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma4_text": _GEMMA4,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_unified_text": _SHARED,
    "gemma4_unified": {"text_config": _SHARED},
    "dots3_note": {"text_config": {"num_key_value_heads": _HEADS}},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 24,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * _LAYERS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
}
"""What single types need beside."""


def config_of(kind: str) -> Any:
    """A tiny config of a type."""
    return _shrunk(CONFIG_MAPPING[kind], _OF_TYPE.get(kind, {}))


def _shrunk(config_class: Any, own: dict[str, Any]) -> Any:
    usual, own = config_class(), dict(own)
    known = usual.to_dict()
    names = set(known) | set(getattr(config_class, "attribute_map", {}))
    sizes = {}
    for name, size in _SIZES.items():
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
            sizes[name] = _shrunk(type(part), own.pop(name, {})).to_dict()
    sizes |= own
    tiny = config_class(**sizes)
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or []))
    if set(kinds) - set(getattr(tiny, "layer_types", None) or kinds):
        tiny = config_class(**sizes, layer_types=(kinds * _LAYERS)[:_LAYERS])
    return tiny


def _of(config: Any, name: str) -> Any:
    """None also where layers differ in it."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def model_of(kind: str) -> Any:
    """A tiny model of a type, with weights large enough that its attention and its text vary."""
    torch.manual_seed(0)
    model_class, config = getattr(transformers, TYPES[kind]), config_of(kind)
    for name in config.sub_configs:
        if type(getattr(config, name, None)) is model_class.config_class:
            config = getattr(config, name)
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


# -- what is compared -----------------------------------------------------------------------


def outcome_of(kind: str) -> Outcome:
    """Build a type, attach it, and compare it with itself unattached and without a cache."""
    try:
        model = model_of(kind)
    except Exception as error:
        return _refused_whole(kind) or Outcome(NOT_BUILT, _said(error))
    try:
        attachment = attach(model)
    except UnsupportedError as error:
        return Outcome(REFUSED, _reason(str(error)))
    detach(model)
    try:
        compared = list(_comparisons(model, attachment.attention > 0))
    except Exception as error:
        return Outcome(NOT_BUILT, f"unattached it raises {_said(error)}")
    with attach(model):
        for what, expected, call in compared:
            try:
                found = call()
            except Exception as error:
                return Outcome(FAILS, f"{what}: {_said(error)}")
            difference = _difference(expected, found)
            if difference:
                return Outcome(WRONG, f"{what}: {difference}")
    return Outcome(WORKS, "" if attachment.attention else "its own attention, on a latent")


def _refused_whole(kind: str) -> Outcome | None:
    """A type that is refused as its config stands, without weights."""
    try:
        with torch.device("meta"):
            model = getattr(transformers, TYPES[kind])(CONFIG_MAPPING[kind]())
        attach(model)
    except UnsupportedError as error:
        return Outcome(REFUSED, _reason(str(error)))
    except Exception:
        return None
    return None


Comparison = tuple[str, Any, Callable[[], Any]]


def _comparisons(model: Any, routed: bool) -> Iterator[Comparison]:
    """What is compared, what the unattached model gives, and the call that is to give the same."""
    ids = torch.randint(2, 96, (len(PADS), PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, pads in enumerate(PADS):
        mask[row, :pads] = 0
    one, batch = {"input_ids": ids[2:]}, {"input_ids": ids * mask, "attention_mask": mask}

    def logits() -> Any:
        return model(**one, past_key_values=Cache(model), use_cache=True).logits

    def chunked() -> Any:
        cache = Cache(model)
        parts = one["input_ids"].split(list(CHUNKS), dim=1)
        return torch.cat(
            [model(x, past_key_values=cache, use_cache=True).logits for x in parts], dim=1
        )

    def text(inputs: dict[str, Any], spec: str | None) -> Any:
        cache: dict[str, Any] = (
            {"use_cache": False} if spec is None else {"past_key_values": Cache(model, spec)}
        )
        found = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **cache)
        assert spec is None or cache["past_key_values"].fed == PROMPT + NEW - 1, "no cache was used"
        return found

    with torch.no_grad():
        plain = model(**one, use_cache=False).logits
    yield "logits", plain, torch.no_grad()(logits)
    yield "logits in chunks", plain, torch.no_grad()(chunked)
    yield "greedy text", text(one, None), lambda: text(one, "keep_all")
    yield "padded batch", text(batch, None), lambda: text(batch, "keep_all")
    if routed:
        yield "window", None, lambda: text(batch, "window:12,sinks=2")


def _difference(expected: Any, found: Any) -> str:
    if expected is None:
        return ""
    if not expected.is_floating_point():
        return "" if expected.equal(found) else "another text"
    if not bool(expected.isfinite().all()):
        return "the unattached model's logits are not finite"
    off, scale = float((found - expected).abs().max()), float(expected.abs().max())
    return "" if off <= RELATIVE * scale else f"logits off by {off:.2g} at {scale:.2g}"


def _reason(message: str) -> str:
    return " ".join(message.partition(": ")[2].partition("; ")[0].split()) or message


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    name = "" if isinstance(error, KVKeepError) else f"{type(error).__name__}: "
    return f"{name}{text}".replace("|", "/")[:160]


# -- one process for each type --------------------------------------------------------------


def sweep(kinds: list[str]) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of some types."""
    context = multiprocessing.get_context("fork")
    for kind in kinds:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(kind, there))
        process.start()
        there.close()
        try:
            found = here.recv() if here.poll(SECONDS) else Outcome(NOT_BUILT, "timed out")
        except EOFError:
            process.join()
            found = Outcome(NOT_BUILT, f"its process ended with {process.exitcode}")
        process.kill()
        process.join()
        yield kind, found


def _child(kind: str, connection: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    connection.send(outcome_of(kind))


# -- the table ------------------------------------------------------------------------------

TABLE = Path(__file__).parents[2] / "docs" / "models.md"


def written(rows: dict[str, Outcome]) -> str:
    """docs/models.md."""
    counts = Counter(found.kind for found in rows.values())
    lines = [
        "# Which models work",
        "",
        *_wrapped(
            "Each causal language model type of transformers was built tiny, with random weights "
            "in float32, attached, and compared with itself unattached and without a cache: logits "
            f"of a prompt of {PROMPT} tokens, at once and in chunks (within {RELATIVE:g} of the "
            "largest logit), the greedy text of one prompt and of a padded batch; a window spec "
            "must run. Layers are of the kinds in a type's default config: others may be refused. "
            "Written by `python tests/support/sweep_models.py` with kvkeep "
            f"{kvkeep.__version__}, torch {torch.__version__.partition('+')[0]} and transformers "
            f"{transformers.__version__}: "
            + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
            + "."
        ),
        "",
        "| type | outcome | why |",
        "|---|---|---|",
    ]
    lines += [f"| {kind} | {found.kind} | {found.reason} |" for kind, found in sorted(rows.items())]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_on_hyphens=False, break_long_words=False)


def _rows_of(text: str) -> dict[str, Outcome]:
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    return {
        kind.strip(): Outcome(outcome.strip(), reason.strip())
        for _, kind, outcome, reason, _ in cells
        if kind.strip() in TYPES
    }


def main(kinds: list[str]) -> None:
    rows = _rows_of(TABLE.read_text()) if kinds and TABLE.exists() else {}
    for kind, found in sweep(kinds or sorted(TYPES)):
        sys.stdout.write(f"{kind:28} {found.kind:20} {found.reason}\n")
        sys.stdout.flush()
        rows[kind] = found
    TABLE.write_text(written(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
