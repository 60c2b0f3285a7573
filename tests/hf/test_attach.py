"""attach and detach, and what they refuse."""

from __future__ import annotations

import copy
import pickle
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import transformers as tf
from support.tiny_models import tiny, with_vision
from transformers import DynamicCache

import kvkeep
from kvkeep.errors import CapacityError, ShapeError, SpecError, StateError, UnsupportedError
from kvkeep.hf.cache_argument import as_cache
from kvkeep.version import TESTED


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture
def attached(model):
    with kvkeep.attach(model):
        yield model


class Box:
    def __init__(self, value):
        self.value = value


def ids(rows: int = 1, n: int = 6) -> torch.Tensor:
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(3))


def test_report_and_undo(model):
    implementation = model.config._attn_implementation
    state, decoder = set(model.__dict__), model.model
    hooks = len(decoder._forward_pre_hooks), len(decoder._forward_hooks)
    attachment = kvkeep.attach(model, "window:64,sinks=4")
    assert attachment.layers == attachment.attention == 2
    assert "2 layers of LlamaForCausalLM" in str(attachment)
    assert model.config._attn_implementation != implementation
    kvkeep.detach(model)
    assert model.config._attn_implementation == implementation
    assert set(model.__dict__) == state
    assert (len(decoder._forward_pre_hooks), len(decoder._forward_hooks)) == hooks
    output = model.generate(ids(), max_new_tokens=2, return_dict_in_generate=True)
    assert type(output.past_key_values) is DynamicCache


def test_twice_is_an_error(attached):
    with pytest.raises(StateError, match="detach"):
        kvkeep.attach(attached)


def test_models_that_share_a_config():
    config = tiny("llama").config
    config._attn_implementation = "sdpa"
    one, other = (tf.LlamaForCausalLM(config).eval() for _ in range(2))
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    expected = [model.generate(ids(), **options).sequences for model in (one, other)]
    kvkeep.attach(one, "keep_all+int8")
    assert other.config is config
    assert config._attn_implementation == other.model.config._attn_implementation == "sdpa"
    assert type(other.generate(ids(), **options).past_key_values) is DynamicCache
    other.set_attn_implementation("eager")
    config.output_attentions = True
    assert one.config.output_attentions
    config.output_attentions = False
    assert isinstance(one.generate(ids(), **options).past_key_values, kvkeep.Cache)
    kvkeep.attach(other)
    kvkeep.detach(one)
    found = [model.generate(ids(), **options) for model in (one, other)]
    assert [isinstance(x.past_key_values, kvkeep.Cache) for x in found] == [False, True]
    assert all(x.sequences.equal(y) for x, y in zip(found, expected, strict=True))
    kvkeep.detach(other)
    assert one.config is config is other.config is other.model.layers[0].self_attn.config


@torch.no_grad()
def test_another_implementation_for_forwards_without_a_cache(model):
    """It is set after the model was attached, and kvkeep still computes attention to its caches."""
    seen = []

    def attention(*args, **kwargs):
        seen.append(args)
        return tf.AttentionInterface._global_mapping["sdpa"](*args, **kwargs)

    tf.AttentionInterface.register("counted", attention)
    tf.AttentionMaskInterface.register("counted", tf.masking_utils.sdpa_mask)
    with kvkeep.attach(model, "keep_all+int8"):
        before = model(ids()).logits
        model.set_attn_implementation("counted")
        out = model(ids())
        assert isinstance(out.past_key_values, kvkeep.Cache)
        assert out.logits.equal(before)
        assert not seen
        model(ids(), use_cache=False)
        assert seen
    assert model.config._attn_implementation == "counted"


@torch.no_grad()
def test_libraries_that_wrap_attention_functions(attached, monkeypatch):
    """kvpress wraps all of them, and passes dropout by position."""
    functions, name = (
        tf.modeling_utils.ALL_ATTENTION_FUNCTIONS,
        attached.config._attn_implementation,
    )
    function, seen = functions[name], []

    def wrapped(module, query, key, value, attention_mask, dropout, **kwargs):
        seen.append(module)
        return function(module, query, key, value, attention_mask, dropout, **kwargs)

    expected = attached(ids()).logits
    monkeypatch.setitem(functions, name, wrapped)
    assert attached(ids()).logits.equal(expected)
    assert seen


