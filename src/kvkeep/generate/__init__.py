"""Text generation for all hosts: sampling, batches, and streams of one answer."""

from kvkeep.generate.answer import Answer
from kvkeep.generate.answer import Likely as Likely
from kvkeep.generate.batch import Batch, NewToken
from kvkeep.generate.many import generate_many
from kvkeep.generate.one import stream
from kvkeep.generate.reuse import Reuse
from kvkeep.generate.reuse import WithMedia as WithMedia
from kvkeep.generate.sampling import Processor as Processor
from kvkeep.generate.sampling import SamplingParams
from kvkeep.generate.sampling import sample as sample
from kvkeep.generate.text import TextStream
from kvkeep.generate.text import TokenTexts as TokenTexts

__all__ = [
    "Answer",
    "Batch",
    "NewToken",
    "Reuse",
    "SamplingParams",
    "TextStream",
    "generate_many",
    "stream",
]
