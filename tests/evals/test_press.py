"""A spec as a press of kvpress's pipeline."""

from __future__ import annotations

import gc
import re
import weakref
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from kvkeep_lab.evals.press import KVKeepPress
from support.short_tokenizer import SIZE, short_tokenizer
from support.tiny_models import tiny
from transformers import DynamicCache

import kvkeep
from kvkeep.errors import UnsupportedError
from kvkeep.host import host_of
from kvkeep.host.compress import compress, compresses, stop_evicting

TEXT = "The lighthouse stands on a cliff, and its lamp burns green in the night. " * 5
QUESTIONS = ["What burns?", "Where does it stand, and since when?"]
STEPS = 9
SPECS = ["keep_all", "kvzip:30%", "snapkv:24,window=8", "h2o:16,recent=8+int8", "window:12,sinks=2"]


@pytest.fixture
def model():
    torch.manual_seed(2)
    return tiny("llama", vocab_size=SIZE, max_position_embeddings=512, eos_token_id=2).eval()


@torch.no_grad()
def greedy(model, spec, context, question):
    """The tokens after a question about a context, and the slots of the context."""
    host = host_of(model)
    cache = host.new_cache(spec)
    host.feed(context, cache)
    if compresses(cache):
        compress(host, cache, context)
    stop_evicting(cache)
    held, said = cache.stats().kept, []
    logits = host.forward(question, cache)
    for _ in range(STEPS):
        said.append(int(logits[0, -1].argmax()))
        logits = host.forward(torch.tensor([said[-1:]]), cache)
    return said, held


# `importorskip` would also skip where a package lacks that kvpress imports.
needs_kvpress = pytest.mark.skipif(not find_spec("kvpress"), reason="kvpress is not installed")


@needs_kvpress
@pytest.mark.slow  # kvpress takes seconds to import
@pytest.mark.parametrize("spec", SPECS)
def test_the_pipeline_answers_from_what_the_spec_keeps(model, spec):
    import kvpress  # noqa: F401 (makes the pipeline known)
    from transformers import pipeline

    tokenizer, press = short_tokenizer(), KVKeepPress(spec)
    pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer, device="cpu")
    ids = pipe.preprocess(TEXT, QUESTIONS, "", 10**6)
    plain = pipe(TEXT, questions=QUESTIONS, max_new_tokens=STEPS)["answers"]
    given = DynamicCache()
    said = pipe(TEXT, questions=QUESTIONS, press=press, max_new_tokens=STEPS, cache=given)
    kept = press.cache(given).stats().kept
    for answer, question in zip(said["answers"], ids["questions_ids"], strict=True):
        tokens, held = greedy(model, spec, ids["context_ids"], question)
        tokens = tokens[: tokens.index(2) + 1] if 2 in tokens else tokens
        assert answer == tokenizer.decode(tokens, skip_special_tokens=True)
    assert kept == pytest.approx(held, abs=1e-6)
    assert press.compression_ratio == pytest.approx(1 - held, abs=1e-6)
    assert given.get_seq_length() == 0
    again = pipe(TEXT, question=QUESTIONS[1], press=press, max_new_tokens=STEPS)
    assert again["answer"] == said["answers"][1]
    assert (said["answers"] == plain) == (spec == "keep_all")
    # Without a press, the attached model answers as before.
    assert pipe(TEXT, questions=QUESTIONS, max_new_tokens=STEPS)["answers"] == plain


def test_contexts_are_freed_with_their_caches_and_full_ones_refused(model):
    press, cache = KVKeepPress("window:8"), DynamicCache()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        model.model(ids, past_key_values=cache)
        with press(model), pytest.raises(UnsupportedError, match="holds 37 tokens; give a new"):
            model.model(ids, past_key_values=cache)
        cache = DynamicCache()
        with press(model):
            model.model(ids, past_key_values=cache)
    assert press.cache(cache).length == 8
    left = weakref.ref(cache)
    del cache
    gc.collect()
    assert left() is None
    kvkeep.detach(model)


@needs_kvpress
@pytest.mark.slow  # imports both packages
def test_the_examples_of_the_page(capsys):
    pytest.importorskip("lm_eval")
    page = Path(__file__).parents[2] / "docs" / "evaluation.md"
    names: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(code, names)
    assert "Ines" in capsys.readouterr().out
