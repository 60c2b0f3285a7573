"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, cast, get_origin, get_type_hints

import typer

from kvkeep.cli import complete
from kvkeep.cli.output import DEFAULT_MODEL, listed, size_in_bytes, titled, whole_numbers
from kvkeep.cli.progress import Working
from kvkeep.options import option

_OURS = ("separator", "least", "size", "values", "complete", "name", "flag", "unrelated")
"""Arguments of `kvkeep.options.option` that are not arguments of `typer.Option`."""


def cache_option(default: str | None) -> Any:
    """A field of a cache's spec."""
    return option(default, "Cache spec, e.g. window:1024,sinks=4.", complete="specs")


def dtype_option() -> Any:
    """A field of a model's dtype."""
    return option("auto", "auto, float32, bfloat16, float16.", complete="dtypes")


def device_option() -> Any:
    """A field of a device."""
    return option(None, "A torch device.", complete="devices")


@dataclass(frozen=True)
class OneModel:
    """The model of a command that takes no adapter."""

    model: str | None = option(
        None,
        "A name from `kvkeep models`, a directory, a GGUF file, or a hub name; "
        "default: smollm2-135m, or the adapter's base model.",
        complete="models",
    )
    dtype: str = dtype_option()


@dataclass(frozen=True)
class ModelOptions(OneModel):
    """The model of a command, and its adapter."""

    adapter: str | None = option(
        None,
        "An adapter's directory, e.g. the output of `kvkeep finetune`.",
        complete="adapters",
    )

    @property
    def named(self) -> str | None:
        """The given model or the default model; None: the adapter's base model."""
        return self.model if self.model or self.adapter else DEFAULT_MODEL

    @property
    def title(self) -> str:
        """The names of the model and its adapter."""
        return titled(self.named, self.adapter)

    def some(self, *names: str) -> dict[str, Any]:
        """The options of these names."""
        return {name: getattr(self, name) for name in names}

    def load(self, working: Working, **more: Any) -> tuple[Any, Any]:
        """The model and its tokenizer; for `more` see `kvkeep.hf.models.load`."""
        from kvkeep.hf.models import load

        return load(self.named, self.dtype, progress=working, adapter=self.adapter, **more)


@dataclass(frozen=True)
class RunOptions(ModelOptions):
    """The model of a command, and how it runs."""

    weights: str | None = option(
        None,
        "Quantise the weights of linear layers, on the CPU: int8 or int4; default: no.",
        values=("int8", "int4"),
    )
    device: str | None = device_option()
    compile: bool | None = option(
        None,
        "Compile decode steps first, or use no compiled steps; default: use compiled steps, "
        "and compile them once the model has generated enough tokens to save time.",
        name="--compile/--no-compile",
    )

    def load(self, working: Working, **more: Any) -> tuple[Any, Any]:
        """See `ModelOptions.load`."""
        return super().load(working, device=self.device, weights=self.weights, **more)


@dataclass(frozen=True)
class AnswerOptions(RunOptions):
    """The model of a command, how it runs, and how the tokens of answers are chosen."""

    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.", min=0.0)
    top_p: float = option(1.0, "Probability mass to sample from.", min=0.0, max=1.0)


def with_options(*kinds: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of a command that takes an object of each of `kinds` first: their fields, which
    are made by `kvkeep.options` or annotated for typer, are the command's first options, before its
    own."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        shown = [_shown(kind) for kind in kinds]

        @wraps(function)
        def command(**given: Any) -> None:
            asked = [
                kind(**{one.name: _parsed(one, given.pop(one.name)) for one, _ in own})
                for kind, own in zip(kinds, shown, strict=True)
            ]
            function(*asked, **given)

        own = list(signature(function, eval_str=True).parameters.values())[len(kinds) :]
        every = [*(_parameter(*one) for some in shown for one in some), *own]
        every.sort(key=lambda one: one.default is not Parameter.empty)
        command.__signature__ = Signature(every)  # type: ignore[attr-defined]
        return command

    return decorated


def _shown(options: type[Any]) -> list[tuple[Field[Any], Any]]:
    """The fields that are options, with their types."""
    hints = get_type_hints(options, include_extras=True)
    pairs = [(one, hints[one.name]) for one in fields(options)]
    return [x for x in pairs if x[0].metadata.get("help") or get_origin(x[1]) is Annotated]


def _flag(one: Field[Any]) -> str:
    return str(one.metadata.get("name") or f"--{one.name.replace('_', '-')}")


def _parameter(one: Field[Any], kind: Any) -> Parameter:
    """A field as typer takes it: lists and sizes as text."""
    told, default = one.metadata, cast(Any, one.default)
    more = {name: x for name, x in told.items() if name not in _OURS}
    separator, size, values = (told.get(name) for name in ("separator", "size", "values"))
    if separator is not None:
        kind, default = str, separator.join(map(str, default or ())) or None
    elif size is not None:
        kind, default = (str | None), size or None
    if values is not None:
        made = complete.one_of if separator is None else complete.several_of
        more["autocompletion"] = made(*values)
    elif "complete" in told:
        more["autocompletion"] = getattr(complete, told["complete"])
    declared = [_flag(one)] if told.get("flag") or told.get("name") else []
    annotation = Annotated[kind, typer.Option(*declared, **more)] if told else kind
    return Parameter(
        one.name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )


def _parsed(one: Field[Any], value: Any) -> Any:
    """The value of a field for the value that typer gives.

    Raises:
        BadParameter: a list is to have whole numbers, but has other parts; or a size is none.
    """
    separator, size = one.metadata.get("separator"), one.metadata.get("size")
    if separator is None and size is None:
        return value
    if value is None:
        return one.default
    if size is not None:
        return size_in_bytes(value, _flag(one))
    if separator == ";":
        from kvkeep.spec import split_specs

        return split_specs(value)
    least = one.metadata.get("least")
    return listed(value, ",") if least is None else whole_numbers(value, _flag(one), least)
