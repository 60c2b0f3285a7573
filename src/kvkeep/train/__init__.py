"""Gradients through a cache: fine-tune on texts far longer than memory allows.

A layer's cache after a chunk is a scatter of new slots into old slots, so its reverse is a
gradient buffer of the same slots; docs/training.md has a picture.

- The outer loop is over layers, the inner loop over chunks, forward and backward. Stubs in place
  of layers show what a model computes before and after them.
- Each layer's inputs and the positions of evicted tokens are stored per chunk, in host memory or
  a file. A position identifies a token in its row, so `ReplayPolicy` repeats an eviction in any
  storage.
- The recomputation equals the forward: same storage (`concat`), same order, same attention
  backend. Otherwise the last bits, and with them the codes of a lossy codec, would differ.
- A layer runs up to its attention to recompute keys and values; an exception ends the run. Slots
  are then filled and evicted by the recorded decisions, and a journal restores each slot on the
  way back.
- A cell is one chunk's attention. Gradients of its output come from the layer above, gradients of
  its slots from the buffer, in at least float32; gradients of earlier slots are added to the
  buffer.
- A recurrent layer's states before each chunk are stored with its inputs, and the gradient of a
  state goes back from chunk to chunk.
- A layer that reads an earlier layer's slots walks through the chunks as that layer did. Its
  gradients of the keys and values of each chunk are stored until that layer's backward.
- Random numbers are drawn from a seed for each layer and chunk, itself drawn from torch's
  generator.
- Processes that share a text (`chain`) each own consecutive chunks. A layer's state travels
  forward, its slots travel the same way in the backward, and their gradients return.
- Gradients change only once the loss is known to be finite.
"""

from kvkeep.files.offload import Offload
from kvkeep.train.gradient import backward, hidden_states, loss
from kvkeep.train.replay import replaying

__all__ = ["Offload", "backward", "hidden_states", "loss", "replaying"]
