"""Text generation for all hosts: sampling, batches, and streams of one answer."""

from kvkeep.generate.answer import Answer, Likely
from kvkeep.generate.batch import Batch, NewToken
from kvkeep.generate.many import generate_many
from kvkeep.generate.one import stream
from kvkeep.generate.reuse import Reuse, WithMedia
from kvkeep.generate.sampling import Processor, SamplingParams, sample
from kvkeep.generate.text import TextStream, TokenTexts

__all__ = [
    "Answer",
    "Batch",
    "Likely",
    "NewToken",
    "Processor",
    "Reuse",
    "SamplingParams",
    "TextStream",
    "TokenTexts",
    "WithMedia",
    "generate_many",
    "sample",
    "stream",
]
