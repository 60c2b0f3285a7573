"""ReplacedForward: the base of callables that replace the forward of an attached model."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.hf.cache_argument import NAMES

_OF_A_STEP = frozenset(
    (
        "input_ids",
        *NAMES,
        "attention_mask",
        "position_ids",
        "cache_position",
        "logits_to_keep",  # no effect with one token
    )
)
_MORE_RESULTS = ("output_attentions", "output_hidden_states")
_WITHOUT_EFFECT = {"use_cache": True, "return_dict": True} | dict.fromkeys(_MORE_RESULTS, False)
"""Arguments, with the values by which they do not change the result of a step."""


class ReplacedForward(ABC):
    """A callable that replaces the forward of an attached model until `detach`.

    Attributes:
        model: the attached model.
        own: the model's forward before.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.own: Callable[..., Any] = model.forward
        self.__signature__ = inspect.signature(self.own)  # read by `generate`
        self._names = tuple(self.__signature__.parameters)

    @property
    def replaced(self) -> Any:
        """The model's forward before, if it was not its class's own; otherwise None."""
        own = getattr(self.own, "__func__", None)
        return None if own is type(self.model).forward else self.own

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return dict(zip(self._names, args, strict=False)) | kwargs

    def is_step(self, given: Mapping[str, Any]) -> bool:
        """Whether a call feeds one token a row, and asks only for logits."""
        ids = given.get("input_ids")
        return (
            isinstance(ids, Tensor)
            and ids.dim() == 2
            and ids.shape[1] == 1
            and all(
                x is None or name in _OF_A_STEP or x == _WITHOUT_EFFECT.get(name)
                for name, x in given.items()
            )
            and not self.gives_more
        )

    @property
    def gives_more(self) -> bool:
        """Whether the model's config asks for results other than logits."""
        return any(getattr(self.model.config, name, False) for name in _MORE_RESULTS)
