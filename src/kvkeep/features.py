"""Features that some models lack, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Feature(Enum):
    """A feature that a model may lack. The value names it in messages."""

    COMPILED = "a compiled graph"
    GRAPHED = "a CUDA graph"
    EXPORTED = "an exported program"
    TRAINED = "training through a cache"
    DRAFTED = "drafts under a policy that decides after each token"
    REREAD = "a second reading of a text"
    JOINED = "a join of texts"
    PLACED = "a forward at given positions"
    """Tokens at positions that do not follow the last token's."""
    MOVED = "a move of keys"
    """Rotating keys to other positions, and predicting queries."""
    NARROWED = "a forward whose later layers compute some tokens only"
    HOLES = "padding behind tokens"
    PAIRS = "a cache made of keys and values"
    UNATTACHED = "a model that is not attached"
    UNTRIED = "attention that was not tried before the first forward"


Lacks = Mapping[Feature, str]
"""Why a model lacks features, each as a clause about the model: "has ..., which ..."."""


def unsupported(clause: str, *features: Feature) -> Lacks:
    """One reason for several features; `clause` is about the model: "has ..."."""
    return {one: f"{clause}, which {one.value} does not support" for one in features}
