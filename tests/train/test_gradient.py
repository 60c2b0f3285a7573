"""`backward` gives the gradients of plain autograd through the same cached forward."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support import sweep_configs
from support.autograd_gradients import (
    adapted,
    error,
    gradients,
    in_float64,
    model_of,
    ordinary,
    texts,
    unrolled,
)
from support.pairwise import pairwise
from support.slow import every

from kvkeep.testing import EXAMPLES
from kvkeep.train import backward

TOKENS, CHUNK = 26, 7
PADS = (6, 1, 0)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SPECS = ("keep_all", "window:8,sinks=2", "h2o:8", "h2o:8+int8")
DTYPES = tuple(TOLERANCE)
FAMILIES = ("llama", "qwen3", "gemma3")
PADDING = ("none", "left", "right")


def compare(model, ids, labels, spec, mask, chunk=CHUNK):
    """The error of `backward` against plain autograd with the same decisions."""
    decisions: list = []
    found = backward(
        model, ids, labels, cache=spec, chunk=chunk, attention_mask=mask, decisions=decisions
    )
    ours = gradients(model)
    expected = unrolled(model, ids, labels, spec, chunk, mask, decisions)
    expected.backward()
    theirs = gradients(model)
    torch.testing.assert_close(found.double(), expected.detach().double(), rtol=1e-5, atol=0)
    return error(ours, theirs)


@pytest.mark.parametrize(
    ("family", "dtype", "padding", "spec"), pairwise(FAMILIES, DTYPES, PADDING, SPECS)
)
def test_equals_plain_autograd(family, dtype, padding, spec):
    model = model_of(family, dtype)
    pads = () if padding == "none" else PADS
    ids, labels, mask = texts(3, TOKENS, pads=pads, side=padding)
    assert compare(model, ids, labels, spec, mask) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("family", "dtype", "spec"), every(2, pairwise(FAMILIES, DTYPES, ("keep_all", "h2o:8+int8")))
)
def test_lora_equals_plain_autograd(family, dtype, spec):
    model = adapted(model_of(family)).to(dtype)
    ids, labels, mask = texts(3, TOKENS, pads=PADS)
    assert compare(model, ids, labels, spec, mask) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("family", "dtype", "padding"), every(2, pairwise(FAMILIES, DTYPES, PADDING))
)
def test_keep_all_equals_ordinary_backprop(family, dtype, padding):
    model = model_of(family, dtype)
    pads = () if padding == "none" else PADS
    ids, labels, mask = texts(3, TOKENS, pads=pads, side=padding)
    backward(model, ids, labels, chunk=CHUNK, attention_mask=mask)
    ours = gradients(model)
    ordinary(model, ids, labels, mask).backward()
    # Gemma 3 normalises in float32 whatever its dtype, where rounding shows.
    most = 1e-6 if family == "gemma3" and dtype == torch.float64 else TOLERANCE[dtype]
    assert error(ours, gradients(model)) < most


@pytest.mark.parametrize(
    ("spec", "family"),
    every(
        3,
        product(
            ["keep_all", "h2o:9"],
            ["gpt2", "opt", "gemma2", "gpt-oss", "mistral", "phi3", "cohere"],
        ),
    ),
)
def test_other_families(family, spec):
    """Softcaps, sinks, learned positions, windows, scaled logits, experts."""
    model = model_of(family, torch.float32, attn_pdrop=0.0, resid_pdrop=0.0, dropout=0.0)
    ids, labels, mask = texts(2, TOKENS, pads=(5, 0))
    assert compare(model, ids, labels, spec, mask) < 1e-5


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("deepseek_v3", "h2o:8"),
        ("deepseek_v32", "window:8,sinks=2"),
        ("glm_moe_dsa", "h2o:8"),  # whose layers hand on a choice that none of them shares
    ],
)
def test_latents_and_indices(kind, spec):
    model = sweep_configs.few_layers(kind).double()
    model.set_experts_implementation("eager")  # torch's own takes no float64
    ids, labels, mask = texts(3, TOKENS, pads=PADS)
    assert compare(model, ids, labels, spec, mask) < 1e-10


@pytest.mark.parametrize(
    ("kind", "spec"),
    every(
        3,
        [
            ("qwen3_5_text", "h2o:8"),
            ("jamba", "h2o:8"),  # which reads its states token by token
            ("gemma4_text", "h2o:8"),
            *product(["bamba", "falcon_h1", "lfm2"], ["window:8,sinks=2", "h2o:8"]),
            *product(["gemma3n_text", "gemma4_text"], ["window:8,sinks=2", "tova:8+int8"]),
        ],
    ),
)
def test_recurrent_states_and_shared_keys(kind, spec):
    """With a budget the gradients of the same decisions, and without one those of whole texts."""
    model = sweep_configs.few_layers(kind).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch's own takes no float64
    ids, labels, mask = texts(2, TOKENS, pads=(5, 0))
    with in_float64(model):
        assert compare(model, ids, labels, spec, mask) < 1e-10
        backward(model, ids, labels, chunk=CHUNK, attention_mask=mask)
        ours = gradients(model)
        ordinary(model, ids, labels, mask).backward()
    # Gemma normalises and scales with numbers that are float32 in its file.
    assert error(ours, gradients(model)) < (1e-6 if "gemma" in kind else 1e-10)


def test_the_states_of_a_model_that_does_not_attend():
    model = sweep_configs.few_layers("mamba2").double()
    ids, labels, _ = texts(2, TOKENS)
    with in_float64(model):
        backward(model, ids, labels, chunk=CHUNK)
        ours = gradients(model)
        ordinary(model, ids, labels).backward()
    assert error(ours, gradients(model)) < 1e-10


@pytest.mark.parametrize("policy", every(2, sorted(EXAMPLES)))
def test_every_policy(policy):
    model = model_of("llama")
    ids, labels, mask = texts(3, TOKENS, pads=PADS)
    assert compare(model, ids, labels, EXAMPLES[policy], mask, chunk=5) < 1e-10


def holes(*at):
    """Texts of which some tokens in the midst are padding, and predicted tokens come after it."""
    ids, labels, _ = texts(3, TOKENS)
    mask = torch.ones_like(ids)
    for row, start in enumerate(at):
        mask[row, start : start + 4] = 0
    return ids, labels.masked_fill(mask == 0, -100), mask


@pytest.mark.parametrize("spec", ["keep_all", "window:8,sinks=2", "h2o:8", "tova:8+int4"])
def test_padding_in_the_midst_of_a_text(spec):
    ids, labels, mask = holes(9, 21, 0)
    assert compare(model_of("llama"), ids, labels, spec, mask) < 1e-10


def test_padding_in_the_midst_equals_ordinary_backprop():
    model = model_of("llama")
    ids, labels, mask = holes(9, 21, 0)
    backward(model, ids, labels, chunk=CHUNK, attention_mask=mask)
    ours = gradients(model)
    # What is predicted from padding that nothing precedes is nobody's to say.
    labels[2, 4] = -100
    ordinary(model, ids, labels, mask).backward()
    theirs = gradients(model)
    labels[2, 4] = ids[2, 4]
    assert error(ours, theirs) > 1e-3
    labels[2, 4] = -100
    backward(model, ids, labels, chunk=CHUNK, attention_mask=mask)
    assert error(gradients(model), theirs) < 1e-10


@pytest.mark.parametrize(
    ("together", "chunk", "tokens"), [(4, 1, 18), (4, 2, 18), (4, 4, 18), (4, 16, 36), (32, 16, 36)]
)
def test_blocks_that_are_full_when_a_chunk_ends(together, chunk, tokens):
    ids, labels, mask = texts(3, tokens, pads=PADS)
    spec = f"keep_all+kivi:4,together={together},recent=0"
    assert compare(model_of("llama"), ids, labels, spec, mask, chunk) < 1e-10


@pytest.mark.parametrize(
    "spec", every(2, ["h2o:8", "adakv(h2o:8)", "expected_attention:8", "snapkv:8,window=4"])
)
def test_single_tokens(spec):
    ids, labels, mask = texts(2, 17, pads=(3, 0))
    assert compare(model_of("llama"), ids, labels, spec, mask, chunk=1) < 1e-10
    assert compare(model_of("llama"), ids, labels, spec, mask, chunk=4) < 1e-10  # and at the end


@pytest.mark.parametrize(
    ("spec", "side"),
    [
        ("keep_all+int4", "left"),
        ("h2o:8+fp8/int8", "left"),
        ("qvlen:8+int4", "right"),
        ("adakv(h2o:8)+int8", "left"),
        *pairwise([f"keep_all+kivi:4,together=4,recent={n}" for n in (0, 6)], ["left", "right"]),
    ],
)
def test_every_codec(spec, side):
    model = model_of("llama")
    ids, labels, mask = texts(3, TOKENS, pads=PADS, side=side)
    assert compare(model, ids, labels, spec, mask) < 1e-10


@pytest.mark.parametrize("spec", ["adakv(knorm:8)", "adakv:0(random:8)"])
def test_heads_of_different_lengths_in_each_row(spec):
    model = model_of("llama")
    ids, labels, mask = texts(3, TOKENS, pads=PADS)
    assert compare(model, ids, labels, spec, mask) < 1e-10


@pytest.mark.parametrize("spec", ["knorm:8", "adakv(knorm:8)"])
def test_equal_scores_are_decided_alike_in_a_batch_and_alone(spec):
    model = model_of("qwen3", torch.float32, hidden_size=64, head_dim=64)
    for layer in model.model.layers:
        torch.nn.init.ones_(layer.self_attn.k_norm.weight)  # keys whose norms differ by rounding
    ids, labels, _ = texts(3, TOKENS)
    backward(model, ids, labels, cache=spec, chunk=CHUNK)
    ours, alone = gradients(model), 0
    for row in range(3):
        backward(model, ids[row : row + 1], labels[row : row + 1], cache=spec, chunk=CHUNK)
        alone = alone + gradients(model) / 3
    assert error(ours, alone) < 1e-5


@pytest.mark.parametrize("spec", ["h2o:8", "window:8,sinks=2", "tova:8", "adakv(knorm:8)"])
def test_decides_as_a_cache_that_is_served(spec):
    model = model_of("llama")
    ids, labels, mask = texts(3, TOKENS, pads=PADS)
    backward(model, ids, labels, cache=spec, chunk=CHUNK, attention_mask=mask)
    ours = gradients(model)
    unrolled(model, ids, labels, spec, CHUNK, mask).backward()
    assert error(ours, gradients(model)) < 1e-10


def test_each_layer_may_have_a_spec_of_its_own():
    model = model_of("llama")
    ids, labels, _ = texts(2, TOKENS)
    specs = ["h2o:8", "window:9,sinks=1"]
    assert compare(model, ids, labels, specs, None) < 1e-10


@pytest.mark.parametrize("spec", ["keep_all", f"window:{TOKENS},sinks=2"])
def test_any_chunk_gives_the_same(spec):
    model = model_of("llama")
    ids, labels, mask = texts(3, TOKENS, pads=PADS)
    found = []
    for chunk in (1, 3, 16, TOKENS):
        backward(model, ids, labels, cache=spec, chunk=chunk, attention_mask=mask)
        found.append(gradients(model))
    assert max(error(x, found[0]) for x in found[1:]) < 1e-12


def test_a_text_shorter_than_a_chunk_is_one_chunk():
    model = model_of("llama")
    ids, labels, _ = texts(1, 5)
    assert compare(model, ids, labels, "h2o:64", None, chunk=64) < 1e-10


def test_weights_and_divisor():
    model = model_of("llama")
    ids, labels, _ = texts(2, 20)
    weights = torch.rand(2, 20, generator=torch.Generator().manual_seed(3)).double()
    found = backward(model, ids, labels, chunk=6, loss_weights=weights, num_items=7.0)
    ours = gradients(model)
    logits = model(ids, use_cache=False).logits[:, :-1]
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    expected = (each * weights[:, 1:].flatten()).sum() / 7.0
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    assert error(ours, gradients(model)) < 1e-10


def test_gradients_accumulate():
    model = model_of("llama")
    first, second = texts(2, 14, seed=1), texts(2, 20, seed=2)
    each = []
    for ids, labels, _ in (first, second):
        backward(model, ids, labels, chunk=6)
        each.append(gradients(model))
    for ids, labels, _ in (first, second):
        backward(model, ids, labels, chunk=6, scale=0.5)
    assert error(gradients(model), (each[0] + each[1]) / 2) < 1e-12


@pytest.mark.parametrize("frozen", ["embedding", "lower layers", "all but the head"])
def test_stops_at_the_lowest_weight_that_is_trained(frozen):
    model = model_of("llama")
    model.model.embed_tokens.requires_grad_(False)
    if frozen != "embedding":
        model.model.layers[0].requires_grad_(False)
    if frozen == "all but the head":
        model.model.layers.requires_grad_(False)
        model.model.norm.requires_grad_(False)
    ids, labels, _ = texts(2, TOKENS)
    assert compare(model, ids, labels, "h2o:8", None) < 1e-10


def test_tied_embeddings():
    model = model_of("llama", tie_word_embeddings=True)
    ids, labels, _ = texts(2, TOKENS)
    assert compare(model, ids, labels, "h2o:8", None) < 1e-10


def test_a_step_is_a_chunk():
    """By default; so gradients are of what the same spec serves for chunks of any size."""
    model = model_of("llama", torch.float32)
    ids, labels, _ = texts(2, TOKENS)
    made: list[list] = [[], []]
    backward(model, ids, labels, cache="h2o:8,step=4", decisions=made[0])
    stepped = gradients(model)
    backward(model, ids, labels, cache="h2o:8", chunk=4, decisions=made[1])
    assert error(stepped, gradients(model)) == 0
    for found, wanted in zip(*made, strict=True):
        assert all(x.equal(y) for x, y in zip(found, wanted, strict=True))
        assert len(found) > 3
