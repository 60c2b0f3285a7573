"""What codecs cost on SmolLM2-135M as it is, and with a few large key channels planted in it.

    python benchmarks/large_channels.py [--context 2000] [--continuation 128] [--kinds "none;bias"]

Prints a table in Markdown, one row for each kind of model and codec: bits of an element of keys and
values, KL to the same model's own full cache in nats a token, agreement on the likeliest token.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

from kvkeep.errors import PrecisionWarning
from kvkeep.evals.planted import large_channels
from kvkeep.evals.run import evaluate
from kvkeep.hf.models import load

SPECS = ("int8", "int8/int4", "kivi", "int4", "int4:32,affine=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--kinds", default="none;scaled;turned;bias")
    parser.add_argument("--times", type=float, default=30.0)
    parser.add_argument("--specs", default=";".join(SPECS))
    options = parser.parse_args()
    warnings.simplefilter("ignore", PrecisionWarning)
    model, tokenizer = load("smollm2-135m", "float32")
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code.py"
        code.write_text(inspect.getsource(argparse), encoding="utf-8")
        say("| model | codec | bits | KL | top-1 | perplexity |")
        say("|---|---|---|---|---|---|")
        for kind in options.kinds.split(";"):
            planted = large_channels(model, kind, options.times) if kind != "none" else None
            with planted or nullcontext():
                found = evaluate(
                    model,
                    tokenizer,
                    [f"keep_all+{codec}" for codec in options.specs.split(";")],
                    contexts=(options.context,),
                    continuation=options.continuation,
                    text_file=code,
                    retrieve=False,
                )
            (full,) = found["baseline"]
            positions = 4 * options.context * model.config.num_hidden_layers
            elements = (full["bytes"] - positions) / model.dtype.itemsize
            for row in (full, *found["rows"]):
                bits = (row["bytes"] - positions) * 8 / elements
                codec = row["spec"].partition("+")[2] or "plain"
                say(
                    f"| {kind} | `{codec}` | {bits:.1f} | {row['kl']:.4f} | {row['top1']:.3f} "
                    f"| {row['perplexity']:.2f} |"
                )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
