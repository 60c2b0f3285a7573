"""Gradients of LitGPT models, against plain autograd."""

from __future__ import annotations

import pytest
import torch
from kvkeep_lab.evals.forward import fill
from litgpt import lora
from support.held_bytes import HeldBytes
from support.tiny_litgpt import tiny_gpt
from torch.nn.functional import cross_entropy

import kvkeep
from kvkeep.blocks.prefill import prefill
from kvkeep.files.offload import Offload
from kvkeep.generate import SamplingParams, stream
from kvkeep.host import host_of
from kvkeep.host.compress import compress
from kvkeep.train import backward, hidden_states, loss, replaying

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, CHUNK = 40, 7
ROUNDED = 1e-6
"""LitGPT's norms compute in float32; so do forwards in double precision, of other chunks."""

LORA = {"lora_r": 4, "lora_alpha": 8} | {
    f"lora_{part}": True for part in ("query", "key", "value", "projection", "mlp", "head")
}


def ids(tokens=TOKENS, rows=2):
    return torch.randint(2, 96, (rows, tokens), generator=torch.Generator().manual_seed(3))


def adapted(family="llama", **options):
    """A model of which LoRA alone is trained."""
    gpt = tiny_gpt(family, kind=lora.GPT, **(LORA | options))
    lora.mark_only_lora_as_trainable(gpt)
    for name, x in gpt.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the gradients of lora_A
            torch.nn.init.normal_(x, std=0.1)
    return gpt


def gradients(gpt):
    """All gradients as one vector; the model has none afterwards."""
    found = torch.cat([p.grad.flatten() for p in gpt.parameters() if p.requires_grad])
    gpt.zero_grad()
    return found


def error(found, expected):
    """|found - expected| / |expected|, Euclidean."""
    assert expected.norm() > 0
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def mean_loss(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def unrolled(gpt, ids, spec, decisions):
    """The mean loss, in a graph of LitGPT's own forward of all chunks through one cache."""
    found, start = [], 0
    with kvkeep.attach(gpt) as attachment:
        for piece in ids.split(CHUNK, dim=1):
            at = torch.arange(start, start + piece.shape[1])
            if not start:  # position 0 would begin a cache of the attachment's spec
                attachment.cache = replaying(gpt, spec, decisions)
            found.append(gpt(piece, at))
            start += piece.shape[1]
    return mean_loss(torch.cat(found, dim=1), ids)


def compare(gpt, spec):
    """Gradients of `backward` and of autograd, with the same evictions."""
    text, decisions = ids(), []
    found = backward(gpt, text, text, cache=spec, chunk=CHUNK, decisions=decisions)
    ours = gradients(gpt)
    expected = unrolled(gpt, text, spec, decisions)
    expected.backward()
    torch.testing.assert_close(found.double(), expected.detach().double(), rtol=1e-4, atol=1e-4)
    if "keep_all" not in spec:
        assert all(sum(x.shape[2] for x in layer) > 0 for layer in decisions)
    return error(ours, gradients(gpt))


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", "h2o:9,recent=3+int8"),
        ("mistral", "qh2o:8,recent=2+int4"),
        ("gemma3", "window:8,sinks=2"),
        ("pythia", "snapkv:12,window=4"),
        ("deepseek", "h2o:9"),
    ],
)
def test_gradients_through_evictions(family, spec):
    assert compare(tiny_gpt(family).double(), spec) < 1e-10


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek"])
def test_a_cache_that_keeps_all_gives_ordinary_gradients(family):
    gpt, text = tiny_gpt(family).double(), ids()
    found = backward(gpt, text, text, chunk=CHUNK)
    ours = gradients(gpt)
    expected = mean_loss(gpt(text), text)
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    assert error(ours, gradients(gpt)) < ROUNDED


@pytest.mark.parametrize(
    ("family", "spec"), [("llama", "h2o:9,recent=3+int8"), ("gemma3", "h2o:9")]
)
def test_gradients_of_lora(family, spec):
    gpt = adapted(family).double()
    assert compare(gpt, spec) < 1e-10
    text = ids()
    backward(gpt, text, text, chunk=CHUNK)
    ours = gradients(gpt)
    mean_loss(gpt(text), text).backward()
    assert error(ours, gradients(gpt)) < ROUNDED


def test_dropout_of_lora():
    """Gradients are the loss's slope when the same numbers are drawn for each loss."""
    gpt, text = adapted(lora_dropout=0.3).double().train(), ids()

    def run():
        torch.manual_seed(5)
        value = float(backward(gpt, text, text, chunk=CHUNK))
        return value, gradients(gpt)

    _, slope = run()
    trained = [p for p in gpt.parameters() if p.requires_grad]
    way, values = slope / slope.norm(), []
    for step in (1e-3, -2e-3, 1e-3):
        at = 0
        for p in trained:
            p.data += step * way[at : at + p.numel()].view_as(p)
            at += p.numel()
        values.append(run()[0])
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(float(slope.norm()), rel=1e-3)


