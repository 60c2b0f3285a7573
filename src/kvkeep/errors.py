"""The exception hierarchy. Every message gives the value, the limit and a remedy."""

from __future__ import annotations


class KVKeepError(Exception):
    """Base class of every error kvkeep raises on purpose."""


class ShapeError(KVKeepError, ValueError):
    """A tensor's shape, dtype, device or values do not fit the cache, or a number is not valid for
    the call."""


class CapacityError(KVKeepError, ValueError):
    """A cache with a fixed number of slots has no room for the new tokens."""


class OutOfMemoryError(CapacityError, MemoryError):
    """A device or the host has too little memory for the slots requested; the contents of the cache
    are unchanged."""


class RollbackError(KVKeepError, ValueError):
    """A crop would remove more tokens than the cache can undo exactly."""


class SpecError(KVKeepError, ValueError):
    """A cache spec, as text or as objects, names something that does not exist or cannot work."""


class ArgumentError(KVKeepError, TypeError):
    """A function has no argument of this name."""


class StateError(KVKeepError, RuntimeError):
    """The call is not possible in the current state of the object."""


class SavedCacheError(KVKeepError, ValueError):
    """A file cannot be written, or is not a complete saved cache of this model."""


class UnsupportedError(KVKeepError, NotImplementedError):
    """A model, mask or attention feature that kvkeep does not support."""


class MissingPackageError(UnsupportedError, ImportError):
    """A feature needs packages that are not installed; the message names the extra to install."""


class ModelError(KVKeepError):
    """A model, or the dtype or device to load it with, does not exist; or the model could not be
    fetched or loaded."""


class PrecisionWarning(UserWarning):
    """A codec loses too much precision with some models; issued once per process."""


class LossError(KVKeepError, ArithmeticError):
    """A training loss that is not finite."""


def reason_of(error: BaseException) -> str:
    """The text of another library's exception, for use in a message: one line of at most 300
    characters without the final full stop; for an empty text, the class's name."""
    return " ".join(str(error).split())[:300].rstrip(". ") or type(error).__name__
