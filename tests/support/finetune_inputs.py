"""A tokenizer of characters, and texts to learn, for tests of fine-tuning."""

from __future__ import annotations

import json

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support import tiny_models

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Me."},
]


def tokenizer(template=TEMPLATE):
    """One token a character, of those that are printed, and a newline."""
    characters = ["<s>", "<e>", "\n", *map(chr, range(32, 127))]
    fast = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=" "))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("<s>|<e>|[\\s\\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        additional_special_tokens=["<s>", "<e>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def model(family="llama", **overrides):
    """One that holds its tokens."""
    return tiny_models.tiny(
        family, **{"vocab_size": 98, "max_position_embeddings": 256} | overrides
    )


def write(path, *documents):
    """A file with a line for each document: text, messages, or a line as it is, in bytes."""
    with path.open("wb") as file:
        for given in documents:
            if isinstance(given, bytes):
                file.write(given + b"\n")
            else:
                name = "text" if isinstance(given, str) else "messages"
                file.write(json.dumps({name: given}).encode() + b"\n")
    return path


def texts(count=6):
    """Some documents of 30 to 80 characters, and a conversation."""
    return [CHAT, *(f"{n} and {n + 1} make {2 * n + 1}. " * (2 + n % 3) for n in range(1, count))]
