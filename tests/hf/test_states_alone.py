"""Models none of whose layers attends: a cache of states alone."""

from __future__ import annotations

import pytest
import torch
from support.random_ids import ids
from support.sweep_configs import few_layers

import kvkeep
from kvkeep.errors import RollbackError, UnsupportedError
from kvkeep.generate import SamplingParams, generate_many

pytestmark = pytest.mark.usefixtures("one_thread")

NEAR = {"atol": 5e-5, "rtol": 2e-4}


@pytest.fixture(params=["mamba", "mamba2", "falcon_mamba"])
def model(request):
    model = few_layers(request.param)
    with kvkeep.attach(model):
        yield model


def test_chunks_forks_and_files_continue_a_text(model, tmp_path):
    text = ids(1, 24)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        cache = kvkeep.Cache(model)
        parts = [model(x, cache=cache).logits for x in text[:, :16].split([9, 1, 6], dim=1)]
        assert cache.fed == int(cache.seen) == 16
        cache.save(tmp_path / "half", tokens=text[:, :16])
        frozen = cache.freeze()
        caches = [kvkeep.load(tmp_path / "half", model), frozen.fork(), frozen.fork(), cache]
        for one in caches:
            rest = model(text[:, 16:], cache=one).logits
            torch.testing.assert_close(torch.cat([*parts, rest], dim=1), expected, **NEAR)


def test_padded_rows_and_batches_answer_as_alone(model):
    texts = [ids(1, n, seed=n)[0] for n in (5, 12)]
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = [model.generate(x[None], **options)[0, len(x) :] for x in texts]
    padded = torch.stack([torch.nn.functional.pad(x, (12 - len(x), 0)) for x in texts])
    mask = torch.tensor([[0] * 7 + [1] * 5, [1] * 12])
    rows = model.generate(padded, attention_mask=mask, **options)[:, 12:]
    answers = generate_many(model, texts, SamplingParams(max_new_tokens=6), progress=False)
    for one, row, (answer,) in zip(alone, rows, answers, strict=True):
        assert one.tolist() == row.tolist() == answer.tokens


def test_nothing_can_be_evicted(model):
    with pytest.raises(UnsupportedError, match="none of its layers attends"):
        model.generate(ids(1, 4), cache=kvkeep.Cache(model, "window:8"), max_new_tokens=2)
    with torch.no_grad():
        cache = kvkeep.Cache(model)
        model(ids(1, 8), cache=cache)
        with pytest.raises(RollbackError):
            cache.crop(-4)
