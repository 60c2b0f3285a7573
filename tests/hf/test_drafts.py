"""Drafts change neither what a model says nor what its cache keeps, whatever the policy."""

from __future__ import annotations

import copy

import pytest
import torch
from support.sweep_configs import model_of
from support.tiny_models import tiny
from transformers import GenerationMixin

import kvkeep
from kvkeep.errors import StateError, UnsupportedError
from kvkeep.policy import POLICIES
from kvkeep.testing import EXAMPLES, live_tokens

PROMPT, NEW, DRAFTS = 20, 12, 4
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
LOOKUP = GREEDY | {"prompt_lookup_num_tokens": DRAFTS}


def ids(n=PROMPT, seed=3):
    return torch.randint(2, 96, (1, n), generator=torch.Generator().manual_seed(seed))


class Scripted:
    """Proposes what the model is going to say, but every third token of it is another."""

    requires_model_outputs = False

    def __init__(self, text):
        self.text = text
        self.accepted = self.rejected = 0

    def get_candidates(self, input_ids, **options):
        start = input_ids.shape[1]
        assert input_ids.equal(self.text[:, :start])
        drafts = self.text[:, start : start + DRAFTS].clone()
        wrong = torch.arange(start, start + drafts.shape[1]) % 3 == 0
        drafts[:, wrong] = 1 + drafts[:, wrong] % 90
        return torch.cat([input_ids, drafts], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, matches):
        self.accepted += int(matches)
        self.rejected += scores.shape[1] - 1 - int(matches)


@pytest.fixture(scope="module")
def llama():
    model = tiny("llama")
    kvkeep.attach(model)
    return model


@pytest.fixture(scope="module")
def gemma3():
    model = tiny("gemma3")
    kvkeep.attach(model)
    return model


@pytest.fixture
def scripted(monkeypatch):
    """Let `generate` verify drafts of a text that is known."""

    def use(text):
        drafts = Scripted(text)
        monkeypatch.setattr(
            GenerationMixin, "_get_candidate_generator", lambda *args, **options: drafts
        )
        return drafts

    return use


def kept(cache):
    return [
        [sorted(place) for row in live_tokens(layer) for place, _, _ in row]
        for layer in cache.layers
    ]


def require_same(model, scripted, prompt, caches):
    """Generate without and with drafts; returns the text."""
    plain, drafted = caches
    expected = model.generate(prompt, past_key_values=plain, **GREEDY)
    drafts = scripted(expected)
    text = model.generate(prompt, past_key_values=drafted, **LOOKUP)
    assert text.equal(expected)
    assert drafts.accepted >= 3
    assert drafts.rejected >= 3
    assert (drafted.fed, kept(drafted)) == (plain.fed, kept(plain))
    assert [x.length for x in drafted.layers] == [x.length for x in plain.layers]
    return text


SPECS = [
    *EXAMPLES.values(),
    "keep_all+kivi:4,together=4,recent=2",
    "h2o:8+int8@fixed:8",
    "adakv:0.3(knorm:8,recent=2)@host",
]


@pytest.mark.parametrize("spec", SPECS)
def test_text_and_decisions_are_those_without_drafts(llama, scripted, spec):
    caches = [kvkeep.Cache(llama, spec) for _ in range(2)]
    require_same(llama, scripted, ids(), caches)
    assert not any(layer.record_past for layer in caches[1].layers)


@pytest.mark.parametrize("spec", ["window:6,sinks=2", "snapkv:6,window=3"])
def test_with_sliding_layers(gemma3, scripted, spec):
    require_same(gemma3, scripted, ids(), [kvkeep.Cache(gemma3, spec) for _ in range(2)])


@pytest.mark.parametrize(
    ("kind", "spec"), [("deepseek_v3", "h2o:8"), ("glm_moe_dsa", "window:8,sinks=1")]
)
def test_latents_and_indices(scripted, kind, spec):
    model = model_of(kind, 2)
    with kvkeep.attach(model):
        require_same(model, scripted, ids(), [kvkeep.Cache(model, spec) for _ in range(2)])
        if kind == "glm_moe_dsa":  # a step's tokens choose before any of them evicts
            with pytest.raises(UnsupportedError, match=r"an index chooses.* such as h2o"):
                model.generate(ids(), past_key_values=kvkeep.Cache(model, "h2o:8"), **LOOKUP)


def test_every_policy_is_among_them():
    """But `kvzap`, whose layers have the policy `adakv`, and needs a scorer."""
    assert {spec.partition(":")[0] for spec in EXAMPLES.values()} | {"kvzap"} == set(POLICIES)


