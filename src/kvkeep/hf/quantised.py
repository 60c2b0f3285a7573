"""Quantises the weights of a loaded model with torchao."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvkeep.errors import ModelError, UnsupportedError
from kvkeep.extras import needed_by

KINDS = ("int8", "int4")

GROUP = 32
"""Inputs of a layer that share a scale and a zero point in int4, as in llama.cpp's Q4_K."""


def quantise(model: PreTrainedModel, weights: str) -> int:
    """Quantise the weights of all linear layers, including the output layer. Embeddings keep their
    dtype.

    Args:
        model: a model on the CPU, which is changed.
        weights: "int8", with a scale for each output; or "int4", with a scale and a zero point for
            each 32 inputs of an output.

    Returns:
        The number of quantised layers. With "int4", a layer keeps its weights if its number of
        inputs is no multiple of 32, or its number of outputs no multiple of 16.

    Raises:
        ModelError: `weights` is neither "int8" nor "int4".
        UnsupportedError: the model is not on the CPU, has adapters or quantised weights, or no
            layer can be quantised. The model is unchanged.
        MissingPackageError: torchao is not installed.
    """
    if weights not in KINDS:
        raise ModelError(f"weights {weights!r}: give one of {', '.join(KINDS)}")
    if why := _why_not(model):
        raise UnsupportedError(f"weights cannot be quantised to {weights}: {why}")
    with needed_by(f"Quantising weights to {weights}", "weights"):
        import torchao.quantization as torchao  # noqa: PLC0415 - an extra

        # The only packed format of 4 bits for which torch has a kernel on the CPU.
        from torchao.prototype.quantization.int4 import (  # noqa: PLC0415
            PrototypeInt4WeightOnlyConfig,
        )
    layers = [x for x in model.modules() if type(x) is nn.Linear and _fits(x, weights)]
    if not layers:
        raise UnsupportedError(
            f"no linear layer of {type(model).__name__} can be quantised to {weights}; leave out "
            "this option"
        )
    config: Any = torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    if weights == "int4":
        config = PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    quantised = {id(layer) for layer in layers}
    torchao.quantize_(model, config, lambda module, _: id(module) in quantised)
    return len(layers)


def _why_not(model: PreTrainedModel) -> str:
    """Why a model's weights cannot be quantised here; empty if they can."""
    if model.device.type != "cpu":
        return f"the model is on {model.device}, not on the CPU; use --device cpu"
    if getattr(model, "is_quantized", False):
        return "they are already quantised; leave out this option"
    if any(hasattr(module, "base_layer") for module in model.modules()):
        return "the model has an adapter; merge the adapter into the model, or leave it out"
    return ""


def _fits(layer: nn.Linear, weights: str) -> bool:
    outputs, inputs = layer.weight.shape
    return weights == "int8" or (inputs % GROUP == 0 and outputs % 16 == 0)
