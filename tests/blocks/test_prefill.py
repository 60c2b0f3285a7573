"""Texts computed once and joined, with more or fewer tokens computed again."""

from __future__ import annotations

import pytest
import torch
from support.joined_logits import expected
from support.tiny_models import tiny

import kvkeep
from kvkeep.blocks import prefill
from kvkeep.errors import ShapeError, SpecError, StateError, UnsupportedError
from kvkeep.store import PrefixStore

FAMILIES = ["llama", "qwen3", "phi", "glm4", "smollm3", "gpt-neox"]


def texts(lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 96, (n,), generator=generator) for n in lengths]


@pytest.fixture(params=FAMILIES)
def model(request):
    more = {"no_rope_layers": [1, 0, 1]} if request.param == "smollm3" else {}
    found = tiny(request.param, max_position_embeddings=256, num_hidden_layers=3, **more).eval()
    found.set_attn_implementation("eager")
    return found


LENGTHS = (9, 30, 1, 17)


@torch.inference_mode()
def after(model, cache, tail):
    """Logits of a tail, fed in two chunks, and what comes then."""
    first = model(tail[None, :4], past_key_values=cache).logits
    return torch.cat([first, model(tail[None, 4:], past_key_values=cache).logits], dim=1)


@torch.no_grad()
def plain(model, parts, tail):
    """Logits of a tail after the whole text."""
    return model(torch.cat([*parts, tail])[None]).logits[:, -len(tail) :]


def test_none(model):
    parts, (tail,) = texts(LENGTHS), texts((6,), seed=4)
    wanted = expected(model, [part[None] for part in parts], tail[None])
    kvkeep.attach(model)
    found = after(model, prefill(model, parts), tail)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recompute", ["all", "boundary:30", 0.9999])
def test_all(model, recompute):
    """Where every token is computed again, it is the plain prefill."""
    parts, (tail,) = texts(LENGTHS), texts((6,), seed=4)
    wanted = plain(model, parts, tail)
    kvkeep.attach(model)
    cache = prefill(model, parts, recompute=recompute)
    assert cache.fed == 57
    torch.testing.assert_close(after(model, cache, tail), wanted, atol=1e-4, rtol=1e-4)


def test_boundary_of_two_layers():
    """What the others hold was computed before, so a mask says it for two layers: in the first all
    is as it was, and the second reads nothing of a third."""
    model = tiny("llama", max_position_embeddings=256).eval()
    model.set_attn_implementation("eager")
    parts, (tail,) = texts((9, 12)), texts((6,), seed=4)
    kvkeep.attach(model)
    cache = prefill(model, parts, recompute="boundary:4")
    with torch.inference_mode():
        whole = kvkeep.Cache(model)
        model(torch.cat(parts)[None], past_key_values=whole)
        alone = prefill(model, parts)
    for layer in range(2):
        held, right, before = (
            c.layers[layer].state().parts["slots"] for c in (cache, whole, alone)
        )
        order = held["position"][0, 0].argsort()
        for name in "kv":
            mine = held[name][:, :, order]
            torch.testing.assert_close(mine[:, :, :13], right[name][:, :, :13])
            torch.testing.assert_close(mine[:, :, 13:], before[name][:, :, 13:])
    assert after(model, cache, tail).isfinite().all()


@pytest.mark.parametrize("recompute", ["boundary:3", 0.3])
def test_what_a_repaired_cache_can_do(recompute, tmp_path):
    model = tiny("llama", max_position_embeddings=256, num_hidden_layers=3)
    parts, (tail,) = texts(LENGTHS), texts((6,), seed=4)
    kvkeep.attach(model)
    cache = prefill(model, parts, recompute=recompute)
    wanted = after(model, cache, tail)
    cache.crop(-6)
    with torch.inference_mode():
        cache.save(tmp_path / "a.kv")
        for other in (
            cache.freeze().fork(),
            kvkeep.load(tmp_path / "a.kv", model),
            _restored(model, cache),
        ):
            assert other.fed == 57
            torch.testing.assert_close(after(model, other, tail), wanted)
        rows = cache.freeze().fork(rows=2)
        found = model(tail[None, :4].expand(2, -1), past_key_values=rows).logits
        # products of two rows are summed in another order than those of one
        torch.testing.assert_close(found, wanted[:, :4].expand(2, -1, -1), rtol=1e-4, atol=1e-4)
    with pytest.raises(kvkeep.RollbackError):
        cache.crop(-1)
    with pytest.raises(UnsupportedError):
        kvkeep.PrefixStore().insert("m", torch.cat(parts), cache)


