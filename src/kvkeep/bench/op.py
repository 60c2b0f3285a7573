"""Attention alone: one decode token over keys and values of a given length."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, View, attend, backends
from kvkeep.bench.environment import environment, read_bandwidth
from kvkeep.codec import Plain
from kvkeep.evals.timing import interleaved, spread
from kvkeep.planes import POSITION, joined, plane_bytes
from kvkeep.spec import CacheSpec

TORCH = "torch-sdpa"
"""torch's own scaled_dot_product_attention with enable_gqa."""


def run(
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    queries: int = 1,
    lengths: Sequence[int] = (256, 2048, 8192, 32768),
    codecs: Sequence[str] = (Plain.name,),
    turns: int = 10,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time `attend` on every backend that can, and torch's own function, one row B = 1.

    `codecs` are specs of a codec, or of one for keys and one for values ("int8/int4"); all but
    "plain" are timed on the native backend alone.

    Returns:
        `rows`: per backend, codec and length `median_us`, `spread_us` (the middle half's width),
        and `gb_per_s`, the bytes of all encoded keys and values once over the median; and
        `read_gb_per_s`, what this machine reads from memory, measured in this run.
    """
    specs = {codec: CacheSpec.parse(f"keep_all+{codec}") for codec in codecs}
    names = [b.name for b in backends() if b.available and b.name != "reference"]
    rows, widths = [], {"dtype": str(dtype).removeprefix("torch."), "B": 1, "Hq": heads}
    with torch.inference_mode():
        read = [read_bandwidth()]
        for length in lengths:
            if progress is not None:
                progress(f"{length} tokens")
            q = torch.randn(1, heads, queries, head_dim).to(dtype)
            k, v = (torch.randn(1, kv_heads, length, head_dim).to(dtype) for _ in range(2))
            calls: dict[tuple[str, str], Callable[[], object]] = {}
            sizes: dict[str, int] = {}
            for codec, spec in specs.items():
                planes = _planes(spec, k, v)
                sizes[codec] = plane_bytes(planes)
                able = names if codec == Plain.name else [n for n in names if n == "native"]
                calls |= {(name, codec): _attend(name, q, planes, spec) for name in able}
                if codec == Plain.name:
                    calls[TORCH, codec] = _torch(q, k, v)
            # Enough calls for a steady median of the fast ones, few of the slow.
            burst = max(2, min(20, 200_000 // length))
            for (name, codec), seconds in interleaved(calls, turns=turns, burst=burst).items():
                median = statistics.median(seconds)
                rows.append(
                    {
                        "backend": name,
                        "codec": codec,
                        "length": length,
                        "median_us": median * 1e6,
                        "spread_us": spread(seconds) * 1e6,
                        "gb_per_s": sizes[codec] / median / 1e9,
                    }
                )
            read.append(read_bandwidth())
    return {
        "benchmark": "op",
        "shape": {**widths, "H": kv_heads, "D": head_dim, "n": queries},
        "environment": environment(),
        "rows": rows,
        "read_gb_per_s": statistics.median(read),
    }


def _planes(spec: CacheSpec, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    encoded = joined(spec.key_codec.encode(k), "k") | joined(
        spec.value_codec.for_values().encode(v), "v"
    )
    return {name: plane.contiguous() for name, plane in encoded.items()}


def _attend(
    backend: str, q: Tensor, planes: dict[str, Tensor], spec: CacheSpec
) -> Callable[[], object]:
    n, length = q.shape[2], planes["k"].shape[2]
    position = torch.arange(length, dtype=torch.int32)
    planes = {**planes, POSITION: position.view(1, 1, -1)}
    segment = Segment(planes, spec.key_codec, spec.value_codec.for_values())
    view = View((segment,), position[-n:], ragged=False)
    scale = q.shape[-1] ** -0.5
    return lambda: attend(q, view, scale=scale, backend=backend)


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    attention = torch.nn.functional.scaled_dot_product_attention
    n, length = q.shape[2], k.shape[2]
    mask = None if n == 1 else torch.ones(n, length, dtype=torch.bool).tril(length - n)
    return lambda: attention(q, k, v, attn_mask=mask, enable_gqa=True)
