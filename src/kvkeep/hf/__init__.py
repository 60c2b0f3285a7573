"""The host for Hugging Face transformers.

How an attached model runs:

- A model calls `cache.update(k, v, layer_idx)` with rotated keys, then the attention function
  that its config names. For an attached model this is kvkeep's: `update` returns the new keys
  unchanged, tagged with their layer, and the attention function runs the layer's step. Modules
  get a view of the config with kvkeep's name (`routing`), because several models may share one
  config.
- The mask function returns the positions of the new tokens instead of a mask: (n,), or (B, n)
  with -1 for padding. It recognises a request for a kvkeep cache by the integer that
  `get_mask_sizes` returned, which carries the layer. All other requests, and keys without a tag,
  go to the implementation that the model had before.
- A mask that the model makes itself is compared with the layer's mask. The model's mask may
  differ only in showing later tokens of the same chunk, up to a column that becomes `until`; any
  other mask is refused.
- Misuse never gives wrong results silently. Another mask, a window that differs from the config,
  changed keys, a layer that is fed twice, a forward that does not attend to its last keys: each
  raises an error that names the remedy.
- `attach` tries the model first (`rehearsal`): a copy of the decoder whose weights are single
  numbers runs short chunks through the real cache, mask and attention functions. A model that
  cannot use kvkeep's attention keeps its own attention if the copy computes the same results with
  a cache as without one; it takes exact caches only.
- Steps of one token are compiled to programs (`compiled`, `compiling`, `saved_steps`).
  `model_state` is everything on which a program depends. Layers write their prepared steps to the
  memory of tickets, where the program finds them; a layer without a prepared step calls back into
  Python. On devices other than the CPU, a graph is compiled in each process, and CUDA graphs
  (`cuda_graph`) replay steps whose state is on the device. A program changes recurrent states in
  place. A layer that reads another layer's slots has a ticket of its own, and Python makes its
  step.
- Attention weights, and dropout on them, are computed by separate operations over the same slots
  (`weights`).
- In `generate()`, `demands` refuses, before the first token, requests that the cache could not
  meet later. With assisted generation, prompts are read up to the drafts in the same chunks as
  without drafts (`generate_hook`).
- `get_seq_length` is the number of tokens fed, not of slots kept. A prompt that does not continue
  its cache raises (`continuing`): the first layer's history records token ids if whole texts are
  known.
- A layer with a sliding window keeps at most its window, whatever the spec says.
- Masks and evictions depend on the order of tokens, not on rotary positions. So for the
  three-part positions of multimodal models, a cache needs only each text's offset from its token
  count (`multimodal`), and a record that token ids do not identify the input.
- Unattached, `update` returns all keys and values in the order of positions, which is right for
  exact specs; a budget with several rows or several tokens at once raises and says to attach.
"""

from kvkeep.hf.attach import Attachment, attach, detach
from kvkeep.hf.cache import Cache

__all__ = ["Attachment", "Cache", "attach", "detach"]
