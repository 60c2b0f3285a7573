"""A step of a batch that is interrupted: each answer goes on as if it was not, or ends alone."""

from __future__ import annotations

import random
import signal
from contextlib import nullcontext

import pytest
import torch
from support.interruption import Interruption, Lines
from support.printable import Printable
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import StateError
from kvkeep.files.offload import Offload
from kvkeep.generate import Batch, SamplingParams
from kvkeep.host import host_of
from kvkeep.host.cache import bytes_of
from kvkeep.layer.layer import LayerCache

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT, EVICTS = "keep_all", "h2o:10"


def warm(most, **more):
    return SamplingParams(most, temperature=1.0, top_k=30, seed=7, **more)


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    packed, single = tiny("llama"), tiny("llama")
    kvkeep.attach(packed)
    return {"packed": packed, "single": single}


def tokens(n, seed):
    return torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(seed))


def once(ids, logits):
    """A logits processor that needs to be called once for each token."""
    length = ids.shape[1]
    assert length not in once.seen
    once.seen.add(length)
    return logits.masked_fill(torch.arange(logits.shape[-1]) % 2 == 1, float("-inf"))


class Scenario:
    """A batch in the midst of what its steps do: answers that begin, from a store too, that share a
    prompt, are preempted and resumed, evict, sample, have text, stop, and end."""

    def __init__(self, model):
        once.seen = set()
        host = host_of(model)
        self.ended, self.told = [], {}
        limits = {"sequences": 5}
        if host.attached:
            limits = {"max_bytes": bytes_of(host.new_cache(), host.geometries(), 60)}
        self.batch = Batch(
            model,
            Printable(),
            store=kvkeep.PrefixStore(),
            chunk=8,
            step_tokens=16,
            offload=Offload(2000),
            on_end=self.ended.append,
            **limits,
        )
        add = self.batch.add
        odd = EVICTS if host.attached else EXACT
        self.answers = [
            *add(tokens(11, 0), warm(9, logprobs=True, top_logprobs=2)),
            *add(tokens(9, 1), SamplingParams(7, stop=["zz"]), spec=odd),
            *add(tokens(12, 2), warm(4), n=2),
            *add(tokens(11, 0)[:10], SamplingParams(5, processors=[once], prompt_logprobs=True)),
            *add(tokens(12, 2), SamplingParams(3)),
            *add(tokens(5, 6).repeat(3), SamplingParams(9, drafts=3), spec=odd),
            *add(tokens(4, 7).repeat(4), warm(9, drafts=3, logprobs=True)),
        ]

    def later(self):
        self.answers += self.batch.add(tokens(10, 5), SamplingParams(4, priority=1))
        self.answers[4].cancel()

    def run(self, trace=None):
        """Take steps until all answers have ended, under a trace."""
        for turn in range(200):
            if turn == 3:
                self.later()
            if turn > 3 and not (self.batch.running or self.batch.waiting or self.batch._begun):
                return self
            with trace or nullcontext():
                for answer, token, text in self.batch.step():
                    self.told.setdefault(answer, []).append((token, text))
        raise AssertionError("an answer never ends")

    def seen(self):
        return [
            (x.tokens, x.text, x.reason, x.logprobs, [score.logprob for score in x.origin.scores])
            for x in self.answers
        ]

    def check(self, expected):
        """Compare with the answers of a scenario that was not interrupted; returns how many
        failed."""
        failed = 0
        for answer, own, wanted in zip(self.answers, self.seen(), expected, strict=True):
            told = self.told.get(answer, [])
            assert [token for token, _ in told] == answer.tokens[: len(told)]
            assert "".join(text for _, text in told) == answer.text
            if answer.reason == "error":
                assert isinstance(answer.error, StateError), answer.error
                assert "interrupted" in str(answer.error)
                assert answer.tokens == wanted[0][: len(answer.tokens)]
                failed += 1
                continue
            assert own[:3] == wanted[:3]
            if answer.reason != "cancelled":
                assert own[3] == pytest.approx(wanted[3], abs=1e-4)
                assert own[4] == pytest.approx(wanted[4], abs=1e-4)
                assert len(told) == len(answer.tokens)
        assert set(self.ended) == set(self.answers)
        offload = self.batch._preemption.offload
        assert offload.host_bytes == offload.file_bytes == 0
        (new,) = self.batch.add(tokens(11, 0), warm(9, logprobs=True))
        list(self.batch)
        assert new.tokens == expected[0][0]
        return failed


