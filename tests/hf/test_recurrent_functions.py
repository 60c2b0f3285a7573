"""Functions of recurrent layers that kvkeep replaces, against transformers' own."""

from __future__ import annotations

import pytest
import torch
from support.sweep_configs import few_layers
from transformers.models.qwen3_next import modeling_qwen3_next as source

import kvkeep
from kvkeep.hf.kinds import recurrent_functions


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """A processor without instructions for bfloat16."""
    monkeypatch.setattr(recurrent_functions, "is_slow", lambda dtype: dtype is torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_step_of_the_gated_delta_rule(norm, dtype):
    """Where two heads of values share a head of keys. The state is changed in place."""
    own = source.torch_recurrent_gated_delta_rule
    step = recurrent_functions._FUNCTIONS[own.__name__](own)
    q, k = torch.randn(2, 3, 1, 4, 8, dtype=dtype)
    v = torch.randn(3, 1, 8, 16, dtype=dtype)
    g, beta = -torch.rand(3, 1, 8), torch.rand(3, 1, 8, dtype=dtype)
    state = torch.randn(3, 8, 8, 16)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": norm}
    expected = own(q, k, v, g=g, beta=beta, initial_state=state.clone(), **options)
    out, after = step(q, k, v, g=g, beta=beta, initial_state=state, **options)
    assert after is state
    assert out.dtype is dtype
    torch.testing.assert_close((out, after), expected)


def test_other_steps_leave_the_state(monkeypatch):
    """Several tokens, no state before, gradients."""
    own = source.torch_recurrent_gated_delta_rule
    step = recurrent_functions._FUNCTIONS[own.__name__](own)
    for tokens, has_state, gradients in ((2, True, False), (1, False, False), (1, True, True)):
        q, k, v = torch.randn(3, 1, tokens, 2, 8)
        g, beta = torch.rand(2, 1, tokens, 2)
        state = torch.randn(1, 2, 8, 8) if has_state else None
        before = None if state is None else state.clone()
        q.requires_grad_(gradients)
        given = {"g": -g, "beta": beta, "output_final_state": True}
        found = step(q, k, v, initial_state=state, **given)
        torch.testing.assert_close(found, own(q, k, v, initial_state=before, **given))
        assert state is None or state.equal(before)


@torch.no_grad()
def test_convolutions_have_the_results_of_float32():
    """Rounded once, and the state exactly."""
    weight, bias = torch.randn(6, 4).bfloat16(), torch.randn(6).bfloat16()
    chunk, token, state = (torch.randn(2, 6, n).bfloat16() for n in (9, 1, 4))
    wide = weight.float(), bias.float(), "silu"
    functions = recurrent_functions._FUNCTIONS
    own = source.causal_conv1d_fn
    found = functions[own.__name__](own)(chunk, weight, bias, activation="silu")
    assert found.equal(own(chunk.float(), *wide).bfloat16())
    own, expected = source.causal_conv1d_update, state.float()
    found = functions[own.__name__](own)(token, state, weight, bias, "silu")
    assert found.equal(own(token.float(), expected, *wide).bfloat16())
    assert state.equal(expected.bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "falcon_h1", "lfm2"])
def test_models_convolve_in_float32(kind, monkeypatch):
    """In layers that are divided, and in layers that attend beside their convolution."""
    model = few_layers(kind).to(torch.bfloat16)
    ids = torch.randint(3, 60, (1, 9))
    own, dtypes = torch.nn.functional.conv1d, []

    def watched(x, *args, **kwargs):
        dtypes.append(x.dtype)
        return own(x, *args, **kwargs)

    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        monkeypatch.setattr(torch.nn.functional, "conv1d", watched)
        for chunk in (ids[:, :8], ids[:, 8:]):
            model(chunk, cache=cache)
            assert set(dtypes) == {torch.float32}
            dtypes.clear()
    assert not any("forward" in vars(module) for module in model.modules())
