"""Host: what kvkeep asks of a model library. One object serves one model.

Stores, blocks, training, evaluation and the server know a model only by its host. So a model
library is added by one folder with a `Host`, and a row in `kvkeep.host.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.geometry import Geometry
from kvkeep.host.cache import DEFAULT_SPEC, Activation, ModelCache
from kvkeep.host.generation import Generation, generate
from kvkeep.host.layerwise import Layerwise
from kvkeep.host.specs import LayerKind, Specs
from kvkeep.rotary import Rotary


class Narrowed(NamedTuple):
    """The tokens of a forward that later layers get: their indices among the tokens that were fed,
    and their positions, int64 (m,) each, ascending."""

    indices: Tensor
    positions: Tensor


class Host(ABC):
    """A model, as the rest of kvkeep sees it.

    Methods that some libraries cannot offer have a default, which raises UnsupportedError or does
    nothing.

    Args:
        model: the library's own, perhaps with adapters around it.
    """

    library: ClassVar[str]
    """The name of the model library, for messages."""

    def __init__(self, model: Any) -> None:
        self.model = model

    # -- what the model is like -------------------------------------------------------------

    @property
    def name(self) -> str:
        """The model's type, for messages."""
        return type(self.model).__name__

    @property
    @abstractmethod
    def kinds(self) -> list[LayerKind]:
        """Each layer's type and sliding window.

        Raises:
            UnsupportedError: some layer does not cache keys and values of its own.
        """

    @abstractmethod
    def geometries(self) -> list[Geometry]:
        """Heads, widths and dtype of each layer's keys and values, of one row.

        Raises:
            UnsupportedError: the model's config does not tell.
        """

    @abstractmethod
    def rotaries(self) -> list[Rotary | None]:
        """How each layer rotates queries and keys; None where it does not.

        Raises:
            UnsupportedError: some layer rotates in an unknown way, or does not cache keys.
        """

    @property
    def changing_rotary(self) -> str:
        """The kind of the rotary frequencies if they, and so a token's keys, depend on the length
        of the text; otherwise empty."""
        return ""

    @property
    def context(self) -> int | None:
        """The model's context length in tokens; None: no limit."""
        return None

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Logits per token, V."""

    @property
    def embeddings(self) -> int | None:
        """Rows of the token embedding; None if not known."""
        return self.vocabulary

    @property
    def device(self) -> torch.device:
        """The device that token ids must be on."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def end_tokens(self) -> set[int]:
        """The tokens that end an answer."""
        return set()

    @abstractmethod
    def fingerprint(self, tokenizer: Any = None, *, glance: bool = False) -> dict[str, str]:
        """What the keys and values of the model depend on, as hashes and text by name.

        Args:
            tokenizer: to be hashed too.
            glance: weights that appear unchanged need not be read again.

        Raises:
            UnsupportedError: a weight cannot be read.
        """

    # -- attention through a cache ----------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the model's attention runs on kvkeep's caches now."""
        return True

    def attach(self, spec: Specs = DEFAULT_SPEC) -> AbstractContextManager[object]:
        """Let the model's attention run on kvkeep's caches until the returned context manager exits
        or `detach` is called. By default it always does."""
        return nullcontext()

    def detach(self) -> None:
        """Undo `attach`."""
        return None

    def new_cache(self, spec: Specs = DEFAULT_SPEC, *, capacity: int | None = None) -> ModelCache:
        """An empty cache for this model.

        Args:
            spec: what to keep.
            capacity: slots of fixed storage whose spec names none; None: the model's context.

        Raises:
            SpecError: a spec that does not exist or does not fit the model.
        """
        capacity = self.context if capacity is None else capacity
        return ModelCache(self.kinds, spec, capacity=capacity, rotaries=self.rotaries)

    @abstractmethod
    def forward(
        self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None, last: int = 1
    ) -> Tensor:
        """Feed a chunk to the model, through a cache of its own.

        Args:
            ids: int64 (B, n), on the model's device.
            cache: from `new_cache`. An activated adapter computes from `cache.activation.start` on.
            position: int64 (n,), ascending, for all rows; None: the next n. Positions can be given
                to attached models only.
            last: of how many last tokens to return logits.

        Returns:
            Logits (B, last, V).
        """

    def feed(self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None) -> None:
        """`forward`, without logits."""
        self.forward(ids, cache, position=position)

    # -- adapters ---------------------------------------------------------------------------

    def activation_in(self, prompt: Tensor) -> Activation | None:
        """Where an active adapter starts to compute in a prompt, int64 (n,); None: there is none.

        Raises:
            UnsupportedError: other adapters are active too.
        """
        return None

    # -- some tokens of a forward -----------------------------------------------------------

    @property
    def narrows(self) -> bool:
        """Whether `narrowed` works for this model."""
        return False

    def narrowed(
        self, first: int, tokens: int, chosen: Callable[[], Narrowed]
    ) -> AbstractContextManager[None]:
        """A context in which layers from `first` on get only some of a forward's tokens. It affects
        forwards of this thread.

        Args:
            tokens: how many tokens the forward is given.
            chosen: returns those that the layers get; called after the layers before `first` ran.
        """
        raise UnsupportedError(
            f"{self.library} has no way to let only some tokens pass through {self.name}'s later "
            "layers; use recompute='boundary:32' or 'all'"
        )

    # -- training and generation ------------------------------------------------------------

    def layerwise(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Layerwise:
        """The model run layer by layer on these texts, to be entered as a context manager.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 for padding; None: there is none.

        Raises:
            UnsupportedError: a model whose layers cannot be run by themselves.
        """
        raise UnsupportedError(f"there are no gradients through a cache for {self.library} yet")

    def generate(
        self,
        tokenizer: Any,
        ids: Tensor,
        cache: ModelCache,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        prefill_chunk: int | None = None,
        on_text: Callable[[str], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Continue ids (1, n), of which the cache may hold the first ones.

        Args:
            max_new_tokens: most tokens to generate.
            temperature: 0 is greedy.
            top_p: nucleus sampling, with a temperature.
            seed: for sampling.
            prefill_chunk: feed the prompt in chunks of that many tokens.
            on_text: given each piece of text as it comes.
            stopped: asked for each token; when it is true, that one is the last.
        """
        return generate(
            self,
            tokenizer,
            ids,
            cache,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            prefill_chunk=prefill_chunk,
            on_text=on_text,
            stopped=stopped,
        )
