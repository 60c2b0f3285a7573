"""Drafts in a batch: answers, caches and scores are those without drafts."""

from __future__ import annotations

import pytest
import torch
from support.printable import Printable
from support.sweep_configs import model_of
from support.tiny_host import tiny_model
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.generate import Batch, SamplingParams, generate_many, stream
from kvkeep.generate.drafting import Drafting
from kvkeep.host import host_of
from kvkeep.store import PrefixStore
from kvkeep.testing import EXAMPLES, live_tokens

NEW = 12


def tokens(n, seed=0):
    return torch.randint(3, 58, (n,), generator=torch.Generator().manual_seed(seed))


PROMPTS = [tokens(n, n) for n in (20, 7, 31)]


@pytest.fixture
def scripted(monkeypatch):
    """Lets each answer draft what it will say, but every third token is another. Counts accepted
    and rejected drafts."""
    counts = {"accepted": 0, "rejected": 0}

    def use(answers):
        texts = {tuple(answer.prompt.tolist()): answer.tokens for answer in answers}

        def propose(self, prompt, said, most):
            text, at = texts[tuple(prompt.tolist())], len(said)
            drafts = text[at : at + min(most, 4)]
            return [3 + x % 50 if (at + i) % 3 == 0 else x for i, x in enumerate(drafts)]

        def learn(self, drafts, accepted):
            counts["accepted"] += accepted
            counts["rejected"] += drafts - accepted

        monkeypatch.setattr(Drafting, "propose", propose)
        monkeypatch.setattr(Drafting, "learn", learn)
        return counts

    return use


def kept(cache):
    return [
        [sorted(place) for row in live_tokens(layer) for place, _, _ in row]
        for layer in cache.layers
    ]


def answers_of(model, params, spec, **options):
    """The answers to the prompts, and what their caches kept."""
    slots = {}

    def end(answer):
        slots[answer.order] = answer.cache.fed, kept(answer.cache)

    batch = Batch(model, Printable(), spec=spec, chunk=8, on_end=end, **options)
    answers = [answer for prompt in PROMPTS for answer in batch.add(prompt, params)]
    list(batch)
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return answers, [slots[answer.order] for answer in answers]


def require_same(model, scripted, spec="keep_all", **params):
    plain, slots = answers_of(model, SamplingParams(NEW, **params), spec)
    counts = scripted(plain)
    drafted, drafted_slots = answers_of(model, SamplingParams(NEW, drafts=4, **params), spec)
    assert counts["accepted"] >= 3
    assert counts["rejected"] >= 3
    for one, other in zip(plain, drafted, strict=True):
        assert (other.tokens, other.text, other.reason) == (one.tokens, one.text, one.reason)
        assert other.text_offsets == one.text_offsets
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        ids = [[likely.token for likely in top] for top in one.top_logprobs]
        assert [[likely.token for likely in top] for top in other.top_logprobs] == ids
    assert drafted_slots == slots


SPECS = [*EXAMPLES.values(), "keep_all+kivi:4,together=4,recent=2", "h2o:8+int8@fixed:8"]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "kvzip" not in spec])
def test_answers_and_decisions_are_those_without_drafts(model, scripted, spec):
    require_same(model, scripted, spec)


def test_sampled_answers_and_scores(model, scripted):
    warm = {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "seed": 7}
    require_same(model, scripted, "h2o:10", logprobs=True, top_logprobs=3, **warm)


@pytest.mark.parametrize("kind", ["tiny host", "gemma3", "unattached", "doge"])
def test_other_forwards(scripted, kind):
    """Of other hosts and kinds, and one sequence after the other."""
    model = {
        "tiny host": tiny_model,
        "gemma3": lambda: tiny("gemma3"),
        "unattached": lambda: tiny("llama"),
        "doge": lambda: model_of("doge"),
    }[kind]()
    if kind in ("gemma3", "doge"):
        kvkeep.attach(model)
    require_same(model, scripted)


def test_text_ends_within_drafts(model, scripted):
    plain, _ = answers_of(model, SamplingParams(NEW), "keep_all")
    stop, end = plain[0].text[5:7], plain[1].tokens[6]
    for params in ({"stop": [stop]}, {"end_tokens": frozenset([end])}):
        require_same(model, scripted, "h2o:10", **params)
        answers, _ = answers_of(model, SamplingParams(NEW, drafts=4, **params), "keep_all")
        assert "stop" in [answer.reason for answer in answers]


