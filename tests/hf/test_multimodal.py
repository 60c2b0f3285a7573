"""Models that read images or sound beside text, with kvkeep caches."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from support.autograd_gradients import error, gradients
from support.slow import every
from support.tiny_multimodal import END, FAMILIES, FIRST_TEXT, MEDIUM, build, without_media
from transformers import DynamicCache

import kvkeep
from kvkeep import Cache, PrefixStore, attach
from kvkeep.blocks import join
from kvkeep.errors import RollbackError, SavedCacheError, StateError, UnsupportedError
from kvkeep.hf.kinds.multimodal import require_counted, why_not_counted
from kvkeep.hf.rotary import rotaries_of
from kvkeep.host import Piece, host_of
from kvkeep.train import backward

REFUSED = {
    "mllama": "attend to images and cache them",
    "paligemma": "lets tokens attend to later tokens",
}
ANOTHER = {"blip_2"}  # its generate() is its language model's, and needs an image each time
SERVED = sorted(set(FAMILIES) - set(REFUSED) - ANOTHER)
MROPE = ("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
NEW = 5
RELATIVE = 1e-4


def new_cache(model, spec):
    """A cache of a spec, or transformers' own."""
    return (
        DynamicCache(config=model.config.get_text_config()) if spec is None else Cache(model, spec)
    )


def said(model, prompt, cache, new=NEW):
    return model.generate(**prompt, past_key_values=cache, max_new_tokens=new, do_sample=False)


def more(ids, seed=7):
    """Token ids followed by a text of 4 tokens, as the next turn of a conversation."""
    drawn = torch.Generator().manual_seed(seed)
    text = torch.randint(FIRST_TEXT, MEDIUM, (len(ids), 4), generator=drawn)
    return torch.cat([ids, text], dim=1)


def next_turn(model, ids, mask, cache):
    ids = more(ids)
    ones = torch.ones(len(ids), ids.shape[1] - mask.shape[1], dtype=torch.int64)
    return said(model, {"input_ids": ids, "attention_mask": torch.cat([mask, ones], dim=1)}, cache)


@torch.no_grad()
def logits(model, prompt, cache):
    found = model(**prompt, past_key_values=cache, use_cache=True).logits
    return found[prompt["attention_mask"].bool()]


@torch.no_grad()
def logits_in_chunks(model, prompt, cache):
    """Of a prompt in two chunks: up to a little after the image, and the rest."""
    ids = prompt["input_ids"]
    cut = int((ids[0] == END).nonzero()[0]) + 3
    columns = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    first = {name: x[:, :cut] if name in columns else x for name, x in prompt.items()}
    before = logits(model, first, cache)
    after = model(input_ids=ids[:, cut:], past_key_values=cache, use_cache=True).logits
    return torch.cat([before, after[0]])


def runs(case, spec):
    """What a model says and computes, through caches of a spec, or through transformers' own."""
    model, found = case.model, {}
    for name, prompt in {"one": case.prompt(), "batch": case.prompt(2, pads=3)}.items():
        cache = new_cache(model, spec)
        first = found[f"{name}: text"] = said(model, prompt, cache)
        found[f"{name}: second turn"] = next_turn(model, first, prompt["attention_mask"], cache)
        found[f"{name}: beams"] = model.generate(
            **prompt,
            past_key_values=new_cache(model, spec),
            max_new_tokens=NEW,
            do_sample=False,
            num_beams=2,
        )
        found[f"{name}: logits"] = logits(model, prompt, new_cache(model, spec))
    found["logits in chunks"] = logits_in_chunks(model, case.prompt(), new_cache(model, spec))
    return found


def require_same(expected, found):
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        if x.is_floating_point():
            off = float((found[name] - x).abs().max())
            assert off < RELATIVE * float(x.abs().max()), f"{name}: off by {off}"
        else:
            assert x.equal(found[name]), name


