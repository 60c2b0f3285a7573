"""What kvkeep asks of a model library, and how the host of a model is found."""

from kvkeep.host.cache import DEFAULT_SPEC, Activation, ModelCache
from kvkeep.host.contract import Host, Narrowed
from kvkeep.host.generation import Generation, GenerationOptions, TextStream, TokenTexts
from kvkeep.host.keep_until import Marker, keep_until
from kvkeep.host.layerwise import Embedded, LayerStep, Layerwise
from kvkeep.host.packed import Packed, Piece, packed
from kvkeep.host.registry import host_of, load_model, register
from kvkeep.host.sampling import Processor, Sampling, drawn
from kvkeep.host.specs import LayerKind, Specs, fitting_some, per_layer

__all__ = [
    "DEFAULT_SPEC",
    "Activation",
    "Embedded",
    "Generation",
    "GenerationOptions",
    "Host",
    "LayerKind",
    "LayerStep",
    "Layerwise",
    "Marker",
    "ModelCache",
    "Narrowed",
    "Packed",
    "Piece",
    "Processor",
    "Sampling",
    "Specs",
    "TextStream",
    "TokenTexts",
    "drawn",
    "fitting_some",
    "host_of",
    "keep_until",
    "load_model",
    "packed",
    "per_layer",
    "register",
]
