"""The host for Hugging Face transformers.

How an attached model runs:

- A model calls `cache.update(k, v, layer_idx)` with rotated keys, then the attention function
  that its config names. In an attached model that name is kvkeep's: `update` returns the new keys
  unchanged, tagged with their layer, and the attention function runs the layer's step. Modules
  get a view of the config with that name (`routing`), because several models may share one
  config.
- The mask function returns the positions of the new tokens instead of a mask: (n,), or (B, n)
  with -1 for padding. It knows a request for a kvkeep cache by the integer that `get_mask_sizes`
  returned, which carries the layer. All other requests, and keys without a tag, go to the
  implementation that the model had before.
- A mask of a model's own making is compared with the layer's own mask. It may show more only up
  to a later column of the same chunk, which becomes `until`; any other mask is refused.
- Nothing is silently wrong. Another mask, a window that differs from the config, changed keys, a
  layer that is fed twice, a forward that leaves its last keys unused: each raises an error that
  names the remedy.
- `attach` tries the model first (`rehearsal`): a copy of the decoder whose weights are single
  numbers runs short chunks through the real cache, mask and attention functions. A model whose
  attention cannot be kvkeep's keeps its own attention if the copy computes the same through a
  cache as without one; it takes exact caches only.
- Steps of one token are compiled to programs (`compiled`, `compiling`, `saved_steps`); what a
  program depends on is `model_state`. Layers prepare their steps in the memory of tickets, where
  the program finds them; a layer without a prepared step calls back into Python. On other devices
  a graph is compiled for the process, and CUDA graphs (`cuda_graph`) replay steps whose state
  lies on the device. A program changes recurrent states in place. A reading of another layer's
  slots is a step of its own ticket, which Python makes.
- Attention weights, and dropout on them, come from separate operations over the same slots
  (`weights`).
- In `generate()`, `demands` refuses before the first token what a cache could not do later.
  Prompts are read up to the drafts of assisted generation in the chunks that they would be read
  in without drafts (`generate_hook`).
- `get_seq_length` is the number of tokens fed, not of slots kept. A prompt that does not continue
  its cache raises (`continuing`): the first layer's history records token ids where whole texts
  are known.
- A layer with a sliding window keeps no more than its window, whatever the spec says.
- Rotary positions decide nothing: the order of tokens does. So the three-part positions of
  multimodal models need only the offset that each text has from its token count (`multimodal`),
  and a record that token ids do not tell what was fed.
- Unattached, `update` returns all keys and values in the order of positions, which is right for
  exact specs; a budget with several rows or several tokens at once raises and says to attach.
"""

from kvkeep.hf.attach import Attachment, attach, detach
from kvkeep.hf.cache import Cache

__all__ = ["Attachment", "Cache", "attach", "detach"]