@pytest.mark.parametrize("name", every(3, SERVED))
def test_an_attached_model_equals_itself(name):
    case = build(name)
    model, before = case.model, set(case.model.__dict__)
    expected = runs(case, None)
    torch.testing.assert_close(
        expected["logits in chunks"], expected["one: logits"], atol=1e-4, rtol=1e-4
    )
    with attach(model):
        require_same(expected, runs(case, "keep_all"))
        assert said(model, case.prompt(), None).equal(expected["one: text"])
    assert set(model.__dict__) == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert said(model, case.prompt(), None).equal(expected["one: text"])


POLICIES = [
    pytest.param(name, marks=() if name in ("llava", "qwen2_vl") else pytest.mark.slow)
    for name in SERVED
]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("spec", ["window:{},sinks=2", "h2o:{}"])
def test_policies(name, spec):
    case = build(name)
    expected = runs(case, None)
    with attach(case.model):
        require_same(expected, runs(case, spec.format(1000)))
        budget = 20
        cache = Cache(case.model, spec.format(budget))
        found = said(case.model, case.prompt(), cache)
        next_turn(case.model, found, case.prompt()["attention_mask"], cache)
        assert cache.length <= budget + 2
        if spec.startswith("window"):  # exact for every chunk size
            torch.testing.assert_close(
                logits_in_chunks(case.model, case.prompt(), Cache(case.model, spec.format(budget))),
                logits(case.model, case.prompt(), Cache(case.model, spec.format(budget))),
                atol=1e-4,
                rtol=1e-4,
            )


@pytest.mark.parametrize("name", ANOTHER)
def test_a_model_that_generates_by_its_language_model(name):
    case = build(name)
    model, prompt = case.model, case.prompt(2, pads=3)
    expected = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    computed = logits(model, prompt, new_cache(model, None))
    with attach(model, "h2o:1000"):
        torch.testing.assert_close(logits(model, prompt, Cache(model)), computed)
        found = model.generate(
            **prompt, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
        )
        assert found.sequences.equal(expected)
        assert str(found.past_key_values.specs[0]).startswith("h2o:1000+")
    assert model.generate(**prompt, max_new_tokens=NEW, do_sample=False).equal(expected)
    assert "_prepare_cache_for_generation" not in model.language_model.__dict__


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_attached(name):
    case = build(name)
    with pytest.raises(UnsupportedError, match=REFUSED[name]):
        attach(case.model)


def text_of(case, rows=1):
    """A prompt without an image."""
    prompt = without_media(case.prompt(rows))
    prompt["input_ids"] = prompt["input_ids"].clamp(max=MEDIUM - 1)
    return prompt


# -- stores and files -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen2_audio"])
def test_a_store_never_serves_a_prompt_with_an_image(name):
    case = build(name)
    model, store = case.model, PrefixStore()
    prompts = [case.prompt(seed=seed) for seed in (0, 1)]
    text = text_of(case)
    assert prompts[0]["input_ids"].equal(prompts[1]["input_ids"])
    expected = [said(model, prompt, None) for prompt in prompts]
    assert not expected[0].equal(expected[1])
    spoken = said(model, text, None)
    with attach(model, store=store):
        for prompt, own in zip(prompts, expected, strict=True):
            assert said(model, prompt, None).equal(own)
        assert store.stats().asked_tokens == 0
        cache = Cache(model)
        ids = said(model, prompts[0], cache)
        assert store.learn(model, ids[0, : cache.fed], cache) == 0
        if case.types:
            text[case.types] = torch.zeros_like(text["input_ids"], dtype=torch.int32)
        for _ in range(2):
            assert said(model, text, None).equal(spoken)
        assert store.stats().hits == 1
    texts = text_of(case, 2)
    texts["input_ids"][:, :-3] = texts["input_ids"][0, :-3]
    spoken = said(model, texts, None)
    with attach(model, store=store):
        assert said(model, texts, None).equal(spoken)
        assert store.stats().hits > 1


def test_caches_of_images_are_neither_joined_nor_compressed():
    case = build("llava")
    with attach(case.model):
        cache = Cache(case.model)
        logits(case.model, case.prompt(), cache)
        with pytest.raises(UnsupportedError, match="images, sound"):
            join(case.model, [cache])
        with pytest.raises(StateError, match="images, sound"):
            cache.compress(case.model, case.prompt()["input_ids"], "kvzip:50%")


