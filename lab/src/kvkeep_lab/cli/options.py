"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, cast, get_origin, get_type_hints

import typer

from kvkeep.cli import complete
from kvkeep.cli.output import AdapterName, ModelDtype, ModelName, listed, whole_numbers


@dataclass(frozen=True)
class ModelOptions:
    """The model of a command."""

    model: ModelName = None
    adapter: AdapterName = None
    dtype: ModelDtype = "auto"


def with_options(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of a command that takes `options` first: their fields, which are made by
    `kvkeep_lab.options` or annotated for typer, are the command's first options, before its own."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(options, include_extras=True)
        shown = [f for f in fields(options) if f.metadata or get_origin(hints[f.name]) is Annotated]

        @wraps(function)
        def command(**given: Any) -> None:
            asked = {one.name: _parsed(one, given.pop(one.name)) for one in shown}
            function(options(**asked), **given)

        own = list(signature(function, eval_str=True).parameters.values())[1:]
        every = [*(_parameter(one, hints[one.name]) for one in shown), *own]
        every.sort(key=lambda one: one.default is not Parameter.empty)
        command.__signature__ = Signature(every)  # type: ignore[attr-defined]
        return command

    return decorated


def _flag(one: Field[Any]) -> str:
    return str(one.metadata.get("name") or f"--{one.name.replace('_', '-')}")


def _parameter(one: Field[Any], kind: Any) -> Parameter:
    """A field as typer takes it: lists as text."""
    more, default = dict(one.metadata), cast(Any, one.default)
    separator, _, values = (more.pop(name, None) for name in ("separator", "least", "values"))
    if separator is not None:
        kind, default = str, separator.join(map(str, default or ())) or None
    if values is not None:
        made = complete.one_of if separator is None else complete.several_of
        more["autocompletion"] = made(*values)
    elif completed := more.pop("complete", None):
        more["autocompletion"] = getattr(complete, completed)
    declared = [_flag(one)] if more.pop("flag", False) or more.pop("name", None) else []
    annotation = Annotated[kind, typer.Option(*declared, **more)] if one.metadata else kind
    return Parameter(
        one.name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )


def _parsed(one: Field[Any], value: Any) -> Any:
    """The value of a field for the value that typer gives.

    Raises:
        BadParameter: a list is to have whole numbers, but has other parts.
    """
    separator = one.metadata.get("separator")
    if separator is None:
        return value
    if value is None:
        return one.default
    if separator == ";":
        from kvkeep.spec import split_specs

        return split_specs(value)
    least = one.metadata.get("least")
    return listed(value, ",") if least is None else whole_numbers(value, _flag(one), least)
