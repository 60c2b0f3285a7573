"""Linear layers on the CPU, by a kernel that reads weights in place, once for up to 32 rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, ClassVar, NamedTuple
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from kvkeep.choice import kernel_rows
from kvkeep.errors import UnsupportedError
from kvkeep.native_library import LIBRARY, TYPES, reason

_LINEAR = Struct("=8q")


class Stored(NamedTuple):
    """A layer's weights as the kernel reads them: floats (outputs, inputs); or int8 codes and a
    float32 scale per output, where weight = code * scale."""

    weight: Tensor
    scale: Tensor | None = None


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """x W^T + b by the native kernel, with sums in float32.

    The result of a row does not depend on other rows.

    Args:
        x: (..., inputs) on the CPU, at least one row; float32, bfloat16 or float16.
        weight: (outputs, inputs) of the same dtype, with contiguous rows; int8 with `scale`.
        bias: (outputs,) of x's dtype.
        scale: float32 (outputs,), the factors of int8 weights.

    Returns:
        (..., outputs), without a gradient.

    Raises:
        UnsupportedError: the native library is missing, or the kernel does not support the tensors.
    """
    require_kernel()
    out = Weights([Stored(weight, scale)], [bias], x.dtype).product(x)
    if out is None:
        raise UnsupportedError(
            "this takes x of at least one row and weights on the CPU, all of one dtype "
            f"({', '.join(str(dtype) for dtype in TYPES)}), or int8 weights with float32 scales; "
            f"x is {tuple(x.shape)} of {x.dtype} on "
            f"{x.device}, weights are {tuple(weight.shape)} of {weight.dtype} on {weight.device} "
            f"with strides {weight.stride()}; use torch.nn.functional.linear"
        )
    return out


def grouped_product(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor | None:
    """x[ends[g - 1] : ends[g]] W_g^T for each group of rows, by the native kernel.

    Args:
        x: (rows, inputs) on the CPU; float32, bfloat16 or float16.
        weight: (groups, outputs, inputs) of the same dtype, with contiguous rows.
        ends: the end of each group, ascending. Results of later rows are 0.

    Returns:
        (rows, outputs), without a gradient; None: the kernel does not support the tensors.
    """
    groups, outputs, inputs = weight.shape
    fits = x.is_cpu and x.dim() == 2 and x.shape[1] == inputs and len(ends) <= groups
    if LIBRARY is None or not fits or not readable(Stored(weight[0]), None, x.dtype):
        return None
    if len(x) < max(ends, default=0):
        return None
    x, threads = x.contiguous(), torch.get_num_threads()
    out = x.new_empty(len(x), outputs)
    given, to, size = x.data_ptr(), out.data_ptr(), x.element_size()
    kind, row, first, step = TYPES[x.dtype], weight.stride(1), weight.data_ptr(), weight.stride(0)
    start = 0
    for group, end in enumerate(ends):
        if end > start:
            own = first + group * step * size
            record = _LINEAR.pack(own, 0, 0, kind, inputs, outputs, row, threads)
            at = given + start * inputs * size, inputs, end - start, to + start * outputs * size
            multiply((record, 1, *at))
            start = end
    out[start:] = 0
    return out


def require_kernel() -> None:
    """Raise UnsupportedError if the native library is missing."""
    if LIBRARY is None:
        raise UnsupportedError(f"no native kernel: {reason}")


def route(model: nn.Module) -> int:
    """Let the native kernel compute the model's linear layers where it is faster (`kvkeep.choice`),
    on the CPU and without gradients. `unroute` undoes this.

    A layer is routed if its type is exactly `nn.Linear`, the kernel can read its weights, and
    nothing has replaced or wrapped its forward (PEFT, quantisation, parametrisation). The kernel
    reads floats, and int8 weights with a scale for each output, as torchao's
    `Int8WeightOnlyConfig` produces. Layers with other quantised weights are not routed.

    Returns:
        The number of routed layers; 0 without the native library.
    """
    if LIBRARY is None:
        return 0
    routed = [(module, _faster(module)) for module in _linears(model)]
    routed = [(module, faster) for module, faster in routed if any(faster)]
    for module, faster in routed:
        module.__dict__["forward"] = _Routed(module, faster)
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


def _faster(module: nn.Linear) -> tuple[bool, ...]:
    """`kernel_rows` of a layer; empty if the kernel cannot compute it."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or "forward" in module.__dict__:
        return ()
    found = stored(weight)
    if found is None or not (_is_plain(bias) and readable(found, bias, weight.dtype)):
        return ()
    return _rows_of(found, weight.dtype)


