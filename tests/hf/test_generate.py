"""Every way of generating, with an attached model, gives what transformers' own cache gives."""

from __future__ import annotations

import copy
from itertools import cycle

import pytest
import torch
from support.tiny_models import WINDOW, tiny
from transformers import DynamicCache, GenerationConfig, StaticCache

import kvkeep
from kvkeep.errors import UnsupportedError

PROMPT, NEW = 14, 8


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3"])
def model(request):
    return tiny(request.param)


@pytest.fixture
def attached(model):
    with kvkeep.attach(model):
        yield model


def ids(rows: int = 1, n: int = PROMPT) -> torch.Tensor:
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(3))


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams_returned": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "beam_sampling": {"do_sample": True, "num_beams": 2},
    "prompt_lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "chunked_prefill": {"do_sample": False, "prefill_chunk_size": 5},
}


STORAGES = cycle(["keep_all@growing", "keep_all@fixed", "keep_all@concat"])


@pytest.mark.parametrize(("mode", "spec"), [*zip(MODES, STORAGES, strict=False)])
def test_mode(model, mode, spec):
    rows = 1 if mode == "prompt_lookup" else 2
    options = {"max_new_tokens": NEW, **MODES[mode]}
    torch.manual_seed(5)
    expected = model.generate(ids(rows), **options)
    with kvkeep.attach(model, spec):
        torch.manual_seed(5)
        output = model.generate(ids(rows), return_dict_in_generate=True, **options)
    assert isinstance(output.past_key_values, kvkeep.Cache)
    assert output.sequences.equal(expected)


@pytest.mark.parametrize("mode", ["beams_returned", "return_sequences"])
@pytest.mark.parametrize("rows", [1, 2])
def test_answers_share_a_prompt_that_was_read(attached, mode, rows):
    options = {"max_new_tokens": NEW, **MODES[mode]}
    cache = kvkeep.Cache(attached, "keep_all")
    with torch.inference_mode():
        attached(ids(rows)[:, :-1], past_key_values=cache)
    one = cache.live_bytes
    sequences = []
    for given in (None, cache):
        torch.manual_seed(5)
        sequences.append(attached.generate(ids(rows), past_key_values=given, **options))
    assert sequences[0].equal(sequences[1])
    several = max(options.get("num_beams", 1), options["num_return_sequences"])
    assert cache.rows == several * rows
    windows = any(layer.window for layer in cache.layers)  # which drop what they share
    assert windows or cache.shared_bytes == one * (several if rows > 1 else 1)


def test_a_call_that_fails_leaves_the_cache_as_it_was(attached):
    cache = kvkeep.Cache(attached, "keep_all@fixed:20")
    with torch.inference_mode():
        attached(ids()[:, :-1], past_key_values=cache)
    options = {"do_sample": False, "num_beams": 3, "past_key_values": cache}
    with pytest.raises((kvkeep.KVKeepError, RuntimeError)):  # transformers' own is a RuntimeError
        attached.generate(ids(), max_new_tokens=5, attention_mask=torch.ones(1, 5), **options)
    if cache.get_max_length() > 0:  # not all of its layers have windows
        with pytest.raises(kvkeep.CapacityError):
            attached.generate(ids(n=40), max_new_tokens=5, **options)
    assert (cache.rows, cache.fed) == (1, PROMPT - 1)
    expected = attached.generate(ids(), max_new_tokens=5, do_sample=False, num_beams=3)
    assert attached.generate(ids(), max_new_tokens=5, **options).equal(expected)


@pytest.mark.parametrize("attach_draft", [True, False])
def test_assisted_generation(attached, attach_draft):
    draft = copy.deepcopy(tiny(attached.config.model_type.split("_")[0]))
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.assistant_confidence_threshold = 0.0
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(1 + 0.2 * torch.randn_like(weight))  # so that some drafts are rejected
    options = {"max_new_tokens": 14, "do_sample": False}
    expected = attached.generate(ids(), use_cache=False, **options)
    if attach_draft:
        kvkeep.attach(draft)
    assert attached.generate(ids(), assistant_model=draft, **options).equal(expected)


