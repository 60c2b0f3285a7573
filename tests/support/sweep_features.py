"""What the sweep compares, for a tiny model of each type: a model attached, and as it was."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

import kvkeep
from kvkeep import Cache, attach, detach, load
from kvkeep.blocks import join
from kvkeep.errors import KVKeepError, UnsupportedError
from kvkeep.generate import Batch, SamplingParams
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config, decoder_of, layer_lists
from kvkeep.hf.kinds import kinds_of, layer_kinds
from kvkeep.planes import Chunks
from kvkeep.train import backward
from support.autograd_gradients import error, gradients, in_float64, ordinary, unrolled
from support.packed_logits import packed_logits
from support.sweep_configs import model_of
from support.sweep_page import (
    BUDGET,
    ENCODE,
    EVICT,
    FIXED,
    GRADIENT,
    HALF,
    MOST_RELATIVE,
    NEW,
    PROMPT,
    RELATIVE,
    WINDOW,
)

CHUNKS = (5, 1, 11, 7)
STEPS = (PROMPT - NEW, *[1] * NEW)
"""A prompt, and tokens one by one."""
PADS = (6, 1, 0)
PACKED = (5, 2, 17)
DRAFTED, FEW = 3, 2
JOINED, LONG = (3, 2, 3), (12, 9, 3)
"""Lengths of texts that are joined, and of the text after them: together not longer than the window
of 8 tokens that the tiny models have, and longer. A long text begins at a multiple of the blocks of
4 tokens among which an index chooses."""
PROGRAMS = frozenset({"compile", "export"})
"""Features that take torch several seconds to compile or to trace."""


class Expected:
    """What a model gives unattached, without a cache."""

    def __init__(self, model: Any) -> None:
        drawn = torch.Generator().manual_seed(1)
        ids = torch.randint(2, 96, (len(PADS), PROMPT), generator=drawn)
        ids[2, HALF:] = ids[2, :HALF]  # so that there are tokens to draft
        mask = torch.ones_like(ids)
        for row, pads in enumerate(PADS):
            mask[row, :pads] = 0
        self.one = {"input_ids": ids[2:]}
        self.batch = {"input_ids": ids * mask, "attention_mask": mask}
        self.logits = _at_once(model, self.one)
        if not bool(self.logits.isfinite().all()):
            raise ValueError("its logits are not finite")
        self.near = self._near(model)
        self.packed = [row[None, :n] for row, n in zip(ids, PACKED, strict=True)]
        self.texts = [_text(model, x, use_cache=False) for x in (self.one, self.batch)]
        pairs = zip(ids, PADS, strict=True)
        self.rows = torch.tensor([_greedy(model, row[None, pads:]) for row, pads in pairs])
        with torch.no_grad():
            last = [model(x, use_cache=False).logits[:, -1] for x in self.packed]
        self.packed_logits = torch.cat(last)
        self.packed_texts = [_greedy(model, x) for x in self.packed]
        self.no_cache = self.no_drafts = ""
        try:
            if _different_text(_text(model, self.one), self.texts[0]):
                self.no_cache = "transformers' own cache changes its text"
        except Exception as error:
            self.no_cache = f"with transformers' own cache it raises {said(error)}"
        try:
            _text(model, self.one, prompt_lookup_num_tokens=DRAFTED)
        except Exception as error:
            self.no_drafts = f"unattached it raises {said(error)}"

    def _near(self, model: Any) -> float:
        """The largest difference of logits that rounding explains."""
        scale = float(self.logits.abs().max())
        twice = 0.0
        try:
            for chunks in (CHUNKS, (HALF, HALF)):
                found = _fed(model, DynamicCache(config=model.config), self.one, chunks)
                twice = max(twice, 2 * float((found - self.logits).abs().max()))
        except Exception:
            return RELATIVE * scale
        return twice if RELATIVE * scale < twice <= MOST_RELATIVE * scale else RELATIVE * scale

    def different(self, found: Tensor, expected: Tensor | None = None) -> str:
        """How logits differ from those of the whole prompt, or from others; empty if they do
        not."""
        expected = self.logits if expected is None else expected
        off, scale = float((found - expected).abs().max()), float(expected.abs().max())
        return "" if off <= self.near else f"logits off by {off:.2g} at {scale:.2g}"


Comparison = tuple[str, Callable[[], str]]
"""What is compared, and a function that returns the difference: empty if there is none."""


def comparisons(model: Any, expected: Expected) -> Iterator[Comparison]:
    """What must hold for every type that works."""

    def text(inputs: dict[str, Any]) -> Tensor:
        cache = Cache(model)
        found: Tensor = _text(model, inputs, past_key_values=cache)
        assert cache.fed == PROMPT + NEW - 1, "no cache was used"
        return found

    def one() -> str:
        return _different_text(text(expected.one), expected.texts[0])

    def batch() -> str:
        """Each row as the model computes it in the batch, or alone, if its text depends on
        padding."""
        found = text(expected.batch)
        padded = _different_text(found, expected.texts[1])
        return padded and _different_text(found[:, -NEW:], expected.rows)

    def logits(*chunks: int) -> str:
        return expected.different(_fed(model, Cache(model), expected.one, chunks))

    yield "logits", logits
    yield "logits in chunks", lambda: logits(*CHUNKS)
    yield "greedy text", one
    yield "padded batch", batch


def features(kind: str, model: Any, expected: Expected, own: str) -> Iterator[Comparison]:
    """What may be refused, with a reason.

    Args:
        model: attached.
        own: why it computes attention itself; empty: it does not.
    """

    def window() -> str:
        at_once, chunked = (
            _fed(model, Cache(model, WINDOW), expected.one, chunks)
            for chunks in ((PROMPT,), CHUNKS)
        )
        return expected.different(chunked, at_once)

    def evict() -> str:
        cache = Cache(model, EVICT)
        _text(model, expected.batch, past_key_values=cache)
        return "" if cache.length <= BUDGET else f"{cache.length} slots for {BUDGET}"

    def encode() -> str:
        cache = Cache(model, ENCODE)
        _text(model, expected.batch, past_key_values=cache)
        assert cache.fed == PROMPT + NEW - 1, "no cache was used"
        return ""

    def drafts() -> str:
        if expected.no_drafts:
            raise UnsupportedError(expected.no_drafts)
        drafting = {"prompt_lookup_num_tokens": DRAFTED}
        output = _text(model, expected.one, **drafting, return_dict_in_generate=True)
        assert isinstance(output.past_key_values, Cache), "no kvkeep cache was used"
        if own:
            return _different_text(output.sequences, expected.texts[0])
        drafted, plain = (
            _text(model, expected.one, past_key_values=Cache(model, WINDOW), **options)
            for options in (drafting, {})
        )
        return _different_text(output.sequences, expected.texts[0]) or _different_text(
            drafted, plain
        )

    def save() -> str:
        """A cache that holds half of the prompt, read from a file, and forks of it."""
        cache = Cache(model)
        halves = [{"input_ids": x} for x in expected.one["input_ids"].split(HALF, dim=1)]
        _fed(model, cache, halves[0])
        with TemporaryDirectory() as folder:
            cache.save(Path(folder, "half"))
            loaded = load(Path(folder, "half"), model)
        frozen = cache.freeze()
        caches = [loaded, frozen.fork(), frozen.fork(), cache]
        found = [_fed(model, one, halves[1]) for one in caches]
        differences = [expected.different(x, expected.logits[:, HALF:]) for x in found]
        return next(filter(None, differences), "")

    def joined() -> str:
        """The tokens after two texts that were fed apart, against transformers' own keys and values
        for their new positions, or for those that they keep."""
        chunked = any(isinstance(layer.window, Chunks) for layer in Cache(model).layers)
        few = (JOINED,) if chunked else (JOINED, LONG)  # a move changes where chunks begin
        return next(filter(None, map(joined_of, few)), "")

    def joined_of(lengths: tuple[int, ...]) -> str:
        whole = expected.one["input_ids"][:, : sum(lengths)]
        *texts, tail = whole.split(list(lengths), dim=1)
        with torch.no_grad():
            caches = [Cache(model) for _ in texts]
            for text, cache in zip(texts, caches, strict=True):
                model(text, past_key_values=cache)
            found = _fed(model, join(model, caches), {"input_ids": tail}, (1, tail.shape[1] - 1))
            with _detached(model):
                return expected.different(found, after_own(model, texts, tail))

    def pack() -> str:
        rows = expected.packed
        answers = Batch(model)
        given = [answers.add(x[0], SamplingParams(max_new_tokens=NEW))[0] for x in rows]
        list(answers)
        for answer, greedy in zip(given, expected.packed_texts, strict=True):
            if answer.error is not None:
                raise answer.error
            if answer.tokens != greedy:
                return "another text"
        found = packed_logits(model, [x[0] for x in rows])
        return expected.different(found, expected.packed_logits)

    def train() -> str:
        ids = expected.one["input_ids"]
        with _detached(model):
            backward(copy.deepcopy(model), ids, ids)  # raises its refusals in its own dtype
            exact = copy.deepcopy(model).double()
            if exact._can_set_experts_implementation():
                exact.set_experts_implementation("eager")  # torch's own takes no float64
            try:
                with in_float64(exact):
                    exact(ids)
            except Exception as its:
                raise UnsupportedError(f"unattached, in float64, it raises {said(its)}") from its
            for spec in ("keep_all",) if own else ("keep_all", WINDOW, EVICT):
                with in_float64(exact):
                    backward(exact, ids, ids, cache=spec, chunk=CHUNKS[0])
                    found = gradients(exact)
                    way = () if spec == "keep_all" else (spec, CHUNKS[0])
                    loss = unrolled(exact, ids, ids, *way) if way else ordinary(exact, ids, ids)
                    loss.backward()
                off = error(found, gradients(exact))
                if not off <= GRADIENT:
                    return f"gradients with {spec} off by {off:.2g} of their norm"
        return ""

    def compiled() -> str:
        few, one, specs = reduced(), expected.one, ("keep_all", WINDOW)
        with _detached(model):
            with attach(model, compile=True):
                pass  # what is refused here is refused whatever the layers are
            at_once = _at_once(few, one)
            with attach(few):
                plain = [_fed(few, Cache(few, spec), one, STEPS) for spec in specs]
            with attach(few, compile=True):
                before = counters["stats"]["unique_graphs"]
                found = [_fed(few, Cache(few, spec), one, STEPS) for spec in specs]
                assert counters["stats"]["unique_graphs"] > before, "no graph was made"
        pairs = zip([*found, found[0]], [*plain, at_once], strict=True)
        return next(filter(None, (expected.different(x, y) for x, y in pairs)), "")

    def export() -> str:
        few = reduced()
        with _detached(model), TemporaryDirectory() as folder:
            at_once = _at_once(few, expected.one)
            kvkeep.export(few, FIXED).save(Path(folder, "a.pt2"))
            program = kvkeep.Program.load(Path(folder, "a.pt2"))
        parts = expected.one["input_ids"].split(list(STEPS), dim=1)
        found = torch.stack([program(part) for part in parts], dim=1)
        return expected.different(found, at_once[:, PROMPT - NEW - 1 :])

    def reduced() -> Any:
        """A model with few layers, which is compiled and traced in less time, if its layers are of
        the same kinds."""
        try:
            few = model_of(kind, FEW)
            return few if _kinds(few) == _kinds(model) else model
        except Exception:  # as where all layers of the few would share those of others
            return model

    yield "window", window
    yield "evict", evict
    yield "encode", encode
    yield "drafts", drafts
    yield "save", save
    yield "join", joined
    yield "pack", pack
    yield "train", train
    yield "compile", compiled
    yield "export", export


def _kinds(model: Any) -> Any:
    """The kinds of layers of a model."""
    layers = {replace(kind, place=None) for kind in layer_kinds(model.config)}
    return layers, kinds_of(model)


def _at_once(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The logits of an unattached model, without a cache."""
    with torch.no_grad():
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


