"""KV blocks: texts that are computed once, each by itself, and reused at any place in a prompt.

A prompt with blocks is rendered and tokenised once, as a whole, so its tokens are the plain
prompt's. In a chat, random marks stand around the blocks while the template renders; without the
marks the text must equal the plain rendering, or the block is refused. Tokens outside blocks are
computed in one forward, at their positions. Tokens of blocks that are computed again belong to
that forward; the slots that they replace are hidden, because runs are shared. The tokens that
differ most are found in the second layer, whose inputs are exact for every token. Joined texts
are marked in a layer's history, in forks, snapshots and files, and no store takes them as read
texts.
"""

from kvkeep.blocks.join import join
from kvkeep.blocks.parts import Block, Component, Part, Text
from kvkeep.blocks.prefill import prefill
from kvkeep.blocks.prompt import BlockReport, Chat, Encoded, Prefilled, Prompt, Report

__all__ = [
    "Block",
    "BlockReport",
    "Chat",
    "Component",
    "Encoded",
    "Part",
    "Prefilled",
    "Prompt",
    "Report",
    "Text",
    "join",
    "prefill",
]