@torch.no_grad()
def test_a_cache_that_was_built_before(model):
    """Where its model is attached, or detached, afterwards."""
    cache = kvkeep.Cache(model, "window:4")
    with kvkeep.attach(model):
        model(ids(), past_key_values=cache)
        assert cache.length == 4
        kept = kvkeep.Cache(model)
        model(ids(), past_key_values=kept)
    with pytest.raises(StateError, match="while it was attached"):
        model(ids(), past_key_values=kept)
    kept.reset()
    model(ids(), past_key_values=kept)


class Renamed(tf.LlamaForCausalLM):
    """A model of a version that prepares caches by a method of another name."""

    def generate(self, *args, **kwargs):
        return super().generate(*args, past_key_values=DynamicCache(), **kwargs)


class Dropped(tf.LlamaModel):
    """A decoder that takes its cache under a name which nobody knows."""

    def forward(self, input_ids=None, kv=None, **kwargs):
        kwargs = {name: x for name, x in kwargs.items() if name not in ("cache", "past_key_values")}
        return super().forward(input_ids, past_key_values=kv, **kwargs)


class Unhooked(tf.LlamaForCausalLM):
    """A model that calls its decoder without the decoder's hooks."""

    def forward(self, input_ids=None, past_key_values=None, cache=None, **kwargs):
        out = self.model.forward(input_ids, past_key_values=DynamicCache(), **kwargs)
        return tf.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(out[0]))


@pytest.mark.parametrize(
    ("outer", "decoder", "reason"),
    [
        (Renamed, tf.LlamaModel, "generate.. gave it a DynamicCache"),
        (tf.LlamaForCausalLM, Dropped, "its cache holds 0 tokens, but 6 were fed"),
        (Unhooked, tf.LlamaModel, "ran without the decoder's hooks"),
    ],
)
def test_a_step_without_kvkeep_is_an_error(outer, decoder, reason):
    model = tiny("llama")
    with kvkeep.attach(model):
        model.__class__, model.model.__class__ = outer, decoder
        with pytest.raises(UnsupportedError, match=reason) as raised:
            model.generate(ids(), max_new_tokens=3)
    assert TESTED["transformers"] in str(raised.value)


def test_a_cache_of_a_class_of_its_own_is_an_error():
    class Own(DynamicCache):
        pass

    def prepare(self, generation_config, model_kwargs, *_):
        model_kwargs["cache"] = model_kwargs["past_key_values"] = Own()

    model = tiny("llama")
    methods = {"_prepare_cache_for_generation": prepare}
    model.__class__ = type("Sub", (tf.LlamaForCausalLM,), methods)
    with kvkeep.attach(model), pytest.raises(UnsupportedError, match="gave it a Own"):
        model.generate(ids(), max_new_tokens=3)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_both_names_of_the_argument(attached, name):
    cache, other = kvkeep.Cache(attached), kvkeep.Cache(attached)
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = attached.generate(ids(), **options)
    assert attached.generate(ids(), **{name: cache}, **options).equal(expected)
    assert cache.fed == 9
    attached(ids(), **{name: other})
    assert other.fed == 6


def test_the_tested_versions_are_the_same_everywhere():
    root = Path(__file__).parents[2]
    required = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, versions in TESTED.items():
        assert name + versions in required
        least, beyond = (text.lstrip("<>=") for text in versions.split(","))
        for page in ("README.md", "docs/transformers.md"):
            assert f"{name} {least} to below {beyond}" in (root / page).read_text()


def test_the_decoder_of_an_attached_model_and_the_reverse(model):
    for first, second in ((model, model.model), (model.model, model)):
        with kvkeep.attach(first), pytest.raises(StateError, match="detach"):
            kvkeep.attach(second)
        assert not model.config._attn_implementation.startswith("kvkeep")
        assert not model.model._forward_pre_hooks