def test_merged_lora():
    """What is served is the model with the adapter, merged or not; merged, nothing is trained."""
    gpt, text = adapted(), ids()
    with kvkeep.attach(gpt), torch.no_grad():
        apart = gpt(text, torch.arange(TOKENS))
        value = loss(gpt, text, text, chunk=CHUNK)
        lora.merge_lora_weights(gpt)
        torch.testing.assert_close(gpt(text, torch.arange(TOKENS)), apart, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loss(gpt, text, text, chunk=CHUNK), value)
    assert (apart - tiny_gpt()(text)).abs().max() > 0.1
    base = [p for name, p in gpt.named_parameters() if "lora" not in name]
    for p in base:
        p.requires_grad_(True)
    backward(gpt, text, text, chunk=CHUNK)
    ours = [p.grad.clone() for p in base]
    gpt.zero_grad()
    mean_loss(gpt(text), text).backward()
    for found, p in zip(ours, base, strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("made", [tiny_gpt, adapted])
def test_mixed_precision(made):
    gpt, text = made(), ids()
    with torch.autocast("cpu", torch.bfloat16):
        assert compare(gpt, "keep_all") < 0.02
    backward(gpt, text, text, chunk=CHUNK)
    exact = gradients(gpt)
    with torch.autocast("cpu", torch.bfloat16):
        backward(gpt, text, text, chunk=CHUNK)
    assert 1e-4 < error(gradients(gpt), exact) < 0.3  # it was bfloat16 indeed


def held(differentiate, gpt, tokens):
    """The most bytes of tensors at once while a gradient is computed."""
    text = ids(tokens, rows=1)
    with HeldBytes() as memory:
        differentiate(text)
    gpt.zero_grad()
    return memory.most


@pytest.mark.parametrize("made", [tiny_gpt, pytest.param(adapted, marks=pytest.mark.slow)])
def test_memory_is_flat_in_the_length_of_a_text(made):
    """Layer inputs lie in a file; everything else that is held depends on the budget and chunk."""
    gpt = made(block_size=256, n_layer=2)

    def ours(text):
        return backward(gpt, text, text, cache="h2o:16+int8", chunk=16, offload=Offload(0))

    short, long = (held(ours, gpt, tokens) for tokens in (64, 256))
    assert long < 1.15 * short
    plain = [held(lambda x: mean_loss(gpt(x), x).backward(), gpt, n) for n in (64, 256)]
    assert plain[1] > 3 * plain[0]  # what is held is seen


class Ends(torch.nn.Module):
    """A score of each text's last token."""

    def __init__(self, width):
        super().__init__()
        self.score = torch.nn.Linear(width, 1, dtype=torch.float64)

    def forward(self, hidden, columns):
        if columns.stop < TOKENS:
            return None
        return self.score(hidden[:, -1]).square().mean()


def without_head(gpt, text):
    """What `ln_f` returns in LitGPT's own forward."""
    found = []
    hook = gpt.transformer.ln_f.register_forward_hook(lambda *call: found.append(call[2]))
    gpt(text)
    hook.remove()
    return found[0]


def refuse(*call):
    raise AssertionError("logits were computed")


class NoHead(torch.nn.Module):
    forward = refuse


@pytest.fixture
def headless():
    """A model that must not compute logits, a text, and its hidden states."""
    gpt, text = tiny_gpt("gemma3").double(), ids()
    expected = without_head(gpt, text)
    gpt.lm_head.register_forward_pre_hook(refuse)
    return gpt, text, expected


def test_a_head_of_ones_own(headless):
    gpt, text, expected = headless
    head = Ends(gpt.config.n_embd)
    found = backward(gpt, text, head=head, chunk=CHUNK)
    parts = [*gpt.transformer.parameters(), *head.parameters()]
    ours = torch.cat([p.grad.flatten() for p in parts])
    assert gpt.lm_head.weight.grad is None
    for p in parts:
        p.grad = None
    value = head(expected, slice(0, TOKENS))
    value.backward()
    torch.testing.assert_close(found, value.detach())
    assert error(ours, torch.cat([p.grad.flatten() for p in parts])) < ROUNDED


def test_hidden_states(headless):
    gpt, text, expected = headless
    heard = []
    found = hidden_states(
        gpt, text, chunk=CHUNK, on_layer=lambda layer, x, at: heard.append((layer, at.start))
    )
    torch.testing.assert_close(found, expected.detach())
    assert heard == [(layer, at) for layer in range(2) for at in range(0, TOKENS, CHUNK)]
    assert loss(gpt, text, head=lambda x, _: x.sum(), chunk=CHUNK) == pytest.approx(
        float(expected.detach().sum())
    )


@torch.no_grad()
def test_what_is_read_needs_no_logits():
    """By a host, a store, joined texts and a second reading."""
    gpt, text = tiny_gpt(), ids()
    gpt.lm_head = NoHead()  # stores refuse a hook
    host, store = host_of(gpt), kvkeep.PrefixStore()
    with kvkeep.attach(gpt):
        host.feed(text, cache := host.new_cache())
        host.feed(text[:, :3], cache)
        assert store.read(gpt, text[0]).found == 0
        assert store.read(gpt, torch.cat([text[0], text[1]])).found == TOKENS
        prefill(gpt, [text[0], text[1]], recompute=0.3)
        zipped = host.new_cache("kvzip:50%")
        host.feed(text[:1], zipped)
        compress(host, zipped, text[0])


@torch.no_grad()
def test_a_prompt_in_chunks_needs_the_logits_of_its_last():
    gpt, text = tiny_gpt(), ids(rows=1)
    host, rows = host_of(gpt), []
    gpt.lm_head.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[1]))
    with kvkeep.attach(gpt):
        fill(host, host.new_cache(), text, 8)
        assert rows == [1]
        list(stream(gpt, text, SamplingParams(3), cache=host.new_cache(), chunk=8))
        assert set(rows) == {1}
