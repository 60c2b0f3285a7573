"""llama.cpp with the same weights as kvkeep, by the optional package llama-cpp-python.

The loaded model is written as a GGUF file in its dtype, the format that llama.cpp reads. llama.cpp
gets token ids, so the file has no vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep_lab.extras import needed_by

with needed_by("Measuring llama.cpp", "llama-cpp"):
    import gguf
    import numpy as np

TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}
"""llama.cpp's name of each dtype that it has."""


def library() -> Any:
    """The package llama_cpp.

    Raises:
        MissingPackageError: llama-cpp-python is not installed.
    """
    with needed_by("Measuring llama.cpp", "llama-cpp"):
        import llama_cpp
    return llama_cpp


def require(model: Any) -> None:
    """Check, before anything is measured, that llama.cpp can run this model.

    Raises:
        MissingPackageError: llama-cpp-python is not installed.
        UnsupportedError: the model is no Llama.
    """
    library()
    config = model.config
    if config.model_type != "llama" or model.dtype not in TYPES:
        raise UnsupportedError(
            f"llama.cpp is measured on Llama models in {', '.join(map(str, TYPES))} only, not "
            f"on {config.model_type} in {model.dtype}"
        )


def written(model: Any, directory: Path) -> Path:
    """The GGUF file of a Llama that passed `require`, which is written once."""
    path = directory / "model.gguf"
    if not path.exists():
        write_gguf(model, path)
    return path


def opened(model: Any, directory: Path, room: int, kind: int) -> Any:
    """llama.cpp with a model's weights.

    Args:
        directory: directory for the GGUF file.
        room: tokens of context to reserve.
        kind: the type of keys and values.
    """
    threads = torch.get_num_threads()
    return library().Llama(
        str(written(model, directory)),
        n_ctx=room,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,  # without it, values have no types of fewer bits
        type_k=kind,
        type_v=kind,
        verbose=False,
    )


def fed(llama: Any, tokens: list[int]) -> Tensor:
    """The logits (V,) after the last of these tokens, float32."""
    llama.eval(tokens)
    last = library().llama_get_logits_ith(llama.ctx, -1)
    return torch.from_numpy(np.ctypeslib.as_array(last, shape=(llama.n_vocab(),)).copy())


def stepper(model: Any, ids: Tensor, room: int, directory: Path) -> Callable[[], None]:
    """Feed all of `ids` (1, n) but the last, and return a function that feeds the last id at each
    call. Keys and values are held in the model's dtype. For the arguments see `opened`."""
    llama = opened(model, directory, room, int(TYPES[model.dtype]))
    *prompt, last = ids[0].tolist()
    llama.eval(prompt)
    return lambda: llama.eval([last])


def write_quantised(model: Any, weights: str, directory: Path) -> None:
    """Write the file that `stepper` reads with quantised weights, by llama.cpp's own quantiser.

    Args:
        model: a Llama that passed `require`, with plain weights.
        weights: "int8" for Q8_0, or "int4" for Q4_K_M. llama.cpp takes another type of 5 or 8 bits
            for weights whose inputs are no multiple of 256.

    Raises:
        UnsupportedError: llama.cpp cannot quantise them.
    """
    llama_cpp, plain = library(), directory / "plain.gguf"
    write_gguf(model, plain)
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = torch.get_num_threads()
    params.ftype = {
        "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
        "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    }[weights]
    names = (str(path).encode() for path in (plain, directory / "model.gguf"))
    if llama_cpp.llama_model_quantize(*names, params):
        raise UnsupportedError(f"llama.cpp cannot quantise this model's weights to {weights}")
    plain.unlink()


def write_gguf(model: Any, path: Path) -> None:
    """Write a Llama's weights and shape as a GGUF file without a vocabulary."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rotated = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        if heads := rotated.get(name.split(".")[-2]):
            weight = _interleaved(weight, heads)
        kind = TYPES[model.dtype] if weight.dim() > 1 else gguf.GGMLQuantizationType.F32
        target = names.get_name(name, try_suffixes=(".weight",))
        if target is None:
            raise UnsupportedError(f"llama.cpp has no tensor for the weight {name}")
        writer.add_tensor(target, _numbers(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head in llama.cpp's order. It rotates adjacent rows together; transformers rotates
    each row of the first half with one of the second."""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _numbers(weight: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    x = weight.detach().cpu()
    if kind == gguf.GGMLQuantizationType.F32:
        return x.float().numpy()
    return x.numpy() if x.dtype == torch.float16 else x.contiguous().view(torch.uint8).numpy()
