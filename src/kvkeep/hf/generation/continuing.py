"""How the prompt of a `generate()` call continues its cache.

If the attention mask is as long as the prompt, the prompt is the whole text, and transformers feeds
the columns that the cache lacks. If the mask is longer, the prompt has new tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from kvkeep.cache import note_tokens
from kvkeep.errors import StateError
from kvkeep.hf.cache import Cache

_ANSWERS = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
"""Modes of generation after which the cache holds prompt and answer, except the last token."""

_PROMPTS = (
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
"""Modes after which the cache holds the prompt, but the tokens after it are unknown."""


@dataclass(frozen=True)
class Fed:
    """The tokens that a call of `generate()` feeds to its cache.

    Args:
        cache: the cache.
        after: number of columns in the cache before the first token id of the call.
        mode: the mode of generation.
    """

    cache: Cache
    after: int
    mode: Any

    def note(self, ids: Tensor, said: Any) -> None:
        """Record in the cache the token ids that were fed.

        Args:
            ids: the prompt, int64 (B, n).
            said: the output, int64 (rows, n'); ignored if it is no tensor.
        """
        cache = self.cache
        if self.mode in _PROMPTS:
            note_tokens(cache, ids.repeat_interleave(cache.rows // len(ids), dim=0), self.after)
        elif (
            self.mode in _ANSWERS
            and isinstance(said, Tensor)
            and cache.fed == self.after + said.shape[1] - 1
        ):
            note_tokens(cache, said, self.after)


def gives_whole_text(given: Mapping[str, Any], columns: int, generation_config: Any) -> bool:
    """Whether a prompt of `columns` columns is the whole text, including the cache's tokens.

    Args:
        given: the arguments of the model's forwards.
    """
    if given.get("inputs_embeds") is not None:
        return True
    mask = given.get("attention_mask")
    if mask is None:  # a mask of ones was removed
        return bool(getattr(generation_config, "_mask_length", -1) == columns)
    return bool(mask.shape[-1] == columns)


def _removes_last(cache: Cache) -> bool:
    held = all(layer.drafts.rollback_limit >= 1 for layer in cache.layers)
    return held and cache.carried.returns_to(cache.fed - 1)


def feeds_last_again(cache: Cache, columns: int) -> bool:
    """Whether the cache already holds all `columns` columns of a whole text, so that the last one
    must be removed and fed again.

    Raises:
        StateError: the cache holds more; or its last column cannot be removed exactly.
    """
    fed = cache.fed
    if columns > fed:
        return False
    if columns == fed and _removes_last(cache):
        return True
    last = "" if columns < fed else " and cannot remove the last one to feed it again"
    raise StateError(
        f"the prompt has {columns} tokens, but the cache already holds {fed}{last}; give the whole "
        f"text, of more than {fed} tokens, or reset() the cache"
    )


def require_same_beginning(cache: Cache, ids: Tensor, mask: Tensor | None) -> None:
    """Raise StateError if a prompt, int64 (B, n), begins with other tokens than the cache was fed,
    as far as these are known. Columns that the mask hides do not count."""
    known, rows = cache.tokens, len(ids)
    if known is None or len(known) % rows:
        return
    count = min(known.shape[1], ids.shape[1])
    given = ids[:, :count].repeat_interleave(len(known) // rows, dim=0)
    differs = given != known[:, :count].to(given.device)
    if mask is not None and mask.dim() == 2 and not len(mask) % rows:
        real = mask[:: len(mask) // rows, :count].repeat_interleave(len(known) // rows, dim=0)
        differs &= real.to(differs.device) != 0
    if not bool(differs.any()):
        return
    row, at = differs.nonzero()[0].tolist()
    raise StateError(
        f"token {at} of the prompt's row {row} is {int(given[row, at])}, but the cache was fed "
        f"{int(known[row, at])} there; give a text that begins with the tokens that the cache "
        "holds, or reset() the cache"
    )