def test_a_text_fed_as_embeddings_is_not_stored():
    model = build("llava").model.model.language_model
    with attach(model):
        cache, ids = Cache(model), torch.arange(5, 25)[None]
        with torch.no_grad():
            model(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache)
        assert PrefixStore().learn(model, ids[0], cache) == 0


def test_a_cache_that_an_unattached_model_filled_is_not_stored():
    case = build("llava")
    cache, prompt = Cache(case.model), case.prompt()
    logits(case.model, prompt, cache)
    assert PrefixStore().learn(case.model, prompt["input_ids"][0], cache) == 0
    text = text_of(case)["input_ids"]
    assert PrefixStore().read(case.model, text).cache.fed == text.shape[1]


@pytest.mark.parametrize("part", ["model.vision_tower", "model.multi_modal_projector"])
def test_a_file_fits_the_tower_it_was_made_with(part, tmp_path):
    case = build("llava")
    with attach(case.model):
        cache = Cache(case.model)
        logits(case.model, case.prompt(), cache)
        cache.save(tmp_path / "cache")
        assert kvkeep.load(tmp_path / "cache", case.model).fed == cache.fed
        with torch.no_grad():
            next(iter(case.model.get_submodule(part).parameters())).add_(1.0)
        with pytest.raises(SavedCacheError, match="weights differ"):
            kvkeep.load(tmp_path / "cache", case.model)


def test_a_file_fits_what_is_taken_from_the_tower(tmp_path):
    case = build("llava")
    with attach(case.model):
        cache = Cache(case.model)
        logits(case.model, case.prompt(), cache)
        cache.save(tmp_path / "cache")
        case.model.config.vision_feature_layer = -1
        with pytest.raises(SavedCacheError, match=r"config\.vision_feature_layer was -2, is -1"):
            kvkeep.load(tmp_path / "cache", case.model)


# -- positions that the tokens of an image share --------------------------------------------


def forget(model):
    """The state of a model that has just been loaded."""
    model.model.rope_deltas = None


def conversation(model, prompt, cache, between=lambda: None):
    """Two turns: `between` is called before the second."""
    first = said(model, prompt, cache)
    between()
    return next_turn(model, first, prompt["attention_mask"], cache)


@pytest.mark.parametrize("name", [*MROPE, "qwen3_5"])
def test_another_conversation_in_between(name):
    case = build(name)
    model, prompt, other = case.model, case.prompt(), case.prompt(2, seed=3, pads=4)
    expected = conversation(model, prompt, new_cache(model, None))
    text = text_of(case)
    spoken = conversation(model, text, new_cache(model, None))
    with attach(model):
        interrupted = conversation(
            model, prompt, Cache(model), lambda: said(model, text, Cache(model))
        )
        assert interrupted.equal(expected)
        assert conversation(model, prompt, Cache(model), lambda: forget(model)).equal(expected)
        between = conversation(
            model, text, Cache(model), lambda: logits(model, other, Cache(model))
        )
        assert between.equal(spoken)


@pytest.mark.parametrize("name", MROPE)
def test_forwards_continue_at_the_positions_of_their_own_cache(name):
    case = build(name)
    model, batch = case.model, case.prompt(2)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 8], [1, 2, 16]])  # as many tokens, but wider
    after = torch.tensor([[7, 8, 9], [10, 11, 12]])
    with torch.no_grad():
        own = new_cache(model, None)
        logits(model, batch, own)
        expected = model(input_ids=after, past_key_values=own).logits
    with attach(model), torch.no_grad():
        cache = Cache(model)
        logits(model, batch, cache)
        text = Cache(model)
        host_of(model).forward(text_of(case)["input_ids"], text)
        forks = [cache.freeze().fork(), copy.deepcopy(cache)]
        for fork in (*forks, cache):
            found = model(input_ids=after, past_key_values=fork).logits
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        cache.crop(-3)
        cache.select([1])
        found = model(input_ids=after[1:], past_key_values=cache).logits
        torch.testing.assert_close(found, expected[1:], atol=1e-4, rtol=1e-4)


