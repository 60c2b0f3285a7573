"""KV blocks: texts that are computed once, each by itself, and reused at any place in a prompt.

A prompt with blocks is rendered and tokenised once, as a whole, so its tokens equal the plain
prompt's. In a chat, blocks are surrounded by random marks while the template renders; without the
marks the text must equal the plain rendering, or the block is refused. Tokens outside blocks are
computed in one forward, at their positions. Tokens of blocks that are recomputed are part of that
forward; the slots that they replace are hidden, because other caches may share the runs. The tokens
that differ most are found in the second layer, where all candidates have been recomputed. Histories
record that texts were joined, also in forks, snapshots and files, and no store takes joined texts
as read texts.
"""

from kvkeep.blocks.join import join
from kvkeep.blocks.parts import Block
from kvkeep.blocks.parts import Component as Component
from kvkeep.blocks.parts import Part as Part
from kvkeep.blocks.parts import Text as Text
from kvkeep.blocks.prefill import prefill
from kvkeep.blocks.prompt import BlockReport as BlockReport
from kvkeep.blocks.prompt import Chat, Encoded, Prompt, Report
from kvkeep.blocks.prompt import Prefilled as Prefilled

__all__ = [
    "Block",
    "Chat",
    "Encoded",
    "Prompt",
    "Report",
    "join",
    "prefill",
]
