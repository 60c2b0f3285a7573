"""Experts that models compute in a loop over the chosen ones, as graphs compute them."""

from __future__ import annotations

import pytest
import torch
from support.sweep_configs import model_of

import kvkeep


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dbrx", "longcat_flash"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_graph_computes_what_the_loop_does(
    kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts that no token chose, and for LongCat those that return their inputs."""
    model = model_of(kind, 2)
    name = {"dbrx": "DbrxExperts", "longcat_flash": "LongcatFlashExperts"}[kind]
    module = next(part for part in model.modules() if type(part).__name__ == name)
    count = getattr(module, "total_experts", None) or module.num_experts
    hidden = torch.randn(tokens, module.hidden_size)
    index = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2)
    expected = module(hidden, index, weights)
    with kvkeep.attach(model):
        torch.testing.assert_close(module(hidden, index, weights), expected)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            found = module.forward(hidden, index, weights)
    torch.testing.assert_close(found.view_as(expected), expected)
