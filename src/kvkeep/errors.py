"""The exception tree. Every message gives the value, the limit and the remedy."""

from __future__ import annotations


class KVKeepError(Exception):
    """Base class of every error kvkeep raises on purpose."""


class ShapeError(KVKeepError, ValueError):
    """A tensor's shape, dtype or device does not fit the cache it was given to."""


class CapacityError(KVKeepError, ValueError):
    """A cache with a fixed number of slots cannot take the tokens it was given."""


class OutOfMemoryError(CapacityError, MemoryError):
    """A device, or the host, has no room for the slots that were asked for; what the cache held is
    as it was."""


class RollbackError(KVKeepError, ValueError):
    """More tokens were to be taken back than the cache can restore exactly."""


class SpecError(KVKeepError, ValueError):
    """A cache spec, as text or as objects, names something that does not exist or cannot work."""


class StateError(KVKeepError, RuntimeError):
    """The call does not fit what happened before it."""


class SavedCacheError(KVKeepError, ValueError):
    """A file that cannot be written, or is not a whole saved cache of this model."""


class UnsupportedError(KVKeepError, NotImplementedError):
    """A model, mask or attention feature that kvkeep refuses, with the reason."""


class MissingPackageError(UnsupportedError, ImportError):
    """A feature whose packages are not installed; the message names the extra that brings them."""


class PrecisionWarning(UserWarning):
    """A codec that some models do not bear; it is given once in a process."""


class LossError(KVKeepError, ArithmeticError):
    """A training loss that is not finite."""
