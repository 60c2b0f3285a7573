"""Training and evaluating a model that is not of transformers."""

from __future__ import annotations

import pytest
import torch
from kvkeep_lab.bench.text import windows_of_text
from kvkeep_lab.evals.kept_positions import fed, kept
from kvkeep_lab.evals.run import evaluate
from support.tiny_host import tiny_model
from torch.nn.functional import cross_entropy, pad

from kvkeep.host import host_of
from kvkeep.train import backward, hidden_states, loss, replaying

TOKENS, CHUNK, ROWS = 40, 7, 2


@pytest.fixture
def model():
    return tiny_model().double()


def ids():
    return torch.randint(61, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def gradients(model):
    """All gradients as one vector; the model has none afterwards."""
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def unrolled(model, spec, decisions):
    """The mean loss, in a graph of the forward of all chunks through one cache."""
    host, cache, logits = host_of(model), replaying(model, spec, decisions), []
    for chunk in torch.split(ids(), CHUNK, dim=1):
        logits.append(host.forward(chunk, cache, last=chunk.shape[1]))
    return mean_loss(torch.cat(logits, dim=1))


def mean_loss(logits):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids()[:, 1:].flatten())


@pytest.mark.parametrize("spec", ["h2o:9,recent=3", "window:8,sinks=2", "snapkv:12,window=4+int8"])
def test_gradients_through_evictions(model, spec):
    decisions: list = []
    found = backward(model, ids(), ids(), cache=spec, chunk=CHUNK, decisions=decisions)
    assert all(sum(x.shape[2] for x in layer) > 0 for layer in decisions)
    ours = gradients(model)
    expected = unrolled(model, spec, decisions)
    expected.backward()
    theirs = gradients(model)
    torch.testing.assert_close(found, expected.detach())
    assert (ours - theirs).norm() < 1e-10 * theirs.norm()


def test_a_cache_that_keeps_all_gives_ordinary_gradients(model):
    found = backward(model, ids(), ids(), chunk=CHUNK)
    ours = gradients(model)
    expected = mean_loss(model(ids()))
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(ours, gradients(model))
    torch.testing.assert_close(loss(model, ids(), ids(), chunk=CHUNK), expected.detach())


def test_padding_changes_no_gradient(model):
    text, count = ids()[:1], 11
    padded = pad(text, (count, 0))
    mask = (torch.arange(TOKENS + count) >= count)[None].long()
    labels = padded.index_fill(1, torch.tensor(count), -100)  # nothing predicts the first token
    backward(model, padded, labels, chunk=CHUNK, attention_mask=mask)
    ours = gradients(model)
    backward(model, text, text, chunk=CHUNK)
    torch.testing.assert_close(ours, gradients(model))
    hidden = hidden_states(model, padded, chunk=CHUNK, attention_mask=mask)[:, count:]
    torch.testing.assert_close(hidden, hidden_states(model, text, chunk=CHUNK))


class Letters:
    """A tokenizer of one token a character."""

    chat_template = eos_token_id = None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        self.input_ids = [ord(c) % 61 for c in text]
        return self


def evaluated(model, *specs):
    found = evaluate(
        model, Letters(), specs, contexts=[40], continuation=9, windows=2, chunk=16, tasks=()
    )
    return {row["spec"]: row for row in found["rows"]}


def test_quality_is_measured_against_a_plain_forward(model):
    rows = evaluated(model, "keep_all", "keep_all+int8", "h2o:8")
    text = windows_of_text(Letters(), 2, 49)
    logits = model(text)[:, 39:-1].detach()
    expected = cross_entropy(logits.flatten(0, 1), text[:, 40:].flatten()).exp()
    assert rows["keep_all"]["perplexity"] == pytest.approx(float(expected))
    assert rows["keep_all"]["kl"] == 0 < rows["keep_all+int8"]["kl"] < rows["h2o:8"]["kl"]
    assert rows["h2o:8"]["bytes"] < rows["keep_all"]["bytes"]


def test_kept_positions(model):
    held = kept(fed(model, ids()[:1], "window:8", chunk=CHUNK))
    assert held == [[[*range(32, 40)]] * 2] * 3
