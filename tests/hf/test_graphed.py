"""Steps whose state stays on the device say what ordinary steps say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.pairwise import pairwise
from support.slow import every
from support.tiny_models import FAMILIES, UNGRAPHED, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import kvkeep
import kvkeep.layer.write_tokens
from kvkeep import attention
from kvkeep.attention import triton
from kvkeep.errors import CapacityError, ShapeError, SpecError, StateError, UnsupportedError
from kvkeep.hf import inputs
from kvkeep.hf.steps.cuda_graph import Graphed
from kvkeep.policy import ranking

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = [
    "keep_all@fixed:80",
    "keep_all+int8@fixed:80",
    "keep_all+int4:affine=1/fp8@fixed:80",
    "window:16@fixed",
    "window:9,sinks=3+int8@fixed:40",
    "h2o:16@fixed:40",
    "h2o:24,recent=4+int8@fixed",
    "qvlen:16+int4@fixed:40",
    "tova:12@fixed:30",
    "snapkv:20,window=8@fixed:40",
    "knorm:16@fixed:40",
    "random:16@fixed:40",
]


def prompt(model, rows, tokens):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, model.config.vocab_size, (rows, tokens), generator=generator)
    return ids.to(DEVICE)


def held(cache):
    """Of each layer, row and head the positions held."""
    found = [layer.positions().tolist() for layer in cache.layers]
    return [[[sorted(p for p in head if p >= 0) for head in row] for row in x] for x in found]


def alike(cache, expected):
    """The same is held, but for what the next query cannot reach."""
    for mine, other in zip(cache.layers, expected.layers, strict=True):
        for one in (mine, other):
            if one.policy.reach is not None:
                with one.cursor.turn:
                    one.settler.evict(one.length - one.sight.reachable(one.cursor))
        assert mine.length == other.length
    assert held(cache) == held(expected)


def feed(model, cache, ids, mask=None):
    """Logits of new tokens, whose positions do not count padding."""
    places = None
    if mask is not None:
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.inference_mode():
        return model(
            ids, attention_mask=mask, position_ids=places, past_key_values=cache
        ).logits  # fmt: skip


def fed(model, spec, ids, mask=None):
    cache = kvkeep.Cache(model, spec)
    return cache, feed(model, cache, ids, mask)[:, -1].argmax(-1, keepdim=True)


@pytest.mark.parametrize(
    ("spec", "length", "padded"), every(2, pairwise(SPECS, [5, 25], [False, True]))
)
def test_as_ordinary_steps(spec, length, padded):
    model = tiny("llama").to(DEVICE)
    kvkeep.attach(model)
    ids = prompt(model, 3, length)
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        mask[2, :4] = 0
    expected, token = fed(model, spec, ids, mask)
    cache, same = fed(model, spec, ids, mask)
    assert same.equal(token)
    with Graphed(model, cache) as step:
        for _ in range(14):
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            ordinary = feed(model, expected, token, mask)[:, -1]
            logits = step(token)
            torch.testing.assert_close(logits, ordinary, atol=2e-5, rtol=1e-4)
            token = logits.argmax(-1, keepdim=True)
    assert cache.fed == expected.fed == length + 14
    assert cache.seen.equal(expected.seen)
    alike(cache, expected)
    for tokens in (token, ids):  # the cache goes on as any other
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        ordinary, mine = (feed(model, x, tokens, mask) for x in (expected, cache))
        torch.testing.assert_close(mine, ordinary, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "spec"),
    every(3, [(family, "keep_all@fixed:80") for family in FAMILIES if family not in UNGRAPHED])
    + [(family, "h2o:12@fixed:40") for family in ("llama", "gemma2", "gpt-oss", "gpt2")],
)
def test_families(family, spec):
    model = tiny(family).to(DEVICE)
    kvkeep.attach(model)
    ids = prompt(model, 2, 9)
    expected, token = fed(model, spec, ids)
    cache, _ = fed(model, spec, ids)
    with Graphed(model, cache) as step:
        for _ in range(12):
            with torch.inference_mode():
                ordinary = model(token, past_key_values=expected).logits[:, -1]
            try:
                logits = step(token)
            except UnsupportedError:  # in float32 torch asks the host how many tokens an expert has
                assert DEVICE == "cuda"
                assert family in ("mixtral", "qwen3-moe", "gpt-oss")
                pytest.skip("a mixture of experts that no graph can hold")
            torch.testing.assert_close(logits, ordinary, atol=2e-5, rtol=1e-4)
            token = logits.argmax(-1, keepdim=True)
    alike(cache, expected)


@pytest.mark.slow  # torch compiles for 15 s what the other tests run
@pytest.mark.parametrize("spec", ["keep_all+int8@fixed:80", "h2o:12@fixed:40"])
def test_compiled(spec):
    model = tiny("llama", num_hidden_layers=1).to(DEVICE)
    kvkeep.attach(model)
    ids = prompt(model, 2, 9)
    expected, token = fed(model, spec, ids)
    cache, _ = fed(model, spec, ids)
    with Graphed(model, cache, compile=True) as step:
        for _ in range(6):
            with torch.inference_mode():
                ordinary = model(token, past_key_values=expected).logits[:, -1]
            logits = step(token)
            torch.testing.assert_close(logits, ordinary, atol=2e-5, rtol=1e-4)
            token = logits.argmax(-1, keepdim=True)
    alike(cache, expected)


def test_behind_frozen_slots():
    model = tiny("llama").to(DEVICE)
    kvkeep.attach(model)
    ids = prompt(model, 1, 9)
    cache, token = fed(model, "keep_all@fixed:80", ids)
    frozen = cache.freeze()
    mine, other = frozen.fork(rows=3), frozen.fork(rows=3)
    token = token.repeat(3, 1)
    with torch.inference_mode():
        for fork in (mine, other):
            logits = model(token, past_key_values=fork).logits[:, -1]
    with Graphed(model, mine) as step:
        for _ in range(5):
            token = logits.argmax(-1, keepdim=True)
            logits = step(token)
            with torch.inference_mode():
                ordinary = model(token, past_key_values=other).logits[:, -1]
            torch.testing.assert_close(logits, ordinary, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", ["h2o:16@fixed:80", "knorm:12@fixed:80", "window:12@fixed:80"])
def test_a_policy_evicts_from_slots_that_were_frozen(spec):
    model = tiny("llama").to(DEVICE)
    kvkeep.attach(model)
    cache, token = fed(model, spec, prompt(model, 1, 9))
    frozen = cache.freeze()
    mine, other = frozen.fork(), frozen.fork()
    for fork in (mine, other):
        feed(model, fork, token)
    with Graphed(model, mine) as step:
        for _ in range(12):
            ordinary = feed(model, other, token)[:, -1]
            torch.testing.assert_close(step(token), ordinary, atol=2e-5, rtol=1e-4)
            token = ordinary.argmax(-1, keepdim=True)
    alike(mine, other)
    assert frozen.fork().fed == 9


def test_threads_that_take_turns():
    model = tiny("llama").to(DEVICE)
    kvkeep.attach(model)
    cache, token = fed(model, "keep_all@fixed:80", prompt(model, 1, 9))
    with Graphed(model, cache) as step, ThreadPoolExecutor(1) as other:
        expected = step(token)
        assert other.submit(step, token).result().shape == expected.shape
    assert cache.fed == 11


def test_a_layer_that_does_not_fit_leaves_the_others():
    model = tiny("llama").to(DEVICE)
    kvkeep.attach(model)
    cache, _ = fed(model, ["window:9@fixed", "keep_all"], prompt(model, 1, 16))
    before = held(cache)
    with pytest.raises(SpecError, match="growing"):
        Graphed(model, cache)
    assert held(cache) == before


def test_bad_input():
    model = tiny("llama").to(DEVICE)
    ids = prompt(model, 2, 9)
    empty = kvkeep.Cache(model, "keep_all@fixed:12")
    with pytest.raises(StateError, match="is not attached"):
        Graphed(model, empty)
    kvkeep.attach(model)
    with pytest.raises(StateError, match="feed the prompt"):
        Graphed(model, empty)
    for spec, error, match in (
        ("keep_all", SpecError, "growing storage can move its slots"),
        ("h2o:12@fixed:12", SpecError, "use @fixed:13 or more"),
        ("kivi", SpecError, "growing"),
        ("adakv(knorm:12)", SpecError, "split storage can move its slots"),
        ("expected_attention:12@fixed:40", UnsupportedError, "policy expected_attention needs"),
    ):
        spec = "keep_all+kivi" if spec == "kivi" else spec
        cache, _ = fed(model, spec, ids)
        with pytest.raises(error, match=match):
            Graphed(model, cache)
        assert cache.fed == 9  # and is not in use
    cache, token = fed(model, "keep_all@fixed:12", ids)
    step = Graphed(model, cache)
    with pytest.raises(StateError, match="in use by graphed steps"):
        cache.crop(-1)
    with pytest.raises(StateError, match="in use by graphed steps"):
        Graphed(model, cache)
    with pytest.raises(StateError, match="in use by graphed steps"), torch.inference_mode():
        model(token, past_key_values=cache)
    with pytest.raises(ShapeError, match=r"\(2, 2\); give one token for each row, \(2, 1\)"):
        step(token.repeat(1, 2))
    for _ in range(3):
        step(token)
    with pytest.raises(CapacityError, match="13 slots needed, but this cache is fixed at 12"):
        step(token)
    step.close()
    step.close()
    assert cache.fed == cache.length == 12
    with pytest.raises(StateError, match="create new ones"):
        step(token)


def test_an_interrupted_step(monkeypatch):
    model = tiny("llama").to(DEVICE)
    kvkeep.attach(model)
    cache, token = fed(model, "h2o:12@fixed:40", prompt(model, 2, 20))
    step = Graphed(model, cache)
    step(token)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(token)
    hook.remove()
    with pytest.raises(StateError, match="interrupted"):
        step(token)
    step.close()
    assert cache.fed == 0


@pytest.fixture
def by_kernels(monkeypatch):
    """Every step as on CUDA: by the Triton kernels, which the interpreter runs on the CPU."""
    if triton.reason():
        pytest.skip(triton.reason())
    kernels = next(b for b in attention.backends() if b.name == "triton")
    table = (replace(kernels, device=None), *attention.backends())
    monkeypatch.setattr(attention, "_TABLE", table)
    monkeypatch.setattr(kvkeep.layer.write_tokens, "_DEVICES", ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        pytest.param("llama", "keep_all@fixed:20", marks=pytest.mark.slow),
        pytest.param("llama", "h2o:6+int8@fixed:20", marks=pytest.mark.slow),
        pytest.param("gpt-oss", "keep_all+int4@fixed:20", marks=pytest.mark.slow),
    ],
)
def test_by_the_kernels(request, family, spec):
    model = tiny(family).to(DEVICE)
    if family == "gpt-oss":  # in float32 its usual experts bring offsets to the host
        model.set_experts_implementation("batched_mm")
    kvkeep.attach(model)
    ids = prompt(model, 2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected, token = fed(model, spec, ids, mask)
    found = []
    for _ in range(3):
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
        found.append(feed(model, expected, token, mask)[:, -1])
    request.getfixturevalue("by_kernels")
    cache, _ = fed(model, spec, ids, mask[:, :8])
    with Graphed(model, cache) as step:
        for logits in found:
            torch.testing.assert_close(step(token), logits, atol=1e-3, rtol=1e-3)


class Recording(TorchDispatchMode):
    """The operations that bring a number, or a shape that depends on numbers, to the host."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.waited = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in self.WAITS or func.__name__.startswith("item"):
            self.waited.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("padded", "spec"), every(2, product([False, True], SPECS)))
def test_nothing_waits_for_the_device(monkeypatch, spec, padded):
    monkeypatch.setattr(ranking, "LIBRARY", None)  # the choice as other devices make it
    monkeypatch.setattr(inputs, "check_tokens", lambda *_: None)  # looked at on the CPU only
    model = tiny("llama").to(DEVICE)
    kvkeep.attach(model)
    ids = prompt(model, 2, 25)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache, token = fed(model, spec, ids, mask if padded else None)
    with Graphed(model, cache) as step:
        step(token)
        with Recording() as recorded:
            step(token)
    assert recorded.waited == []
