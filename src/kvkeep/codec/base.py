"""The contract of a codec: how keys or values are encoded, as pure functions on planes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.context import within
from kvkeep.errors import PrecisionWarning, SpecError
from kvkeep.packing import KernelLayout
from kvkeep.planes import Planes, PlaneSpec
from kvkeep.renamed import Renamed, require_new_names


@dataclass(frozen=True)
class Codec(ABC):
    """A stateless encoding. The dataclass fields are the options of its spec.

    Names of planes lack the prefix `k` or `v` here: "" is the main plane; another may be "_scale".
    """

    name: ClassVar[str]
    differentiable: ClassVar[bool] = False
    """Whether gradients flow through encoding and decoding."""
    of_keys: ClassVar[bool] = False
    """Whether values are elements of their keys: they have no planes, and are decoded from the
    planes of the keys."""

    def __init_subclass__(cls) -> None:
        require_new_names(cls)

    @property
    def block(self) -> int:
        """Number of tokens that are encoded together in one slot, whose planes then have a token
        axis. 1: each slot holds one token."""
        return 1

    @property
    def tail(self) -> int:
        """The least number of newest tokens that are kept plain."""
        return 0

    @property
    def sinks(self) -> int:
        """Number of each row's first tokens that are kept plain."""
        return 0

    @property
    def centre(self) -> int:
        """Number of a layer's first tokens on which the centre is measured: the mean key that is
        subtracted from all keys before they are encoded. 0: no centre. See
        `kvkeep.attention.centre`."""
        return 0

    @cached_property
    def layout(self) -> KernelLayout | None:
        """The memory layout, for kernels that read the planes directly; None: no kernel can read
        them, so they are decoded first."""
        return None

    @property
    def rewritable(self) -> bool:
        """Whether the slot of one token can be overwritten without changing other tokens."""
        return self.block == 1

    caution = Renamed("key_warning")

    @property
    def key_warning(self) -> str | None:
        """A warning against this codec for keys, with an alternative; None: no warning."""
        return None

    @abstractmethod
    def planes(self, dim: int, dtype: torch.dtype) -> dict[str, PlaneSpec]:
        """The planes of one slot, for a tensor of width `dim` and type `dtype`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Planes:
        """Encode x (B, H, n, D), where n is a multiple of `block`; the result may be views of x."""

    def encode_into(self, x: Tensor, planes: Planes, prefix: str) -> None:
        """Encode x (B, H, n, D) into planes of n slots; names of planes begin with `prefix`."""
        for name, plane in self.encode(x).items():
            planes[prefix + name].copy_(plane)

    @abstractmethod
    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        """Decode to (B, H, S, D) in `dtype`; the result may be a view of the planes."""

    def width(self, planes: Planes) -> int:
        """The width D of the tensor that is encoded in `planes`."""
        return planes[""].shape[-1]

    def for_values(self) -> Codec:
        """The codec to use for values, if values are encoded differently from keys."""
        return self

    def for_latents(self) -> Codec:
        """The codec for keys whose first elements are the values: it must not rotate."""
        return self.for_values()

    def with_tail(self, recent: int, sinks: int) -> Codec:
        """The codec with at most `recent` newest and `sinks` first tokens plain. A codec with a
        `tail` or `sinks` that encodes single tokens must override it.

        Raises:
            SpecError: the codec keeps more tokens plain, and does not override this method.
        """
        if self.block == 1 and (self.tail > recent or self.sinks > sinks):
            raise SpecError(
                f"codec {self.name} keeps the newest {self.tail} and the first {self.sinks} tokens "
                f"plain, but a policy that sees few tokens allows only {recent} and {sinks}; "
                "override Codec.with_tail in its class, so that it returns a codec with fewer"
            )
        return self

    def waiting(self, plain: Codec) -> Codec:
        """The codec of tokens that are not encoded yet; `plain`: the plain codec."""
        return plain

    def rotate(self, q: Tensor) -> Tensor:
        """Rotate queries (..., D) for encoded keys: if keys are encoded as R k with an orthonormal
        R, then q . k = R q . R k. Also rotates back a sum of encoded values, since R is its own
        inverse. The result is q itself, or in at least float32."""
        return q


def encoded_count(tokens: int, *codecs: Codec, budget: int | None = None) -> int:
    """Number of `tokens` tokens that codecs with equal `block` encode; the rest stays plain."""
    block = codecs[0].block
    return max(0, tokens - plain_count(*codecs, budget=budget)) // block * block


def keeps_plain(key: Codec, value: Codec) -> bool:
    """Whether these codecs keep tokens plain for a while: the tokens of an incomplete block; or the
    newest and the first tokens, if both codecs do so."""
    return key.block > 1 or all(codec.tail or codec.sinks for codec in (key, value))


def plain_count(*codecs: Codec, budget: int | None = None) -> int:
    """Number of tokens that these codecs keep plain, not counting tokens of an incomplete block; at
    most half of a budget."""
    count = max(codec.tail for codec in codecs) + max(codec.sinks for codec in codecs)
    return count if budget is None else min(count, budget // 2)


_WARNS: ContextVar[bool] = ContextVar("warns", default=True)


def warn_about_keys(codec: Codec) -> None:
    """Issue the PrecisionWarning of a codec that is used for keys, if it has one."""
    if codec.key_warning is not None and _WARNS.get():
        _warn_once(codec.key_warning)


def without_warnings() -> AbstractContextManager[None]:
    """Within this context, codecs issue no PrecisionWarning, because nobody chose them."""
    return within(_WARNS, False)


@cache  # once per process, not once per layer
def _warn_once(text: str) -> None:
    warnings.warn(text, PrecisionWarning, stacklevel=4)