def test_processors_see_each_text_once(model, scripted):
    def once():
        seen = []

        def process(ids, logits):
            seen.append(ids.shape[1])
            assert seen == list(range(seen[0], seen[0] + len(seen)))
            return logits.index_fill(1, ids[0], -1e4)

        return process

    require_same(model, scripted, own_processors=[once])


def test_a_store_gets_the_text_without_drafts(model, scripted):
    plain, _ = answers_of(model, SamplingParams(NEW), "keep_all")
    scripted(plain)
    store = PrefixStore()
    for most in (5, NEW):
        answers, _ = answers_of(model, SamplingParams(most, drafts=4), "keep_all", store=store)
        assert [x.tokens for x in answers] == [x.tokens[:most] for x in plain]
        store.check()
    batch = Batch(model, store=store)
    (again,) = batch.add(plain[0].ids, SamplingParams(2))
    list(batch)
    assert again.cached == len(plain[0].ids) - 1


def test_a_text_that_repeats_takes_fewer_steps(model):
    def again(ids, logits):
        return logits.index_fill(1, ids[0, -6:-5], 1e4)

    prompt, repeats = tokens(6).repeat(4), {"processors": [again]}
    cache = host_of(model).new_cache("h2o:12")
    calls, answers = [], []
    for drafts in (0, 8):
        batch = Batch(model)
        forward = batch._host.forward_packed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                batch._host,
                "forward_packed",
                lambda x, drafts=drafts, forward=forward: calls.append(drafts) or forward(x),
            )
            answers += batch.add(prompt, SamplingParams(60, drafts=drafts, **repeats))
            list(batch)
    assert answers[0].tokens == answers[1].tokens
    assert calls.count(8) < 0.2 * calls.count(0)
    plain = generate_many(model, [prompt], SamplingParams(20), spec="h2o:12", chunk=99)
    told = [new.token for new in stream(model, prompt, SamplingParams(20, drafts=3), cache=cache)]
    assert told == plain[0][0].tokens
    assert not any(layer.record_past for layer in cache.layers)


def test_a_processor_that_fails_leaves_no_drafts(model):
    prompt, cache = tokens(6).repeat(4), host_of(model).new_cache("h2o:12")

    def failing(ids, logits):
        if ids.shape[1] == len(prompt) + 9:
            raise RuntimeError("a fault")
        return logits.index_fill(1, ids[0, -6:-5], 1e4)

    params, told = SamplingParams(20, processors=[failing], drafts=4), []
    with pytest.raises(RuntimeError, match="a fault"):
        told.extend(stream(model, prompt, params, cache=cache))
    (answer,) = {new.answer for new in told}
    assert answer.tokens == prompt.repeat(2)[:9].tolist()
    assert cache.fed == len(prompt) + 8
    assert not any(layer.record_past for layer in cache.layers)
    plain = host_of(model).new_cache("h2o:12")
    with torch.inference_mode():
        for ids in (prompt, *torch.tensor(answer.tokens[:-1]).split(1)):
            host_of(model).feed(ids[None], plain)
    assert kept(cache) == kept(plain)


def test_the_tokens_after_the_latest_occurrence_are_proposed():
    drafting = Drafting(9)
    prompt = torch.tensor([5, 6, 7, 8, 1, 6, 7, 9, 4])
    assert drafting.propose(prompt, [6, 7], 9) == [9, 4]  # two at first
    drafting.learn(2, 2)
    assert drafting.propose(prompt, [6, 7], 9) == [9, 4, 6, 7]
    drafting.learn(4, 1)
    assert drafting.propose(prompt, [6, 7, 9], 9) == [4, 6]  # three tokens match
    assert drafting.propose(prompt, [6, 7, 9, 3], 9) == []
    assert drafting.propose(prompt, [6, 7, 9, 3, 3, 3], 9) == [3, 3]  # a repeated token
    assert drafting.propose(prompt, [6, 7, 9, 3, 3, 3], 1) == [3]


def test_caches_without_a_way_back_are_refused(model):
    with pytest.raises(SpecError, match="drafts is -1"):
        SamplingParams(drafts=-1)
    for kind, spec, why in (
        ("lfm2", "keep_all", "recurrent layers cannot return"),
        ("glm_moe_dsa", "h2o:8", "an index chooses.* such as h2o"),
        ("llama", "h2o:8", r"call kvkeep.attach\(model\)"),
    ):
        other = tiny("llama") if kind == "llama" else model_of(kind, 2)
        if kind != "llama":
            kvkeep.attach(other)
        batch = Batch(other, spec=spec)
        with pytest.raises(UnsupportedError, match=why):
            batch.add(tokens(5), SamplingParams(2, drafts=1))
        batch.add(tokens(5), SamplingParams(2))
