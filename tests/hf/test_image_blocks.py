"""Tokens of an image that see each other (Gemma 3), against the model without kvkeep."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import IMAGE, with_vision

import kvkeep
from kvkeep.errors import UnsupportedError

NEAR = {"atol": 2e-5, "rtol": 1e-4}
LENGTH, STARTS = 22, (3, 12)
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return with_vision()


@pytest.fixture(scope="module")
def small_window():
    """Its window of three tokens is shorter than an image."""
    return with_vision(sliding_window=3)


@pytest.fixture(scope="module")
def prompt():
    """A row with two images, as keyword arguments."""
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 93, (1, LENGTH), generator=random)
    types = torch.zeros_like(ids)
    for start in STARTS:
        ids[:, start : start + 4], types[:, start : start + 4] = IMAGE, 1
    pixels = torch.randn(2, 3, 28, 28, generator=random)
    return {"input_ids": ids, "token_type_ids": types, "pixel_values": pixels}


def pieces(prompt, *borders):
    """The prompt in chunks. Types of tokens are given from the first column on."""
    for start, stop in zip((0, *borders), (*borders, LENGTH), strict=True):
        own = [i for i, first in enumerate(STARTS) if start <= first < stop]
        part = {"input_ids": prompt["input_ids"][:, start:stop]}
        part["token_type_ids"] = prompt["token_type_ids"][:, :stop]
        yield part | ({"pixel_values": prompt["pixel_values"][own]} if own else {})


@torch.no_grad()
@pytest.mark.parametrize("borders", [(), (9,), (3, 7, 12, 16)])
@pytest.mark.parametrize("spec", ["keep_all", "keep_all@fixed"])
@pytest.mark.parametrize("which", ["model", "small_window"])
def test_logits(request, prompt, which, spec, borders):
    model = request.getfixturevalue(which)
    expected = model(**prompt, use_cache=False).logits
    plain = prompt | {"token_type_ids": torch.zeros_like(prompt["token_type_ids"])}
    assert (model(**plain, use_cache=False).logits - expected).abs().max() > 0.1
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, spec)
        found = [model(**part, past_key_values=cache).logits for part in pieces(prompt, *borders)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **NEAR)


@torch.no_grad()
@pytest.mark.parametrize("at_once", [1 << 22, 50])
def test_text(monkeypatch, model, prompt, at_once):
    """Also when the masks of a few tokens at a time are compared."""
    monkeypatch.setattr("kvkeep.hf.forward.masks._AT_ONCE", at_once)
    expected = model.generate(**prompt, **GREEDY)
    with kvkeep.attach(model):
        found = model.generate(**prompt, return_dict_in_generate=True, **GREEDY)
    assert isinstance(found.past_key_values, kvkeep.Cache)
    assert found.sequences.equal(expected)


@torch.no_grad()
def test_rows_with_padding(model, prompt):
    """Two rows, of which the second has one of the images, and padding in front."""
    ids, types, mask = (torch.zeros(2, LENGTH, dtype=torch.long) for _ in range(3))
    ids[0], types[0], mask[0] = prompt["input_ids"], prompt["token_type_ids"], 1
    short = prompt["input_ids"][:, 9:]
    ids[1, 9:], types[1, 9:], mask[1, 9:] = short, prompt["token_type_ids"][:, 9:], 1
    pixels = prompt["pixel_values"][[0, 1, 1]]
    both = {"input_ids": ids, "token_type_ids": types, "pixel_values": pixels}
    expected = model.generate(**both, attention_mask=mask, **GREEDY)
    with kvkeep.attach(model):
        assert model.generate(**both, attention_mask=mask, **GREEDY).equal(expected)


@torch.no_grad()
def test_a_policy_counts_what_later_tokens_gave(model, prompt):
    """With a budget that evicts nothing, text is the same; with less, an image is read before."""
    expected = model.generate(**prompt, **GREEDY)
    with kvkeep.attach(model, "h2o:64"):
        assert model.generate(**prompt, **GREEDY).equal(expected)
    with kvkeep.attach(model, "h2o:16"):
        found = model.generate(**prompt, return_dict_in_generate=True, **GREEDY)
    assert found.past_key_values.layers[1].length == 16


@torch.no_grad()
@pytest.mark.parametrize("border", [4, 14])
def test_a_chunk_that_ends_in_an_image(model, prompt, border):
    """Its tokens were fed without seeing the rest."""
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        ids, types = prompt["input_ids"], prompt["token_type_ids"]
        model(ids[:, :border], token_type_ids=types[:, :border], past_key_values=cache)
        with pytest.raises(UnsupportedError, match=f"before column {border} and end after it"):
            model(ids[:, border:], token_type_ids=types, past_key_values=cache)
        assert cache.fed == border


@torch.no_grad()
def test_other_masks_are_refused(model, prompt):
    """Image tokens that are apart, but see each other."""
    types = prompt["token_type_ids"]
    blocks = torch.where(types == 1, 0, -1)  # both images are one block
    with kvkeep.attach(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "transformers.models.gemma3.modeling_gemma3.get_block_sequence_ids_for_mask",
            lambda *_, **__: blocks,
        )
        cache = kvkeep.Cache(model)
        with pytest.raises(UnsupportedError, match="not causal, sliding, chunked or padding"):
            model(**prompt, past_key_values=cache)
        assert cache.fed == 0


@torch.no_grad()
def test_a_mask_on_another_device_keeps_what_tokens_see(monkeypatch, model, prompt):
    """A copy of the mask lacks the tag of its request, as where layers lie on several devices."""
    expected = model(**prompt, use_cache=False).logits

    def copied(module, args, kwargs):
        return args, kwargs | {"attention_mask": kwargs["attention_mask"].clone()}

    with kvkeep.attach(model):
        layers = model.model.language_model.layers
        hooks = [x.register_forward_pre_hook(copied, with_kwargs=True) for x in layers]
        try:
            found = model(**prompt, past_key_values=kvkeep.Cache(model)).logits
        finally:
            for hook in hooks:
                hook.remove()
    torch.testing.assert_close(found, expected, **NEAR)
