"""Options of transformers' `generate` as sampling parameters: the same tokens."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import UnsupportedError
from kvkeep.generate import generate_many, stream
from kvkeep.hf.sampling_params import sampling_params

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(5, 17)[None]


@pytest.fixture
def model():
    model = tiny("llama")
    kvkeep.attach(model)
    return model


OPTIONS = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "end": {"eos_token_id": [3, 60], "min_new_tokens": 5},
    "forced": {"forced_eos_token_id": 9, "suppress_tokens": [1, 2, 4]},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "typical": {"do_sample": True, "top_k": 0, "typical_p": 0.8, "epsilon_cutoff": 1e-3},
}


@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_generate(model, name, in_config):
    """`in_config`: the model's own generation config has the options."""
    options = OPTIONS[name]
    if in_config:
        model.generation_config.update(**options)
    given = {"max_new_tokens": 9} | ({} if in_config else options)
    torch.manual_seed(4)
    expected = model.generate(IDS, **given)[0]
    params = sampling_params(model, IDS.shape[1], seed=4, **given)
    *_, last = stream(model, IDS, params, cache=kvkeep.Cache(model))
    assert last.answer.ids.equal(expected)
    ((answer,),) = generate_many(model, [IDS], params, progress=False)
    assert answer.ids.equal(expected)


def test_a_temperature_decides_whether_to_sample(model):
    model.generation_config.update(do_sample=True, temperature=0.3)
    greedy = sampling_params(model, 12, temperature=0.0, max_new_tokens=4)
    assert (greedy.temperature, greedy.processors) == (0.0, ())
    assert sampling_params(model, 12, temperature=0.5, max_new_tokens=4).processors


def test_stop_strings_and_the_ends_of_the_model(model):
    model.generation_config.eos_token_id = 7
    params = sampling_params(model, 12, max_new_tokens=4, stop_strings="end")
    assert (params.stop, params.end_tokens) == (("end",), {7})
    model.generation_config.eos_token_id = None
    assert sampling_params(model, 12, max_new_tokens=4).end_tokens == frozenset()


@pytest.mark.parametrize(
    "option",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"guidance_scale": 1.5},
        {"output_scores": True},
        {"prompt_lookup_num_tokens": 3},
        {"inputs_embeds": torch.zeros(1)},
    ],
)
def test_what_is_not_served_is_named(model, option):
    with pytest.raises(UnsupportedError, match=r"is not supported here; leave it out"):
        sampling_params(model, 12, max_new_tokens=4, **option)
    with pytest.raises(UnsupportedError, match="max_new_tokens is not set"):
        sampling_params(model, 12)
