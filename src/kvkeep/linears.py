"""Linear layers of few rows on the CPU, by a kernel that reads the weights once and in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, ClassVar
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from kvkeep.errors import UnsupportedError
from kvkeep.native_library import LIBRARY, TYPES, reason

MOST_ROWS = 32
"""Most rows per call of the kernel; KV_LINEAR_ROWS of native/abi.h."""

FEWEST_BYTES, FEWEST_FOR_ONE = 1 << 16, 1 << 18
"""Fewest bytes of weights for which a layer is routed, and for which a single row is not left to
torch: with fewer, the call itself takes most of the time."""

_LINEAR = Struct("=7q")


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b by the native kernel, with sums in float32.

    The result of a row does not depend on other rows.

    Args:
        x: (..., inputs) on the CPU, 1 to `MOST_ROWS` rows; float32, bfloat16 or float16.
        weight: (outputs, inputs) of the same dtype, with contiguous rows.
        bias: (outputs,) of the same dtype.

    Returns:
        (..., outputs), without a gradient.

    Raises:
        UnsupportedError: the native library is missing, or the kernel does not support the tensors.
    """
    require_kernel()
    out = Weights([weight], [bias]).product(x)
    if out is None:
        raise UnsupportedError(
            f"this takes x of 1 to {MOST_ROWS} rows and weights on the CPU, all of one dtype "
            f"({', '.join(str(dtype) for dtype in TYPES)}); x is {tuple(x.shape)} of {x.dtype} on "
            f"{x.device}, weights are {tuple(weight.shape)} of {weight.dtype} on {weight.device} "
            f"with strides {weight.stride()}; use torch.nn.functional.linear"
        )
    return out


def require_kernel() -> None:
    """Raise UnsupportedError if the native library is missing."""
    if LIBRARY is None:
        raise UnsupportedError(f"no native kernel: {reason}")


def route(model: nn.Module) -> int:
    """Let the native kernel compute the model's linear layers where it is faster: calls of at most
    `MOST_ROWS` rows on the CPU, without gradients. `unroute` undoes this.

    A layer is routed if its type is exactly `nn.Linear`, the kernel can read its weights, and
    nothing has replaced or wrapped its forward (PEFT, quantisation, parametrisation).

    Returns:
        The number of routed layers; 0 without the native library.
    """
    if LIBRARY is None:
        return 0
    routed = [module for module in _linears(model) if _gains(module)]
    for module in routed:
        small = module.weight.nbytes < FEWEST_FOR_ONE
        module.__dict__["forward"] = _Routed(module, module.in_features if small else 0)
    return len(routed)


def unroute(model: nn.Module) -> None:
    """Restore the forwards of the layers that `route` changed."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _Routed):
            del module.__dict__["forward"]


def _linears(model: nn.Module) -> Iterator[nn.Linear]:
    wrapped = {
        id(part)
        for module in model.modules()
        if hasattr(module, "base_layer")  # a PEFT layer
        for part in module.modules()
    }
    for module in model.modules():
        if type(module) is nn.Linear and id(module) not in wrapped:
            yield module


def _gains(module: nn.Linear) -> bool:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        weight is not None
        and "forward" not in module.__dict__
        and weight.nbytes >= FEWEST_BYTES
        and _is_plain(weight, bias)
        and readable(weight, bias)
    )


def readable(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can read the layout of these weights."""
    return (
        weight.is_cpu
        and weight.layout is torch.strided
        and weight.dtype in TYPES
        and weight.dim() == 2
        and (weight.stride(1) == 1 or weight.shape[1] == 1)
        and (bias is None or (bias.is_cpu and bias.dtype is weight.dtype and bias.is_contiguous()))
        and (bias is None or bias.shape == weight.shape[:1])
    )


def _is_plain(*tensors: Tensor | None) -> bool:
    """True for plain tensors and parameters; subclasses may store other data."""
    return all(x is None or type(x) in (Tensor, nn.Parameter) for x in tensors)


Arguments = tuple[bytes, int, int, int, int, int]  # arguments of kv_linear


def multiply(arguments: Arguments) -> None:
    """Compute the product described by `Weights.arguments`.

    Raises:
        MemoryError: there is no scratch memory.
    """
    assert LIBRARY is not None
    if LIBRARY.kv_linear(*arguments):
        raise MemoryError(f"no scratch memory for {arguments[4]} rows of {arguments[3]} inputs")


