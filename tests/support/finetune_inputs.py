"""A tokenizer of characters, and texts to learn, for tests of fine-tuning."""

from __future__ import annotations

import json

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

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
    """One that holds its tokens; of one layer, if its family has one type of them."""
    sizes = {"vocab_size": 98, "max_position_embeddings": 256}
    sizes |= {"num_hidden_layers": 1} if family == "llama" else {}
    return tiny_models.tiny(family, **sizes | overrides)


def classifier(labels=("down", "up"), **overrides):
    """A model with a head for classes."""
    config = model(**overrides).config
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: index for index, name in enumerate(labels)}
    config.pad_token_id = 2  # a newline
    torch.manual_seed(5)
    return AutoModelForSequenceClassification.from_config(config).eval()


def labelled(count=12):
    """Lines of texts that rise or fall, with their labels."""
    texts = [" ".join(map(str, range(n, n + 6 + n % 5))) for n in range(1, count + 1)]
    lines = []
    for n, text in enumerate(texts):
        label = "up" if n % 2 else "down"
        given = text if n % 2 else text[::-1]
        lines.append(
            json.dumps({"text": f"{label[0]} {given} {label[0]}", "label": label}).encode()
        )
    return lines


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
