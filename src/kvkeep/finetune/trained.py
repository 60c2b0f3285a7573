"""Trained: which weights of a model are trained, and the files they are saved to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from kvkeep.finetune.options import Options


class Trained(ABC):
    """A kind of training: which weights are trained, and in which form they are saved.

    Checkpoints and the result have the same safetensors file of weights, so each checkpoint can be
    loaded like the result.
    """

    noun: ClassVar[str]
    """The result's name in messages, such as "adapter"."""

    weights_file: ClassVar[str]
    """The name of the safetensors file for `weights`."""

    mark: ClassVar[str]
    """The name of the file by which loaders recognise the result; it is written last."""

    @abstractmethod
    def prepare(self, model: Any, options: Options) -> Any:
        """The model to train. The parameters that require gradients are trained.

        Raises:
            OptionError: the options do not fit the model.
        """

    @abstractmethod
    def weights(self, model: Any) -> dict[str, Tensor]:
        """The tensors to save, by their names in the file. They share the model's memory: writing
        to them sets the model's weights."""

    @abstractmethod
    def describe(self, model: Any, directory: Path) -> None:
        """Write all files but the weights to a directory: the config that a loader needs."""
