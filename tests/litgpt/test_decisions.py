"""What an attached LitGPT model keeps is what the float64 oracle keeps, in every layer and step."""

from __future__ import annotations

import pytest
import torch
from litgpt.generate.base import batched_generate_fn
from support.eviction_oracle import EvictionOracle
from support.tiny_litgpt import tiny_gpt

import kvkeep
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 28
SEPARATED = 1e-4
"""Scores that decide differ by more than float32 can err, and than what counts as equal."""


@torch.no_grad()
def batched(gpt, ids):
    """LitGPT's loop for a batch: one prompt, then single tokens."""
    list(
        batched_generate_fn(
            gpt,
            ids[:, :16],
            TOKENS,
            sample_args={"temperature": 0.0, "top_p": 0.0},
            include_prompt=False,
            include_eos=True,
        )
    )


@torch.no_grad()
def chunked(gpt, ids):
    for start in range(0, TOKENS, 7):
        gpt(ids[:, start : start + 7], torch.arange(start, start + 7))


@torch.no_grad()
def padded(gpt, ids):
    """The first row is shorter by five tokens."""
    at = torch.stack([torch.arange(-5, TOKENS - 5).clamp(min=-1), torch.arange(TOKENS)])
    for start, stop in ((0, 16), (16, 17), (17, 23), (23, TOKENS)):
        gpt(ids[:, start:stop], at[:, start:stop])


@pytest.fixture
def watched(monkeypatch):
    """Run a loop; what each layer kept after each step, the oracle's, and its closest decision."""
    plain = LayerCache.run

    def watch(gpt, spec, loop, ids):
        oracles, steps = {}, []

        def run(layer, inputs):
            out = plain(layer, inputs)
            if layer not in oracles:
                window = gpt.config.sliding_window_size
                oracles[layer] = EvictionOracle(spec, scale=inputs.scale, window=window)
            rows, heads, new, _ = inputs.k.shape
            position = inputs.position
            real = (position >= 0).expand(rows, new)
            kept = oracles[layer].step(inputs.q, inputs.k, inputs.v, real)
            slots = layer.storage.read()[POSITION].expand(-1, heads, -1).tolist()
            found = [[sorted(p for p in head if p >= 0) for head in row] for row in slots]
            reach, seen = layer.policy.reach, layer.seen.tolist()
            if reach is not None:  # a reach does not wait for padding to drop the others
                kept, found = (
                    [
                        [[p for p in head if reach.allows(now, p)] for head in row]
                        for row, now in zip(one, seen, strict=True)
                    ]
                    for one in (kept, found)
                )
            steps.append((found, kept))
            return out

        with kvkeep.attach(gpt, spec), monkeypatch.context() as patch:
            patch.setattr(LayerCache, "run", run)
            loop(gpt, ids)
        assert len(oracles) == gpt.config.n_layer
        return steps, min(oracle.gap for oracle in oracles.values())

    return watch


@pytest.mark.parametrize(
    ("family", "spec", "loop"),
    [
        ("llama", "h2o:8", batched),
        ("llama", "h2o:8,recent=2,sinks=1+int8", chunked),
        ("llama", "qh2o:8,recent=2+int8", padded),
        ("llama", "window:6,sinks=2+int8/int4", padded),
        ("falcon", "qh2o:8,recent=1,mix=0.2+int4:centre=0/int8", batched),
        ("qwen3", "h2o:8,recent=2+int4:centre=0,recent=0,sinks=0", padded),
        ("mistral", "h2o:8,recent=2", chunked),
        ("mistral", "window:8+int8", batched),
    ],
)
def test_decisions_are_those_of_the_oracle(family, spec, loop, watched):
    gpt = tiny_gpt(family)
    for seed in range(50):
        ids = torch.randint(2, 96, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
        steps, gap = watched(gpt, spec, loop, ids)
        if gap > SEPARATED:
            break
    else:
        pytest.fail("no text whose scores are far enough apart")
    for step, (found, kept) in enumerate(steps):
        same = found == kept  # pytest would take seconds to explain the difference
        assert same, f"step {step} of all layers: {found}, not {kept}"
    assert all(len(head) <= 8 for row in kept for head in row)