def test_a_long_prompt_is_read_in_the_same_chunks(scripted):
    model = tiny("llama")
    with kvkeep.attach(model, "snapkv:8,window=4", prefill_chunk=7):
        caches = [kvkeep.Cache(model, "snapkv:8,window=4") for _ in range(2)]
        require_same(model, scripted, ids(), caches)


@pytest.mark.parametrize("spec", ["h2o:8", "kvzip:50%"])
def test_a_conversation_goes_on(llama, scripted, spec):
    caches = [kvkeep.Cache(llama, spec) for _ in range(2)]
    text = ids()
    for seed in (5, 6):
        text = require_same(llama, scripted, text, caches)
        text = torch.cat([text, ids(5, seed)], dim=1)
    with pytest.raises(StateError, match="has 5 tokens, but the cache already holds"):
        llama.generate(ids(5), past_key_values=caches[1], **LOOKUP)
    assert caches[1].fed == caches[0].fed


def test_a_draft_model_with_a_policy_of_its_own(llama):
    draft = tiny("llama")
    draft.generation_config.num_assistant_tokens = DRAFTS
    draft.generation_config.assistant_confidence_threshold = 0.0
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(1 + 0.02 * torch.randn_like(weight))
    caches = [kvkeep.Cache(llama, "h2o:12") for _ in range(2)]
    expected = llama.generate(ids(), past_key_values=caches[0], **GREEDY)
    crops = []
    crop, of_target = kvkeep.Cache.crop, caches[1]
    with kvkeep.attach(draft, "tova:10"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kvkeep.Cache, "crop", lambda self, n: (crops.append((self, int(n))), crop(self, n))
        )
        text = llama.generate(ids(), past_key_values=of_target, assistant_model=draft, **GREEDY)
    assert text.equal(expected)
    assert kept(of_target) == kept(caches[0])
    assert {n < 0 for cache, n in crops if cache is of_target} == {True, False}
    of_draft = next(cache for cache, _ in crops if cache is not of_target)
    assert of_draft.specs[0].policy.name == "tova"
    assert all(layer.length <= 10 + DRAFTS + 2 for layer in of_draft.layers)


def test_the_weights_of_drafts(llama, scripted):
    """Of a policy that sees them one by one, as of one that sees them together."""
    options = {"output_attentions": True, "return_dict_in_generate": True}
    drafts = scripted(llama.generate(ids(), **GREEDY))
    found = [
        llama.generate(
            ids(), past_key_values=kvkeep.Cache(llama, spec), **LOOKUP, **options
        ).attentions
        for spec in ("keep_all", "h2o:64")
    ]
    assert drafts.accepted
    for step, same in zip(*found, strict=True):
        for layer, other in zip(step, same, strict=True):
            torch.testing.assert_close(layer, other, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_an_interrupted_forward_is_rewound(llama):
    caches = [kvkeep.Cache(llama, "h2o:8") for _ in range(2)]
    drafts = ids(5, 9)
    for cache in caches:
        llama(ids(), past_key_values=cache)
        cache.activate_past_recording()
    last = caches[0].layers[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(last.policy), "victims", fail_in(last))
        with pytest.raises(KeyboardInterrupt):
            llama(drafts, past_key_values=caches[0])
    assert [layer.fed for layer in caches[0].layers] == [PROMPT + 5, PROMPT]
    caches[0].rewind(PROMPT)
    logits = [llama(drafts, past_key_values=cache).logits for cache in caches]
    assert logits[0].equal(logits[1])
    for cache in caches:
        cache.crop(-2)
    assert kept(caches[0]) == kept(caches[1])


def fail_in(layer):
    """The policy's method, which is interrupted when that layer has been fed three drafts."""
    victims = type(layer.policy).victims

    def failing(self, count, planes, seen):
        if seen.state is layer.cursor.history.memory and layer.fed == PROMPT + 3:
            raise KeyboardInterrupt
        return victims(self, count, planes, seen)

    return failing


@pytest.mark.parametrize("name", ["assistant_model", "prompt_lookup_num_tokens"])
def test_an_unattached_model_cannot_decide_about_drafts(name):
    model = tiny("llama")
    cache = kvkeep.Cache(model, ["keep_all", "h2o:6"])
    drafts = {name: copy.deepcopy(model) if name == "assistant_model" else 3}
    with pytest.raises(
        UnsupportedError, match=r"policy h2o decides after .*kvkeep.attach\(model\)"
    ):
        model.generate(ids(), past_key_values=cache, **GREEDY, **drafts)
    assert cache.fed == 0
    assert not cache.is_croppable
