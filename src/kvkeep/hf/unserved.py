"""The error for an attached model that ran without the cache that kvkeep supplied."""

from __future__ import annotations

import transformers
from torch import nn

from kvkeep.errors import UnsupportedError
from kvkeep.version import TESTED


def not_served(model: nn.Module, seen: str) -> UnsupportedError:
    """The error for a step of an attached model that did not use kvkeep's cache.

    Args:
        seen: what was found instead, as a clause.
    """
    return UnsupportedError(
        f"{type(model).__name__} is attached, but this step did not run through kvkeep's cache: "
        f"{seen}. A class that overrides methods of transformers, a patch by another library, or "
        f"transformers {transformers.__version__} may be the reason; kvkeep was tested with "
        f"{TESTED['transformers']}. Call kvkeep.detach(model) to run the model without kvkeep"
    )
