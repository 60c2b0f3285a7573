"""Drafting: proposes the next tokens of a text from the text itself.

The drafts are fed together with the text's newest token. The answer's tokens are then chosen as
without drafts, one by one, while each equals its draft; the other drafts are removed from the
cache. So drafts change an answer only by the rounding of a forward of several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.host import Host, ModelCache
from kvkeep.host.drafts import require_recordable

_LENGTHS = (3, 2)
"""Numbers of last tokens that are looked up, the first with a match counts."""


def require_draftable(host: Host, cache: ModelCache) -> None:
    """Raise UnsupportedError if drafts cannot be removed from a cache."""
    if cache.carried:
        raise UnsupportedError(
            f"drafts for {host.name}, whose recurrent layers cannot return to an earlier token; "
            "leave out drafts"
        )
    require_recordable(cache, attached=host.attached)


@final
class Drafting:
    """Proposes the tokens that followed the latest earlier occurrence of a text's last tokens
    (prompt lookup decoding, A. Saxena, 2023).

    The number of drafts doubles after a step that accepts all of them; otherwise it becomes the
    number of accepted drafts plus one.

    Args:
        most: the most drafts in a step.
    """

    def __init__(self, most: int) -> None:
        self._most, self._count = most, min(most, 2)
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """For some tokens in order, the index of the token after their latest occurrence."""

    def propose(self, prompt: Tensor, tokens: Sequence[int], most: int) -> list[int]:
        """Drafts of the next tokens of a text, at most `most` (at least 1).

        Args:
            prompt: the text's first tokens, int64 (n,).
            tokens: all later tokens; between calls they may only grow.
        """
        most = min(most, self._count)
        self._extend(prompt, tokens)
        ids = self._ids
        for length in _LENGTHS:
            at = self._after.get(tuple(ids[-length:]))
            if at is not None:
                repeated = len(ids) - at  # a text may repeat this many tokens
                return [ids[at + index % repeated] for index in range(most)]
        return []

    def learn(self, drafts: int, accepted: int) -> None:
        """Adapt the number of drafts to how many of the last ones were accepted."""
        self._count = min(self._most, 2 * drafts if accepted == drafts else accepted + 1)

    def _extend(self, prompt: Tensor, tokens: Sequence[int]) -> None:
        ids = self._ids
        known = len(ids)
        for token in [*prompt[known:].tolist(), *tokens[max(0, known - len(prompt)) :]]:
            for length in _LENGTHS:
                if len(ids) >= length:
                    self._after[tuple(ids[-length:])] = len(ids)
            ids.append(token)
