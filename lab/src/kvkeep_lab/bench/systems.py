"""Systems that decode with the same weights, each with a cache of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.hf.attach import attach
from kvkeep.hf.cache_argument import as_cache
from kvkeep.host import host_of
from kvkeep.host.compress import compress, compresses
from kvkeep_lab.bench.decode_loop import DYNAMIC, STATIC, bytes_per_token, filled_from, new_cache
from kvkeep_lab.bench.random_model import fill

Feed = Callable[[Tensor], Tensor | None]
"""Feeds one token (1, 1) and returns the logits (1, V), or None if the system does not expose
them."""

KVKEEP, SPEC = "kvkeep", "keep_all"
LLAMA_CPP, LITGPT = "llama.cpp", "litgpt"
OTHERS = (DYNAMIC, STATIC, LLAMA_CPP)
PLAIN, EAGER, FUSED, GRAPH, COMPILED = "default", "eager", "compile", "graph", "compiled"
WAYS = (PLAIN, EAGER, FUSED, GRAPH, COMPILED)
STEPS_AHEAD = 64
"""Slots for steps that are not timed: steps whose logits are compared, and steps before a graph is
captured."""

_COMPILING = 40.0  # seconds that a compilation takes


_NAMES = {
    PLAIN: KVKEEP,
    EAGER: f"{KVKEEP}-linears",
    FUSED: f"{KVKEEP}+compile",
    GRAPH: f"{KVKEEP}+graph",
    COMPILED: f"{KVKEEP}+compile+graph",
}


def named(spec: str, way: str = PLAIN) -> str:
    """The name of a kvkeep cache whose steps run in one of the `WAYS`."""
    return _NAMES[way] if spec == SPEC else f"{_NAMES[way]} {spec}"


def labels(name: str) -> dict[str, str | None]:
    """The columns of a row that name a system: a kvkeep cache has a spec too."""
    system, _, spec = name.partition(" ")
    ours = system in _NAMES.values()
    return {"system": system, "spec": (spec or SPEC) if ours else None}


def twin(model: Any) -> Any:
    """A copy of a model, to be attached or compiled by itself, with the same weights in memory."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


class Systems:
    """The systems to measure. `hold` sets the content of all caches created after it.

    Args:
        directory: directory for llama.cpp's file.
    """

    lead = DYNAMIC
    """The system whose logits and tokens the others are compared with, where it is measured."""

    def __init__(
        self,
        model: Any,
        specs: Sequence[str],
        ways: Sequence[str],
        against: Sequence[str],
        directory: Path,
    ) -> None:
        plain, static, eager, fused = (twin(model) for _ in range(4))
        attach(model, compile=False)
        attach(eager, linears=False, compile=False)
        attach(fused, compile=FUSED in ways)
        self._ways = {PLAIN: model, EAGER: eager, FUSED: fused}
        self.kvkeep, self.directory = model, directory
        self._any = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        self._ours = {named(spec, way): (spec, way) for way in ways for spec in specs}
        self.names = (*self._ours, *against)
        # Each context and each system compiles the same function again.
        torch._dynamo.config.recompile_limit = 64
        mode = "reduce-overhead" if model.device.type == "cuda" else None
        self._transformers: dict[str, Callable[..., Any]] = {
            DYNAMIC: plain,
            STATIC: torch.compile(static.forward, fullgraph=True, dynamic=False, mode=mode),
        }

    def hold(self, tokens: int, ids: Tensor | None, room: int) -> None:
        """Set the content of the next caches: the first `tokens` of ids (1, tokens + 1), whose last
        id is fed in each step, or random keys and values without ids. `room` is the capacity in
        tokens."""
        self._held, self._ids, self._room = tokens, ids, room
        self._full: Any = None
        self.token = self._any if ids is None else ids[:, -1:]

    def seconds_of(self, name: str) -> float:
        """An upper estimate of the seconds that a system's first steps take."""
        way = self._ours[name][1] if name in self._ours else name
        return _COMPILING if way in (FUSED, COMPILED, STATIC) else 0.0

    def bytes_of(self, context: int) -> int:
        """Bytes that a system needs in addition: its slots, and a copy of them."""
        return 2 * context * bytes_per_token(self.kvkeep)

    def feed(self, name: str) -> Feed:
        """A function that feeds a token to a system whose cache is filled. Create all feeds before
        using any: other caches may be copied from the cache of `SPEC`."""
        if name == LLAMA_CPP:
            return self._llama_cpp()
        if name in self._transformers:
            cache = self._theirs(new_cache(name, self.kvkeep, self._room))
            return _fed(self._transformers[name], cache)
        spec, way = self._ours[name]
        if way in self._ways:
            first = way == PLAIN and spec == SPEC
            return _fed(self._ways[way], self._whole() if first else self._filled(spec))
        fixed = f"{spec.partition('@')[0]}@fixed:{self._room}"
        graphed = import_module("kvkeep.hf.steps.cuda_graph").Graphed
        step = graphed(self.kvkeep, self._filled(fixed), compile=way == COMPILED)

        def feed(token: Tensor) -> Tensor:
            with torch.inference_mode():
                logits: Tensor = step(token)
            return logits

        return feed

    def _filled(self, spec: str) -> Any:
        """A kvkeep cache filled with the prompt, and compressed if its policy is to do that."""
        cache = new_cache(spec, self.kvkeep)
        if self._ids is None:
            return fill(cache, self.kvkeep, self._held)
        if self._full is not None and spec.partition("@")[0] == SPEC:
            cache.restore(self._whole().snapshot())
            return cache
        with torch.inference_mode():
            self.kvkeep(self._ids[:, :-1], **as_cache(self.kvkeep, cache), logits_to_keep=1)
        if compresses(cache):
            compress(host_of(self.kvkeep), cache, self._ids[:, :-1])
        return cache

    def _whole(self) -> Any:
        """The full cache, with `SPEC`."""
        if self._full is None:
            self._full = self._filled(SPEC)
        return self._full

    def _theirs(self, cache: Any) -> Any:
        """A cache of transformers, filled with the slots that kvkeep computed."""
        if self._ids is None:
            return fill(cache, self.kvkeep, self._held)
        return filled_from(self._whole(), cache)

    def _llama_cpp(self) -> Feed:
        llama_cpp = import_module("kvkeep_lab.bench.llama_cpp")
        assert self._ids is not None
        step = llama_cpp.stepper(self.kvkeep, self._ids, self._room, self.directory)

        def feed(token: Tensor) -> None:
            step()

        return feed


def _fed(model: Callable[..., Any], cache: Any) -> Feed:
    begin_step: Any = torch.compiler.cudagraph_mark_step_begin

    def feed(token: Tensor) -> Tensor:
        begin_step()
        with torch.inference_mode():
            out = model(token, **as_cache(model, cache), logits_to_keep=1)
        logits: Tensor = out.logits[:, -1]
        return logits

    return feed
