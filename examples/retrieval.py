# %% [markdown]
# # Retrieval: each document is computed once
#
# A program that answers questions about documents puts the ones that fit a question before it. The
# same documents come back for other questions, in another order, so prompts share hardly any
# beginning. With blocks, each document is computed once, by itself, and reused wherever it stands
# in a prompt.
#
# As a program: `python examples/retrieval.py`.

# %%
from __future__ import annotations

import math
import re
import time
from collections import Counter
from pydoc_data.topics import topics

import kvkeep
from kvkeep.blocks import Block, Chat
from kvkeep.hf.models import load

# %% [markdown]
# ## Documents
#
# The documents are Python's own help pages. A question gets the three that share the most rare
# words with it. Any other search does as well: blocks do not depend on how a document was found.

# %%
FETCHED = 3


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"[a-z]{3,}", text.lower()))


documents = {name: text for name, text in topics.items() if 300 < len(text) < 3000}
counted = {name: words(text) for name, text in documents.items()}
rarity = {
    word: math.log(len(counted) / sum(word in found for found in counted.values()))
    for word in set().union(*counted.values())
}


def nearest(question: str) -> list[str]:
    """Names of the documents that share the most rare words with a question."""
    asked = words(question)

    def score(name: str) -> float:
        found = counted[name]
        shared = (rarity.get(w, 0.0) * found[w] / sum(found.values()) for w in asked)
        return sum(shared)

    return sorted(documents, key=score, reverse=True)[:FETCHED]


nearest("What does the pass statement do?")

# %% [markdown]
# ## A model and a store
#
# The store holds what was computed, up to its budget in bytes. A document that was computed by
# itself has not seen what stands before it. `recompute=0.15` computes 15 % of each prompt's tokens
# again, those that differ most.

# %%
model, tokenizer = load("smollm2-135m")
store = kvkeep.PrefixStore(budget=2**30)
kvkeep.attach(model, store=store, recompute=0.15)

# %% [markdown]
# ## Questions
#
# `Block` marks a document; all other text is computed anew in each prompt. `generate()` takes the
# encoded chat in place of token ids, and fills in its report: how many tokens of the prompt were
# found, and how many were computed again. Nothing is found for the first question. The others find
# the documents that an earlier one had.

# %%
QUESTIONS = (
    "What does the pass statement do?",
    "What does the break statement do in a loop?",
    "What is the difference between break and continue?",
)

for question in QUESTIONS:
    content = ["Answer from these pages of Python's manual.\n\n"]
    for name in nearest(question):
        content += [Block(documents[name]), "\n\n"]
    encoded = Chat([{"role": "user", "content": [*content, question]}]).encode(tokenizer)
    start = time.perf_counter()
    output = model.generate(encoded, max_new_tokens=24, do_sample=False)
    took = time.perf_counter() - start
    answer = tokenizer.decode(output[0, encoded.input_ids.shape[1] :], skip_special_tokens=True)
    report = encoded.report
    print(f"> {question} {nearest(question)}\n{answer}")
    print(
        f"[{report.cached} of {report.tokens} tokens found, {report.repaired} recomputed, "
        f"{took:.2f} s]\n"
    )

# %% [markdown]
# The answers can differ from those of the whole prompts. [Blocks](../docs/blocks.md) says by how
# much, how that is estimated for each prompt, and what `recompute` costs.
