"""What a policy keeps of a prompt that is fed in chunks, beside what it keeps token by token; and
what `step=` costs.

    python benchmarks/steps.py [--context 700] [--chunks 8,64,512] [--steps 1] [--dtype float32]
        [--specs "h2o:256;tova:256"]
    python benchmarks/steps.py --turns 5 --steps 64,32,8,1 [--threads 1] [...]

Prints a Markdown table with a row for each spec: for each size of chunks, the share of the
positions kept token by token that are kept so too, over all layers and heads; without `step=`, and
for the largest chunks with each step. With `--turns`, what the prompt costs in the largest chunks
with each step, as a multiple of what it costs without one: the median ratio of turns, in which each
step comes once, of the process's CPU time, which is little disturbed by other work. The model is
SmolLM2-135M, the text that of `kvkeep inspect --context`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from kvkeep_lab.bench.timing import interleaved, median_ratio
from kvkeep_lab.evals.forward import fill
from kvkeep_lab.evals.kept_positions import Kept, kept, prompt_ids
from torch import Tensor

from kvkeep.hf.models import load
from kvkeep.host import host_of
from kvkeep.spec import CacheSpec

SPECS = ("h2o:256,recent=32", "tova:256", "snapkv:256", "keydiff:256", "knorm:256")


def stepped(spec: str, step: int) -> str:
    """The spec, with a step for its policy."""
    at = spec.index(")") if ")" in spec else (f"{spec}+").index("+")
    return f"{spec[:at]},step={step}{spec[at:]}"


def shared(found: Kept, wanted: Kept) -> float:
    """The share of the wanted positions that were found."""
    pairs = [
        (set(head), other)
        for layers in zip(found, wanted, strict=True)
        for head, other in zip(*layers, strict=True)
    ]
    return sum(len(a.intersection(b)) for a, b in pairs) / sum(len(b) for _, b in pairs)


class Prompt:
    """Feeds a prompt to an attached model."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._host, self._ids = host_of(model), ids

    def call(self, spec: str, chunk: int) -> Callable[[], Any]:
        """A call that feeds the prompt in chunks and returns the cache."""

        def feed() -> Any:
            cache = self._host.new_cache(spec)
            with torch.inference_mode():
                fill(self._host, cache, self._ids, chunk)
            return cache

        return feed

    def kept(self, spec: str, chunk: int) -> Kept:
        """The positions kept by layer and head."""
        return kept(self.call(spec, chunk)())


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=700)
    parser.add_argument("--chunks", type=numbers, default=[8, 64, 512])
    parser.add_argument("--steps", type=numbers, default=[1])
    parser.add_argument("--specs", default=";".join(SPECS))
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    specs, steps, largest = options.specs.split(";"), options.steps, max(options.chunks)
    for spec in specs:
        CacheSpec.parse(stepped(spec, 1))
    torch.set_num_threads(options.threads)
    model, tokenizer = load("smollm2-135m", options.dtype)
    ids = prompt_ids(model, tokenizer, "", options.context)
    heads = [f"{largest}, `step={n}`" for n in steps]
    if not options.turns:
        heads = [f"chunks of {n}" for n in options.chunks] + heads
    say(f"| policy | {' | '.join(heads)} |")
    say("|---" * (len(heads) + 1) + "|")
    with host_of(model).attach():
        prompt = Prompt(model, ids)
        for spec in specs:
            if options.turns:
                calls = {n: prompt.call(stepped(spec, n), largest) for n in steps}
                calls[0] = prompt.call(spec, largest)
                seconds = interleaved(calls, turns=options.turns, burst=1, timer=cpu_seconds)
                cells = [f"{median_ratio(seconds[n], seconds[0]):.2f}" for n in steps]
            else:
                wanted = prompt.kept(spec, 1)
                found = [prompt.kept(spec, n) for n in options.chunks]
                found += [prompt.kept(stepped(spec, n), largest) for n in steps]
                cells = [f"{shared(x, wanted):.4f}" for x in found]
            say(f"| `{spec}` | {' | '.join(cells)} |")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
