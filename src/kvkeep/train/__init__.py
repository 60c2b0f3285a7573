"""Gradients through a cache: fine-tune on texts far longer than memory allows.

A chunk scatters new slots into a layer's old slots. The reverse of this scatter is a gradient
buffer of the same slots; docs/training.md has a picture.

- The outer loop is over layers, the inner loop over chunks, forward and backward. A run of the
  model with stubs for its layers shows the computation before and after the layers.
- Each layer's inputs, and the positions of evicted tokens, are stored per chunk, in host memory or
  a file. A position identifies a token in its row, so `ReplayPolicy` repeats an eviction in any
  storage.
- The recomputation equals the forward: same storage (`concat`), same order, same attention
  backend. Otherwise the last bits, and with them the codes of a lossy codec, would differ.
- To recompute keys and values, a layer runs up to its attention; an exception ends the run. Slots
  are then written and evicted by the recorded decisions, and a journal restores evicted slots when
  the backward returns to an earlier chunk.
- A cell is one chunk's attention. Gradients of its output come from the layer above, gradients of
  its slots from the buffer, in at least float32; gradients of earlier slots are added to the
  buffer.
- A recurrent layer's states before each chunk are stored with its inputs. Gradients of states go
  back from chunk to chunk.
- A layer that reads an earlier layer's slots repeats that layer's chunks and evictions. Its
  gradients of each chunk's keys and values are stored until the earlier layer's backward.
- Random numbers are drawn from a seed for each layer and chunk; these seeds depend on one number
  from torch's generator.
- Processes that share a text (`chain`) each compute consecutive chunks. A layer's state is sent
  from process to process in the forward, its slots in the backward, and their gradients return.
- Gradients change only once the loss is known to be finite.
"""

from kvkeep.files.offload import Offload
from kvkeep.train.gradient import backward, hidden_states, loss
from kvkeep.train.replay import replaying

__all__ = ["Offload", "backward", "hidden_states", "loss", "replaying"]
