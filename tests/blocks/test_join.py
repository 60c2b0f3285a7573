"""Texts that were computed separately and joined: a forward under a block-diagonal mask."""

from __future__ import annotations

import pytest
import torch
from support.joined_logits import expected
from support.sweep_configs import model_of
from support.sweep_features import after_own
from support.tiny_models import growing_rope, tiny
from transformers import DynamicCache

import kvkeep
from kvkeep.blocks import join
from kvkeep.blocks.join import join_at
from kvkeep.errors import KVKeepError, RollbackError, ShapeError, StateError, UnsupportedError
from kvkeep.host import host_of
from kvkeep.rotary import Rotary
from kvkeep.store.layer_slices import require_storable, why_not_kept

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DYNAMIC = growing_rope("dynamic")
LONG = growing_rope("longrope") | {"original_max_position_embeddings": 64}
BY_TYPE = {
    "full_attention": LINEAR | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
MODELS = {
    "default": ("llama", {}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "longrope": ("llama", {"rope_parameters": LONG}),
    "partial": ("phi", {}),
    "interleaved": ("cohere", {}),
    "partial, interleaved": ("glm4", {}),
    "neox": ("gpt-neox", {}),
    "not in every layer": ("smollm3", {}),
    "qwen3": ("qwen3", {}),
    "one for each type of layer": ("gemma3", {"sliding_window": 128, "rope_parameters": BY_TYPE}),
}


def texts(lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 96, (1, n), generator=generator) for n in lengths]


def alone(model, text, spec="keep_all"):
    """A cache that was fed a text by itself."""
    cache = kvkeep.Cache(model, spec)
    model(text, past_key_values=cache)
    return cache


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attached", [True, False])
def test_block_diagonal(name, attached):
    family, options = MODELS[name]
    model = tiny(family, **{"max_position_embeddings": 256} | options).eval()
    model.set_attn_implementation("eager")
    parts, (tail,) = texts((9, 30, 1, 17)), texts((6,), seed=4)
    wanted = expected(model, parts, tail)
    if attached:
        kvkeep.attach(model)
    with torch.inference_mode():
        cache = join(model, [alone(model, part) for part in parts])
        assert cache.fed == cache.length == 57
        assert cache.shared_bytes > 0
        first = model(tail[:, :4], past_key_values=cache).logits
        rest = [model(tail[:, i : i + 1], past_key_values=cache).logits for i in (4, 5)]
    torch.testing.assert_close(torch.cat([first, *rest], dim=1), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "kind",
    [
        *("exaone4", "nanochat", "emu3", "gptj", "gpt_oss"),
        *("deepseek_v2", "deepseek_v3", "deepseek_v32"),
    ],
)
def test_keys_are_moved_as_the_model_rotates_them(kind):
    """Not in every layer, though the config does not say so; the other way round; by a language
    model that `AutoModel` does not list; by code that names no rotation; a part behind a latent, by
    neighbours or halves; an index's keys too."""
    model = model_of(kind)
    model.set_attn_implementation("eager")
    *parts, tail = texts((3, 2, 3))  # within the windows
    wanted = expected(model, parts, tail)
    with kvkeep.attach(model), torch.inference_mode():
        cache = join(model, [alone(model, part) for part in parts])
        found = model(tail, past_key_values=cache).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("lengths", [(11, 9), (11, 2, 9), (11, 3)])
def test_texts_longer_than_a_window(kind, lengths):
    """Layers with a window of 8 tokens hold the last 8 of a text."""
    model = model_of(kind)
    *parts, tail = texts((*lengths, 12))
    with torch.no_grad():
        wanted = after_own(model, parts, tail)
        with kvkeep.attach(model):
            cache = join(model, [alone(model, part) for part in parts])
            assert {layer.length for layer in cache.layers} >= {sum(min(n, 8) for n in lengths)}
            with pytest.raises(RollbackError):
                cache.freeze().fork().crop(4)
            found = [model(x, past_key_values=cache).logits for x in tail.split([1, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=1e-4, rtol=1e-4)


def test_texts_longer_than_a_chunk_of_chunked_attention_are_refused():
    model = model_of("llama4_text")
    with torch.no_grad(), kvkeep.attach(model):
        cache = alone(model, texts((11,))[0])
        with pytest.raises(UnsupportedError, match="fit in the window"):
            join(model, [cache])


def test_keys_without_positions_are_not_turned():
    """Bloom's biases tell distances."""
    model = model_of("bloom")
    *parts, tail = texts((3, 2, 3))
    whole = DynamicCache()
    with torch.inference_mode():
        caches = [model(part, use_cache=True).past_key_values for part in parts]
        for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
            keys, values = zip(*((layer.keys, layer.values) for layer in layers), strict=True)
            whole.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), index)
        wanted = model(tail, past_key_values=whole).logits
        kvkeep.attach(model)
        found = model(tail, past_key_values=join(model, [alone(model, x) for x in parts])).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_keys_that_change_with_their_position_otherwise(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr("kvkeep.hf.host.rotaries_of", lambda _: [Rotary(torch.ones(4) * 0.3)] * 2)
    with pytest.raises(
        UnsupportedError, match="the keys of layer 0 of llama depend on their position"
    ):
        join(model, [kvkeep.Cache(model)])


def test_states_of_recurrent_layers():
    model = model_of("lfm2")
    with kvkeep.attach(model), torch.inference_mode():
        caches = [alone(model, part) for part in texts((3, 2))]
        with pytest.raises(UnsupportedError, match="recurrent layers, whose states"):
            join(model, caches)


def test_the_first_text_alone_is_itself():
    model = tiny("llama")
    (text,), (tail,) = texts((20,)), texts((5,), seed=4)
    with kvkeep.attach(model), torch.inference_mode():
        one, two = alone(model, text), join(model, [alone(model, text)])
        assert model(tail, past_key_values=two).logits.equal(
            model(tail, past_key_values=one).logits
        )


@pytest.mark.parametrize(
    "spec",
    [
        "keep_all+int8",
        "keep_all+int4:centre=0,recent=0,sinks=0",
        "keep_all@fixed:64",
        "window:60",
    ],
)
def test_other_specs(spec):
    """As the same caches joined for good, by a snapshot; within what encoding again costs."""
    model = tiny("llama", max_position_embeddings=256)
    parts, (tail,) = texts((9, 20)), texts((4,), seed=4)
    with kvkeep.attach(model), torch.inference_mode():
        cache = join(model, [alone(model, part, spec) for part in parts])
        placed = kvkeep.Cache(model, spec)
        placed.restore(cache.snapshot())
        assert placed.shared_bytes == 0
        one, two = (model(tail, past_key_values=c).logits for c in (cache, placed))
        coarse = 0.3 if "int4" in spec else 0.05 if "int8" in spec else 1e-5
        assert (one - two).norm() < coarse * one.norm()


def test_what_a_joined_cache_can_do(tmp_path):
    model = tiny("llama", max_position_embeddings=256)
    parts, (tail,) = texts((9, 20, 7)), texts((4,), seed=4)
    with kvkeep.attach(model), torch.inference_mode():
        caches = [alone(model, part) for part in parts]
        cache = join(model, caches)
        wanted = model(tail, past_key_values=cache).logits
        cache.crop(-4)

        fork = cache.freeze().fork(rows=3)
        assert fork.shared_bytes == cache.shared_bytes
        found = model(tail.expand(3, -1), past_key_values=fork).logits
        torch.testing.assert_close(found, wanted.expand(3, -1, -1))
        cache.save(tmp_path / "a.kv")
        loaded = kvkeep.load(tmp_path / "a.kv", model)
        torch.testing.assert_close(model(tail, past_key_values=loaded).logits, wanted)

        again = join(model, [cache, caches[0]])  # joined ones can be joined
        flat = join(model, [*caches, caches[0]])
        for one in (again, flat):
            assert one.layers[0].positions()[0, 0].tolist() == [*range(45)]
        one, two = (model(tail, past_key_values=c).logits for c in (again, flat))
        torch.testing.assert_close(one, two)
        flat.crop(-4 - 9 - 3)  # into a text that was moved
        assert flat.fed == 33
        short = join(model, [*caches[:2], alone(model, parts[2][:, :4])])
        one, two = (model(tail, past_key_values=c).logits for c in (flat, short))
        torch.testing.assert_close(one, two)
        assert all(cache.fed == part.shape[1] for cache, part in zip(caches, parts, strict=True))


def test_a_text_behind_a_gap_is_never_stored():
    """Its tokens have not seen those that will stand before it."""
    model = tiny("llama")
    (text,) = texts((9,))
    with kvkeep.attach(model), torch.inference_mode():
        moved = join_at(host_of(model), [alone(model, text)], [4], 13)
        require_storable(join(model, [alone(model, text)]), why_not_kept)
    with pytest.raises(UnsupportedError, match="texts that were computed separately"):
        require_storable(moved, why_not_kept)


def test_eviction_from_joined_texts():
    """A window takes its own copy, with keys rotated for good."""
    model = tiny("llama", max_position_embeddings=256)
    parts, (tail,) = texts((9, 20)), texts((30,), seed=4)
    with kvkeep.attach(model), torch.inference_mode():
        cache = join(model, [alone(model, part, "window:32") for part in parts])
        wide = join(model, [alone(model, part) for part in parts])
        for i in range(30):
            one = model(tail[:, i : i + 1], past_key_values=cache).logits
        assert cache.shared_bytes == 0
        assert cache.length == 32
        assert one.isfinite().all()
        model(tail[:, :2], past_key_values=wide)
        assert wide.length == 31


def test_bad_input():
    model, other = tiny("llama"), tiny("llama", num_hidden_layers=1)
    parts = texts((9, 5))
    with torch.inference_mode():
        cache = alone(model, parts[0])
        rows = kvkeep.Cache(model)
        model(torch.cat([parts[0]] * 2), past_key_values=rows)
        short = kvkeep.Cache(model, "window:4")
        cases: list[tuple[type[KVKeepError], str, list[kvkeep.Cache]]] = [
            (ShapeError, "no caches", []),
            (ShapeError, "a cache of 2 rows", [cache, rows]),
            (StateError, "different specs", [cache, alone(model, parts[1], "keep_all+int8")]),
            (StateError, "different specs", [cache, alone(other, parts[1])]),
        ]
        with kvkeep.attach(model):
            cases.append(
                (
                    StateError,
                    "some while it was not",
                    [cache, alone(model, parts[1])],
                )
            )
            model(parts[0], past_key_values=short)
            cases.append((UnsupportedError, "evicted", [short]))
            scored = alone(model, parts[0], "h2o:40")
            cases.append((UnsupportedError, "scores", [scored]))
        for kind, message, caches in cases:
            with pytest.raises(kind, match=message):
                join(model, caches)
        own = model_of("roformer")  # rotates by a table among its weights
        with pytest.raises(UnsupportedError, match="another way than by its rotary embedding"):
            join(own, [alone(own, parts[0])])
        assert join(model, [kvkeep.Cache(model)]).fed == 0
        assert cache.shared_bytes == 0


@pytest.mark.parametrize(("rope", "most"), [(DYNAMIC, 63), (LONG, 64)])
def test_frequencies_that_change_with_the_length(rope, most):
    """Also after the model has read a longer text, for which they changed."""
    model = tiny("llama", max_position_embeddings=64, rope_parameters=rope)
    model.set_attn_implementation("eager")
    *parts, tail, longer = texts((30, most - 34, 4, 70))
    wanted = expected(model, parts, tail)
    with kvkeep.attach(model), torch.inference_mode():
        alone(model, longer)
        caches = [alone(model, part) for part in (*parts, tail, tail[:, :1])]
        found = model(tail, past_key_values=join(model, caches[:2])).logits
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        assert join(model, caches[:3]).fed == most
        with pytest.raises(UnsupportedError, match=f"change after {most} tokens"):
            join(model, caches)
        with pytest.raises(UnsupportedError, match="predict queries"):
            kvkeep.Cache(model, "expected_attention:16")


def test_an_index_of_blocks():
    """Of 4 tokens, of which two are chosen: a text begins at a block, or in one of two blocks."""
    model = model_of("minimax_m3_vl_text")
    *parts, tail = texts((12, 9, 2, 5))
    with torch.no_grad():
        wanted = after_own(model, parts, tail)
        with kvkeep.attach(model):
            caches = [alone(model, part) for part in parts]
            found = model(tail, past_key_values=join(model, caches)).logits
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
            with pytest.raises(UnsupportedError, match="a text of 9 that begins at position 2"):
                join(model, [caches[2], caches[1]])
