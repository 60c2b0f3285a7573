"""The quality that codecs lose on SmolLM2-135M, unchanged and with a few large key channels added.

    python benchmarks/large_channels.py [--context 800] [--continuation 128] [--kinds "none;bias"]
        [--dtype float32]

Prints a Markdown table with a row for each kind of model and codec: bits per element of keys and
values, KL divergence from the same model with a full cache in nats per token, agreement on the most
likely token, and perplexity. The text is Python source; the continuation is fed 32 tokens at a
time.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from kvkeep_lab.evals.quality import compare
from large_key_channels import large_channels
from torch import Tensor

import kvkeep
from kvkeep.errors import PrecisionWarning
from kvkeep.hf.models import load

CODECS = ("int8", "int8/int4", "kivi", "int4", "int4:32,affine=1")
CHUNK = 32


@torch.inference_mode()
def predicted(model: Any, codec: str, ids: Tensor, context: int) -> tuple[list[Tensor], int]:
    """The logits that predict the tokens from `context` on, and the cache's bytes at the end."""
    cache = kvkeep.Cache(model, f"keep_all+{codec}")
    first = model(ids[:, :context], past_key_values=cache, logits_to_keep=1).logits
    rest = [
        model(part, past_key_values=cache).logits
        for part in torch.split(ids[:, context:-1], CHUNK, dim=1)
    ]
    return list(torch.cat([first, *rest], dim=1).unbind(dim=1)), cache.live_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=800)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--kinds", default="none;scaled;turned;bias")
    parser.add_argument("--codecs", default=";".join(CODECS))
    parser.add_argument("--times", type=float, default=30.0)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    warnings.simplefilter("ignore", PrecisionWarning)
    model, tokenizer = load("smollm2-135m", options.dtype)
    kvkeep.attach(model)
    tokens = options.context + options.continuation
    ids = tokenizer(inspect.getsource(argparse), return_tensors="pt", verbose=False).input_ids
    ids = ids[:, :tokens]
    say("| keys | codec | bits | KL | same top token | perplexity |")
    say("|---|---|---|---|---|---|")
    for kind in options.kinds.split(";"):
        planted = large_channels(model, kind, options.times) if kind != "none" else nullcontext()
        with planted:
            full, held = predicted(model, "plain", ids, options.context)
            # Every codec stores positions too: one int32 for each token and layer.
            positions = 4 * (tokens - 1) * model.config.num_hidden_layers
            elements = (held - positions) / model.dtype.itemsize
            for codec in options.codecs.split(";"):
                logits, held = predicted(model, codec, ids, options.context)
                found = compare(logits, full, ids[:, options.context :])
                bits = (held - positions) * 8 / elements
                say(
                    f"| {kind} | `{codec}` | {bits:.1f} | {found.kl:.4f} | {found.top1:.3f} "
                    f"| {found.perplexity:.2f} |"
                )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
