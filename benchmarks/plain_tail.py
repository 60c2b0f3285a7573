"""KL of codecs and policies whose newest tokens are plain, at several places of a text.

    python benchmarks/plain_tail.py > tail.jsonl
    python benchmarks/plain_tail.py --figures tail.jsonl

With `--rows` several places are rows of one cache, which takes less time; where heads differ in
length, a row then holds empty slots. Prints a line of JSON for each place and spec: `kl`, of each
token in nats, and `bytes` after the context.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from kvkeep_lab.bench.text import windows_of_text
from kvkeep_lab.evals.forward import fill, follow, reads_exactly
from kvkeep_lab.evals.intervals import of_mean

from kvkeep.host import host_of, load_model
from kvkeep.host.compress import compress, compresses
from kvkeep.store.beginning import begin, settle

SPECS = [
    *("keep_all+int4:recent=4000", "keep_all+int4", "keep_all+int4/int3", "keep_all+int3"),
    *("keep_all+int3/int2", "keep_all+kivi"),
    *("h2o:25%", "h2o:25%+int4", "kvzip:25%", "kvzip:25%+int4"),
]
"""With `recent=4000` all tokens are plain: the rounding of the model's dtype alone."""


def after_context(host, spec, ids, full, chunk):
    """A cache of `spec` that holds a context (B, n), and the logits (B, V) after it: of the cache
    `full`, which has read it in one chunk, or read again, if the policy observes it or in chunks.
    """
    cache = host.new_cache(spec, capacity=ids.shape[1])
    if chunk is None and full is not None and reads_exactly(cache):
        begin(cache, full[0])
        settle(cache)
        last = full[1]
    else:
        last = fill(host, cache, ids, chunk)
    if compresses(cache):
        compress(host, cache, ids)
    return cache, last


def log_probabilities(host, cache, last, ids):
    """Of each token of `ids` (B, n), fed one at a time: (B, n, V)."""
    found = list(follow(host, cache, last, ids))
    return torch.stack(found, dim=1).float().log_softmax(-1)


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@torch.inference_mode()
def measure(args):
    model, tokenizer = load_model(args.model, args.dtype)
    host = host_of(model)
    texts = windows_of_text(tokenizer, args.places, args.context + args.tokens)
    with host.attach("keep_all"):
        places = args.only or list(range(args.places))
        for first in range(0, len(places), args.rows):
            some = places[first : first + args.rows]
            past, new = texts[some].split([args.context, args.tokens], dim=1)
            full = after_context(host, "keep_all", past, None, None)
            expected = log_probabilities(host, *full, new)
            if args.chunk is None:  # sliding windows cannot be cropped so far
                full[0].crop(1 - args.tokens)
            for spec in args.specs:
                cache, last = after_context(host, spec, past, full, args.chunk)
                held = cache.live_bytes // len(some)
                found = log_probabilities(host, cache, last, new)
                kl = (expected.exp() * (expected - found)).sum(dim=-1, dtype=torch.float64)
                for place, own in zip(some, kl.tolist(), strict=True):
                    row = {"spec": spec, "place": place, "chunk": args.chunk, "bytes": held}
                    say(json.dumps(row | {"kl": [round(x, 6) for x in own]}))


def figures(files):
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rows = {(row["spec"], row["place"]): row for row in found}.values()
    for spec in dict.fromkeys(row["spec"] for row in rows):
        own = [row for row in rows if row["spec"] == spec]
        kl = torch.tensor([row["kl"] for row in own])
        low, high = of_mean(kl) if kl.shape[1] > 1 else (0, 0)
        held = sum(row["bytes"] for row in own) / len(own) / 1e6
        mean = float(kl.mean())
        say(f"{spec:40} {len(own):3} places  {mean:.4f} ({low:.4f} to {high:.4f})  {held:.2f} MB")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--places", type=int, default=12)
    parser.add_argument("--chunk", type=int, help="tokens of a chunk; by default all at once")
    parser.add_argument("--rows", type=int, default=1, help="places read as rows of one cache")
    parser.add_argument("--only", type=int, nargs="*", help="some of the places")
    parser.add_argument("--specs", nargs="*", default=SPECS)
    parser.add_argument("--figures", type=Path, nargs="*", help="files of earlier runs")
    args = parser.parse_args()
    if args.figures:
        figures(args.figures)
    else:
        measure(args)


if __name__ == "__main__":
    main()
