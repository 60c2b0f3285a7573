"""Paths that a file names are data: the caller gives the file that is opened."""

from __future__ import annotations

import copy
import json
import os
import signal
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import finetune_inputs, tiny_gguf, tiny_scorer

import kvkeep
from kvkeep.errors import SavedCacheError, SpecError
from kvkeep.files import snapshot
from kvkeep.finetune import checkpoint
from kvkeep.hf import models
from kvkeep.hf import session as sessions
from kvkeep.hf.loading.adapter_files import AdapterError, with_adapter
from kvkeep.hf.loading.fingerprint import fingerprint
from kvkeep.hf.session import Session, info
from kvkeep.policy import scorer as module
from kvkeep.policy.scorer import Scorer

SPEC = "kvzap:50%,scorer={},recent=2,sinks=1"


@contextmanager
def no_wait(seconds=20):
    """Raise if the block takes longer: what hangs is a failure, not a run that never ends."""

    def late(*_):
        raise AssertionError(f"it did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def model():
    return finetune_inputs.model()


@pytest.fixture(scope="module")
def place(model, tmp_path_factory):
    return tiny_scorer.write(tmp_path_factory.mktemp("scorer") / "a.scorer", model)


@pytest.fixture
def saved(model, place, tmp_path):
    """A saved cache with a scorer, and the cache."""
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model, SPEC.format(place))
        model(torch.arange(3, 40)[None], past_key_values=cache)
        cache.save(tmp_path / "a.kv")
        yield tmp_path / "a.kv", cache


@pytest.fixture(params=["fifo", "/dev/zero", "directory", "none"])
def odd(request, tmp_path):
    """A path at which there is no regular file."""
    path = tmp_path / "odd"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "directory":
        path.mkdir()
    return "/dev/zero" if request.param == "/dev/zero" else path


def never(*_):
    raise AssertionError("a path of a file was opened")


def test_the_caller_gives_the_scorer(model, saved, place, tmp_path, monkeypatch):
    path, cache = saved
    moved = place.rename(tmp_path / "moved")
    try:
        loaded = kvkeep.load(path, model, scorer=moved)
    finally:
        moved.rename(place)
    assert str(loaded.specs[0]) == str(kvkeep.CacheSpec.parse(SPEC.format(moved)))
    with torch.no_grad():
        step = torch.tensor([[7]])
        logits = [model(step, past_key_values=x).logits for x in (cache, loaded)]
    assert logits[0].equal(logits[1])
    other = tiny_scorer.write(tmp_path / "other", model, seed=1)
    with pytest.raises(SavedCacheError, match="the same scorer"):
        kvkeep.load(path, model, scorer=other)
    monkeypatch.setattr(module, "_read", never)
    with pytest.raises(SavedCacheError, match="scorer=FILE"):
        kvkeep.load(path, model)
    with pytest.raises(SpecError, match="rename the file"):
        kvkeep.load(path, model, scorer="a+b")


@pytest.mark.parametrize("spec", [SPEC, "full_attention=" + SPEC, "pyramid(" + SPEC + ")"])
def test_no_path_of_a_saved_cache_is_opened(model, spec, tmp_path, monkeypatch):
    os.mkfifo(odd := tmp_path / "odd")
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model)
        model(torch.arange(3, 9)[None], past_key_values=cache)
    path, spec = tmp_path / "a.kv", spec.format(odd)
    own = fingerprint(model)
    snapshot.save(cache, path, specs=[spec] * len(cache.layers), fingerprint=own, sync=False)
    monkeypatch.setattr(module, "_read", never)
    with no_wait(), pytest.raises(SavedCacheError):
        kvkeep.load(path, model)
    with no_wait(), pytest.raises(SavedCacheError):
        kvkeep.load(path, model, force=True, verify=False)


def test_no_path_of_a_session_is_opened(model, place, tmp_path, monkeypatch):
    os.mkfifo(odd := tmp_path / "odd")
    monkeypatch.setattr(sessions, "home", lambda: tmp_path)
    tokenizer, spec = finetune_inputs.tokenizer(), SPEC.format(place)
    talk = Session(model, tokenizer, cache=spec, name="a")
    talk.ask("Who?", max_new_tokens=3)
    talk.save()
    talk.close()
    again = Session(model, tokenizer, cache=spec, name="a")
    assert again.cache.fed
    again.ask("And you?", max_new_tokens=3)
    again.close()
    specs = [SPEC.format(odd)] * len(again.cache.layers)
    notes = {"messages": json.dumps(again.messages), "cache": ""}
    for cache in ("", SPEC.format(odd), "full_attention=" + SPEC.format(odd)):
        snapshot.save(
            again.cache,
            sessions.path_of("b"),
            specs=specs,
            fingerprint=fingerprint(model, tokenizer),
            tokens=torch.tensor([again._ids]),
            notes=notes | {"cache": cache},
        )
        with monkeypatch.context() as patch, no_wait():
            patch.setattr(module, "_read", never)
            assert str(odd) in info("b").spec
            for reread in (False, True):
                with pytest.raises(SavedCacheError, match="scorer=FILE"):
                    Session(model, tokenizer, name="b", reread=reread)
        Session(model, tokenizer, cache=spec, name="b").close()


