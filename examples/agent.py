"""An agent with tools: their descriptions and results are computed once.

    python examples/agent.py

A small model does not write reliable tool calls. So the agent calls the tool whose name gains the
most probability from the question, and lets the model answer from the tool's result. All names are
tried on forks of one cache, which share the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import kvkeep
from kvkeep.blocks import Block, Chat
from kvkeep.hf.models import load

LOG = {
    "Monday": "Wind from the west, force 4. Two ships passed before noon, both colliers.",
    "Tuesday": "Fog from five in the morning. The bell was rung for eleven hours. No ship passed.",
}


def tides(_: str) -> str:
    """The times of the next high and low tides at the lighthouse, from the almanac."""
    return "High water at 05:12 and 17:40, low water at 11:25 and 23:50. The range is 4.1 metres."


def ships(question: str) -> str:
    """The ships that passed on a day, and its weather, from the keeper's log."""
    return next(
        (text for day, text in LOG.items() if day.lower() in question.lower()), LOG["Monday"]
    )


def repairs(_: str) -> str:
    """What was broken and mended at the tower, the lamp and the boat, with dates and costs."""
    return "The lamp's third lens was replaced in March for 40 pounds. The boat has a new rudder."


TOOLS: dict[str, Callable[[str], str]] = {tool.__name__: tool for tool in (tides, ships, repairs)}
QUESTIONS = ("When is the next high tide?", "Which ships passed on Monday?")


NEUTRAL = "Tell me something."


def main() -> None:
    model, tokenizer = load("smollm2-135m")
    store = kvkeep.PrefixStore(budget=2**30)
    kvkeep.attach(model, store=store)
    described = "\n".join(f"{name}: {tool.__doc__}" for name, tool in TOOLS.items())
    system = {"role": "system", "content": ["You keep a lighthouse. Tools:\n", Block(described)]}

    def likelihoods(question: str) -> dict[str, float]:
        """The log-likelihood of each tool's name as the answer to which tool to use."""
        asked = {"role": "user", "content": f"{question}\nWhich tool knows?"}
        begun = {"role": "assistant", "content": "The tool is:"}
        prompt = Chat([system, asked, begun], continue_final_message=True).encode(tokenizer)
        cache, _ = prompt.prefill(model, store=store)
        frozen = cache.freeze()
        found = {}
        for name in TOOLS:
            said = tokenizer(f" {name}", return_tensors="pt").input_ids
            fed = torch.cat([prompt.input_ids[:, -1:], said[:, :-1]], dim=1)
            with torch.inference_mode():
                logits = model(fed, cache=frozen.fork()).logits[0].log_softmax(dim=-1)
            found[name] = float(logits.gather(1, said[0][:, None]).sum())
        return found

    neutral = likelihoods(NEUTRAL)
    for question in QUESTIONS:
        likely = likelihoods(question)
        name = max(TOOLS, key=lambda name: likely[name] - neutral[name])
        messages = [
            system,
            {"role": "user", "content": question},
            {"role": "tool", "content": ["The tool says: ", Block(TOOLS[name](question))]},
            {"role": "user", "content": f"{question} Answer from what the tool says."},
        ]
        encoded = Chat(messages).encode(tokenizer)
        output = model.generate(encoded, max_new_tokens=40, do_sample=False)
        answer = tokenizer.decode(output[0, encoded.input_ids.shape[1] :], skip_special_tokens=True)
        report = encoded.report
        print(f"> {question}\n[{name}] {answer}")
        print(f"[{report.cached} of {report.tokens} tokens found]\n")


if __name__ == "__main__":
    main()