def test_continuous_batching(model):
    """It has a cache of its own; detached, the model runs it as before."""
    options = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=95)
    with (
        kvkeep.attach(model),
        pytest.raises(UnsupportedError, match=r"kvkeep.detach\(model\) first"),
    ):
        model.generate_batch([[3, 4, 5]], generation_config=options)
    assert "init_continuous_batching" not in model.__dict__


@pytest.mark.parametrize("spec", ["keep_all", "keep_all@fixed:64", "window:60"])
def test_conversation_goes_on(attached, spec):
    cache = kvkeep.Cache(attached, spec)
    text = ids()
    for _ in range(3):
        options = {"max_new_tokens": 6, "do_sample": False}
        expected = attached.generate(text, use_cache=False, **options)
        text = attached.generate(text, past_key_values=cache, **options)
        assert text.equal(expected)
        text = torch.cat([text, torch.tensor([[7, 8, 9]])], dim=1)
    assert cache.fed == text.shape[1] - 4


def test_conversation_goes_on_from_a_padded_batch(attached):
    prompt = ids(2)
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    cache = kvkeep.Cache(attached)
    options = {"max_new_tokens": 6, "do_sample": False}
    text = attached.generate(prompt, attention_mask=mask, past_key_values=cache, **options)
    text = torch.cat([text, torch.tensor([[7, 8], [9, 7]])], dim=1)
    mask = torch.cat([mask, torch.ones(2, 8, dtype=mask.dtype)], dim=1)
    second = attached.generate(text, attention_mask=mask, past_key_values=cache, **options)
    expected = attached.generate(text, attention_mask=mask, use_cache=False, **options)
    assert second.equal(expected)
    assert cache.seen.tolist() == [second.shape[1] - 6, second.shape[1] - 1]


@torch.no_grad()
def test_plain_loop_without_a_cache_gets_one(attached):
    output = attached(ids())
    assert isinstance(output.past_key_values, kvkeep.Cache)
    expected = attached(torch.cat([ids(), torch.tensor([[5]])], 1), use_cache=False).logits[:, -1]
    step = attached(torch.tensor([[5]]), past_key_values=output.past_key_values).logits[:, -1]
    torch.testing.assert_close(step, expected, atol=2e-5, rtol=2e-4)


def test_cache_goes_on_after_inference_mode(attached):
    cache = kvkeep.Cache(attached, "keep_all@growing")
    with torch.inference_mode():
        attached(ids(), past_key_values=cache)
    with torch.no_grad():
        step = attached(torch.tensor([[5]]), past_key_values=cache).logits[:, -1]
        whole = torch.cat([ids(), torch.tensor([[5]])], dim=1)
        expected = attached(whole, use_cache=False).logits[:, -1]
    torch.testing.assert_close(step, expected, atol=2e-5, rtol=2e-4)


def test_training_forward_is_unchanged(model):
    model.train()
    grads = []
    for attach in (False, True):
        if attach:
            kvkeep.attach(model)
        model.zero_grad()
        model(ids(2), labels=ids(2)).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    kvkeep.detach(model)
    model.eval()
    for before, after in zip(*grads, strict=True):
        assert before.equal(after)


@pytest.mark.parametrize("make", [DynamicCache, StaticCache])
def test_foreign_caches_run_as_before(attached, make):
    kwargs = {"max_cache_len": PROMPT + NEW} if make is StaticCache else {}
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = attached.generate(ids(), use_cache=False, **options)
    foreign = make(config=attached.config, **kwargs)
    output = attached.generate(
        ids(), past_key_values=foreign, return_dict_in_generate=True, **options
    )
    assert output.past_key_values is foreign
    assert output.sequences.equal(expected)
    static = attached.generate(ids(), cache_implementation="static", **options)
    assert static.equal(expected)


