"""Specs: `policy:arg,key=value+codec@storage` as text, and as objects that build layers."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.codec import CODECS, Codec, Plain
from kvkeep.errors import SpecError
from kvkeep.layer import LayerCache
from kvkeep.policy import POLICIES, Policy
from kvkeep.storage import STORAGES, Growing, Storage

Options = tuple[tuple[str, int | float], ...]


@dataclass(frozen=True)
class StorageSpec:
    """A storage to be built once per layer."""

    name: str = Growing.name
    options: Options = ()

    def build(self, capacity: int | None) -> Storage:
        """A new storage; `capacity` is what a fixed one takes when its spec names none."""
        options = dict(self.options)
        parameters = _parameters(STORAGES[self.name])
        if "capacity" in parameters and "capacity" not in options:
            if capacity is None:
                raise SpecError(f"@{self.name} of unknown capacity; write @{self.name}:4096")
            options["capacity"] = capacity
        return STORAGES[self.name](**options)


@dataclass(frozen=True)
class CacheSpec:
    """What a layer keeps, in what encoding, where. `str` and `CacheSpec.parse` are inverse."""

    policy: Policy
    key_codec: Codec = dataclasses.field(default_factory=Plain)
    value_codec: Codec = dataclasses.field(default_factory=Plain)
    storage: StorageSpec = StorageSpec()

    @classmethod
    def parse(cls, text: str) -> CacheSpec:
        """Read `keep_all`, `window:1024,sinks=4+plain@fixed:2048`, ...

        Raises:
            SpecError: an unknown name or option (the nearest right one is named), or a value of
                the wrong kind or range.
        """
        rest, _, storage_text = text.strip().partition("@")
        policy_text, _, codec_text = rest.partition("+")
        name, options = _component("policy", policy_text, POLICIES, text)
        codecs = [Plain.name] * 2
        if codec_text or "+" in rest:
            codecs = codec_text.split("/")
            if len(codecs) > 2:
                raise SpecError(f"{len(codecs)} codecs in {text!r}; give one, or keys/values")
            codecs = (codecs * 2)[:2]
        storage = StorageSpec()
        if storage_text or "@" in text:
            storage = StorageSpec(*_component("storage", storage_text, STORAGES, text))
        key, value = (CODECS[_component("codec", codec, CODECS, text)[0]]() for codec in codecs)
        spec = cls(POLICIES[name](**dict(options)), key, value, storage)
        if storage.options:
            storage.build(None)
        return spec

    def __str__(self) -> str:
        options = [
            (field.name, getattr(self.policy, field.name))
            for field in dataclasses.fields(self.policy)
            if getattr(self.policy, field.name) != field.default
        ]
        codec = self.key_codec.name
        if self.value_codec.name != codec:
            codec += f"/{self.value_codec.name}"
        policy = _printed(self.policy.name, options, POLICIES[self.policy.name])
        storage = _printed(self.storage.name, self.storage.options, STORAGES[self.storage.name])
        return f"{policy}+{codec}@{storage}"

    def layer(self, *, window: int | None = None, capacity: int | None = None) -> LayerCache:
        """A new, empty layer.

        Args:
            window: the layer's own sliding window in tokens, if it has one.
            capacity: slots of fixed storage whose spec names none; a policy with a budget takes
                its budget instead.

        Raises:
            SpecError: the parts cannot work together.
        """
        policy = self.policy if window is None else self.policy.within(window)
        return LayerCache(
            policy,
            self.key_codec,
            self.value_codec,
            self.storage.build(policy.budget or capacity),
            window=window,
        )


def as_spec(spec: str | CacheSpec) -> CacheSpec:
    """Text or object -> object.

    Raises:
        SpecError: neither, or text that is no spec.
    """
    if not isinstance(spec, str | CacheSpec):
        raise SpecError(f"spec {spec!r}; give text such as 'keep_all', or a CacheSpec")
    return CacheSpec.parse(spec) if isinstance(spec, str) else spec


def _component(
    kind: str, text: str, registry: Mapping[str, type], whole: str
) -> tuple[str, Options]:
    """Read `name:value,key=value`; a first value without a key is the first option."""
    name, colon, rest = text.strip().partition(":")
    if name not in registry:
        raise SpecError(f"no {kind} {name!r} in {whole!r}; {_nearest(name, registry)}")
    parameters = _parameters(registry[name])
    if colon and not parameters:
        raise SpecError(f"{kind} {name} takes no options in {whole!r}; write {name}")
    options: dict[str, int | float] = {}
    for index, item in enumerate(rest.split(",") if colon else ()):
        key, equals, value = item.strip().partition("=")
        if not equals:
            key, value = next(iter(parameters)), item
            if index:
                raise SpecError(f"option {item!r} in {whole!r} has no name; write key=value")
        if key not in parameters:
            raise SpecError(
                f"{kind} {name} has no option {key!r} in {whole!r}; {_nearest(key, parameters)}"
            )
        if key in options:
            raise SpecError(f"{kind} {name} is given {key!r} twice in {whole!r}; give it once")
        options[key] = _number(value, parameters[key].annotation, f"{name} {key}", whole)
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and key not in options
    ]
    if missing and kind == "policy":
        raise SpecError(f"{kind} {name} in {whole!r} lacks {missing[0]!r}; write {name}:1024")
    return name, tuple(options.items())


def _parameters(component: type) -> dict[str, inspect.Parameter]:
    """A component's options: what its constructor takes."""
    return {
        key: parameter
        for key, parameter in inspect.signature(component, eval_str=True).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }


def _number(value: str, kind: Any, what: str, whole: str) -> int | float:
    try:
        return int(value) if kind is int else float(value)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise SpecError(f"{what} is {value!r} in {whole!r}; give {noun}") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there is {', '.join(names)}"


def _printed(name: str, options: Iterable[tuple[str, Any]], component: type) -> str:
    first = next(iter(_parameters(component)), None)
    items = [str(v) if k == first else f"{k}={v}" for k, v in options]
    return name + (":" + ",".join(items) if items else "")