def _rows_of(layer: Stored, dtype: torch.dtype) -> tuple[bool, ...]:
    return kernel_rows(dtype, layer.weight.nbytes, coded=layer.scale is not None)


def stored(weight: Tensor) -> Stored | None:
    """A layer's weights as the kernel reads them; None if it cannot read their class."""
    if _is_plain(weight):
        return Stored(weight)
    if type(weight) is not getattr(sys.modules.get("torchao.quantization"), "Int8Tensor", None):
        return None
    own: Any = weight
    if own.act_quant_kwargs is not None or own.act_pre_scale is not None:
        return None  # x must be quantised or scaled too
    if own.zero_point is not None and own.zero_point.any():
        return None
    return Stored(own.qdata, own.scale)


def readable(stored: Stored, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the kernel can read the layout of these weights, for x of a dtype."""
    weight, scale = stored
    return (
        weight.is_cpu
        and weight.layout is torch.strided
        and dtype in TYPES
        and weight.dtype is (dtype if scale is None else torch.int8)
        and weight.dim() == 2
        and (weight.stride(1) == 1 or weight.shape[1] == 1)
        and (bias is None or (bias.is_cpu and bias.dtype is dtype and bias.is_contiguous()))
        and (bias is None or bias.shape == weight.shape[:1])
        and (scale is None or (scale.is_cpu and scale.dtype is torch.float32))
        and (scale is None or (scale.is_contiguous() and scale.numel() == weight.shape[0]))
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
    """Weights of layers that share an input x, and the records that describe them to the kernel.

    Args:
        weights: the weights of each layer, all with scales or all without.
        biases: the bias of each layer; None: no bias.
        dtype: the dtype of x.
    """

    __slots__ = ("_dtype", "_given", "_inputs", "_outputs", "_pointers", "_records", "_threads")

    _of_graphs: ClassVar[dict[int, Weights]] = {}
    """Objects by the id of their first weight. The entry is removed when the weight is freed."""

    def __init__(
        self, weights: Sequence[Stored], biases: Sequence[Tensor | None], dtype: torch.dtype
    ) -> None:
        # Weak references, so that a model's weights are freed with the model.
        tensors = _in_line(weights, biases)
        self._given = [None if x is None else ref(x) for x in tensors]
        self._pointers = [None if x is None else x.data_ptr() for x in tensors]
        first, scales = weights[0]
        self._dtype, self._inputs = dtype, first.shape[-1]
        self._outputs = sum(layer.weight.shape[0] for layer in weights)
        self._threads, self._records = 0, b""
        if not all(
            _is_plain(layer.weight, bias, layer.scale)
            and readable(layer, bias, dtype)
            and layer.weight.shape[1] == self._inputs
            and (layer.scale is None) == (scales is None)
            for layer, bias in zip(weights, biases, strict=True)
        ):
            self._inputs = 0  # matches no x

    @classmethod
    def known(
        cls, weights: Sequence[Stored], biases: Sequence[Tensor | None], dtype: torch.dtype
    ) -> Weights:
        """The object for these tensors, created on first use."""
        first = weights[0].weight
        number = id(first)
        cached = cls._of_graphs.get(number)
        if (
            cached is None
            or cached._dtype is not dtype
            or not cached.are(_in_line(weights, biases))
        ):
            cached = cls._of_graphs[number] = cls(weights, biases, dtype)
            finalize(first, cls._of_graphs.pop, number, None)
        return cached

    def are(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether the tensors, each layer's weights, bias and scale, are the object's, at the same
        addresses."""
        if len(tensors) != len(self._given):
            return False
        for x, held, pointer in zip(tensors, self._given, self._pointers, strict=True):
            if x is None or held is None:
                if x is not None or held is not None:
                    return False
            elif held() is not x or x.data_ptr() != pointer:
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
            and x.numel() > 0
            and x.dim() > 0
            and x.shape[-1] == inputs
            and x.is_cpu
            and x.layout is torch.strided
        )

    def _arguments(self, x: Tensor, out: Tensor) -> Arguments:
        if self._threads != torch.get_num_threads():
            self._describe(torch.get_num_threads())
        inputs, count = self._inputs, len(self._given) // 3
        rows = x.numel() // inputs
        return self._records, count, x.data_ptr(), inputs, rows, out.data_ptr()

    def _describe(self, threads: int) -> None:
        records = []
        tensors = [None if x is None else x() for x in self._given]
        for at in range(0, len(tensors), 3):
            weight, bias, scale = tensors[at : at + 3]
            assert weight is not None  # `are` has compared it with a tensor
            outputs, inputs = weight.shape
            others = (0 if x is None else x.data_ptr() for x in (bias, scale))
            kind, row = TYPES[self._dtype], weight.stride(0)
            records.append(
                _LINEAR.pack(weight.data_ptr(), *others, kind, inputs, outputs, row, threads)
            )
        self._threads, self._records = threads, b"".join(records)


