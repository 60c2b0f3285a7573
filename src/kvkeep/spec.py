"""Specs: `policy:arg,key=value+codec@storage` as text, and as objects that build layers."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, cast, get_args, get_type_hints

from kvkeep.codec import CODECS, Codec, Plain, StraightThrough
from kvkeep.errors import SpecError
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.setup import LayerOptions
from kvkeep.policy import ALIASES, POLICIES, Policy, Share
from kvkeep.policy.installed import installed, load
from kvkeep.storage import STORAGES, Concat, Growing, Storage

Options = tuple[tuple[str, int | float | str], ...]

_MOST_TEXT = 1000  # characters of a spec
_MOST_TEXTS = 1 << 16  # characters of a list of specs


@dataclass(frozen=True)
class StorageSpec:
    """A storage's name and options, from which each layer's storage is built."""

    name: str = Growing.name
    options: Options = ()

    @property
    def limited(self) -> bool:
        """Whether the storage has a fixed number of slots, its option `capacity`."""
        return STORAGES[self.name].fixed_addresses

    def build(self, capacity: int | None) -> Storage:
        """A new storage. `capacity` is used if the storage needs it and the options lack it."""
        options = dict(self.options)
        if self.limited and "capacity" not in options:
            if capacity is None:
                raise SpecError(f"@{self.name} needs a capacity; write @{self.name}:4096")
            options["capacity"] = capacity
        return STORAGES[self.name](**options)


@dataclass(frozen=True)
class CacheSpec:
    """A policy, codecs and a storage. `str` and `CacheSpec.parse` are inverses."""

    policy: Policy
    key_codec: Codec = dataclasses.field(default_factory=Plain)
    value_codec: Codec = dataclasses.field(default_factory=Plain)
    storage: StorageSpec = StorageSpec()

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_codec", self.value_codec.for_values())

    @classmethod
    def parse(cls, text: str) -> CacheSpec:
        """Parse text such as `keep_all` or `window:1024,sinks=4+plain@fixed:2048`.

        Raises:
            SpecError: a name or option is unknown (the message suggests the closest name), or a
                value has the wrong type or range.
        """
        if len(text) > _MOST_TEXT:
            raise SpecError(f"a spec of {len(text)} characters; give at most {_MOST_TEXT}")
        rest, _, storage_text = text.strip().partition("@")
        policy_text, _, codec_text = rest.partition("+")
        policy = _policy(policy_text, text)
        codecs = codec_text.split("/") if "+" in rest else [Plain.name]
        if len(codecs) > 2:
            raise SpecError(f"{len(codecs)} codecs in {text!r}; give one codec, or keys/values")
        storage = StorageSpec()
        if storage_text or "@" in text:
            storage = StorageSpec(*_component("storage", storage_text, STORAGES, text))
        key, value = (_codec(codec, text) for codec in (codecs * 2)[:2])
        spec = cls(policy, key, value, storage)
        if storage.options:
            storage.build(None)
        return spec

    def __str__(self) -> str:
        policy = _printed_policy(self.policy)
        codec = _printed(self.key_codec.name, _changed(self.key_codec), type(self.key_codec))
        if self.value_codec != self.key_codec.for_values():
            like_keys = type(self.value_codec)().for_values()
            options = _changed(self.value_codec, like_keys)
            codec += "/" + _printed(self.value_codec.name, options, type(self.value_codec))
        storage = _printed(self.storage.name, self.storage.options, STORAGES[self.storage.name])
        return f"{policy}+{codec}@{storage}"

    def differentiable(self) -> CacheSpec:
        """This spec with codecs and a storage that support gradients."""
        key, value = (
            codec if codec.differentiable else StraightThrough(codec)
            for codec in (self.key_codec, self.value_codec)
        )
        return CacheSpec(self.policy, key, value, StorageSpec(Concat.name))

    def layer(
        self,
        *,
        window: int | None = None,
        capacity: int | None = None,
        index: int = 0,
        count: int = 1,
        **options: Unpack[LayerOptions],
    ) -> LayerCache:
        """A new, empty layer.

        Args:
            index, count: the layer's index and the number of layers, for policies whose budget
                differs by layer.
            window: the layer's own sliding window in tokens; None: no window.
            capacity: slots of fixed storage if the spec gives no number and the policy has no
                budget; otherwise the spec's number or the budget is used.
            chunked, rotary, readers, slopes, latent: see `kvkeep.LayerCache`.

        Raises:
            SpecError: the policy, codecs and storage cannot be combined.
        """
        policy = self.policy.in_layer(index, count)
        policy = policy if window is None else policy.within(window)
        return LayerCache(
            policy,
            self.key_codec,
            self.value_codec,
            self.storage.build(policy.most_slots or capacity),
            window=window,
            **options,
        )


class PerType(Mapping[str, CacheSpec]):
    """A spec for each layer type of a model, by transformers' name of the type. `str` and
    `parse_specs` are inverses."""

    def __init__(self, specs: Mapping[str, CacheSpec]) -> None:
        self._specs = dict(sorted(specs.items()))

    def __getitem__(self, kind: str) -> CacheSpec:
        return self._specs[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __hash__(self) -> int:
        return hash(tuple(self._specs.items()))

    def __str__(self) -> str:
        return ";".join(f"{kind}={spec}" for kind, spec in self._specs.items())

    __repr__ = __str__


def parse_specs(text: str) -> CacheSpec | PerType:
    """Parse a spec for all layers, or a spec for each layer type, such as
    `full_attention=keep_all+int8;sliding_attention=window:512`.

    Raises:
        SpecError: see `CacheSpec.parse`; or a type occurs twice, or a spec lacks its type.
    """
    found = split_specs(text)
    if len(found) > 1:
        raise SpecError(
            f"{len(found)} specs in {text!r}; give one spec, or one for each type of layer, each "
            "type once: full_attention=keep_all;sliding_attention=window:512"
        )
    if not found or not _TYPED.match(found[0]):
        return CacheSpec.parse("".join(found))
    named = (part.partition("=") for part in found[0].split(";"))
    return PerType({kind.strip(): CacheSpec.parse(spec) for kind, _, spec in named})


def split_specs(text: str) -> list[str]:
    """Split a list of specs separated by semicolons. Consecutive specs of different layer types
    form one entry, which ends where a type is repeated or a spec for all layers follows.

    Raises:
        SpecError: the text is too long.
    """
    if len(text) > _MOST_TEXTS:
        raise SpecError(f"specs of {len(text)} characters; give at most {_MOST_TEXTS}")
    found: list[list[str]] = []
    kinds: set[str] = set()
    for part in (part.strip() for part in text.split(";")):
        typed = _TYPED.match(part)
        if typed and kinds and typed[1] not in kinds:
            found[-1].append(part)
        elif part:
            found.append([part])
            kinds.clear()
        if typed:
            kinds.add(typed[1])
    return [";".join(parts) for parts in found]


_TYPED = re.compile(r"\s*(\w+)\s*=")
"""Prefix of a spec for a layer type."""


def as_spec(spec: str | CacheSpec) -> CacheSpec:
    """Parse text to a spec; a spec is returned unchanged.

    Raises:
        SpecError: the value is neither, or the text is not a valid spec.
    """
    if not isinstance(spec, str | CacheSpec):
        raise SpecError(f"spec {spec!r}; give text such as 'keep_all', or a CacheSpec")
    return CacheSpec.parse(spec) if isinstance(spec, str) else spec


def _component(
    kind: str, text: str, registry: Mapping[str, type], whole: str
) -> tuple[str, Options]:
    """Parse `name:value,key=value`; a first value without a key belongs to the first option."""
    name, colon, rest = text.strip().partition(":")
    # Options after a wrong separator: `int4,affine=1`, `int4:32:affine=1`.
    head, comma, _ = name.partition(",")
    name, preset = ALIASES.get(head, (head, {}))
    if name not in registry:
        hint = _elsewhere(kind, text.strip(), whole) or _nearest(name, _names(kind))
        raise SpecError(f"no {kind} {name!r} in {whole!r}; {hint}")
    parameters = _parameters(registry[name])
    if (colon or comma) and not parameters:
        raise SpecError(f"{kind} {name} takes no options in {whole!r}; write {name}")
    if comma or (":" in rest and "(" not in rest):
        options_text = text.strip()[len(head) + 1 :].replace(":", ",")
        raise SpecError(
            f"the options of {kind} {head} in {whole!r} need a colon before the first option and "
            f"commas between options; write {head}:{options_text}"
        )
    options: dict[str, int | float | str] = {}
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
        options[key] = _value(value, parameters[key].annotation, f"{name} {key}", whole)
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and key not in options
    ]
    if missing and kind == "policy":
        kinds = {Share: "25%", str: "FILE"}
        needed = ((key, one) for key, one in parameters.items() if one.default is one.empty)
        example = ",".join(f"{key}={kinds.get(one.annotation, 1024)}" for key, one in needed)
        example = example.removeprefix(f"{next(iter(parameters))}=")
        raise SpecError(f"{kind} {head} in {whole!r} lacks {missing[0]!r}; write {head}:{example}")
    return name, tuple((preset | options).items())


@functools.cache
def _parameters(component: type) -> dict[str, inspect.Parameter]:
    """A component's options: the parameters of its constructor, except a wrapped policy."""
    # The annotations of a dataclass field refer to the module of the class that declares it.
    own = dataclasses.is_dataclass(component)
    types = get_type_hints(component) if own else {}
    found = inspect.signature(component, eval_str=not own).parameters
    typed = {
        key: one.replace(annotation=types.get(key, one.annotation)) for key, one in found.items()
    }
    return {
        key: parameter
        for key, parameter in typed.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and not (isinstance(kind := parameter.annotation, type) and issubclass(kind, Policy))
    }


