"""Hosts: the interface between kvkeep and a model library, and the lookup of a model's host."""

from typing import NoReturn

from kvkeep.host.cache import DEFAULT_SPEC, Activation, ModelCache
from kvkeep.host.contract import Host, Narrowed
from kvkeep.host.keep_until import Marker, keep_until
from kvkeep.host.layerwise import Carries, ChunkStep, Embedded, LayerStep, Layerwise
from kvkeep.host.packed import Packed, Piece, packed
from kvkeep.host.registry import host_of, load_model, register
from kvkeep.host.specs import LayerKind, Specs, fitting_some, per_layer
from kvkeep.renamed import refuse_name

__all__ = [
    "DEFAULT_SPEC",
    "Activation",
    "Carries",
    "ChunkStep",
    "Embedded",
    "Host",
    "LayerKind",
    "LayerStep",
    "Layerwise",
    "Marker",
    "ModelCache",
    "Narrowed",
    "Packed",
    "Piece",
    "Specs",
    "fitting_some",
    "host_of",
    "keep_until",
    "load_model",
    "packed",
    "per_layer",
    "register",
]

_MOVED = {
    "Generation": "Answer",
    "GenerationOptions": "SamplingParams",
    "Processor": "Processor",
    "Sampling": "SamplingParams",
    "TextStream": "TextStream",
    "TokenTexts": "TokenTexts",
    "drawn": "sample",
}


def __getattr__(name: str) -> NoReturn:
    refuse_name(__name__, name, {old: f"kvkeep.generate.{now}" for old, now in _MOVED.items()})