def test_copies_and_pickles_of_an_attached_model(model):
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids(), use_cache=False, **options)
    with kvkeep.attach(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for clone in copies:
        output = clone.generate(ids(), return_dict_in_generate=True, **options)
        assert output.past_key_values.config is clone.config
        assert output.sequences.equal(expected)
        kvkeep.detach(clone)
        assert not clone.model._forward_pre_hooks
        assert clone.generate(ids(), **options).equal(expected)
    assert model.generate(ids(), **options).equal(expected)


@pytest.mark.parametrize("mask_is_object", [False, True])
def test_an_attention_whose_masks_are_not_4d(mask_is_object):
    """FlashAttention's masks are 2D, flex attention's are objects."""
    sdpa = tf.AttentionInterface._global_mapping["sdpa"]

    def attention(module, query, key, value, attention_mask, **kwargs):
        attention.masks.append(attention_mask)
        return sdpa(module, query, key, value, None, **kwargs)

    def mask(attention_mask=None, **_):
        return Box(attention_mask) if mask_is_object else attention_mask

    attention.masks = []
    tf.AttentionInterface.register("odd", attention)
    tf.AttentionMaskInterface.register("odd", mask)
    model = tiny("llama")
    model.config._attn_implementation = "odd"
    padded = torch.ones(2, 6, dtype=torch.long)
    with kvkeep.attach(model), torch.no_grad():
        for cache in ({"use_cache": False}, {"past_key_values": DynamicCache()}):
            model(ids(2), attention_mask=padded, **cache)
            given = attention.masks.pop()
            assert (given.value if mask_is_object else given).equal(padded)
        attention.masks.clear()
        model(ids(2), attention_mask=padded)
        assert not attention.masks
    assert model.config._attn_implementation == "odd"


@torch.no_grad()
def test_a_forward_that_no_cache_could_serve_gets_none():
    model = tiny("llama", attention_dropout=0.5)
    model.set_attn_implementation("eager")
    square = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)
    plain = model(ids()).logits
    with kvkeep.attach(model):
        torch.testing.assert_close(model(ids(), attention_mask=square).logits, plain)
        model.train()
        assert not isinstance(model(ids()).past_key_values, kvkeep.Cache)


def test_detach_of_an_unattached_model(model):
    with pytest.raises(StateError, match="attach"):
        kvkeep.detach(model)


@pytest.mark.parametrize("spec", ["windw:3", ["keep_all"], {"sliding_attention": "keep_all"}])
def test_a_bad_spec_leaves_the_model_alone(model, spec):
    state = set(model.__dict__)
    with pytest.raises(SpecError):
        kvkeep.attach(model, spec)
    assert set(model.__dict__) == state
    assert not model.config._attn_implementation.startswith("kvkeep")


def test_not_a_transformers_model():
    with pytest.raises(UnsupportedError, match="Linear is not a transformers model"):
        kvkeep.attach(torch.nn.Linear(2, 2))


def test_only_the_text_model_of_a_composite_is_routed():
    model = with_vision()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids(1, 14), use_cache=False, **options)
    with kvkeep.attach(model):
        assert model.config.text_config._attn_implementation.startswith("kvkeep")
        assert not model.config.vision_config._attn_implementation.startswith("kvkeep")
        output = model.generate(ids(1, 14), return_dict_in_generate=True, **options)
    assert isinstance(output.past_key_values, kvkeep.Cache)
    assert output.sequences.equal(expected)


@pytest.mark.parametrize("at_once", [1 << 22, 64])
def test_a_text_with_the_types_of_its_tokens_where_none_is_an_image(monkeypatch, at_once):
    """As the processor of a model with vision returns it."""
    monkeypatch.setattr("kvkeep.hf.forward.masks._AT_ONCE", at_once)
    model, types = with_vision(), torch.zeros(2, 14, dtype=torch.long)
    mask = torch.ones_like(types)
    mask[0, :4] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids(2, 14), use_cache=False, token_type_ids=types, **options)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        given = {"token_type_ids": types, "past_key_values": cache}
        assert model.generate(ids(2, 14), **given, **options).equal(expected)
        assert cache.fed == 17


@torch.no_grad()
def unchanged_by(cache, error, match, call):
    """`call` raises, and afterwards the cache is what it was, down to its bytes."""
    before = (
        cache.stats(),
        [{k: p.clone() for k, p in x.storage.read().items()} for x in cache.layers],
    )
    with pytest.raises(error, match=match):
        call()
    assert cache.stats() == before[0]
    for layer, planes in zip(cache.layers, before[1], strict=True):
        for name, plane in layer.storage.read().items():
            assert plane.equal(planes[name])


@pytest.fixture
def cache(attached):
    cache = kvkeep.Cache(attached)
    with torch.no_grad():
        attached(ids(2), past_key_values=cache)
    return cache


def test_4d_mask(attached, cache):
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    unchanged_by(
        cache,
        UnsupportedError,
        "of four axes",
        lambda: attached(ids(2, 1), attention_mask=mask, past_key_values=cache),
    )