def _policy(text: str, whole: str) -> Policy:
    """Parse a policy, or `name:options(policy)` for a policy that wraps another."""
    outer, bracket, inner = text.strip().partition("(")
    name = outer.partition(":")[0].partition(",")[0].strip()
    if name not in POLICIES and name in installed():
        load(name)
    if not bracket or name not in POLICIES or not POLICIES[name].wraps:
        if name in POLICIES and POLICIES[name].wraps:
            raise SpecError(f"policy {name} in {whole!r} wraps no policy; write {name}(h2o:1024)")
        name, options = _component("policy", text, POLICIES, whole)
        return POLICIES[name](**dict(options))
    if not inner.endswith(")"):
        raise SpecError(f"no closing bracket in {whole!r}; write {name}(h2o:1024)")
    name, options = _component("policy", outer, POLICIES, whole)
    wrapper: Any = POLICIES[name]
    return cast(Policy, wrapper(_policy(inner[:-1], whole), **dict(options)))


def _printed_policy(policy: Policy) -> str:
    text = _printed(policy.name, _changed(policy), type(policy))
    return f"{text}({_printed_policy(policy.inner)})" if policy.wraps else text  # type: ignore[attr-defined]


def _codec(text: str, whole: str) -> Codec:
    name, options = _component("codec", text, CODECS, whole)
    return CODECS[name](**dict(options))


