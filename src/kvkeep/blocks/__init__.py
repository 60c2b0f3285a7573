"""KV blocks: texts that are computed once, each by itself, and reused anywhere in a prompt."""

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