@pytest.mark.parametrize("mask", [[0], [1], [5]])
def test_an_integer_mask_of_four_axes_is_not_taken_for_positions(attached, cache, mask):
    given = torch.tensor([mask, mask], dtype=torch.int32)[:, None, None]
    unchanged_by(
        cache,
        UnsupportedError,
        "was not made by kvkeep",
        lambda: attached(ids(2, 1), attention_mask=given, past_key_values=cache),
    )


def test_mask_of_the_wrong_width(attached, cache):
    unchanged_by(
        cache,
        ShapeError,
        "give 7 columns",
        lambda: attached(ids(2, 1), attention_mask=torch.ones(2, 5), past_key_values=cache),
    )


def test_rows_changed_without_select(attached, cache):
    unchanged_by(cache, ShapeError, "select", lambda: attached(ids(3, 1), past_key_values=cache))


@pytest.mark.parametrize("rows", [1, 4])  # of one, the cache frees what is empty
def test_a_mask_that_shows_other_tokens_than_were_fed(attached, rows):
    cache = kvkeep.Cache(attached)
    mask = torch.ones(rows, 6, dtype=torch.long)
    mask[0, 4:] = 0
    with torch.no_grad():
        attached(ids(rows), attention_mask=mask, past_key_values=cache)
    moved = torch.cat([mask.flip(1), torch.ones(rows, 1, dtype=torch.long)], dim=1)
    unchanged_by(
        cache,
        ShapeError,
        "or tokens in other columns",
        lambda: attached(ids(rows, 1), attention_mask=moved, past_key_values=cache),
    )


@torch.no_grad()
def test_cache_of_an_attached_model_in_another(attached):
    cache, other = kvkeep.Cache(attached), tiny("llama")
    with pytest.raises(StateError, match="not the attached one"):
        other(ids(), past_key_values=cache)
    assert cache.fed == 0
    cache.reset()
    attached(ids(), past_key_values=cache)
    assert cache.fed == 6


def test_cache_of_another_model(attached):
    cache = kvkeep.Cache(tiny("llama"))
    unchanged_by(
        cache, UnsupportedError, "another model", lambda: attached(ids(), past_key_values=cache)
    )


@pytest.mark.parametrize("spec", ["keep_all", ["keep_all@concat", "keep_all"]])
def test_gradients_through_an_in_place_cache(attached, spec):
    cache = kvkeep.Cache(attached, spec)
    with pytest.raises(StateError, match="concat"):
        attached(ids(), past_key_values=cache)
    assert [layer.fed for layer in cache.layers] == [0, 0]


def test_gradients_of_the_queries_alone():
    model = tiny("llama")
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.0.self_attn.q_proj" in name)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        with pytest.raises(StateError, match="concat"):
            model(ids(), past_key_values=cache)
    assert [layer.fed for layer in cache.layers] == [0, 0]


def test_gradients_through_concat_equal_uncached(attached):
    gradients = []
    for chunks in ([6], [2, 4]):
        attached.zero_grad()
        cache = kvkeep.Cache(attached, "keep_all@concat")
        logits = [attached(c, past_key_values=cache).logits for c in ids().split(chunks, dim=1)]
        torch.cat(logits, dim=1).square().mean().backward()
        gradients.append(attached.model.layers[0].self_attn.k_proj.weight.grad.clone())
    attached.zero_grad()
    attached(ids(), use_cache=False).logits.square().mean().backward()
    expected = attached.model.layers[0].self_attn.k_proj.weight.grad
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_a_row_of_padding_is_finite_and_leaves_the_others_alone(attached):
    mask = torch.tensor([[0] * 6, [1] * 6])
    both = attached(ids(2), attention_mask=mask, past_key_values=kvkeep.Cache(attached)).logits
    alone = attached(ids(2)[1:], past_key_values=kvkeep.Cache(attached)).logits
    assert both.isfinite().all()
    torch.testing.assert_close(both[1:], alone, atol=2e-5, rtol=2e-4)


@torch.no_grad()
def test_filled_in_the_other_mode(model):
    cache = kvkeep.Cache(model)
    model(ids(), past_key_values=cache)
    with kvkeep.attach(model):
        unchanged_by(
            cache,
            StateError,
            "before it was attached",
            lambda: model(ids(), past_key_values=cache),
        )
        cache.reset()
        model(ids(), past_key_values=cache)
    with pytest.raises(StateError, match="while it was attached"):
        model(ids(), past_key_values=cache)


