"""What `backward` refuses, before any gradient is changed, and what it does when the loss fails."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from support.autograd_gradients import texts
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import LossError
from kvkeep.files.offload import Offload
from kvkeep.hf.layerwise import _stubs
from kvkeep.train import backward


@pytest.fixture
def model():
    """With gradients that must stay as they are."""
    model = tiny("llama")
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)
    return model


def untouched(model):
    return all(bool((p.grad == 0.25).all()) for p in model.parameters())


IDS, LABELS, _ = texts(2, 20)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("chunk of 16 tokens for h2o:8.*use chunk=8", {"cache": "h2o:8", "chunk": 16}),
        ("chunk of 8 tokens for h2o:64,step=4.*use chunk=4", {"cache": "h2o:64,step=4"}),
        ("chunk of 0 tokens", {"chunk": 0}),
        ("chunk of 2.5 tokens", {"chunk": 2.5}),
        ("none of 40 labels is learned", {"labels": torch.full_like(LABELS, -100)}),
        ("label 96: .* has 0 to 95", {"labels": LABELS.clamp(min=96)}),
        ("label -1: .*or -100 for tokens", {"labels": LABELS - LABELS - 1}),
        ("labels .2, 19. for texts .2, 20.", {"labels": LABELS[:, 1:]}),
        ("loss_weights .2, 19.", {"loss_weights": torch.ones(2, 19)}),
        ("of weight 0", {"loss_weights": torch.zeros(2, 20)}),
        ("divided by -38.0, the sum of their weights", {"loss_weights": -torch.ones(2, 20)}),
        ("divided by 0.0, num_items", {"num_items": 0}),
        ("attention_mask .2, 3.", {"attention_mask": torch.ones(2, 3)}),
        ("either labels or a head", {"labels": None}),
        ("either labels or a head", {"head": lambda hidden, columns: hidden.sum()}),
        ("input_ids .20,.", {"input_ids": IDS[0]}),
        ("input_ids .2, 0.", {"input_ids": IDS[:, :0], "labels": LABELS[:, :0]}),
        ("input_ids .*float32", {"input_ids": IDS.float()}),
    ],
)
def test_bad_arguments(model, message, options):
    given = {"input_ids": IDS, "labels": LABELS, "chunk": 8} | options
    with pytest.raises(kvkeep.ShapeError, match=message):
        backward(model, given.pop("input_ids"), given.pop("labels"), **given)
    assert untouched(model)


def test_a_spec_that_does_not_exist(model):
    with pytest.raises(kvkeep.SpecError, match="h2o"):
        backward(model, IDS, LABELS, cache="h20:64")
    assert untouched(model)


def test_gradient_checkpointing(model):
    model.gradient_checkpointing_enable()
    with pytest.raises(kvkeep.StateError, match="gradient_checkpointing_disable"):
        backward(model, IDS, LABELS)
    model.gradient_checkpointing_disable()
    backward(model, IDS, LABELS)


def test_attention_dropout():
    model = tiny("llama", attention_dropout=0.1).train()
    with pytest.raises(kvkeep.StateError, match=r"attention dropout of 0\.1"):
        backward(model, IDS, LABELS)
    assert all(p.grad is None for p in model.parameters())
    backward(model.eval(), IDS, LABELS)


def test_models_that_cannot_be_taken_apart(model):
    prompted = get_peft_model(
        tiny("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(kvkeep.UnsupportedError, match="learned tokens before a text"):
        backward(prompted, IDS, LABELS)
    adapter = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5]
    )
    with pytest.raises(kvkeep.UnsupportedError, match="activated LoRA"):
        backward(get_peft_model(tiny("llama"), adapter), IDS, LABELS)
    with pytest.raises(kvkeep.UnsupportedError, match="output_router_logits=False"):
        backward(tiny("mixtral", output_router_logits=True), IDS, LABELS)
    with pytest.raises(kvkeep.UnsupportedError, match="Linear is not a model of transformers"):
        backward(torch.nn.Linear(2, 2), IDS, LABELS)


def test_a_model_that_does_something_between_its_layers(model):
    decoder = model.model

    class Doubling(torch.nn.ModuleList):
        def __iter__(self):
            return (
                lambda hidden, layer=layer, **kw: 2 * layer(hidden, **kw)
                for layer in super().__iter__()
            )

        def __getitem__(self, index):
            found = super().__getitem__(index)
            return list(self) if isinstance(index, slice) else found

    decoder.layers = Doubling(decoder.layers)
    with pytest.raises(kvkeep.UnsupportedError, match="between its layers"):
        backward(model, IDS, LABELS)
    assert untouched(model)


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_loss_that_is_not_finite(model, chunk):
    weights = torch.ones(2, 20)
    weights[1, 8 * chunk + 2] = torch.inf
    with pytest.raises(LossError, match=rf"loss is inf in chunk {chunk}, columns {8 * chunk} to"):
        backward(model, IDS, LABELS, chunk=8, loss_weights=weights, num_items=1.0)
    assert untouched(model)
    assert issubclass(LossError, kvkeep.KVKeepError)


def test_weights_that_are_not_finite(model):
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(LossError, match="loss is nan in chunk 0"):
        backward(model, IDS, LABELS, chunk=8)
    assert untouched(model)


def test_gradients_are_added_to_what_there_was(model):
    alone = tiny("llama")
    backward(alone, IDS, LABELS, cache="h2o:8", chunk=8)
    backward(model, IDS, LABELS, cache="h2o:8", chunk=8)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad + 0.25)


def test_inference_mode(model):
    with torch.inference_mode(), pytest.raises(kvkeep.StateError, match="inference_mode"):
        backward(model, IDS, LABELS)
    assert untouched(model)


def test_no_grad_around_it_changes_nothing(model):
    with torch.no_grad():
        backward(model, IDS, LABELS, chunk=8)
    assert not untouched(model)


def test_a_chunk_that_is_not_given_fits_the_budget():
    starts = []
    model = tiny("llama")
    backward(model, IDS, LABELS, cache="h2o:6", on_layer=lambda i, x, at: starts.append(at.start))
    assert starts == [0, 6, 12, 18] * 2
    starts.clear()
    backward(model, IDS, LABELS, on_layer=lambda i, x, at: starts.append(at.start))
    assert starts == [0] * 2


def test_a_failure_in_the_midst_leaves_the_model_as_it_was():
    model = tiny("llama")
    layers, attention = list(model.model.layers), model.config._attn_implementation

    def fail(index, hidden, columns):
        if index == 1 and columns.start == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backward(model, IDS, LABELS, chunk=8, on_layer=fail)
    assert list(model.model.layers) == layers
    assert model.config._attn_implementation == attention
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_another_thread_takes_apart(model):
    found = []

    def again(index, hidden, columns):
        with parts(model), pytest.raises(kvkeep.StateError, match="another thread") as raised:
            backward(model, IDS, LABELS)
        found.append(raised)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backward(model, IDS, LABELS, on_layer=again)
    assert found
    assert untouched(model)


@contextmanager
def parts(model):
    """As while a model's forward runs in another thread."""
    layers = model.model.layers
    with _stubs(layers, lambda index, hidden, call: hidden, tuples=False):
        yield


def test_a_disk_that_fills_on_the_way_back(monkeypatch):
    model, written = tiny("llama"), []
    write = os.pwrite

    def filling(*args):
        written.append(args)
        if len(written) > 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(kvkeep.StateError, match="spill directory") as raised:
        backward(model, IDS, LABELS, cache="h2o:4", chunk=2, offload=Offload(0))
    assert any(p.grad is not None for p in model.parameters())
    assert "call zero_grad() before you continue" in raised.value.__notes__[0]