@pytest.fixture(scope="module")
def expected(models):
    return {name: Scenario(model).run().seen() for name, model in models.items()}


@pytest.fixture(scope="module")
def lines_of(models):
    """How often each line of kvkeep runs in the steps of a scenario."""
    found = {name: Lines() for name in models}
    for name, lines in found.items():
        Scenario(models[name]).run(lines)
    return {name: lines.met for name, lines in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "single"])
def test_an_interrupt_at_every_line_of_a_step(models, expected, lines_of, kind):
    """Each line once, and those of the batch when they run first and last."""
    failed = 0
    lines = lines_of[kind]
    assert len(lines) > 400
    for line, count in lines.items():
        own = "/kvkeep/generate/" in line[0]
        for at in {0, count - 1} if own else {count // 2}:
            interruption = Interruption(at, line=line)
            one = Scenario(models[kind]).run(interruption)
            assert interruption.met
            try:
                failed += one.check(expected[kind])
            except BaseException as error:
                raise AssertionError(f"interrupted at {line}, the time {at} of {count}") from error


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("packed", "generate/batch.py"),
        ("packed", "generate/answer.py"),
        ("packed", "layer/packed.py"),
        ("single", "layer/settling.py"),
    ],
)
def test_an_interrupt_at_some_lines_of_a_step(models, expected, lines_of, kind, name):
    lines = lines_of[kind]
    own = [(line, count) for line, count in lines.items() if line[0].endswith(name)]
    for line, count in own[:: max(1, len(own) // 2)]:
        interruption = Interruption(count // 2, line=line)
        one = Scenario(models[kind]).run(interruption)
        assert interruption.met
        one.check(expected[kind])


def test_an_answer_that_evicted_ends_alone(models, monkeypatch):
    """Interrupted between its layers' steps, it cannot go back, and says so."""
    batch = Batch(models["packed"])
    (exact,) = batch.add(tokens(20, 0), SamplingParams(6))
    (evicting,) = batch.add(tokens(20, 1), SamplingParams(6), spec=EVICTS)
    batch.step()
    run, last = LayerCache.run, evicting.cache.layers[1]

    def interrupted(self, inputs, attend=None):
        if self is last:
            raise KeyboardInterrupt
        return run(self, inputs, attend)

    with monkeypatch.context() as patch:
        patch.setattr(LayerCache, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    list(batch)
    with pytest.raises(StateError, match="interrupted after it had changed this answer's cache"):
        raise evicting.error
    (again,) = batch.add(tokens(20, 0), SamplingParams(6))
    assert list(batch) == [again]
    assert (exact.reason, exact.tokens) == ("length", again.tokens)


class Alarms:
    """Signals of the system that raise KeyboardInterrupt somewhere in a step, one in each of the
    first steps."""

    def __init__(self, seed):
        self._random, self.met, self._left = random.Random(seed), 0, 6

    def _raise(self, _, frame):
        while frame is not None:
            if frame.f_code is Batch.step.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    def __enter__(self):
        self._before = signal.signal(signal.SIGALRM, self._raise)
        if self._left:
            self._left -= 1
            signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-4, 2e-2))

    def __exit__(self, kind, *error):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        self.met += kind is KeyboardInterrupt
        return kind is KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
@pytest.mark.parametrize("kind", ["packed", "single"])
def test_real_signals(models, expected, kind):
    met = 0
    for seed in range(150):
        alarms = Alarms(seed)
        one = Scenario(models[kind]).run(alarms)
        met += alarms.met
        one.check(expected[kind])
    assert met > 100
