"""An activated LoRA adapter (aLoRA) that reuses the base model's cache: train, save, load, use.

    python examples/alora.py [DIRECTORY]

The adapter names the thing a message is about. It is active only from its invocation tokens on, so
the base model computes everything before them, and the adapter, like any other, reuses those keys
and values. Training takes half a minute on one core.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DynamicCache

import kvkeep
from kvkeep.hf.models import load

INVOCATION = "<|im_start|>topic\n"
WORDS = (
    "cat dog horse cow rabbit tiger eagle whale snake frog table car lamp book house guitar "
    "mountain bridge bottle computer shoe window train violin"
).split()
SENTENCES = (
    "I saw a {} near the river.",
    "My neighbour bought a {} last week.",
    "There was a {} in the picture.",
    "She drew a {} on the wall.",
    "We talked about the {} for an hour.",
)
NEW_WORDS = "elephant pig duck wolf monkey piano umbrella truck chair ladder clock pencil".split()
NEW_SENTENCES = (
    "Yesterday the children looked at a {} in the park.",
    "Tell me a story about a {} and the old town.",
)


def message(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def train(directory: str | Path, seed: int = 0, steps: int = 14, batch: int = 8) -> None:
    """Train an adapter on SmolLM2 and save it. The base model computes the tokens before the
    invocation once; each step feeds only the rest."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model, tokenizer = load("smollm2-135m", "float32")
    tokenizer.padding_side = "left"
    invocation = tokenizer(INVOCATION).input_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj"],
        alora_invocation_tokens=invocation,
    )
    tuned: Any = get_peft_model(model, config)
    texts = draw.sample([(s.format(word), word) for s in SENTENCES for word in WORDS], 48)
    before = tokenizer([message(text) for text, _ in texts], return_tensors="pt", padding=True)
    with torch.no_grad(), tuned.disable_adapter():
        read = model.model(**before, past_key_values=DynamicCache()).past_key_values
    said = [[*tokenizer(word).input_ids, end] for _, word in texts]
    longest = max(map(len, said))
    tails = torch.tensor([invocation + x + [end] * (longest - len(x)) for x in said])
    labels = torch.tensor([x + [-100] * (longest - len(x)) for x in said])
    weights = [x for x in tuned.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 5) * (1 - step / steps)
    )
    order = [index for _ in range(3) for index in draw.sample(range(len(texts)), len(texts))]
    for step in range(steps):
        rows = torch.tensor(order[step * batch :][:batch])
        cache = DynamicCache()
        for index, layer in enumerate(read.layers):
            cache.update(layer.keys[rows], layer.values[rows], index)
        fed = tails[rows, :-1]
        mask = torch.cat([before.attention_mask[rows], torch.ones_like(fed)], dim=1)
        place = (mask.cumsum(dim=1) - 1)[:, -fed.shape[1] :]
        logits = tuned(
            input_ids=fed,
            attention_mask=mask,
            position_ids=place,
            past_key_values=cache,
            logits_to_keep=longest,
        ).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    tuned.save_pretrained(directory)


def main(directory: str | None = None) -> None:
    with TemporaryDirectory() as own:
        folder = Path(directory or own)
        if not (folder / "adapter_config.json").exists():
            train(folder)
        model, tokenizer = load("smollm2-135m", "float32")
        tuned: Any = PeftModel.from_pretrained(model, folder).eval()
        store = kvkeep.PrefixStore(budget=2**30)
        kvkeep.attach(tuned, store=store)
        right = 0
        for word in NEW_WORDS[:4]:
            text = message(NEW_SENTENCES[1].format(word))
            for invoked in ("<|im_start|>assistant\n", INVOCATION):
                ids = tokenizer(text + invoked, return_tensors="pt").input_ids
                before = store.stats().hit_tokens
                output = tuned.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
                answer = tokenizer.decode(output[0, ids.shape[1] :])
                found = store.stats().hit_tokens - before
                print(f"{text}{invoked}{answer}\n[{found} of {ids.shape[1]} tokens found]\n")
            right += answer.startswith(f"{word}<|im_end|>")
        print(f"{right} of 4 right")


if __name__ == "__main__":
    main(*sys.argv[1:2])
