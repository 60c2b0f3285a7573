"""Questions about documents. Each document's keys and values are computed once for all questions.

    python examples/retrieval.py

The documents are Python's help pages. Each question follows the documents that share the most rare
words with it, so documents appear in different orders.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from pydoc_data.topics import topics

import kvkeep
from kvkeep.blocks import Block, Chat
from kvkeep.hf.models import load

QUESTIONS = (
    "What does the pass statement do?",
    "What does the break statement do in a loop?",
    "What is the difference between break and continue?",
)


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"[a-z]{3,}", text.lower()))


def main(fetched: int = 3) -> None:
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

        return sorted(documents, key=score, reverse=True)[:fetched]

    model, tokenizer = load("smollm2-135m")
    store = kvkeep.PrefixStore(budget=2**30)
    kvkeep.attach(model, store=store, recompute=0.15)
    for question in QUESTIONS:
        content = ["Answer from these pages of Python's manual.\n\n"]
        for name in nearest(question):
            content += [Block(documents[name]), "\n\n"]
        messages = [{"role": "user", "content": [*content, question]}]
        encoded = Chat(messages).encode(tokenizer)
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


if __name__ == "__main__":
    main()
