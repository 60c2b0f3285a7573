"""Gradients through a cache: fine-tune on texts far longer than memory allows."""

from kvkeep.files.offload import Offload
from kvkeep.train.gradient import backward, hidden_states, loss
from kvkeep.train.replay import replaying

__all__ = ["Offload", "backward", "hidden_states", "loss", "replaying"]
