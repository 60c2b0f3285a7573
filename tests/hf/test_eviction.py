"""Evicting and quantised caches in attached models, through generate() and by hand."""

from __future__ import annotations

import pytest
import torch
from support.slow import every
from support.tiny_models import tiny

import kvkeep

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = [
    "h2o:10,recent=4",
    "snapkv:10,window=4,pool=3",
    "tova:10",
    "vlen:10",
    "random:10,sinks=1,recent=1",
    "knorm:10,sinks=1",
]
QUANTISED = ["keydiff:10+int8", "qh2o:10+int4", "adakv(h2o:10)", "pyramid:2(h2o:10)"]
NEW = 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


CASES = [("llama", spec) for spec in POLICIES + QUANTISED]
CASES += [("gemma3", spec) for spec in (POLICIES[0], POLICIES[1], QUANTISED[2])]
CASES += [("gemma4", spec) for spec in (POLICIES[1], QUANTISED[2])]
CASES += [("gpt2", spec) for spec in (POLICIES[2], QUANTISED[0])]
each_case = pytest.mark.parametrize(("model", "spec"), every(2, CASES), indirect=["model"])


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma4", "gpt2"])
def model(request):
    model = tiny(request.param)
    with kvkeep.attach(model):
        yield model


def ids(rows=1, n=20, seed=3):
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def by_hand(model, cache, fed, steps, mask=None):
    """Greedy tokens of a plain loop, fed columns `fed` (B, n) after what the cache has seen."""
    out = []
    for _ in range(steps):
        extra = {}
        if mask is not None:
            position = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -fed.shape[1] :]
            extra = {"attention_mask": mask, "position_ids": position}
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = model(fed, past_key_values=cache, **extra).logits
        fed = logits[:, -1:].argmax(dim=-1)
        out.append(fed)
    return torch.cat(out, dim=1)


def positions(cache, row):
    """What each layer keeps of a row, by head."""
    kept = []
    for layer in cache.layers:
        heads = layer.storage.read()["position"][row].tolist()
        kept.append([sorted(p for p in head if p >= 0) for head in heads])
    return kept


@each_case
def test_generate_is_the_plain_loop(model, spec):
    prompt = ids()
    cache, other = kvkeep.Cache(model, spec), kvkeep.Cache(model, spec)
    text = model.generate(prompt, past_key_values=cache, **GREEDY)
    assert text[:, 20:].equal(by_hand(model, other, prompt, NEW))
    assert cache.get_seq_length() == 19 + NEW
    assert min(layer.length for layer in cache.layers) < 20
    assert positions(cache, 0) == positions(other, 0)


@each_case
def test_padded_batch_equals_its_rows_alone(model, spec):
    prompt, mask = ids(2), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    cache = kvkeep.Cache(model, spec)
    text = model.generate(prompt, attention_mask=mask, past_key_values=cache, **GREEDY)
    for row, start in ((0, 6), (1, 0)):
        alone = kvkeep.Cache(model, spec)
        own = model.generate(prompt[row : row + 1, start:], past_key_values=alone, **GREEDY)
        assert text[row, start:].equal(own[0])
        assert positions(cache, row) == positions(alone, 0)
    assert cache.seen.tolist() == [13 + NEW, 19 + NEW]


@torch.no_grad()
@pytest.mark.parametrize("spec", ["knorm:8", "adakv(knorm:8)"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_scores_that_differ_by_rounding_evict_the_same_in_a_batch_and_alone(family, spec):
    model = tiny(family, num_hidden_layers=1, layer_types=["full_attention"])
    for name, weight in model.named_parameters():
        if "k_norm" in name:  # every key has the same norm, but for rounding
            weight.fill_(0.0 if family == "gemma3" else 1.0)
    prompt, chunks = ids(3, 40), [20] + [1] * 20
    with kvkeep.attach(model):
        cache, *alone = (kvkeep.Cache(model, spec) for _ in range(4))
        for part in prompt.split(chunks, dim=1):
            model(part, past_key_values=cache)
            for row, own in enumerate(alone):
                model(part[row : row + 1], past_key_values=own)
    for row, own in enumerate(alone):
        assert positions(cache, row) == positions(own, 0)


@each_case
def test_conversation_goes_on_after_eviction(model, spec):
    cache, other = kvkeep.Cache(model, spec), kvkeep.Cache(model, spec)
    text = model.generate(ids(), past_key_values=cache, **GREEDY)
    by_hand(model, other, ids(), NEW)
    for turn in range(2):
        before = cache.get_seq_length()
        text = torch.cat([text, ids(n=5, seed=turn)], dim=1)
        new = text[:, before:]
        assert new.shape[1] == 6  # the last answer's last token was not fed
        expected = by_hand(model, other, new, NEW)
        text = model.generate(text, past_key_values=cache, **GREEDY)
        assert text[:, -NEW:].equal(expected)
        assert cache.get_seq_length() == text.shape[1] - 1 == cache.seen.item()
        assert positions(cache, 0) == positions(other, 0)
        newest = max(p for layer in positions(cache, 0) for head in layer for p in head)
        if spec in POLICIES[:2]:  # which protect the newest
            assert newest == text.shape[1] - 2


@each_case
def test_beam_search(model, spec):
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 3}
    cache = kvkeep.Cache(model, spec)
    out = model.generate(
        ids(2), past_key_values=cache, output_scores=True, return_dict_in_generate=True, **options
    )
    assert out.sequences.shape == (6, 20 + NEW)
    # Each beam's score is what its own tokens get when they run alone through the same policy.
    for row in range(6):
        alone, total = kvkeep.Cache(model, spec), 0.0
        sequence, fed = out.sequences[row], out.sequences[row : row + 1, :20]
        for token in sequence[20:]:
            with torch.no_grad():
                logits = model(fed, past_key_values=alone).logits[0, -1]
            total += float(logits.log_softmax(dim=0)[token])
            fed = token[None, None]
        assert out.sequences_scores[row].item() == pytest.approx(total / NEW, abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("codec", "most"), [("int8", 1e-3), ("fp8", 5e-2), ("int4", 0.6)])
def test_quantised_is_close_to_the_full_cache(model, codec, most):
    full, quantised = (kvkeep.Cache(model, f"keep_all+{c}") for c in ("plain", codec))
    text = model.generate(ids(), past_key_values=kvkeep.Cache(model, f"keep_all+{codec}"), **GREEDY)
    assert text.shape == (1, 20 + NEW)
    worst = 0.0
    for part in text.split([20] + [1] * NEW, dim=1):
        right, close = (
            model(part, past_key_values=c).logits.log_softmax(dim=-1) for c in (full, quantised)
        )
        worst = max(worst, float((right.exp() * (right - close)).sum(dim=-1).max()))
    assert 0 < worst < most