def test_a_loaded_cache_continues_at_its_positions(tmp_path):
    case = build("qwen2_vl")
    model, prompt = case.model, case.prompt()
    expected = conversation(model, prompt, new_cache(model, None))
    with attach(model):
        cache = Cache(model)
        first = said(model, prompt, cache)
        cache.save(tmp_path / "cache")
        forget(model)
        loaded = kvkeep.load(tmp_path / "cache", model)
        assert next_turn(model, first, prompt["attention_mask"], loaded).equal(expected)
        snapshot = cache.snapshot()
        forget(model)
        cache.reset()
        cache.restore(snapshot)
        assert next_turn(model, first, prompt["attention_mask"], cache).equal(expected)
        assert PrefixStore().learn(model, first[0, : loaded.fed], loaded) == 0


def test_an_image_is_not_cropped_in_part():
    case = build("qwen2_vl")
    prompt = case.prompt()
    after_image = int((prompt["input_ids"][0] == MEDIUM).nonzero()[-1]) + 1
    with attach(case.model):
        cache = Cache(case.model)
        logits(case.model, prompt, cache)
        cache.rewind(after_image)
        with pytest.raises(RollbackError, match="the tokens of images share positions"):
            cache.rewind(after_image - 1)
        assert cache.fed == after_image


def test_saved_by_an_unattached_model(tmp_path):
    case = build("qwen2_vl")
    cache = Cache(case.model)
    logits(case.model, case.prompt(), cache)
    with pytest.raises(StateError, match=r"call kvkeep\.attach"):
        cache.save(tmp_path / "cache")


@pytest.mark.parametrize("name", MROPE)
def test_policies_that_need_positions_are_refused_images(name):
    case = build(name)
    model, text = case.model, text_of(case)
    expected = said(model, text, None)
    with attach(model):
        cache = Cache(model, "expected_attention:1000")
        assert said(model, text, cache).equal(expected)
        for step in (logits, said):
            empty = Cache(model, "expected_attention:16")
            with pytest.raises(UnsupportedError, match="undoes the rotation of keys by their"):
                step(model, case.prompt(2, pads=2), empty)
            assert empty.fed == 0


@pytest.mark.parametrize("name", MROPE)
def test_rotaries_are_the_models_own(name):
    model = build(name).model
    decoder = model.model.language_model
    seen = {}

    def look(module, args, kwargs):
        seen["given"] = kwargs["position_embeddings"]

    decoder.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        decoder(input_ids=torch.arange(5, 12)[None])
    module = __import__(type(decoder).__module__, fromlist=["apply_rotary_pos_emb"])
    rotary = rotaries_of(model.config)[0]
    x = torch.randn(1, 1, 7, 8, generator=torch.Generator().manual_seed(0))
    found, _ = module.apply_rotary_pos_emb(x, x, *seen["given"])
    torch.testing.assert_close(rotary.turn(x, torch.arange(7)), found)


# -- texts in such models -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llava", *MROPE])
def test_texts_in_packed_forwards(name):
    case = build(name)
    model, host = case.model, host_of(case.model)
    texts = [torch.arange(5, 15), torch.arange(30, 43)]
    with torch.no_grad():
        expected = torch.stack([model(input_ids=ids[None]).logits[0, -1] for ids in texts])
    with attach(model), torch.no_grad():
        image = Cache(model)
        logits(model, case.prompt(), image)
        caches = [Cache(model) for _ in texts]
        for part in (slice(0, 4), slice(4, None)):
            pieces = [Piece(ids[part], cache) for ids, cache in zip(texts, caches, strict=True)]
            found = host.forward_packed(pieces)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        if name in MROPE:
            with pytest.raises(UnsupportedError, match="share positions"):
                host.forward_packed([Piece(texts[0], image), Piece(texts[1], caches[1])])
            with pytest.raises(UnsupportedError, match="share positions"):
                host.forward(texts[0][None], image, position=torch.arange(40, 50))
            with pytest.raises(UnsupportedError, match="share positions"):
                require_counted(model, image, "graphed steps")
            with pytest.raises(StateError, match="images, sound"):
                image.compress(model, case.prompt()["input_ids"], "kvzip:50%")


