"""The old place of `kvkeep.generate.answer`."""

from kvkeep.generate.answer import Prompt as Prompt
