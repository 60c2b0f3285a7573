"""Intake: checks a batch's prompts, and computes the most bytes of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, final

import torch
from torch import Tensor

from kvkeep.errors import CapacityError, ShapeError, UnsupportedError
from kvkeep.generate.answer import Prompt
from kvkeep.generate.drafting import require_draftable
from kvkeep.geometry import Geometry
from kvkeep.host import Host, ModelCache, Specs
from kvkeep.host.cache import bytes_of, token_limit
from kvkeep.host.compress import compresses
from kvkeep.policy import Share


class BatchLimits(TypedDict, total=False):
    """How much a `Batch` computes and holds at once; see there."""

    sequences: int | None
    max_bytes: int | None
    chunk: int | None
    step_tokens: int


@final
class Intake:
    """The checks of a batch's prompts; see `Batch` for the arguments.

    Raises:
        UnsupportedError: `max_bytes` is given, but the size of the model's slots is not known; or
            the spec's policy is `kvzip`.
    """

    def __init__(
        self, host: Host, tokenizer: Any, spec: Specs, *, max_bytes: int | None, chunk: int
    ) -> None:
        self._host, self._tokenizer = host, tokenizer
        self._max_bytes, self._chunk = max_bytes, chunk
        _require_one_reading(host.new_cache(spec))
        self._geometries = self._known_geometries()
        specs = {} if self._geometries is None else host.recurrent_specs()
        self._state_bytes = sum(spec.nbytes for spec in specs.values())

    def ids(self, prompt: str | Tensor | Sequence[int]) -> Tensor:
        """The token ids of a prompt, int64 (n,) on the CPU.

        Raises:
            ShapeError: there is no id, or an id is not in the model's vocabulary.
        """
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ShapeError("a prompt of text, but the batch has no tokenizer; give token ids")
            prompt = self._tokenizer(prompt)["input_ids"]
        ids = torch.as_tensor(prompt).cpu()
        if not ids.numel() or ids.is_floating_point() or ids.numel() != ids.shape[-1]:
            raise ShapeError(
                f"a prompt of {ids.numel()} tokens, {tuple(ids.shape)} of {ids.dtype}; give one "
                "row of at least one id"
            )
        ids = ids.flatten()
        known = self._host.embeddings
        if known is not None and not 0 <= int(ids.min()) <= int(ids.max()) < known:
            raise ShapeError(
                f"a prompt has token ids from {int(ids.min())} to {int(ids.max())}; the model's "
                f"vocabulary has 0 to {known - 1}"
            )
        return ids.to(torch.int64)

    def check(self, origin: Prompt) -> None:
        """Check a prompt, and set its `own_bytes` and `shared_bytes`.

        Raises:
            ShapeError: fewer than 1 answer, the model's context is too short, or the given cache
                cannot continue the prompt.
            CapacityError: one answer could exceed `max_bytes`, or its storage.
            SpecError: the spec does not fit the model.
            UnsupportedError: the policy is `kvzip`, or drafts cannot be removed from the cache.
        """
        if origin.answers < 1:
            raise ShapeError(f"n is {origin.answers}; ask for at least 1 answer")
        tokens, new = len(origin.ids), origin.params.max_new_tokens
        cache = origin.reuse.new_cache(origin.spec)
        if origin.params.drafts:
            require_draftable(self._host, cache)
        longest, limit = tokens + new, token_limit(cache)
        if limit is not None and longest - 1 > limit:  # the last token is never fed
            raise CapacityError(
                f"a prompt of {tokens} tokens and {new} new tokens, but the spec's storage holds "
                f"{limit}; ask for fewer, or use @growing"
            )
        if origin.reuse.given is not None:
            _require_continued(cache, origin)
            return
        context = self._host.context
        if context is not None and longest > context:
            raise ShapeError(
                f"a prompt of {tokens} tokens and {new} new tokens exceed the model's context of "
                f"{context}; shorten the prompt, or lower max_new_tokens"
            )
        _require_one_reading(cache)
        shares = origin.answers > 1 and not any(layer.policy.evicts for layer in cache.layers)
        shared = self._bytes_of(cache, tokens - 1) if shares else 0
        # Recurrent states are copied so that a failed step can be undone. For a store, they are
        # also copied after each chunk of the prompt and at its end, until the store has the copies.
        # The copy at an answer's end is made after the prompt's copies are freed.
        copies = tokens // self._chunk + 1 if origin.reuse.stores(origin) else 0
        origin.shared_bytes = shared + copies * self._state_bytes
        origin.own_bytes = self._bytes_of(cache, longest) - shared + 2 * self._state_bytes
        most = origin.own_bytes + origin.shared_bytes
        if self._max_bytes is not None and most > self._max_bytes:
            raise CapacityError(
                f"an answer of up to {longest} tokens takes {most} bytes, but this batch may hold "
                f"{self._max_bytes}; ask for fewer tokens, use a spec that keeps less, or raise "
                "max_bytes"
            )

    def _known_geometries(self) -> list[Geometry] | None:
        try:
            return self._host.geometries()
        except UnsupportedError as error:
            if self._max_bytes is None:
                return None
            raise UnsupportedError(
                f"max_bytes is {self._max_bytes}, but the size of {self._host.name}'s slots is not "
                f"known: {error}; leave max_bytes out, and limit sequences"
            ) from error

    def _bytes_of(self, cache: ModelCache, tokens: int) -> int:
        """The most bytes that a cache allocates while `tokens` tokens are fed."""
        if self._geometries is None:
            return 0
        if any(layer.policy.share is not None for layer in cache.layers):
            tokens = Share.fullest(tokens)
        return bytes_of(cache, self._geometries, tokens)


def _require_one_reading(cache: ModelCache) -> None:
    if compresses(cache):
        raise UnsupportedError(
            "kvzip reads a prompt twice, and a batch reads it once; use another policy, or "
            "kvkeep.generate.stream for one prompt"
        )


def _require_continued(cache: ModelCache, origin: Prompt) -> None:
    tokens = len(origin.ids)
    if origin.params.prompt_logprobs and cache.fed:
        raise UnsupportedError(
            f"prompt_logprobs with a cache that already holds {cache.fed} tokens of the prompt; "
            "give an empty cache"
        )
    if origin.answers > 1 or cache.rows > 1 or cache.fed >= tokens:
        raise ShapeError(
            f"{origin.answers} answers to a prompt of {tokens} tokens with a cache of {cache.rows} "
            f"rows that holds {cache.fed} tokens; ask for one answer, with a cache of one row and "
            "a prompt that is longer than the cache"
        )
