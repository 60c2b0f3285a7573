"""Experts: those that models compute in a loop, as graphs compute them; and all by the kernel."""

from __future__ import annotations

import pytest
import torch
from support.sweep_configs import model_of

import kvkeep
from kvkeep import native_library
from kvkeep.graph import linear_op
from kvkeep.hf.forward import experts

LOOPS = {"dbrx": "DbrxExperts", "longcat_flash": "LongcatFlashExperts"}
OTHERS = {
    "qwen3_next": "Qwen3NextExperts",
    "gpt_oss": "GptOssExperts",  # weights by input, biases, a gate of its own
    "nemotron_h": "NemotronHExperts",  # without a gate
}


def found_in(kind: str, dtype: torch.dtype = torch.float32):
    """A model, its first module of experts, and inputs of the module's width for each token."""
    model = model_of(kind, 2 if kind in LOOPS else 4).to(dtype)
    name = (LOOPS | OTHERS)[kind]
    module = next(part for part in model.modules() if type(part).__name__ == name)
    width = getattr(module, "hidden_size", None) or module.hidden_dim
    count = getattr(module, "total_experts", None) or module.num_experts

    def given(tokens: int):
        hidden = torch.randn(tokens, width, dtype=dtype)
        index = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)])
        return hidden, index, torch.rand(tokens, 2, dtype=dtype)

    return model, module, given


@torch.no_grad()
@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_graph_computes_what_the_loop_does(
    kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts that no token chose, and for LongCat those that return their inputs."""
    model, module, made = found_in(kind)
    given = made(tokens)
    expected = module(*given)
    with kvkeep.attach(model):
        torch.testing.assert_close(module(*given), expected)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            found = module.forward(*given)
    torch.testing.assert_close(found.view_as(expected), expected)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A processor without instructions for bfloat16; the number of tokens of each product."""
    counted: list[int] = []

    def counting(x, *rest):
        counted.append(len(x))
        return linear_op.grouped(x, *rest)

    for module in (experts, linear_op):
        monkeypatch.setattr(module, "is_slow", lambda dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(experts, "grouped", counting)
    return counted


@torch.no_grad()
@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
@pytest.mark.parametrize("kind", LOOPS | OTHERS)
def test_the_kernel_computes_experts_where_torch_is_slow(kind: str, slow: list[int]) -> None:
    model, module, made = found_in(kind, torch.bfloat16)
    given = made(9)
    expected = module.to(torch.float32)(given[0].float(), given[1], given[2].float())
    module.to(torch.bfloat16)
    with kvkeep.attach(model):
        found = module(*given)
        assert set(slow) == {18}
        assert (found.view_as(expected) - expected).norm() < 1e-2 * expected.norm()
        for token in range(9):
            assert module(*(x[token : token + 1] for x in given)).equal(found[token : token + 1])
    assert "forward" not in vars(module)


def test_other_experts_stay(slow: list[int]) -> None:
    """With gradients, in float32, by an implementation that the user chose, without `linears`."""
    model, module, made = found_in("qwen3_next", torch.bfloat16)
    given = made(3)
    with kvkeep.attach(model):
        assert module(*given).requires_grad
        with torch.no_grad():
            model.set_experts_implementation("batched_mm")
            module(*given)
            model.set_experts_implementation("grouped_mm")
            module.to(torch.float32)(given[0].float(), given[1], given[2].float())
    module.to(torch.bfloat16)
    with kvkeep.attach(model, linears=False), torch.no_grad():
        module(*given)
    assert not slow
