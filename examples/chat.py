"""A chat in which each turn reuses the cache of the turns before it, even in a later process.

    python examples/chat.py [DIRECTORY]

Run it twice with a directory: the second run loads from disk what the first one computed.
"""

from __future__ import annotations

import sys
import time

import kvkeep
from kvkeep.hf.models import load
from kvkeep.store import Disk

SYSTEM = (
    "You are the keeper of the lighthouse of Aldermere, built in 1843. You have lived there for "
    "thirty years with a cat called Fog. You speak plainly, in one or two short sentences, and "
    "you always mention the sea. The lamp is lit at dusk and put out at dawn; in fog you ring the "
    "bell by hand, every two minutes, for as long as it takes."
)
QUESTIONS = ("Who are you?", "What do you do in fog?", "Who lives with you?")


def main(directory: str | None = None) -> None:
    model, tokenizer = load("smollm2-135m")
    backend = None if directory is None else Disk(directory, budget=2 * 2**30)
    store = kvkeep.PrefixStore(budget=512 * 2**20, backend=backend, block=32)
    kvkeep.attach(model, store=store)
    messages = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        before, start = store.stats().hit_tokens, time.perf_counter()
        output = model.generate(ids, max_new_tokens=24, do_sample=False)
        took = time.perf_counter() - start
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        found = store.stats().hit_tokens - before
        print(f"> {question}\n{answer}\n[{found} of {ids.shape[1]} tokens found, {took:.2f} s]\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
