"""Many sequences of one model at once: each joins and leaves between steps."""

from kvkeep.batch.answer import Answer, Likely, Settings
from kvkeep.batch.batch import Batch, NewToken
from kvkeep.batch.many import generate_many
from kvkeep.batch.reuse import Reuse
from kvkeep.host import Sampling

__all__ = [
    "Answer",
    "Batch",
    "Likely",
    "NewToken",
    "Reuse",
    "Sampling",
    "Settings",
    "generate_many",
]