def test_device_map(model):
    from accelerate import dispatch_model

    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(ids(), use_cache=False, **options)
    spread = dispatch_model(
        copy.deepcopy(model), device_map={"": "cpu"}, main_device="cpu", force_hooks=True
    )
    with kvkeep.attach(spread):
        output = spread.generate(ids(), return_dict_in_generate=True, **options)
        assert isinstance(output.past_key_values, kvkeep.Cache)
        assert output.sequences.equal(expected)


def test_peft_model(model):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora)
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = adapted.generate(input_ids=ids(), use_cache=False, **options)
    with kvkeep.attach(adapted):
        output = adapted.generate(input_ids=ids(), return_dict_in_generate=True, **options)
    assert isinstance(output.past_key_values, kvkeep.Cache)
    assert output.sequences.equal(expected)


def test_speculation_frees_what_the_window_dropped(attached):
    cache = kvkeep.Cache(attached)
    attached.generate(
        ids(), past_key_values=cache, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=3
    )
    sliding = [layer.length for layer in cache.layers if layer.window is not None]
    assert all(length <= WINDOW for length in sliding)
    attached.generate(ids(1, 60), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert not any(layer.record_past for layer in cache.layers)
    assert all(x.length <= WINDOW for x in cache.layers if x.window is not None)


@torch.no_grad()
@pytest.mark.parametrize("attach", [True, False])
def test_recording_ends_with_speculation(model, attach):
    if attach:
        kvkeep.attach(model)
    options = {"max_new_tokens": 6, "do_sample": False}
    cache = kvkeep.Cache(model)
    text = model.generate(ids(), past_key_values=cache, prompt_lookup_num_tokens=3, **options)
    text = torch.cat([text, ids(1, 20)], dim=1)
    logits = [
        model(text[:, i : i + 1], past_key_values=cache).logits
        for i in range(cache.fed, text.shape[1])
    ]
    assert all(x.length <= WINDOW for x in cache.layers if x.window is not None)
    expected = model(text, use_cache=False).logits[:, -len(logits) :]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=2e-5, rtol=2e-4)
    if attach:
        kvkeep.detach(model)


def test_assisted_generation_on_fixed_storage(model):
    draft = copy.deepcopy(model)
    draft.generation_config.num_assistant_tokens = 8
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids(), use_cache=False, **options)
    with kvkeep.attach(model, "keep_all@fixed"), kvkeep.attach(draft, "keep_all@fixed"):
        assert model.generate(ids(), assistant_model=draft, **options).equal(expected)


@torch.no_grad()
def test_a_copied_cache_goes_on_alone(attached):
    """Copying the cache of a prompt for each continuation is transformers' own recipe."""
    prompt = kvkeep.Cache(attached)
    attached(ids(), past_key_values=prompt)
    for token in (5, 6):
        cache = copy.deepcopy(prompt)
        step = attached(torch.tensor([[token]]), past_key_values=cache).logits
        whole = torch.cat([ids(), torch.tensor([[token]])], dim=1)
        expected = attached(whole, use_cache=False).logits[:, -1:]
        torch.testing.assert_close(step, expected, atol=2e-5, rtol=2e-4)
    assert prompt.fed == PROMPT


def test_compiled_training_of_an_attached_model():
    model = tiny("llama")
    with kvkeep.attach(model):
        eager = model(ids(), use_cache=False).logits
        compiled = torch.compile(model, backend="eager")(ids(), use_cache=False).logits
    torch.testing.assert_close(compiled, eager)


class Fed:
    """The columns of each forward of a model, and what a cache then held."""

    def __init__(self, model) -> None:
        self.columns: list[int] = []
        self.most = 0
        self._hook = model.get_decoder().register_forward_hook(self, with_kwargs=True)

    def __call__(self, decoder, args, kwargs, output) -> None:
        self.columns.append(output.last_hidden_state.shape[1])
        self.most = max(self.most, output.past_key_values.nbytes)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self._hook.remove()