@pytest.mark.parametrize("attach", [True, False])
def test_a_full_layer_stops_the_forward_before_any_layer_changed(model, attach):
    cache = kvkeep.Cache(model, ["keep_all", "keep_all@fixed:8"])
    if attach:
        kvkeep.attach(model)
    with torch.no_grad():
        model(ids(), past_key_values=cache)
        unchanged_by(
            cache,
            CapacityError,
            "9 slots needed.*fixed at 8",
            lambda: model(ids(1, 3), past_key_values=cache),
        )
        model(ids(1, 2), past_key_values=cache)
    if attach:
        kvkeep.detach(model)


@torch.no_grad()
@pytest.mark.parametrize("empty", [False, True])
def test_an_interrupted_forward_is_noticed(attached, cache, empty):
    def interrupt(*_):
        raise KeyboardInterrupt

    if empty:
        cache.reset()
    hook = attached.model.layers[1].self_attn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        attached(ids(2, 1), past_key_values=cache)
    hook.remove()
    with pytest.raises(StateError, match="interrupted"):
        attached(ids(2, 1), past_key_values=cache)
    cache.reset()
    attached(ids(2), past_key_values=cache)
    assert cache.fed == 6


def test_per_layer_specs():
    model = tiny("gemma3")
    named = kvkeep.Cache(
        model, {"sliding_attention": "keep_all@fixed", "full_attention": "window:12,sinks=2"}
    )
    listed = kvkeep.Cache(model, ["keep_all@fixed", "window:12,sinks=2"])
    options = {"max_new_tokens": 20, "do_sample": False}
    with kvkeep.attach(model):
        texts = [model.generate(ids(1, 14), past_key_values=c, **options) for c in (named, listed)]
    assert texts[0].equal(texts[1])
    assert [layer.length for layer in named.layers] == [8, 14]
    assert [layer.stats().capacity for layer in named.layers] == [
        8,
        named.layers[1].stats().capacity,
    ]


def test_a_spec_that_some_layers_cannot_take_names_the_way_to_give_each_type_its_own():
    model = tiny("gemma3")
    typed = {"sliding_attention": "keep_all+int8", "full_attention": "keep_all+kivi"}
    with pytest.raises(SpecError) as raised:
        kvkeep.attach(model, "keep_all+kivi")
    said = str(raised.value)
    assert "in layers of type sliding_attention: a sliding window of 8 tokens" in said
    assert str(typed) in said
    assert "'sliding_attention=keep_all+int8;full_attention=keep_all+kivi'" in said
    with kvkeep.attach(model, typed):
        assert model.generate(torch.ones(1, 20, dtype=torch.long), max_new_tokens=20).shape[1] == 40
    for every in (
        "window:4+kivi",
        {"sliding_attention": "keep_all+kivi", "full_attention": "h2o:8"},
    ):
        with pytest.raises(SpecError) as raised:
            kvkeep.Cache(model, every)
        assert "for each type" not in str(raised.value)


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "1 rows of 0 tokens"),
        (torch.zeros(0, 4, dtype=torch.long), "0 rows of 4 tokens"),
        (torch.tensor([[5, 96]]), "token id 96: the model.s vocabulary has 0 to 95"),
        (torch.tensor([[5, -1]]), "token id -1: the model.s vocabulary has 0 to 95"),
    ],
)
def test_what_no_model_can_read_is_refused_before_anything_changes(attached, cache, given, reason):
    before = cache.fed
    for call in (
        lambda: attached(given, past_key_values=cache),
        lambda: attached(given),
        lambda: attached.model(given, past_key_values=cache),
        lambda: attached.generate(given, max_new_tokens=2),
    ):
        with pytest.raises(ShapeError, match=reason):
            call()
    embedded = torch.zeros(*given.shape, 32)
    if not given.numel():
        with pytest.raises(ShapeError, match=reason):
            attached(inputs_embeds=embedded, past_key_values=cache)
    assert cache.fed == cache.length == before


@torch.no_grad()
def test_positions_past_the_models_limit_are_warned_of_once():
    model = tiny("llama", max_position_embeddings=16)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(ids(1, 16), **as_cache(model, cache))
        with pytest.warns(UserWarning, match="17 tokens are fed to a model made for 16"):
            model(ids(1, 1), **as_cache(model, cache))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(ids(1, 1), **as_cache(model, cache))
            model(ids(1, 30))
