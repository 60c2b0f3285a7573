"""Systems that decode with the same weights, each with a cache of its own."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.hf.attach import attach
from kvkeep.hf.cache_argument import as_cache
from kvkeep.host import host_of
from kvkeep.host.compress import read
from kvkeep.host.registry import require_host
from kvkeep.spec import parse_specs
from kvkeep_lab.bench.decode_loop import bytes_per_token, filled_from, new_cache
from kvkeep_lab.bench.options import DYNAMIC, SPEC, STATIC, Decode
from kvkeep_lab.bench.random_model import RANDOM, fill
from kvkeep_lab.checks import require_known

Feed = Callable[[Tensor], Tensor | None]
"""Feeds one token (1, 1) and returns the logits (1, V), or None if the system does not expose
them."""

KVKEEP = "kvkeep"
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


def chosen(asked: Decode, place: torch.device) -> Decode:
    """The options, with the ways and systems of a host and a device where none are given.

    Raises:
        SpecError: a host, way, system or spec does not exist.
        UnsupportedError: a combination cannot be measured.
    """
    require_host(asked.host)
    ways: Sequence[str]
    against: Sequence[str]
    on_cpu, by_litgpt = place.type == "cpu", asked.host == LITGPT
    if by_litgpt:
        ways, against = ((PLAIN, EAGER) if on_cpu else (PLAIN,)), (LITGPT,)
    else:
        ways = (PLAIN, FUSED) if on_cpu else (PLAIN, GRAPH, COMPILED)
        against = (DYNAMIC,) if on_cpu else OTHERS[:2]
    ways, against = asked.ways or ways, against if asked.against is None else asked.against
    require_known("system", against, (LITGPT,) if by_litgpt else OTHERS)
    require_known("way", ways, (PLAIN, EAGER) if by_litgpt else WAYS)
    for spec in asked.specs:
        parse_specs(spec)
    reading = [name for name in (asked.host, *against) if name in (LITGPT, LLAMA_CPP)]
    if asked.model in RANDOM and reading:
        raise UnsupportedError(
            f"{reading[0]} needs a prompt, but {asked.model} has no tokenizer; leave out one of "
            "them"
        )
    if asked.weights is not None and by_litgpt:
        raise UnsupportedError("weights are quantised with transformers only; leave out litgpt")
    return replace(asked, ways=ways, against=against)


class BaseSystems(ABC):
    """The systems to measure in one library. `hold` sets the content of all caches created after
    it.

    Args:
        asked: the options, as `chosen` returns them.
    """

    lead: str
    """The system whose logits and tokens are the reference, where it is measured."""

    def __init__(self, asked: Decode) -> None:
        self._ways = asked.ways or ()
        self._ours = {named(spec, way): (spec, way) for way in self._ways for spec in asked.specs}
        self.names = (*self._ours, *(asked.against or ()))

    def hold(self, tokens: int, ids: Tensor | None, room: int) -> None:
        """Set the content of the next caches: the first `tokens` of ids (1, tokens + 1), whose last
        id is fed in each step, or random keys and values without ids. `room` is the capacity in
        tokens."""
        self._held, self._ids, self._room = tokens, ids, room
        self.token = torch.ones(1, 1, dtype=torch.int64) if ids is None else ids[:, -1:]

    def seconds_of(self, name: str) -> float:
        """An upper estimate of the seconds that a system's first steps take."""
        return 0.0

    @abstractmethod
    def bytes_of(self, context: int) -> int:
        """Bytes that a system needs in addition."""

    @abstractmethod
    def feed(self, name: str) -> Feed:
        """A function that feeds a token to a system whose cache is filled. Create all feeds before
        using any: other caches may be copied from the cache of `SPEC`."""


class Systems(BaseSystems):
    """transformers' caches, kvkeep's and llama.cpp's.

    Args:
        directory: directory for llama.cpp's file.
    """

    lead = DYNAMIC

    def __init__(self, model: Any, asked: Decode, directory: Path) -> None:
        super().__init__(asked)
        plain, static, eager, fused = (twin(model) for _ in range(4))
        attach(model, compile=False)
        attach(eager, linears=False, compile=False)
        attach(fused, compile=FUSED in self._ways)
        self._models = {PLAIN: model, EAGER: eager, FUSED: fused}
        self.kvkeep, self.directory = model, directory
        # Each context and each system compiles the same function again.
        torch._dynamo.config.recompile_limit = 64
        mode = "reduce-overhead" if model.device.type == "cuda" else None
        self._transformers: dict[str, Callable[..., Any]] = {
            DYNAMIC: plain,
            STATIC: torch.compile(static.forward, fullgraph=True, dynamic=False, mode=mode),
        }

    def hold(self, tokens: int, ids: Tensor | None, room: int) -> None:
        """See `BaseSystems`."""
        super().hold(tokens, ids, room)
        self._full: Any = None
        self.token = self.token.to(self.kvkeep.device)

    def seconds_of(self, name: str) -> float:
        """See `BaseSystems`."""
        way = self._ours[name][1] if name in self._ours else name
        return _COMPILING if way in (FUSED, COMPILED, STATIC) else 0.0

    def bytes_of(self, context: int) -> int:
        """The slots, and a copy of them."""
        return 2 * context * bytes_per_token(self.kvkeep)

    def feed(self, name: str) -> Feed:
        """See `BaseSystems`."""
        if name == LLAMA_CPP:
            assert self._ids is not None  # a random model is refused
            llama_cpp = import_module("kvkeep_lab.bench.llama_cpp")
            step = llama_cpp.stepper(self.kvkeep, self._ids, self._room, self.directory)
            return lambda token: step()
        if name in self._transformers:
            cache = new_cache(name, self.kvkeep, self._room)
            if self._ids is None:
                return _fed(self._transformers[name], fill(cache, self.kvkeep, self._held))
            return _fed(self._transformers[name], filled_from(self._whole(), cache))
        spec, way = self._ours[name]
        if way in self._models:
            first = way == PLAIN and spec == SPEC
            return _fed(self._models[way], self._whole() if first else self._filled(spec))
        fixed = f"{spec.partition('@')[0]}@fixed:{self._room}"
        graphed = import_module("kvkeep.hf.steps.cuda_graph").Graphed
        made = graphed(self.kvkeep, self._filled(fixed), compile=way == COMPILED)
        return torch.inference_mode()(lambda token: made(token))

    def _filled(self, spec: str) -> Any:
        """A kvkeep cache filled with the prompt, and compressed if its policy is to do that."""
        cache = new_cache(spec, self.kvkeep)
        if self._ids is None:
            return fill(cache, self.kvkeep, self._held)
        if self._full is not None and spec.partition("@")[0] == SPEC:
            cache.restore(self._whole().snapshot())
            return cache
        read(host_of(self.kvkeep), cache, self._ids[:, :-1])
        return cache

    def _whole(self) -> Any:
        """The full cache, with `SPEC`."""
        if self._full is None:
            self._full = self._filled(SPEC)
        return self._full


def _fed(model: Callable[..., Any], cache: Any) -> Feed:
    begin_step: Any = torch.compiler.cudagraph_mark_step_begin

    @torch.inference_mode()
    def feed(token: Tensor) -> Tensor:
        begin_step()
        logits: Tensor = model(token, **as_cache(model, cache), logits_to_keep=1).logits
        return logits[:, -1]

    return feed
