"""The model libraries that kvkeep has hosts for. Only the hosts' folders and this table name them,
and nothing is imported before a model needs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class ModelLibrary(NamedTuple):
    """A model library, and where its host is. Classes are written `module:name`.

    `title`: `Host.library`; `models`: the module of the models' base class; `host`: the host's
    class; `loader`: the module whose `load` loads its models; `adapter`: the class that trains the
    library's own adapters; empty: PEFT's LoRA.
    """

    title: str
    models: str
    host: str
    loader: str
    adapter: str = ""


LIBRARIES = {
    "transformers": ModelLibrary(
        "transformers",
        models="transformers.modeling_utils",
        host="kvkeep.hf.host:TransformersHost",
        loader="kvkeep.hf.models",
    ),
    "litgpt": ModelLibrary(
        "LitGPT",
        models="litgpt.model",
        host="kvkeep.litgpt.host:LitGPTHost",
        loader="kvkeep.litgpt.checkpoint",
        adapter="kvkeep.finetune.litgpt_lora:LitGPTLora",
    ),
}
"""The libraries by the names that options take, which are the names of their packages."""


def class_at(path: str) -> Any:
    """The class at `module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def loader_of(library: str) -> Any:
    """The module that loads a library's models. Files in transformers' formats are read by its."""
    return import_module(LIBRARIES[library].loader)
