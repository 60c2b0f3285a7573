"""KL of codecs and policies whose newest tokens are plain, at several places of a text.

    python benchmarks/plain_tail.py > tail.jsonl
    python benchmarks/plain_tail.py --figures tail.jsonl

Each place is a cache of one row, so that heads of different lengths hold no empty slots. Prints a
line of JSON for each place and spec: `kl`, of each token in nats, and `bytes` after the context.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from kvkeep_lab.bench.text import windows_of_text
from kvkeep_lab.evals.intervals import of_mean

from kvkeep.host import host_of, load_model
from kvkeep.host.compress import compress, compresses

SPECS = [
    *("kvzip:25%", "kvzip:25%+int4", "kvzip:25%+int4:recent=0,sinks=0"),
    *("adakv(h2o:25%)", "adakv(h2o:25%)+int4", "adakv(h2o:25%)+int4:recent=0,sinks=0"),
    *("keep_all+int4:recent=4000", "keep_all+int4", "keep_all+int4/int3", "keep_all+int3"),
    "keep_all+kivi",
]
"""With `recent=4000` all tokens are plain: the rounding of bfloat16 alone."""


def log_probabilities(host, spec, ids, context):
    """Of each token after the context, (n, V), fed one at a time; and the bytes held after it."""
    cache = host.new_cache(spec, capacity=ids.shape[1])
    found = [host.forward(ids[:, :context], cache)[0, -1]]
    if compresses(cache):
        compress(host, cache, ids[:, :context])
    held = cache.live_bytes
    for token in ids[:, context:-1].split(1, dim=1):
        found.append(host.forward(token, cache)[0, -1])
    return torch.stack(found).double().log_softmax(-1), held


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@torch.inference_mode()
def measure(args):
    model, tokenizer = load_model(args.model, args.dtype)
    host = host_of(model)
    texts = windows_of_text(tokenizer, args.places, args.context + args.tokens)
    with host.attach("keep_all"):
        for place in args.only or range(args.places):
            ids = texts[place : place + 1]
            full, held = log_probabilities(host, "keep_all", ids, args.context)
            say(json.dumps({"spec": "keep_all", "place": place, "kl": [0.0], "bytes": held}))
            for spec in args.specs:
                other, held = log_probabilities(host, spec, ids, args.context)
                kl = [round(x, 6) for x in (full.exp() * (full - other)).sum(dim=-1).tolist()]
                say(json.dumps({"spec": spec, "place": place, "kl": kl, "bytes": held}))


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
