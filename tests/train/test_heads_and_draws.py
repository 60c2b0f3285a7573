"""`backward` with dropout, mixed precision and heads of one's own, and what it leaves behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.autograd_gradients import (
    adapted,
    error,
    gradients,
    model_of,
    ordinary,
    shifted,
    texts,
    unrolled,
)

import kvkeep
from kvkeep.files.offload import Offload
from kvkeep.train import backward, hidden_states, loss, walk
from kvkeep.train.cell import Cell
from kvkeep.train.slots import Slots

TOKENS, CHUNK = 40, 7
PADS = (6, 1, 0)


def test_dropout_draws_the_same_numbers_again():
    """Gradients are the loss's slope when the same numbers are drawn for each loss."""
    model = adapted(model_of("llama"), lora_dropout=0.3).double().train()
    ids, labels, _ = texts(2, 30)

    def run():
        torch.manual_seed(5)
        value = float(backward(model, ids, labels, chunk=8))
        return value, gradients(model)

    _, slope = run()
    trained = [p for p in model.parameters() if p.requires_grad]
    way, values = slope / slope.norm(), []
    for step in (1e-2, -2e-2, 1e-2):
        at = 0
        for p in trained:
            p.data += step * way[at : at + p.numel()].view_as(p)
            at += p.numel()
        values.append(run()[0])
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(float(slope.norm()), rel=1e-3)
    assert float(backward(model, ids, labels, chunk=8)) != values[2]  # drawn anew


def test_dropout_in_a_part_of_the_model():
    """The model itself is in evaluation, its adapters are not."""
    model = adapted(model_of("llama"), lora_dropout=0.3).double().eval()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.train()
    ids, labels, _ = texts(2, 30)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(backward(model, ids, labels, chunk=8))
    assert found[0].equal(found[1])
    gradients(model)
    torch.manual_seed(5)
    backward(model, ids, labels, chunk=8)
    part = gradients(model)
    torch.manual_seed(5)
    backward(model.train(), ids, labels, chunk=8)
    assert part.equal(gradients(model))


def test_random_numbers_are_those_of_the_generator():
    model = adapted(model_of("llama"), lora_dropout=0.3).double().train()
    ids, labels, _ = texts(2, 30)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append((backward(model, ids, labels, chunk=8), torch.rand(1), gradients(model)))
    for one, other in zip(*found, strict=True):
        assert one.equal(other)


def test_each_chunk_and_layer_draws_its_own_numbers():
    model = adapted(model_of("llama"), lora_dropout=0.5).train()
    drawn = []
    for layer in model.get_base_model().model.layers:
        layer.self_attn.q_proj.lora_dropout["default"].register_forward_hook(
            lambda _, given, out: drawn.append((out == 0) & (given[0] != 0))
        )
    ids, labels, _ = texts(1, 32)
    backward(model, ids, labels, chunk=8)
    different = {tuple(mask.flatten().tolist()) for mask in drawn}
    assert len(different) == 4 * len(model.get_base_model().model.layers)
    assert len(drawn) > len(different)  # forward and backward drew the same ones


def test_gradients_of_slots_in_half_precision_are_summed_in_float32():
    """A thousand small gradients on a large one; bfloat16 would lose each of them."""
    slots = Slots(Offload(host_bytes=1 << 20), kvkeep.CacheSpec.parse("keep_all").layer())
    x = torch.ones(1, 2, 3, 4, dtype=torch.bfloat16)
    slots.push(x, x, torch.arange(3), [])
    slots.absorb(x, x)
    for _ in range(1024):
        slots.absorb(x / 1024, x / 1024)
    for found in slots.pop():
        assert found.equal(torch.full((1, 2, 3, 4), 2.0))