_SWITCH = {"0": False, "1": True}


def _value(value: str, kind: Any, what: str, whole: str) -> int | float | str:
    """An option's value, parsed by its annotation: an integer, a float, or 0 or 1 for a bool."""
    kinds = get_args(kind) or (kind,)
    # For X | None, the type X; for int | Share, Share if the value is a percentage.
    kind = Share if Share in kinds and value.strip().endswith("%") else kinds[0]
    try:
        if kind is str:
            return value.strip()
        if kind is bool:
            return _SWITCH[value]
        if kind is Share:
            return Share.parse(value)
        return float(value) if kind is float else int(value)
    except SpecError:
        raise
    except (ValueError, KeyError):
        nouns = {bool: "0 or 1", float: "a number", Share: "a percentage, such as 25%"}
        either = " or a percentage, such as 25%" if Share in kinds[1:] else ""
        noun = nouns.get(kind, "a whole number") + either
        raise SpecError(f"{what} is {value!r} in {whole!r}; give {noun}") from None


_PARTS: dict[str, tuple[Mapping[str, type], str]] = {
    "policy": (POLICIES, ""),
    "codec": (CODECS, "+"),
    "storage": (STORAGES, "@"),
}
"""The parts of a spec: their registries, and the separators before them."""


def _names(kind: str) -> list[str]:
    """The names of all policies, codecs or storages."""
    names = list(_PARTS[kind][0])
    return [*names, *ALIASES, *installed()] if kind == "policy" else names


def _elsewhere(kind: str, text: str, whole: str) -> str:
    """A hint for an error, if `text` stands where a `kind` is expected but names another part of a
    spec; otherwise empty."""
    name = re.split("[:,/]", text, maxsplit=1)[0]
    for other, (_, sign) in _PARTS.items():
        if other != kind and name in _names(other):
            before = "keep_all" if kind == "policy" else re.split("[+@]", whole.strip())[0]
            return f"{name} is a {other}: write {before + sign + text if sign else text}"
    return ""


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    stem = name.rstrip("0123456789")
    alike = [one for one in names if one != stem and one.rstrip("0123456789") == stem != name]
    if len(alike) > 1:
        return f"there is {', '.join(alike)}"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there is {', '.join(names)}"


def _changed(component: Any, usual: Any = None) -> list[tuple[str, int | float | str]]:
    """A component's options that differ from the defaults, or from the options of `usual`."""
    options = _parameters(component.__class__)
    fields = [field for field in dataclasses.fields(component) if field.name in options]
    defaults = {field.name: getattr(usual, field.name, field.default) for field in fields}
    values = {field.name: getattr(component, field.name) for field in fields}
    return [(name, value) for name, value in values.items() if value != defaults[name]]


def _printed(name: str, options: Iterable[tuple[str, Any]], component: type) -> str:
    first = next(iter(_parameters(component)), None)
    items = [
        str(value) if key == first else f"{key}={int(value) if isinstance(value, bool) else value}"
        for key, value in options
    ]
    return name + (":" + ",".join(items) if items else "")
