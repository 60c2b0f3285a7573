"""Features that some models lack, with the reasons."""

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
    """Tokens at other positions than the next ones."""
    MOVED = "a move of keys"
    """Keys turned to other positions, and queries predicted for them."""
    NARROWED = "a forward whose later layers compute some tokens only"
    HOLES = "padding behind tokens"
    PAIRS = "a cache made of keys and values"
    UNATTACHED = "a model that is not attached"
    UNTRIED = "attention that was not tried before the first forward"


Lacks = Mapping[Feature, str]
"""Why a model lacks features, each as a clause about the model: "has ..., which ..."."""


def unsupported(clause: str, *features: Feature) -> Lacks:
    """Reasons why a model lacks features: a clause about the model for all of them."""
    return {one: f"{clause}, which {one.value} does not support" for one in features}