@contextmanager
def _detached(model: Any) -> Iterator[None]:
    """An attached model, as it was before."""
    detach(model)
    try:
        yield
    finally:
        attach(model)


def after_own(model: Any, texts: list[Tensor], tail: Tensor) -> Tensor:
    """The logits of a tail after texts that do not see each other, by an unattached model. Texts
    are at their positions in the whole, or each from 0 on, if the model embeds positions."""
    indexed = any(kind.beside for kind in layer_kinds(model.config))
    new = partial(DynamicCache, config=model.config) if indexed else DynamicCache
    caches, start, cache, embeds = [], 0, new(), _embeds_positions(model)
    by_columns = hasattr(decoder_config(model.config), "index_block_size")

    def placed(text: Tensor, start: int) -> dict[str, Any]:
        place = torch.arange(start, start + text.shape[1])[None]
        return {"use_cache": True} | ({} if embeds else {"position_ids": place})

    for text in texts:
        caches.append(new())
        at = 0 if by_columns else start
        model(text, **placed(text, at), **as_cache(model, caches[-1]))
        if by_columns:
            _turn_keys(model, caches[-1], start)
        start += text.shape[1]
    for index, layers in enumerate(zip(*(own.layers for own in caches), strict=True)):
        joined = {
            name: torch.cat([getattr(x, name) for x in layers], dim=axis)
            for name, axis in {"keys": 2, "values": 2, "indexer_keys": 1, "idx_keys": 2}.items()
            if isinstance(getattr(layers[0], name, None), Tensor)
        }
        cache.update(joined.pop("keys"), joined.pop("values"), index)
        for name, keys in joined.items():
            own: Any = cache.layers[index]
            (own.update_indexer if name == "indexer_keys" else own.update_index)(keys)
    logits: Tensor = model(tail, **placed(tail, start), **as_cache(model, cache)).logits
    return logits