BUDGET = "h2o:16"


@pytest.mark.parametrize(
    ("spec", "rows"),
    [(BUDGET, 2), ("window:16", 1), ("snapkv:16,window=8", 2), ("adakv(h2o:16)", 1)],
)
def test_a_prompt_is_fed_in_chunks_into_a_budget(model, spec, rows):
    """As if one fed the chunks oneself; padding does not matter."""
    text, mask = ids(rows, 45), torch.ones(rows, 45, dtype=torch.long)
    mask[0, : 7 * (rows - 1)] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    with kvkeep.attach(model, spec, prefill_chunk=20):
        with Fed(model) as fed:
            found = model.generate(text, return_dict_in_generate=True, **options)
        assert fed.columns == [20, 20, 5, *[1] * 5]
        assert model.generation_config.prefill_chunk_size is None
        cache = kvkeep.Cache(model, spec)
        with torch.inference_mode():
            place = (mask.cumsum(dim=1) - 1).clamp(min=0)
            for stop in (20, 40):
                part = slice(stop - 20, stop)
                padding = {"attention_mask": mask[:, :stop], "position_ids": place[:, part]}
                model(text[:, part], past_key_values=cache, **padding)
        assert model.generate(text, past_key_values=cache, **options).equal(found.sequences)
    for layer, other in zip(found.past_key_values.layers, cache.layers, strict=True):
        assert layer.positions().sort(dim=2).values.equal(other.positions().sort(dim=2).values)


def test_a_budget_never_holds_a_long_prompt_whole():
    model = tiny("llama", max_position_embeddings=4096)
    with kvkeep.attach(model, "h2o:64"):
        with Fed(model) as fed:
            model.generate(ids(n=2500), max_new_tokens=2, do_sample=False)
        with Fed(model) as whole:
            options = {"max_new_tokens": 2, "do_sample": False, "prefill_chunk_size": 2500}
            model.generate(ids(n=2500), **options)
    assert fed.columns == [1024, 1024, 452, 1]
    assert whole.columns == [2500, 1]


@pytest.mark.parametrize(
    ("spec", "attached", "called"),
    [
        ("keep_all", {}, {}),
        (BUDGET, {"prefill_chunk": None}, {}),
        (BUDGET, {}, {"prefill_chunk_size": 45}),
        (BUDGET, {}, {"output_hidden_states": True, "return_dict_in_generate": True}),
    ],
)
def test_a_prompt_is_fed_whole(model, spec, attached, called):
    options = {"prefill_chunk": 20} | attached
    with kvkeep.attach(model, spec, **options), Fed(model) as fed:
        model.generate(ids(n=45), max_new_tokens=2, do_sample=False, **called)
    assert fed.columns == [45, 1]


def test_embedded_prompts_are_fed_whole(model):
    embedded = model.get_input_embeddings()(ids(n=45)).detach()
    with kvkeep.attach(model, BUDGET, prefill_chunk=20), Fed(model) as fed:
        model.generate(inputs_embeds=embedded, max_new_tokens=2, do_sample=False)
    assert fed.columns == [45, 1]


def test_chunks_of_no_tokens(model):
    with pytest.raises(kvkeep.SpecError, match="prefill_chunk 0: give at least 1"):
        kvkeep.attach(model, BUDGET, prefill_chunk=0)


def test_a_conversation_goes_on_in_chunks(model):
    with kvkeep.attach(model, BUDGET, prefill_chunk=20):
        cache, text = kvkeep.Cache(model, BUDGET), ids(n=10)
        for _ in range(2):
            said = model.generate(text, past_key_values=cache, max_new_tokens=4, do_sample=False)
            text = torch.cat([said, ids(n=30)], dim=1)
        with Fed(model) as fed:
            model.generate(text, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert fed.columns == [20, 11, 1]
