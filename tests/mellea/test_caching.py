"""How one call caches: the model option `CACHING`."""

from __future__ import annotations

import asyncio

import pytest
from mellea import MelleaSession
from mellea.core import CBlock
from mellea.stdlib.context import SimpleContext
from support.lighthouse import DOCUMENTS, OPTIONS, QUESTION, ask

import kvkeep
from kvkeep.errors import SpecError, StateError
from kvkeep.mellea import CACHING, Caching, KVKeepBackend, report_of


@pytest.fixture(params=[1, 3], ids=["generate", "batch"])
def backend(request, model, tokenizer):
    with KVKeepBackend(model, tokenizer, sequences=request.param, model_options=OPTIONS) as made:
        yield made


def caching(**choices):
    return {"model_options": {CACHING: Caching(**choices)}}


def test_without_reuse(backend):
    wanted = str(ask(backend, "built", cache=False))
    before = backend.store.stats()
    answer = ask(backend, "built", **caching(reuse=False))
    assert report_of(answer) is None
    assert "prompt_tokens_details" not in answer.generation.usage
    assert str(answer) == wanted
    assert backend.store.stats() == before
    assert report_of(ask(backend, "built")).exact > 0


def test_a_store_and_a_namespace_of_its_own(backend):
    store = kvkeep.PrefixStore()
    ask(backend)
    for choice in ({"store": store}, {"namespace": "others"}):
        first, second = (report_of(ask(backend, **caching(**choice))) for _ in range(2))
        assert first.exact == 0
        assert second.exact == second.tokens
    assert store.stats().hits == 1
    assert report_of(ask(backend)).exact > 0


def test_recompute(backend):
    ask(backend, "built")
    answer = ask(backend, "green", "built", **caching(recompute="all"))
    report = report_of(answer)
    assert report.approximate == 0
    assert all("computes everything" in block.refused for block in report.blocks)
    assert report_of(ask(backend, "storm", "built")).approximate > 0


def test_spec(backend, monkeypatch):
    """Caches of the call keep what it asks for, those of others what the backend was made for."""
    made = []
    original = kvkeep.hf.Cache.__init__

    def init(cache, *args, **options):
        original(cache, *args, **options)
        made.append(f"{cache.specs[0].policy} {cache.specs[0].key_codec}")

    monkeypatch.setattr(kvkeep.hf.Cache, "__init__", init)
    ask(backend, "built")
    assert set(made) == {"KeepAll() Plain()"}
    coded = report_of(ask(backend, "built", **caching(spec="keep_all+int8")))
    assert coded.exact == 0  # other codecs have entries of their own
    assert "Int8" in made[-1]
    ask(backend, "built", **caching(spec="window:24,sinks=2", reuse=False))
    assert "Window(" in made[-1]
    ask(backend, "built")
    assert made[-1] == "KeepAll() Plain()"


def test_a_call_without_a_template(backend):
    """`generate_from_raw` takes the same options."""

    def read(**options):
        actions = [CBlock(DOCUMENTS["storm"] + " " + QUESTION)]
        answers = asyncio.run(
            backend.generate_from_raw(actions, SimpleContext(), model_options=options)
        )
        return report_of(answers[0])

    assert read().exact == 0
    assert read(**{CACHING: Caching(reuse=False)}) is None
    again = read()
    assert again.exact == again.tokens


def test_a_default_of_the_backend(model, tokenizer):
    options = OPTIONS | {CACHING: Caching(reuse=False)}
    with KVKeepBackend(model, tokenizer, model_options=options) as backend:
        assert report_of(ask(backend)) is None
        assert report_of(ask(backend, **caching())) is not None


def test_errors(backend, model, tokenizer):
    with pytest.raises(SpecError, match="half"):
        Caching(recompute="half")
    with pytest.raises(SpecError, match=r"'kvkeep' is \{'reuse': False\}; give a .*Caching"):
        ask(backend, model_options={CACHING: {"reuse": False}})
    with pytest.raises(SpecError, match="no_such"):
        ask(backend, **caching(spec="no_such"))
    assert report_of(ask(backend)).exact == 0  # nothing was read before
    backend.close()
    with pytest.raises(StateError, match="is closed"):
        ask(backend, **caching(reuse=False))
    with pytest.raises(SpecError, match="'kvkeep' is 3"):
        KVKeepBackend(model, tokenizer, model_options={CACHING: 3})
    with pytest.raises(SpecError, match="sequences is 0"):
        KVKeepBackend(model, tokenizer, sequences=0)
    assert MelleaSession(backend).instruct(QUESTION, strategy=None) is not None