def test_counting_ends_no_forward_of_another_thread():
    model = build("llava").model
    text, inside, done = torch.arange(5, 15)[None], Event(), Event()

    def wait(*_):
        inside.set()
        done.wait(20)

    embeddings = model.get_input_embeddings()
    with attach(model), ThreadPoolExecutor(1) as pool:
        hook = embeddings.register_forward_pre_hook(wait)
        counts = pool.submit(why_not_counted, model)
        assert inside.wait(20)
        hook.remove()
        with torch.no_grad():
            assert model(input_ids=text, past_key_values=Cache(model)).logits.shape[1] == 10
        done.set()
        assert counts.result() == ""


def test_a_model_that_was_attached_is_freed():
    model = build("qwen2_vl").model.model  # which keeps the difference of positions itself
    with attach(model), torch.no_grad():
        model(input_ids=torch.arange(5, 15)[None], past_key_values=Cache(model))
    weak = weakref.ref(model)
    del model
    gc.collect()
    assert weak() is None


@torch.no_grad()
def test_embeddings_after_an_interrupted_text():
    model, text = build("llava").model, torch.arange(5, 15)[None]
    decoder = model.model.language_model

    def interrupt(*_):
        raise KeyboardInterrupt

    with attach(model):
        hook = decoder.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=text, past_key_values=Cache(model))
        hook.remove()
        cache = Cache(model)
        decoder(inputs_embeds=model.get_input_embeddings()(text), past_key_values=cache)
    assert cache.layers[0].history.embedded


def test_drafts_of_a_text_are_no_embeddings():
    model, text = build("qwen3_5").model, torch.arange(5, 11).repeat(4)[None]
    with attach(model):
        plain, cache = said(model, {"input_ids": text}, Cache(model), 12), Cache(model)
        options = {"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3}
        assert model.generate(text, past_key_values=cache, **options).equal(plain)
        assert not any(layer.history.embedded for layer in cache.layers)


def test_a_model_that_counts_from_one_is_not_packed():
    case = build("paligemma")
    model = case.model
    model.set_attn_implementation("eager")
    text = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = model(input_ids=text).logits
    with attach(model), torch.no_grad():
        cache = Cache(model)
        host = host_of(model)
        assert "counts positions in another way" in host.unpackable
        host.feed(text[:, :9], cache)
        found = host.forward(text[:, 9:], cache, last=11)
        torch.testing.assert_close(found, expected[:, 9:], atol=1e-4, rtol=1e-4)
        with pytest.raises(UnsupportedError, match="counts positions in another way"):
            host.forward(text, Cache(model), position=torch.arange(20))


@pytest.mark.parametrize("name", ["llava", *MROPE])
def test_gradients_of_texts(name):
    case = build(name)
    model = case.model
    said(model, case.prompt(), None)  # a model keeps the positions of the last image
    ids = torch.randint(FIRST_TEXT, MEDIUM, (2, 20), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    found = backward(model, ids, ids, cache="keep_all", chunk=7)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-4)
    assert error(gradients(model), expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_compiled_steps(name):
    case = build(name)
    model, prompt, text = case.model, case.prompt(), text_of(case)
    expected = conversation(model, prompt, new_cache(model, None))
    spoken = said(model, text, None)
    with attach(model, compile=True):
        for _ in range(2):
            assert said(model, text, Cache(model)).equal(spoken)
            assert conversation(model, prompt, Cache(model)).equal(expected)
            cache = Cache(model)
            logits(model, prompt, cache)
            with torch.no_grad():
                step = model(input_ids=torch.tensor([[7]]), past_key_values=cache).logits
        compiled = step
    with torch.no_grad():
        cache = new_cache(model, None)
        logits(model, prompt, cache)
        step = model(input_ids=torch.tensor([[7]]), past_key_values=cache).logits
    torch.testing.assert_close(compiled, step, atol=1e-4, rtol=1e-4)
