"""Hosts: the interface between kvkeep and a model library, and the lookup of a model's host."""

from typing import NoReturn

from kvkeep.host.cache import DEFAULT_SPEC as DEFAULT_SPEC
from kvkeep.host.cache import Activation as Activation
from kvkeep.host.cache import ModelCache
from kvkeep.host.contract import Host, Narrowed
from kvkeep.host.keep_until import Marker as Marker
from kvkeep.host.keep_until import keep_until
from kvkeep.host.layerwise import Carries, ChunkStep, Embedded, LayerStep, Layerwise
from kvkeep.host.packed import Packed, Piece, packed
from kvkeep.host.registry import host_of, load_model, register
from kvkeep.host.specs import LayerKind, Specs
from kvkeep.host.specs import fitting_some as fitting_some
from kvkeep.host.specs import per_layer as per_layer
from kvkeep.renamed import refuse_name

__all__ = [
    "Carries",
    "ChunkStep",
    "Embedded",
    "Host",
    "LayerKind",
    "LayerStep",
    "Layerwise",
    "ModelCache",
    "Narrowed",
    "Packed",
    "Piece",
    "Specs",
    "host_of",
    "keep_until",
    "load_model",
    "packed",
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