def test_a_scorer_is_a_regular_file_within_bounds(model, odd, place, tmp_path, monkeypatch):
    with no_wait(), pytest.raises(SpecError, match="kvkeep calibrate"):
        kvkeep.Cache(model, SPEC.format(odd))
    tensors = load_file(place)
    first = torch.zeros(1 << 40, 0, 1 << 20)  # no bytes, but biases of 2 ** 60
    save_file(tensors | {"0.first": first}, tmp_path / "s", {"format": "kvkeep-scorer-1"} | OTHER)
    with no_wait(), pytest.raises(SpecError, match="lacks shares or weights"):
        Scorer.read(str(tmp_path / "s"))
    monkeypatch.setattr(module, "_MOST_BYTES", place.stat().st_size - 1)
    module._read.cache_clear()
    with pytest.raises(SpecError, match="at most"):
        Scorer.read(str(place))


OTHER = {"model": "x", "count": "2"}


def test_a_damaged_scorer_is_noticed(place, tmp_path):
    data = bytearray(place.read_bytes())
    data[-1] ^= 1  # a share, still in order
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(SpecError, match="its checksum does not match"):
        Scorer.read(str(tmp_path / "s"))


def test_a_session_whose_spec_is_none(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "home", lambda: tmp_path)
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model)
        model(torch.arange(3, 9)[None], past_key_values=cache)
    (tmp_path / "sessions").mkdir()
    for spec in ("no_such", "window:-1", "other_attention=keep_all", "keep_all@fixed:" + "9" * 17):
        snapshot.save(
            cache,
            sessions.path_of("a"),
            specs=["keep_all"] * len(cache.layers),
            fingerprint=fingerprint(model),
            tokens=torch.arange(6)[None],
            notes={"messages": "[]", "cache": spec},
        )
        with pytest.raises(SavedCacheError, match=r"a\.kv"):
            Session(model, finetune_inputs.tokenizer(), name="a")


def test_a_checkpoint_is_made_of_regular_files(odd, tmp_path):
    place = tmp_path / "checkpoint"
    place.mkdir()
    (place / checkpoint.CONTENTS).symlink_to(odd)
    with no_wait(), pytest.raises(checkpoint.CheckpointError, match="is damaged"):
        checkpoint._read(place)
    with no_wait(), pytest.raises(OSError, match=r"regular file|No such file"):
        checkpoint._checksum(place / checkpoint.CONTENTS)


@pytest.fixture
def adapter(model, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_made_of_regular_files(model, adapter, odd, name):
    (adapter / name).unlink()
    (adapter / name).symlink_to(odd)
    with no_wait(), pytest.raises(AdapterError):
        with_adapter(copy.deepcopy(model), str(adapter))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"r": 1 << 30}, "size mismatch|can't allocate"),
        ({"peft_type": "XLORA", "hidden_size": 8, "adapters": {"a": "/dev/zero"}}, "more than"),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 1 << 40}, "more than the model's"),
    ],
    ids=["rank", "adapters of an adapter", "prompt"],
)
def test_an_adapter_names_no_sizes_and_no_paths(model, adapter, change, reason):
    config = json.loads((adapter / "adapter_config.json").read_text())
    if "peft_type" in change:
        config = {"base_model_name_or_path": ""}
    (adapter / "adapter_config.json").write_text(json.dumps(config | change))
    with no_wait(), pytest.raises(AdapterError, match=reason):
        with_adapter(copy.deepcopy(model), str(adapter))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", "lacks 1 weights"),  # else random ones
        (b"llama.block_count\4\0\0\0\2", b"llama.block_count\4\0\0\0\3", "of 2 layers"),
        (
            b"embedding_length\4\0\0\0\x20\0\0\0",
            b"embedding_length\4\0\0\0\0\0\0\1",
            "of a model of",
        ),
        (b"tokens\t\0\0\0\x08\0\0\0", b"tokens\t\0\0\0\x09\0\0\0", "unknown type 9"),
    ],
    ids=["tensor", "layers", "width", "arrays of arrays"],
)
def test_a_gguf_file_agrees_with_itself(tmp_path, old, new, reason):
    pytest.importorskip("gguf")
    path = tiny_gguf.write(tmp_path / "a.gguf")
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    with no_wait(), pytest.raises(models.ModelError, match=reason):
        models.load(str(path), "float32", "cpu")


def test_lengths_in_a_gguf_file_end_within_it(tmp_path):
    pytest.importorskip("gguf")
    path = tiny_gguf.write(tmp_path / "a.gguf")
    data = path.read_bytes()
    for place in (8, 16):  # the numbers of tensors and of pairs of its metadata
        path.write_bytes(data[:place] + (1 << 40).to_bytes(8, "little") + data[place + 8 :])
        with no_wait(), pytest.raises(models.ModelError, match="would have 1099511627776 items"):
            models.load(str(path), "float32", "cpu")