def _restored(model, cache):
    other = kvkeep.Cache(model)
    other.restore(cache.snapshot())
    return other


def test_texts_are_computed_once(monkeypatch):
    model, store = tiny("llama", max_position_embeddings=256), PrefixStore()
    parts = texts((30, 20, 25))
    kvkeep.attach(model)
    prefill(model, parts, store=store)
    fed = []
    admit = kvkeep.Cache.admit
    monkeypatch.setattr(kvkeep.Cache, "admit", lambda cache, n: (fed.append(n), admit(cache, n)))
    cache = prefill(model, [parts[1], parts[2], parts[0]], store=store)
    assert fed == []
    assert cache.shared_bytes >= 75 * 2 * 2 * 2 * 8 * 4
    prefill(model, [parts[2], parts[0]], store=store, recompute="boundary:4")
    assert fed == [4]


@pytest.mark.slow
def test_more_is_nearer_on_a_real_model(smollm2):
    """What is computed again brings the next token's distribution nearer to the plain prefill's."""
    model, tokenizer = smollm2
    facts = [
        "The lighthouse of Aldermere was built in 1843 by Ida Brandt, who had lost a ship there.",
        "Its keeper, her grandson, painted the tower green, though the harbour office forbade it.",
        "In the storm of 1911 the lamp failed, and he rang the bell by hand for eleven hours.",
    ]
    question = "\n\nQuestion: Who built the lighthouse, and which colour is it?\nAnswer:"
    parts = [tokenizer(fact, return_tensors="pt").input_ids[0] for fact in facts]
    tail = tokenizer(question, return_tensors="pt").input_ids[0]
    with kvkeep.attach(model), torch.inference_mode():

        def prediction(recompute):
            cache = prefill(model, parts, recompute=recompute)
            return model(tail[None], past_key_values=cache).logits[0].log_softmax(dim=-1)

        full = prediction("all")
        distance = {
            r: float((full.exp() * (full - prediction(r))).sum(dim=-1).mean())
            for r in (0, "boundary:8", 0.3, 0.9999)
        }
    assert distance[0.9999] < 1e-6
    assert distance[0.3] < 0.7 * distance[0]
    assert distance["boundary:8"] < distance[0]


def test_layers_with_windows_of_their_own(monkeypatch):
    """Texts are joined, and nothing is read where recomputation is refused."""
    kinds = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"]
    model = tiny("gemma3", num_hidden_layers=4, layer_types=kinds)  # windows of 8
    kvkeep.attach(model)
    reads = []
    admit = kvkeep.Cache.admit

    def counted(cache, n):
        reads.append(n)
        admit(cache, n)

    monkeypatch.setattr(kvkeep.Cache, "admit", counted)
    refused = r"3 of 4 layers \(layers 0-1, 3\) have a sliding window"
    for recompute in ("boundary:1", 0.3):
        with pytest.raises(UnsupportedError, match=refused):
            prefill(model, texts((3, 2)), recompute=recompute)
    assert not reads
    assert prefill(model, texts((3, 5))).fed == 8
    assert sum(reads) == 8
    assert prefill(model, texts((3, 12))).fed == 15  # a text longer than the window


def test_bad_input():
    model = tiny("llama", max_position_embeddings=256)
    parts = texts((9, 5))
    with pytest.raises(UnsupportedError, match="only an attached model"):
        prefill(model, parts, recompute=0.5)
    kvkeep.attach(model)
    for given in ([], [parts[0], parts[1][:0]], [parts[0][None]]):
        with pytest.raises(ShapeError, match="give texts"):
            prefill(model, given)
    for recompute in (-1, 1, 1.5, "some", "boundary", "boundary:0", "boundary:x"):
        with pytest.raises(SpecError, match="recompute="):
            prefill(model, parts, recompute=recompute)
    from kvkeep.blocks import recomputation
    from kvkeep.host import host_of

    cache = prefill(model, parts)
    with torch.inference_mode():
        model(parts[0][None], past_key_values=cache)
    with pytest.raises(ShapeError, match="that was fed 23"):
        recomputation.recompute(host_of(model), cache, torch.cat(parts), torch.arange(3))
    with pytest.raises(StateError, match="were fed after"):
        recomputation.recompute(
            host_of(model), cache, torch.cat([*parts, parts[0]]), torch.arange(3)
        )
