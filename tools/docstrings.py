"""An extension of griffe for this package's classes and docstrings."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function, Object, Parameter, ParameterKind, Parameters

_KIND = ParameterKind.positional_or_keyword
_RETURNS = re.compile(r"(?<=^Returns:\n    )(?=\S)", re.MULTILINE)


class Docstrings(Extension):
    """Gives a `NamedTuple` the constructor that its fields make, as griffe does for dataclasses;
    and takes what a `Returns:` section says as text, with no type before its first colon."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Called when griffe has read a class and its members."""
        if [str(base) for base in cls.bases] != ["NamedTuple"]:
            return
        fields = [
            Parameter(one.name, annotation=one.annotation, kind=_KIND, default=one.value)
            for one in cls.attributes.values()
            if one.annotation is not None and "property" not in one.labels
        ]
        own = Parameter("self", kind=_KIND)
        init = Function("__init__", parameters=Parameters(own, *fields), returns="None", parent=cls)
        cls.set_member("__init__", init)

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called when griffe has read any object."""
        if obj.docstring is not None:
            obj.docstring.value = _RETURNS.sub(": ", obj.docstring.value, count=1)