class Weights:
    """Weights of layers that share an input, and the records that describe them to the kernel."""

    __slots__ = ("_dtype", "_given", "_inputs", "_outputs", "_pointers", "_records", "_threads")

    _of_graphs: ClassVar[dict[int, Weights]] = {}
    """Objects by the id of their first weight, which removes its entry when it is freed."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        # Weak references, so that a model's weights are freed with the model.
        self._given = [
            (ref(weight), None if bias is None else ref(bias))
            for weight, bias in zip(weights, biases, strict=True)
        ]
        first = weights[0]
        self._dtype, self._inputs = first.dtype, first.shape[-1]
        self._outputs = sum(weight.shape[0] for weight in weights)
        self._pointers = [x.data_ptr() for x in (*weights, *biases) if x is not None]
        self._threads, self._records = 0, b""
        if not all(
            _is_plain(weight, bias)
            and readable(weight, bias)
            and (weight.shape[1], weight.dtype) == (self._inputs, self._dtype)
            for weight, bias in zip(weights, biases, strict=True)
        ):
            self._inputs = 0  # matches no x

    @classmethod
    def known(cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Weights:
        """The object for these tensors, created on first use."""
        number = id(weights[0])
        cached = cls._of_graphs.get(number)
        if cached is None or not cached.are(weights, biases):
            cached = cls._of_graphs[number] = cls(weights, biases)
            finalize(weights[0], cls._of_graphs.pop, number, None)
        return cached

    def are(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
        """Whether these are the same tensors at the same addresses."""
        if len(weights) != len(self._given):
            return False
        pointers = iter(self._pointers)
        for weight, (held, _) in zip(weights, self._given, strict=True):
            if held() is not weight or weight.data_ptr() != next(pointers):
                return False
        for bias, (_, own) in zip(biases, self._given, strict=True):
            if (bias is None) != (own is None):
                return False
            if bias is None or own is None:
                continue
            if own() is not bias or bias.data_ptr() != next(pointers):
                return False
        return True

    def product(self, x: Tensor) -> Tensor | None:
        """x W^T + b with the outputs of all layers side by side, or None if the kernel does not
        support x or the weights."""
        if not self._takes(x):
            return None
        if not x.is_contiguous():
            x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self._outputs))
        multiply(self._arguments(x, out))
        return out

    def _takes(self, x: Tensor) -> bool:
        inputs = self._inputs
        return (
            type(x) is Tensor
            and x.dtype is self._dtype
            and inputs > 0
            and 0 < x.numel() <= MOST_ROWS * inputs
            and x.dim() > 0
            and x.shape[-1] == inputs
            and x.is_cpu
            and x.layout is torch.strided
        )

    def _arguments(self, x: Tensor, out: Tensor) -> Arguments:
        if self._threads != torch.get_num_threads():
            self._describe(torch.get_num_threads())
        inputs, count = self._inputs, len(self._given)
        rows = x.numel() // inputs
        return self._records, count, x.data_ptr(), inputs, rows, out.data_ptr()

    def _describe(self, threads: int) -> None:
        records = []
        for of_weight, of_bias in self._given:
            weight, bias = of_weight(), None if of_bias is None else of_bias()
            assert weight is not None  # `are` has compared it with a tensor
            outputs, inputs = weight.shape
            address = 0 if bias is None else bias.data_ptr()
            kind, row = TYPES[weight.dtype], weight.stride(0)
            records.append(
                _LINEAR.pack(weight.data_ptr(), address, kind, inputs, outputs, row, threads)
            )
        self._threads, self._records = threads, b"".join(records)


class _Routed:
    """The `forward` of a routed layer. Calls that the kernel does not support go to the module's
    own forward."""

    __slots__ = ("_few", "_module", "_weights")

    def __init__(self, module: nn.Linear, few: int) -> None:
        """`few`: most elements of an input for which torch is as fast."""
        self._module, self._few = module, few
        self._weights: Weights | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Routed, (self._module, self._few)  # copies have their own weights

    def __call__(self, input: Tensor) -> Tensor:  # named as in nn.Linear
        module = self._module
        if input.numel() > self._few and not is_compiling():
            parameters, weights = module._parameters, self._weights
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if weight is not None and (weights is None or not weights.are((weight,), (bias,))):
                weights = self._weights = Weights([weight], [bias])
            if weight is not None and weights is not None and not self._is_watched(input):
                out = weights.product(input)
                if out is not None:
                    return out
        return nn.Linear.forward(module, input)

    def _is_watched(self, x: Tensor) -> bool:
        """Whether gradients, hooks, autocast, tracing or torch.func require torch's operations."""
        module = self._module
        if torch.is_grad_enabled():
            weights = module._parameters.values()
            if x.requires_grad or any(p is not None and p.requires_grad for p in weights):
                return True
        return bool(
            module._forward_hooks
            or module._forward_pre_hooks
            or torch.is_autocast_enabled("cpu")
            or torch._C._len_torch_dispatch_stack()
            or torch._C._get_tracing_state()
            or peek_interpreter_stack()
            or forward_ad._current_level >= 0
        )