def _turn_keys(model: Any, cache: DynamicCache, by: int) -> None:
    """Move keys by some positions, by the model's own code: its index takes positions for columns,
    so it cannot compute a text at other positions."""
    embedding = next(x for x in model.modules() if type(x).__name__.endswith("RotaryEmbedding"))
    rotate = sys.modules[type(embedding).__module__].apply_rotary_pos_emb
    for layer in cache.layers:
        for name in ("keys", "idx_keys"):
            keys = getattr(layer, name, None)
            if keys is not None:
                angles = embedding(keys, torch.full((1, 1), by))
                cos, sin = (x[..., : keys.shape[-1]] for x in angles)
                setattr(layer, name, rotate(keys, keys, cos, sin)[0])


def _embeds_positions(model: Any) -> bool:
    """Whether the first layer's input for a token depends on the token's position."""
    text, inputs = decoder_config(model.config), dict[Any, list[Tensor]]()
    count = len(getattr(text, "layer_types", None) or range(text.num_hidden_layers))

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        inputs.setdefault(module, []).append(hidden[:, -1])

    hooks = [
        one[0].register_forward_pre_hook(keep, with_kwargs=True)
        for one in layer_lists(decoder_of(model), count)
    ]
    with torch.no_grad():
        for tokens in (1, 2):
            model(torch.full((1, tokens), 5), use_cache=False)
    for hook in hooks:
        hook.remove()
    first = next(iter(inputs.values()), [])  # the layers run before parts of them
    return len(first) == 2 and not torch.allclose(*first, atol=1e-5)