def test_mixed_precision():
    model = model_of("llama", torch.float32)
    ids, labels, _ = texts(2, TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        backward(model, ids, labels, chunk=CHUNK)
        ours = gradients(model)
        unrolled(model, ids, labels, "keep_all", CHUNK).backward()
        theirs = gradients(model)
    assert ours.dtype == torch.float32
    assert error(ours, theirs) < 0.02
    ordinary(model, ids, labels).backward()
    assert 1e-4 < error(ours, gradients(model)) < 0.05  # it was bfloat16 indeed


class Ends(torch.nn.Module):
    """A score of each text's last token."""

    def __init__(self, width, last):
        super().__init__()
        self.score = torch.nn.Linear(width, 1, dtype=torch.float64)
        self.last = last

    def forward(self, hidden, columns):
        if columns.stop <= self.last:
            return None
        return self.score(hidden[:, self.last - columns.start]).square().mean()


def test_a_head_of_ones_own():
    model = model_of("llama")
    ids, _, _ = texts(2, TOKENS)
    head = Ends(model.config.hidden_size, TOKENS - 1)
    found = backward(model, ids, head=head, chunk=CHUNK)
    ours, own = gradients(model), gradients(head)
    expected = head(model.model(ids, use_cache=False).last_hidden_state, slice(0, TOKENS))
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    assert error(ours, gradients(model)) < 1e-10
    assert error(own, gradients(head)) < 1e-10


def test_a_bare_decoder_with_a_head_of_ones_own():
    model = model_of("llama").model
    ids, labels, _ = texts(2, TOKENS)
    head = Ends(model.config.hidden_size, TOKENS - 1)
    backward(model, ids, head=head, chunk=CHUNK)
    ours = gradients(model)
    head(model(ids, use_cache=False).last_hidden_state, slice(0, TOKENS)).backward()
    assert error(ours, gradients(model)) < 1e-10
    with pytest.raises(kvkeep.UnsupportedError, match="give a head"):
        backward(model, ids, labels)


def test_a_head_with_weights_of_the_model():
    """They get their gradients once, also on top of others."""
    model = model_of("llama")
    ids, labels, _ = texts(2, TOKENS)

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = model.lm_head

        def forward(self, hidden, columns):
            logits = self.head(hidden).flatten(0, 1)
            targets = shifted(labels)[:, columns].flatten()
            loss = torch.nn.functional.cross_entropy
            return loss(logits, targets, ignore_index=-100, reduction="sum") / (2 * TOKENS - 2)

    for _ in range(2):
        backward(model, ids, head=Own(), chunk=CHUNK)
    ours = gradients(model)
    ordinary(model, ids, labels).backward()
    assert error(ours, 2 * gradients(model)) < 1e-10


def test_labels_of_padding_count_for_nothing():
    model = model_of("llama")
    ids, labels, mask = texts(2, 20, pads=(6, 0), side="right")
    found = [
        float(loss(model, ids, given, chunk=7, attention_mask=mask)) for given in (labels, ids)
    ]
    assert found[0] == found[1]


def test_a_batch_with_nothing_to_learn_among_others():
    model = model_of("llama")
    ids, labels, _ = texts(2, 20)
    assert backward(model, ids, torch.full_like(labels, -100), num_items=19, chunk=8) == 0
    assert not gradients(model).any()
    backward(model, ids, labels.int(), chunk=8)  # and labels of another integer type
    ours = gradients(model)
    ordinary(model, ids, labels).backward()
    assert error(ours, gradients(model)) < 1e-10


def test_hidden_states_and_loss_without_gradients():
    model = model_of("llama")
    ids, labels, mask = texts(3, TOKENS, pads=PADS)
    heard = []
    both = hidden_states(
        model,
        ids,
        cache="keep_all",
        chunk=CHUNK,
        attention_mask=mask,
        on_layer=lambda layer, hidden, columns: heard.append((layer, hidden.shape, columns)),
    )
    expected = model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    real = mask.bool()
    torch.testing.assert_close(both[real], expected[real])
    starts = range(0, TOKENS, CHUNK)
    assert [(layer, columns.start) for layer, _, columns in heard] == [
        (layer, start) for layer in range(2) for start in starts
    ]
    value = loss(model, ids, labels, cache="h2o:8", chunk=CHUNK, attention_mask=mask)
    again = backward(model, ids, labels, cache="h2o:8", chunk=CHUNK, attention_mask=mask)
    torch.testing.assert_close(value, again)
    gradients(model)
    loss(model, ids, labels, chunk=CHUNK)
    assert all(p.grad is None for p in model.parameters())


def test_leaves_the_model_as_it_was():
    model = model_of("llama")
    layers, attention = list(model.model.layers), model.config._attn_implementation
    ids, labels, _ = texts(1, 20)
    backward(model, ids, labels, cache="h2o:8", chunk=8)
    assert list(model.model.layers) == layers
    assert model.config._attn_implementation == attention
    assert not model.training
    with kvkeep.attach(model, "keep_all"):
        before = gradients(model)
        backward(model, ids, labels, cache="h2o:8", chunk=8)
        assert error(gradients(model), before) < 1e-12 or before.norm() > 0
        assert model.config._attn_implementation.startswith("kvkeep_")
        model.generate(ids, max_new_tokens=2, do_sample=False)


def test_a_cell_is_freed_with_its_chunk(monkeypatch):
    """At once, not when the garbage collector comes: it holds a chunk's activations."""
    held = []

    def cell(*args):
        assert not any(made() for made in held[:-1])
        made = Cell(*args)
        held.append(weakref.ref(made))
        return made

    monkeypatch.setattr(walk, "Cell", cell)
    model = model_of("llama")
    ids, labels, _ = texts(2, TOKENS)
    gc.disable()
    try:
        backward(model, ids, labels, cache="h2o:8", chunk=CHUNK)
    finally:
        gc.enable()
    assert len(held) == 2 * 6
    assert not any(made() for made in held)
