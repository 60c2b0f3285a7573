"""Host: kvkeep's interface to a model library. One object serves one model.

Stores, blocks, training, evaluation and the server access a model only through its host. So a
folder with a `Host` and a row in `kvkeep.libraries` add a model library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.geometry import Geometry
from kvkeep.host.cache import DEFAULT_SPEC, Activation, ModelCache
from kvkeep.host.fingerprint import sampled
from kvkeep.host.layerwise import Layerwise
from kvkeep.host.packed import Piece
from kvkeep.host.progress import Progress, silent
from kvkeep.host.specs import LayerKind, Specs
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.recurrent import StateSpec
from kvkeep.renamed import Renamed
from kvkeep.rotary import Rotary


class Narrowed(NamedTuple):
    """The tokens of a forward that later layers compute: their indices among the fed tokens, and
    their positions, int64 (m,) each, ascending."""

    indices: Tensor
    positions: Tensor


class Host(ABC):
    """One model, as the rest of kvkeep sees it.

    Methods that some libraries cannot implement have a default that raises UnsupportedError or does
    nothing.

    Args:
        model: the library's model, possibly wrapped by adapters.
    """

    library: ClassVar[str]
    """The name of the model library, for messages."""

    def __init__(self, model: Any) -> None:
        self.model = model

    # -- the model's properties -------------------------------------------------------------

    @property
    def name(self) -> str:
        """The model's type, for messages."""
        return type(self.model).__name__

    @property
    @abstractmethod
    def kinds(self) -> list[LayerKind]:
        """The type and sliding window of each attention layer.

        Raises:
            UnsupportedError: a layer caches something other than its own keys and values or a
                recurrent state.
        """

    @abstractmethod
    def geometries(self) -> list[Geometry]:
        """Heads, widths and dtype of each layer's keys and values, for one row.

        Raises:
            UnsupportedError: the model's config does not give them.
        """

    @property
    def parallel(self) -> bool:
        """Whether several processes compute every forward together, each with some of the heads or
        experts. All processes must then feed the same tokens in the same order."""
        return False

    @abstractmethod
    def rotaries(self, tokens: int | None = None) -> list[Rotary | None]:
        """Each layer's rotary embedding; None for a layer without one, whose keys depend on their
        position only by the layer's input.

        Args:
            tokens: the length of the longest text; None: any length. Frequencies may depend on it.

        Raises:
            UnsupportedError: a layer's rotary embedding is unknown or changes, or the layer does
                not cache keys.
        """

    def recurrent_specs(self) -> dict[str, StateSpec]:
        """Shape and dtype of each recurrent state, by its name in `RecurrentStates.tensors` of a
        new cache; empty if the model has none."""
        return {}

    @property
    def changing_rotary(self) -> str:
        """The type of the rotary embedding, if its frequencies (and so the keys) depend on the
        length of the text; empty if they do not."""
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
        """Rows of the token embedding; None if unknown."""
        return self.vocabulary

    @property
    def device(self) -> torch.device:
        """The device that token ids must be on."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def devices(self) -> list[torch.device]:
        """The device of each layer's keys and values."""
        return [self.device] * len(self.kinds)

    def end_tokens(self) -> set[int]:
        """The ids of the tokens that end an answer."""
        return set()

    @abstractmethod
    def fingerprint(self, tokenizer: Any = None, *, glance: bool = False) -> dict[str, str]:
        """Hashes and descriptions, by name, of everything that the model's keys and values depend
        on.

        Args:
            tokenizer: the model's tokenizer, to hash too.
            glance: allow to skip reading weights that appear unchanged.

        Raises:
            UnsupportedError: a weight cannot be read.
        """

    def as_transformers(self, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The weights in the names and layout of a model type of transformers, such as "llama", and
        the config fields that the model determines: at least every number that the weights' shapes
        do not show. `kvkeep.load` uses them to find whether a cache of a transformers model was
        made with this model. None if the layout or a field is not known."""
        return None

    # -- attention through a cache ----------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the model's attention runs on kvkeep's caches now."""
        return True

    def attach(
        self, spec: Specs = DEFAULT_SPEC, *, linears: bool = True, compile: bool | None = None
    ) -> AbstractContextManager[object]:
        """Route the model's attention through kvkeep's caches until the returned context manager
        exits or `detach` is called. The default does nothing, for models that are always attached.

        Args:
            linears: also route linear layers through `kvkeep.linears`.
            compile: run steps of one token in compiled programs; None: only in programs that an
                earlier process compiled.
        """
        return nullcontext()

    def warm(self, spec: Specs, sequences: int, progress: Progress = silent) -> None:
        """Do the work of the first steps of one token now, such as compilation. The default does
        nothing.

        Args:
            sequences: the most sequences in a step; several sequences are packed.
            progress: receives progress reports.

        Raises:
            UnsupportedError: the model cannot be compiled.
        """
        return None

    def detach(self) -> None:
        """Undo `attach`."""
        return None

    def new_cache(self, spec: Specs = DEFAULT_SPEC, *, capacity: int | None = None) -> ModelCache:
        """An empty cache for this model.

        Args:
            spec: the cache's spec.
            capacity: slots of fixed storage whose spec gives no number; None: the model's context.

        Raises:
            SpecError: a spec does not exist or does not fit the model.
        """
        capacity = self.context if capacity is None else capacity
        return ModelCache(
            self.kinds,
            spec,
            capacity=capacity,
            rotaries=self.rotaries,
            identity=partial(sampled, self.model),
        )

    @abstractmethod
    def forward(
        self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None, last: int = 1
    ) -> Tensor:
        """Feed a chunk to the model, through a cache.

        Args:
            ids: int64 (B, n), on the model's device.
            cache: a cache from `new_cache`. An activated adapter is active from
                `cache.activation.start` on.
            position: int64 (n,), ascending, for all rows; None: the next n positions. Only attached
                models accept other positions.
            last: number of last tokens to return logits for.

        Returns:
            Logits (B, last, V).
        """

    def read(self, ids: Tensor, cache: ModelCache, media: Mapping[str, Tensor]) -> Tensor:
        """Feed a prompt with images to an empty cache.

        Args:
            ids: int64 (1, n), on the model's device; the whole prompt, or all but its last tokens.
            media: further arguments of the model's forward for the whole prompt, as its processor
                makes them.

        Returns:
            Logits (1, 1, V), of the last token.

        Raises:
            UnsupportedError: the model reads text only.
        """
        raise UnsupportedError(f"{self.name} of {self.library} reads text only; leave out images")

    def feed(self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None) -> None:
        """`forward`, without logits."""
        self.forward(ids, cache, position=position)

    # -- several sequences in one forward ---------------------------------------------------

    @property
    def unpackable(self) -> str:
        """The reason why `forward_packed` does not work for this model now; empty if it works."""
        return f"kvkeep's host for {self.library} has no packed forwards"

    def forward_packed(self, pieces: Sequence[Piece]) -> Tensor:
        """Feed the next tokens of several sequences in one forward, without padding. A sequence's
        result equals that of a separate forward, up to rounding. If the forward fails, every
        cache that evicted nothing returns to its state before.

        Args:
            pieces: each sequence's next tokens, and its cache from `new_cache`, of one row.

        Returns:
            Logits (n, V) of the last `piece.last` tokens of each piece, in order.

        Raises:
            UnsupportedError: the model cannot compute them in one forward.
            ShapeError, StateError, CapacityError: see `kvkeep.host.packed`; nothing was fed.
        """
        raise UnsupportedError(
            f"{self.name} cannot compute several sequences in one forward: "
            f"{self.unpackable}; feed them one by one, or to a kvkeep.generate.Batch, which does so"
        )

    def feed_layers(self, ids: Tensor, position: Tensor, layers: Sequence[AttendingLayer]) -> None:
        """Run the decoder on a row of tokens, without logits; `layers[i].run` computes the
        attention of layer i.

        Args:
            ids, position: int64 (n,).

        Raises:
            UnsupportedError: the model does not attend once in each layer, at given positions.
        """
        raise UnsupportedError(
            f"kvkeep's host for {self.library} cannot give layers to a forward; implement "
            f"{type(self).__name__}.feed_layers"
        )

    # -- adapters ---------------------------------------------------------------------------

    def activation_in(self, prompt: Tensor) -> Activation | None:
        """The start of an activated adapter in a prompt, int64 (n,); None if there is none.

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
        """A context in which layers from `first` on compute only some of a forward's tokens. It
        affects forwards of this thread only.

        Args:
            tokens: number of tokens in the forward.
            chosen: returns the tokens to compute; called after the layers before `first` ran.
        """
        raise UnsupportedError(
            f"{self.name} of {self.library} cannot compute only some tokens in its later layers; "
            "use recompute='boundary:32' or 'all'"
        )

    # -- training --------------------------------------------------------------------------

    def layerwise(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Layerwise:
        """A context manager that runs the model layer by layer on a batch of texts.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 for padding; None: no padding.

        Raises:
            UnsupportedError: the model's layers cannot be run one by one.
        """
        raise UnsupportedError(
            f"kvkeep computes no gradients through a cache for {self.library}; implement "
            f"{type(self).__name__}.layerwise"
        )

    generate = Renamed("kvkeep.generate.stream")
    sees = Renamed("read, which raises UnsupportedError for a model that reads text only")
