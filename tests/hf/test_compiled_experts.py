"""Products of experts in compiled steps: the operator, its function for programs, and models."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe as moe
from support.tiny_models import tiny
from torch import nn

import kvkeep
from kvkeep import native_library
from kvkeep.graph.compiled_library import CompiledLibrary
from kvkeep.graph.linear_op import grouped, linears, route_experts
from kvkeep.graph.package import Package, compile_package

pytestmark = pytest.mark.skipif(not native_library.available, reason=native_library.reason)

OFFS = torch.tensor([0, 3, 3, 40, 41], dtype=torch.int32)  # experts 0 and 2 have no token


def given(dtype=torch.float32, transposed=False, tokens=43):
    """Tokens, of which the last have no expert, and weights that lie by output or by input."""
    x = torch.randn(tokens, 24, dtype=dtype)
    weight = torch.randn(5, 24, 40, dtype=dtype) / 5
    return x, weight if transposed else weight.transpose(1, 2).contiguous().transpose(1, 2)


def reference(x, weight):
    found = moe._grouped_mm_fallback(x.double(), weight.double(), OFFS)
    return found.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_like_transformers_operator(dtype, transposed):
    x, weight = given(dtype, transposed)
    torch.testing.assert_close(grouped(x, weight, OFFS), reference(x, weight))


@pytest.mark.slow  # compiles a program of its own
def test_as_a_function_of_programs(tmp_path):
    """With linear layers, whose input's elements do not lie side by side."""

    class Both(nn.Module):
        def forward(self, x, weight, other, doubled, offs):
            joined = torch.cat([grouped(x, w, offs) for w in (weight, other)], 1)
            twisted = torch.stack([x[:4], x[:4] + 1], dim=-1)[..., 0]
            layers = linears(twisted, [weight[0].T, weight[1].T], [None, None], [])
            return joined, grouped(doubled, other.double(), offs), layers

    (x, weight), (_, other) = given(), given(transposed=True)
    inputs = x, weight, other, x.double(), OFFS
    graph = torch.fx.symbolic_trace(Both())
    with torch.no_grad():
        compile_package(graph, inputs, tmp_path / "experts.pt2")
        program = Package(tmp_path / "experts.pt2")
        for offs in (OFFS, OFFS // 2, OFFS * 0):
            for a, b in zip(
                program([*inputs[:4], offs], []), Both()(*inputs[:4], offs), strict=True
            ):
                torch.testing.assert_close(a, b)


def test_a_library_that_needs_torchs_dispatcher_is_refused(tmp_path):
    file = tmp_path / "step.so"
    file.write_bytes(b"\0aoti_torch_proxy_executor_call_function\0")
    with pytest.raises(RuntimeError, match="dispatcher"):
        CompiledLibrary(file)


@pytest.mark.slow  # compiles models
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_steps_of_models(family, monkeypatch, tmp_path):
    monkeypatch.setenv("KVKEEP_STEPS", str(tmp_path))
    tmp_path.chmod(0o700)
    plain, model = (tiny(family) for _ in range(2))
    kvkeep.attach(model, compile=True)
    ids = torch.randint(3, 90, (1, 7))
    with torch.no_grad():
        kept = kvkeep.Cache(model)
        fed = None
        for chunk in (ids, *[ids[:, :1]] * 4):
            a = model(chunk, past_key_values=kept).logits
            out = plain(chunk, past_key_values=fed)
            fed = out.past_key_values
            torch.testing.assert_close(a, out.logits, rtol=1e-4, atol=1e-3)
    assert [*tmp_path.glob("*.pt2")]


def test_other_products_stay(monkeypatch):
    """With gradients, and for more tokens than a step has."""
    x, weight = given(tokens=300)
    found = []

    def backend(graph, inputs):
        found.append(route_experts(graph))
        return graph

    def product(x, offs):
        return torch.ops.transformers.grouped_mm_fallback(x, weight, offs)

    compiled = torch.compile(product, backend=backend, dynamic=False)
    with torch.no_grad():
        compiled(x, OFFS)
        assert compiled(x[:43], OFFS).allclose(reference(x[:43], weight), atol=1e-5)
    compiled(x[:40], OFFS.clamp(max=40))
    assert found == [0, 1, 0]