def _in_line(weights: Sequence[Stored], biases: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The weights, bias and scale of each layer, one after the other."""
    layers = zip(weights, biases, strict=True)
    return [x for (weight, scale), bias in layers for x in (weight, bias, scale)]


class _Routed:
    """The `forward` of a routed layer. Calls that the kernel does not support, and calls that torch
    computes faster, go to the module's own forward."""

    __slots__ = ("_faster", "_module", "_weights")

    def __init__(self, module: nn.Linear, faster: tuple[bool, ...]) -> None:
        """`faster`: the `kernel_rows` of the layer."""
        self._module, self._faster = module, faster
        self._weights: Weights | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Routed, (self._module, self._faster)  # copies have their own weights

    def __call__(self, input: Tensor) -> Tensor:  # named as in nn.Linear
        module = self._module
        if is_compiling() or torch._C._get_tracing_state():  # sizes are not numbers
            return nn.Linear.forward(module, input)
        parameters = module._parameters
        weight = parameters.get("weight")
        if weight is None or "bias" not in parameters:  # they were replaced
            return nn.Linear.forward(module, input)
        bias = parameters["bias"]
        rows = input.numel() // module.in_features
        if self._faster[(rows - 1).bit_length()] and not self._is_watched(input):
            weights = self._read(weight, bias)
            out = None if weights is None else weights.product(input)
            if out is not None:
                return out
        # As the module's own forward, which takes longer to find the parameters.
        return nn.functional.linear(input, weight, bias)

    def _read(self, weight: Tensor, bias: Tensor | None) -> Weights | None:
        weights, tensors = self._weights, (weight, bias, None)
        if type(weight) is not nn.Parameter:  # torchao's int8 weights
            tensors = getattr(weight, "qdata", weight), bias, getattr(weight, "scale", None)
        if weights is None or not weights.are(tensors):
            found = stored(weight)
            if found is None:
                return None
            weights = self._weights = Weights([found], [bias], weight.dtype)
            self._faster = _rows_of(found, weight.dtype)
        return weights

    def _is_watched(self, x: Tensor) -> bool:
        """Whether gradients, hooks, autocast or torch.func require torch's operations."""
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
            or peek_interpreter_stack()
            or forward_ad._current_level >= 0
        )
