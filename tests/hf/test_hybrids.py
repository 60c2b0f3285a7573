"""Hybrid models: attention by kvkeep's layers, recurrent states beside them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache as cached
from functools import wraps
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import transformers
from support.sweep_configs import few_layers
from torch import Tensor
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import kvkeep
from kvkeep import Cache, attach, detach
from kvkeep.errors import (
    KVKeepError,
    RollbackError,
    SavedCacheError,
    StateError,
    UnsupportedError,
)
from kvkeep.generate import Batch, SamplingParams
from kvkeep.hf.config import decoder_config
from kvkeep.hf.kinds import Forwards, kinds_of

FAMILIES = [
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "inkling_text",
    "inkling2_text",
    "jamba",
    "lfm2",
    "minimax",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "zamba",
    "zamba2",
    "zaya",
]
FEW = ["jamba", "lfm2", "qwen3_next"]
"""A model that ignores states in chunks, one of convolutions, one of linear attention."""

_slow_but = [x if x in FEW else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES]
_TOLERANCE = 2e-4


@cached
def _model(kind: str) -> Any:
    transformers.logging.set_verbosity_error()
    return few_layers(kind)


@pytest.fixture(params=_slow_but)
def model(request: pytest.FixtureRequest) -> Any:
    found = _model(request.param)
    with attach(found):
        yield found


@pytest.fixture
def hybrid() -> Any:
    """A model whose forward is cheap, for what does not depend on the family."""
    found = _model("lfm2")
    with attach(found):
        yield found


def _ids(rows: int = 1, tokens: int = 24) -> Tensor:
    return torch.randint(2, 96, (rows, tokens), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def _logits(model: Any, ids: Tensor, cache: Any, pieces: list[int] | None = None) -> Tensor:
    """Logits of all tokens; like `generate`, with positions."""
    found, at = [], cache.get_seq_length()
    for part in ids.split(pieces or [ids.shape[1]], dim=1):
        position = torch.arange(at, at + part.shape[1])[None].expand(len(part), -1)
        found.append(model(part, past_key_values=cache, position_ids=position).logits)
        at += part.shape[1]
    return torch.cat(found, dim=1)


def _own_cache(model: Any) -> DynamicCache:
    text = decoder_config(model.config)
    return MiniMaxCache() if text.model_type == "minimax" else DynamicCache(config=text)


def _text(model: Any, ids: Tensor, cache: Any = None, **options: Any) -> Tensor:
    found: Tensor = model.generate(
        ids, past_key_values=cache, max_new_tokens=12, do_sample=False, **options
    )
    return found


@pytest.mark.parametrize("kind", ["minimax", "recurrent_gemma"])
def test_detach_restores_forwards_that_were_replaced_twice(kind: str) -> None:
    found = _model(kind)
    with attach(found):
        assert any("forward" in vars(module) for module in found.modules())
    assert not any("forward" in vars(module) for module in found.modules())


def test_logits_and_text_are_those_of_transformers_own_cache(model: Any) -> None:
    ids = _ids()
    tokenwise = [17] + [1] * 7  # in chunks, some models are wrong with transformers' own cache
    expected = _logits(model, ids, _own_cache(model), tokenwise)
    text = _text(model, ids, _own_cache(model))
    whole = _logits(model, ids, Cache(model))
    assert torch.allclose(whole, expected, atol=_TOLERANCE * float(expected.abs().max()))
    chunked = _logits(model, ids, Cache(model), [5, 1, 11, 7])
    assert torch.allclose(chunked, expected, atol=_TOLERANCE * float(expected.abs().max()))
    assert _text(model, ids, Cache(model)).equal(text)


def test_padded_batch(model: Any) -> None:
    ids, mask = _ids(3), torch.ones(3, 24, dtype=torch.int64)
    mask[0, :6], mask[1, :1] = 0, 0
    padded = ids * mask
    text = _text(model, padded, _own_cache(model), attention_mask=mask)
    assert _text(model, padded, Cache(model), attention_mask=mask).equal(text)


def test_forks_snapshots_and_files_continue_bit_for_bit(model: Any, tmp_path: Path) -> None:
    ids = _ids(2, 20)
    cache = Cache(model)
    _logits(model, ids[:, :12], cache)
    snapshot, path = cache.snapshot(), tmp_path / "hybrid.safetensors"
    cache.save(path)
    frozen = cache.freeze()
    expected = _logits(model, ids[:, 12:], cache)
    fork, other, loaded = frozen.fork(), Cache(model), kvkeep.load(path, model)
    other.restore(snapshot)
    for one in (fork, other, loaded, frozen.fork()):
        assert one.live_bytes == frozen.fork().live_bytes
        assert _logits(model, ids[:, 12:], one).equal(expected)
    assert fork.stats().recurrent_bytes == sum(x.nbytes for x in fork.carried.tensors().values())


def test_rows_take_their_states_along(model: Any) -> None:
    ids, index = _ids(3, 16), torch.tensor([2, 0, 2, 1])
    cache = Cache(model)
    _logits(model, ids[:, :10], cache)
    whole = _logits(model, ids[:, 10:], cache.freeze().fork())
    cache.select(index)
    selected = _logits(model, ids[index, 10:], cache)
    assert torch.allclose(selected, whole[index], atol=_TOLERANCE * float(whole.abs().max()))
    assert not torch.allclose(selected[0], whole[0], atol=1e-2)


@pytest.fixture
def drafting(model: Any) -> Any:
    """A model that takes drafts; without the cache in its output, transformers refuses them."""
    if any(not kind.returns_cache for kind in kinds_of(model)):
        with pytest.raises(ValueError, match="not supported with stateful models"):
            _text(model, _ids(), prompt_lookup_num_tokens=2)
        pytest.skip("it takes no drafts")
    return model


@pytest.mark.parametrize(
    "spec", ["window:12,sinks=2", "h2o:12", pytest.param("keep_all", marks=pytest.mark.slow)]
)
def test_drafts_give_the_text_without_them(
    drafting: Any, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = _ids(tokens=6).repeat(1, 5)  # so that there is something to look up
    plain = _text(drafting, ids, Cache(drafting, spec))
    cache, again, rejected = Cache(drafting, spec), Forwards.again, []

    def counted(forwards: Forwards, columns: int, least: int) -> Any:
        rejected.append(cache.fed - columns)
        return again(forwards, columns, least)

    monkeypatch.setattr(Forwards, "again", counted)
    assert _text(drafting, ids, cache, prompt_lookup_num_tokens=4).equal(plain)
    assert rejected
    assert cache.fed == plain.shape[1] - 1
    assert not cache.carried.marks


@pytest.fixture
def stateful() -> Any:
    """A model for which transformers allows no drafts."""
    found = _model("jamba")
    assert found._is_stateful
    with attach(found):
        yield found
    assert found._is_stateful


def test_drafts_in_two_threads_at_once(stateful: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, begun, second = _ids(), Event(), Event()
    prepare = type(stateful)._prepare_generation_config

    class Waits:
        def put(self, value: Tensor) -> None:
            begun.set()
            second.wait(20)

        def end(self) -> None:
            pass

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(_text, stateful, ids, prompt_lookup_num_tokens=2, streamer=Waits())
        assert begun.wait(20)

        def after_the_first(*args: Any, **kwargs: Any) -> Any:
            second.set()
            first.exception(20)
            return prepare(*args, **kwargs)

        monkeypatch.setattr(type(stateful), "_prepare_generation_config", after_the_first)
        assert _text(stateful, ids, prompt_lookup_num_tokens=2).equal(first.result())


def test_drafts_with_transformers_own_cache_are_refused(stateful: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"DynamicCache.*give a kvkeep\.Cache"):
        _text(stateful, _ids(), _own_cache(stateful), prompt_lookup_num_tokens=2)


def _recording(model: Any) -> Any:
    """A cache that read 8 tokens, and 3 drafts."""
    cache = Cache(model)
    _logits(model, _ids()[:, :8], cache)
    cache.activate_past_recording()
    _logits(model, _ids()[:, 8:11], cache)
    return cache


def test_a_cache_that_records_drafts_holds_no_model() -> None:
    model, ids = few_layers("lfm2"), _ids()
    attach(model)
    cache, weak = _recording(model), weakref.ref(model)
    copied, pickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    detach(model)
    with pytest.raises(StateError, match=r"kvkeep.attach\(model\) again"):
        cache.crop(-2)
    assert cache.fed == cache.carried.columns == 11
    attach(model)
    expected = _logits(model, ids, Cache(model), [8, 1, 15])[:, 9:]
    for one in (cache, copied):
        one.crop(-2)
        assert torch.allclose(_logits(model, ids[:, 9:], one), expected, atol=1e-4)
    assert pickled.fed == 11
    del model
    gc.collect()
    assert weak() is None
    with pytest.raises(RollbackError, match="only after 8"):
        pickled.crop(-2)


def test_a_refused_forward_is_not_read_again(hybrid: Any) -> None:
    forwards, decoder = Forwards(), hybrid.get_decoder()
    for start, stop in ((0, 5), (5, 9), (5, 8)):  # the second was refused
        forwards.add(decoder, {"input_ids": _ids()[:, start:stop]}, start, marks=False)
    again = forwards.again(columns=8, least=6)
    assert [(one.start, one.stop) for one in again] == [(0, 5), (5, 8)]


@pytest.mark.parametrize("spec", ["keep_all", "h2o:16"])
def test_drafts_in_a_second_turn(hybrid: Any, spec: str) -> None:
    """Only where no policy evicts: the states could not return past an eviction."""
    ids = _ids(tokens=6).repeat(1, 4)

    def second(**drafts: Any) -> Tensor:
        cache = Cache(hybrid, spec)
        text = torch.cat([_text(hybrid, ids, cache), ids], dim=1)
        return _text(hybrid, text, cache, **drafts)

    if spec == "keep_all":
        assert second(prompt_lookup_num_tokens=4).equal(second())
    else:
        with pytest.raises(UnsupportedError, match=r"holds \d+ tokens, .*; use keep_all"):
            second(prompt_lookup_num_tokens=4)


def test_accepted_drafts_of_a_second_model(drafting: Any) -> None:
    ids = _ids()
    drafted = _text(drafting, ids, Cache(drafting), assistant_model=_model("lfm2"))
    assert drafted.equal(_text(drafting, ids, Cache(drafting)))


def test_marks_are_the_points_to_return_to(hybrid: Any) -> None:
    ids, cache = _ids(), Cache(hybrid)
    _logits(hybrid, ids[:, :8], cache)
    cache.mark()
    expected = _logits(hybrid, ids[:, 8:], cache)
    assert cache.nbytes >= cache.carried.nbytes + cache.carried.marked_bytes
    assert cache.rollback_limit == 0
    with pytest.raises(RollbackError, match=r"after 20 tokens.*only after 8; call cache.mark"):
        cache.crop(-4)
    assert cache.fed == 24
    cache.rewind(8)
    assert _logits(hybrid, ids[:, 8:], cache).equal(expected)
    cache.rewind(0)
    assert not cache.carried.tensors()
    assert not cache.carried.marks


def test_a_crop_of_drafts_keeps_other_marks(hybrid: Any) -> None:
    ids, cache = _ids(tokens=6).repeat(1, 4), Cache(hybrid)
    cache.mark()
    _logits(hybrid, ids[:, :8], cache)
    cache.mark()
    cache.activate_past_recording()
    _logits(hybrid, ids[:, 8:12], cache)
    cache.crop(-3)
    assert list(cache.carried.marks) == [0, 8]
    cache.end_recording()
    cache.rewind(8)
    assert cache.fed == 8


def test_a_layers_own_forward_is_called_and_put_back() -> None:
    model, ids = _model("jamba"), _ids()  # whose layers are given tokens one by one
    (layer, *_) = [x for x in model.modules() if type(x).__name__ == "JambaMambaMixer"]
    forward, tokens = layer.forward, []

    @wraps(forward)
    def own(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens.append(hidden_states.shape[1])
        return forward(hidden_states, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(layer.__dict__, "forward", own)
        with attach(model):
            _logits(model, ids, Cache(model), [20, 4])
        assert tokens == [20, 1, 1, 1, 1]
        assert layer.forward is own


def test_an_interrupted_forward_leaves_no_state_that_is_used(hybrid: Any) -> None:
    ids, cache = _ids(), Cache(hybrid)
    _logits(hybrid, ids[:, :8], cache)
    cache.mark()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = hybrid.get_decoder().layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        _logits(hybrid, ids[:, 8:], cache)
    hook.remove()
    with pytest.raises(StateError, match="states of recurrent layers"):
        _logits(hybrid, ids[:, 8:], cache)
    cache.rewind(8)
    expected = _logits(hybrid, ids, Cache(hybrid), [8, 16])[:, 8:]
    assert _logits(hybrid, ids[:, 8:], cache).equal(expected)


def _refused(hybrid: Any, cache: Any, **given: Any) -> str:
    with torch.no_grad(), pytest.raises(KVKeepError) as refusal:
        hybrid(_ids(tokens=4), past_key_values=cache, **given)
    return type(refusal.value).__name__


def test_a_refused_forward_changes_nothing(hybrid: Any) -> None:
    ids, full = _ids(), Cache(hybrid, "keep_all@fixed:26")
    cache, expected = Cache(hybrid, "window:8"), Cache(hybrid, "window:8")
    for one in (cache, expected, full):
        _logits(hybrid, ids, one)
    assert _refused(hybrid, full) == "CapacityError"
    assert _refused(hybrid, cache, output_attentions=True) == "UnsupportedError"
    assert _refused(hybrid, cache, attention_mask=torch.ones(1, 9)) == "ShapeError"
    assert _refused(hybrid, cache, attention_mask=torch.zeros(1, 1, 4, 28)) == "UnsupportedError"
    after = _logits(hybrid, ids[:, :2], expected)
    assert _logits(hybrid, ids[:, :2], cache).equal(after)
    assert _logits(hybrid, ids[:, :2], full).isfinite().all()


def _begin(cache: Cache, model: Any) -> None:
    """Begin a forward of one token."""
    for kind in cache.kinds:
        kind.begin(cache, model.get_decoder(), {"input_ids": _ids(tokens=1)})


def test_a_state_that_a_layer_was_given_may_have_changed(hybrid: Any) -> None:
    cache = Cache(hybrid)
    _logits(hybrid, _ids(), cache)
    _begin(cache, hybrid)
    assert cache.carried.columns == 24
    cache.get_conv_state(0)  # a fused kernel changes it in place
    with pytest.raises(StateError, match=r"rewind\(\) to a mark"):
        _begin(cache, hybrid)


@torch.no_grad()
def test_arguments_in_their_order(hybrid: Any) -> None:
    ids, decoder = _ids(), hybrid.get_decoder()
    caches = [Cache(hybrid), Cache(hybrid)]
    for part in (ids[:, :9], ids[:, 9:]):
        named = decoder(input_ids=part, past_key_values=caches[0])[0]
        assert decoder(part, None, None, caches[1])[0].equal(named)
    assert caches[1].fed == 24
    assert decoder(ids, None, None)[0].equal(decoder(input_ids=ids)[0])


def test_reset_and_another_text(hybrid: Any) -> None:
    ids, cache = _ids(2), Cache(hybrid)
    _logits(hybrid, ids, cache)
    cache.reset()
    assert cache.live_bytes == 0
    one = ids[:1, :9]
    assert _logits(hybrid, one, cache).equal(_logits(hybrid, one, Cache(hybrid)))


def test_states_of_inference_mode_serve_later_forwards(hybrid: Any) -> None:
    ids, cache = _ids(), Cache(hybrid)
    with torch.inference_mode():
        hybrid(ids[:, :8], past_key_values=cache)
    found = _logits(hybrid, ids[:, 8:], cache)
    assert found.equal(_logits(hybrid, ids, Cache(hybrid), [8, 16])[:, 8:])


def test_a_file_with_other_states_is_refused(hybrid: Any, tmp_path: Path) -> None:
    cache = Cache(hybrid)
    _logits(hybrid, _ids(), cache)
    name, state = next(iter(cache.carried.tensors().items()))
    held = cache.carried.tensors()
    for changed in ({name: state[:, :-1]}, {name: state.double()}, {f"{name}0": state}):
        path = tmp_path / "other.safetensors"
        without = {n: x for n, x in held.items() if n != name}
        cache.carried.tensors = lambda other=without | changed: other  # type: ignore[method-assign]
        cache.save(path)
        with pytest.raises(SavedCacheError, match="state"):
            kvkeep.load(path, hybrid)
    cache.carried.tensors = lambda: {}  # type: ignore[method-assign]
    cache.save(path)
    with pytest.raises(SavedCacheError, match="recurrent states"):
        kvkeep.load(path, hybrid)


def test_what_cannot_work_is_refused(hybrid: Any) -> None:
    plain = _model("lfm2")
    detach(plain)
    with pytest.raises(UnsupportedError, match=r"recurrent layers.*attach\(model\) first"):
        _logits(plain, _ids(), Cache(plain))
    attach(plain)


@pytest.mark.parametrize("max_bytes", [None, 40_000])
def test_a_batch_of_answers(hybrid: Any, max_bytes: int | None) -> None:
    prompts = [_ids(tokens=n)[0] for n in (5, 9, 7)]
    batch = Batch(hybrid, chunk=4, max_bytes=max_bytes)
    answers = [batch.add(prompt, SamplingParams(6))[0] for prompt in prompts]
    for _ in range(3):
        batch.step()
    (urgent,) = batch.add(prompts[0], SamplingParams(6, priority=1))  # may put others aside
    while batch.running or batch.waiting:
        batch.step()
    for prompt, answer in zip([*prompts, prompts[0]], [*answers, urgent], strict=True):
        expected = _text(hybrid, prompt[None], Cache(hybrid))[0, len(prompt) :][:6]
        assert answer.tokens == expected.tolist()


def test_promised_bytes(hybrid: Any) -> None:
    cache = Cache(hybrid)
    forwards = list[int]()
    counting = hybrid.get_decoder().register_forward_pre_hook(lambda *_: forwards.append(1))
    promised = cache.bytes_for(24, rows=2)
    assert cache.bytes_for(24, rows=2) == promised
    counting.remove()
    assert len(forwards) == 1
    _logits(hybrid, _ids(2), cache)
    assert promised == cache.live_bytes == cache.bytes_for(24, rows=2)
