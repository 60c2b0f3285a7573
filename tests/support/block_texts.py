"""Texts of a few words, and tiny models that read them with the demo model's tokenizer."""

from __future__ import annotations

import torch

from support.tiny_models import tiny

WORDS = ["lamp", "tower", "bell", "storm", "harbour", "keeper", "ship", "night", "green", "stone"]
VOCABULARY = 49152


def text(seed, words=40):
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(WORDS), (words,), generator=draw).tolist()
    return " ".join(WORDS[index] for index in chosen) + "."


def model_of(family="llama", **more):
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "num_hidden_layers": 3}
    model = tiny(family, **options | more).eval()
    model.set_attn_implementation("eager")
    return model