def _fed(model: Any, cache: Any, inputs: dict[str, Any], chunks: tuple[int, ...] = ()) -> Tensor:
    """The logits of a text that is read in chunks, or at once."""
    ids = inputs["input_ids"]
    parts = ids.split(list(chunks or ids.shape[1:]), dim=1)
    with torch.no_grad():
        given = as_cache(model, cache) | {"use_cache": True}
        return torch.cat([model(x, **given).logits for x in parts], 1)


def _greedy(model: Any, ids: Tensor) -> list[int]:
    """What `generate()` makes of a prompt, without what a generation config asks for."""
    with torch.no_grad():
        for _ in range(NEW):
            token = model(ids, use_cache=False).logits[:, -1:].argmax(dim=-1)
            ids = torch.cat([ids, token], dim=1)
    return list(ids[0, -NEW:].tolist())


def _text(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    given = dict.fromkeys(("pad_token_id", "decoder_start_token_id", "num_beams"), 1)
    options = given | {"use_cache": True, "num_return_sequences": 1} | options
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


def said(error: BaseException) -> str:
    """An error in one line."""
    name = "" if isinstance(error, KVKeepError) else f"{type(error).__name__}: "
    return cell(f"{name}{error}")


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return shorten(text, 200, placeholder=" ...").replace("|", "/").replace("<", "&lt;")


def _different_text(found: Tensor, expected: Tensor) -> str:
    return "" if found.equal(expected) else "another text"
