"""What code that was written for transformers' DynamicCache finds in a kvkeep cache."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from support.tiny_models import WINDOW, tiny
from transformers import DynamicCache

import kvkeep

PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
"""A mask that pads every row, so that its padding is freed."""


def prompt(rows=2, n=7):
    return torch.randint(3, 90, (rows, n), generator=torch.Generator().manual_seed(5))


def generated(model, **options):
    ids = prompt()
    output = model.generate(
        ids,
        attention_mask=PADDED,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )
    return output.past_key_values


def hybrid():
    return tf.Lfm2ForCausalLM(
        tf.Lfm2Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"] * 2,
        )
    ).eval()


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma3", "gemma4", "llama4", "gpt-oss", "deepseek-v3"]
)
def test_as_many_columns_as_were_fed_where_every_row_is_padded(family):
    model = tiny(family)
    theirs = generated(model)
    with kvkeep.attach(model):
        ours = generated(model)
    assert len(ours) == len(theirs)
    assert ours.get_seq_length() == theirs.get_seq_length() == 12
    for (k, v, window), (their_k, their_v, their_window) in zip(ours, theirs, strict=True):
        assert (window is None) == (their_window is None)
        if window is not None:
            assert window == their_window == WINDOW
            assert k.shape[2] - 1 == their_k.shape[2] or family == "llama4"  # its chunks begin anew
        elif k is None:
            assert their_k is None
        else:
            assert k.shape == their_k.shape
            assert v.shape == their_v.shape
            real = ours.layers[0].seen[0]  # columns of padding hold anything
            torch.testing.assert_close(k[:, :, -real:], their_k[:, :, -real:], atol=1e-4, rtol=1e-4)


def test_a_window_that_was_not_passed_has_a_column_for_each_that_was_fed():
    model = tiny("mistral", sliding_window=9)
    with kvkeep.attach(model):
        ours = generated(model)
    assert [layer.keys.shape[2] for layer in ours.layers] == [12, 12]
    assert [layer.length for layer in ours.layers] == [9, 9]  # the padding was freed
    held = ours.layers[0].held()
    assert held.position[0, 0].tolist() == [-1, -1, -1, *range(9)]
    assert not held.keys[:, :, :3].any()


def test_columns_are_slots_once_a_token_was_evicted():
    model = tiny("llama")
    with kvkeep.attach(model, "window:6"):
        ours = generated(model)
    assert [layer.keys.shape[2] for layer in ours.layers] == [6, 6]


def test_a_hybrid_has_the_length_of_its_model():
    model = hybrid()
    ids = prompt()
    with torch.no_grad():
        theirs = model(ids).past_key_values
    with kvkeep.attach(model), torch.no_grad():
        ours = model(ids).past_key_values
        assert isinstance(ours, kvkeep.Cache)
    assert len(ours) == len(theirs) == 4
    assert len(ours.layers) == 2
    assert [k is None for k, _, _ in ours] == [True, False, True, False]
    assert "layers=2" in repr(ours)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_dynamic_cache_is_made_of_a_kvkeep_cache(family):
    model, ids = tiny(family), prompt(n=12)
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model)
        expected = model(ids, past_key_values=cache).logits[:, -1:]
        ours = kvkeep.Cache(model)
        model(ids[:, :-1], past_key_values=ours)
    theirs = DynamicCache(iter(ours))
    with torch.no_grad():
        position = torch.tensor([[11]])
        found = model(ids[:, -1:], past_key_values=theirs, position_ids=position).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
