"""Gradients of a long text through an evicting cache: kvkeep beside keys_values 0.2.0.

    python benchmarks/train_keys_values.py --python KEYS_VALUES_ENV/bin/python --source keys_values/
        [--tokens 2048,4096,8192] [--budget 1024] [--chunk 256] [--layers 12] [--width 384]
        [--repeats 1] [--threads 2] [--out benchmarks/keys-values.json]

Run it with kvkeep's Python, in an environment with LitGPT. `--python` is one of an environment with
torch and LitGPT of the same versions and the packages that keys_values imports; `--source` is a
checkout of keys_values, if it is not installed there. Both systems get the same weights of a Llama
of LitGPT, in float32, without dropout, the same random tokens, one text, and the next-token loss.
Each gradient has a process of its own: after a short one to warm up, its seconds and the peak of
resident memory above the model are taken. The peak includes the gradients, and what is kept of the
layers' inputs.

`h2o` keeps `--budget` tokens. The systems do not decide alike: keys_values makes room before a
chunk is attended to, so that a query sees the budget; kvkeep evicts after it, so that a query sees
the budget and its chunk. keys_values reads the first `budget` tokens as one chunk. In the rows of
`exact` nothing is evicted: there `difference`, of the gradients from kvkeep's, shows that the
systems compute the same.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

KVKEEP, KEYS_VALUES, EIGHT_BIT = "kvkeep", "keys_values", "keys_values, 8-bit checkpoints"
SYSTEMS = (KVKEEP, KEYS_VALUES, EIGHT_BIT)
EXACT_TOKENS = 512
_WARM_UP = {"tokens": 64, "budget": 32, "chunk": 8}


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """The config of the model, for LitGPT's and keys_values' classes alike."""
    return {
        "name": "Llama-3.2-1B",  # whose layers these are, of another size
        "n_layer": options.layers,
        "n_embd": options.width,
        "n_head": options.width // 64,
        "n_query_groups": max(1, options.width // 192),
        "head_size": 64,
        "intermediate_size": options.width * 8 // 3,
        "padded_vocab_size": options.vocabulary,
        "block_size": max(*options.tokens, EXACT_TOKENS),
        "rope_adjustments": None,
    }


# -- one gradient, in a process of its own --------------------------------------------------------


def measure(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compute one gradient; it is written to the folder."""
    torch.set_num_threads(job["threads"])
    gradient_of = {KVKEEP: _kvkeep}.get(job["system"], _keys_values)
    weights = load_file(folder / "weights.safetensors")
    model, differentiate = gradient_of(job, weights)
    del weights
    ids = load_file(folder / "ids.safetensors")["ids"]
    differentiate(ids[:, : _WARM_UP["tokens"]], _WARM_UP["budget"], _WARM_UP["chunk"])
    model.zero_grad(set_to_none=True)
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    start = time.perf_counter()
    loss = differentiate(ids[:, : job["tokens"]], job["budget"], job["chunk"])
    seconds = time.perf_counter() - start
    peak_bytes = _status("VmHWM") - before
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    save_file(found, folder / f"{job['system']}.safetensors")
    return {
        "peak_bytes": peak_bytes,
        "seconds": round(seconds, 3),
        "loss": round(loss, 6),
        "versions": {name: version(name) for name in ("torch", "litgpt")},
    }


Differentiate = Callable[[Tensor, int, int], float]
"""Adds the gradients of a text, with a budget and a chunk; returns the loss."""


def _kvkeep(job: dict[str, Any], weights: dict[str, Tensor]) -> tuple[nn.Module, Differentiate]:
    from litgpt import GPT, Config

    from kvkeep.files.offload import Offload
    from kvkeep.train import backward

    model = GPT(Config.from_name(**job["sizes"]))
    model.load_state_dict(weights)

    def differentiate(ids: Tensor, budget: int, chunk: int) -> float:
        spec = "keep_all" if job["exact"] else f"h2o:{budget}"
        # In memory, as keys_values keeps its checkpoints, so that the peak counts both.
        kept = Offload(host_bytes=1 << 40)
        return float(backward(model, ids, ids, cache=spec, chunk=chunk, offload=kept))

    return model, differentiate


def _keys_values(
    job: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[nn.Module, Differentiate]:
    from keys_values.config import Config
    from keys_values.finetune.utils import may_match_twice_flex_attention_sdpa
    from keys_values.head_model import CrossEntropyOnLogits
    from keys_values.kvcache.factory import KVCacheFactory
    from keys_values.kvcache.gradient.main import LongContextGradientModel
    from keys_values.model import GPT
    from keys_values.utils import VerbosityLevels

    config = Config.from_name(**job["sizes"])
    model = GPT(config)
    model.load_state_dict(weights)
    checkpoints = "torch-quantized8" if job["system"] == EIGHT_BIT else "default"

    def differentiate(ids: Tensor, budget: int, chunk: int) -> float:
        policy = "lastrec-default" if job["exact"] else "h2o-default"
        length = ids.shape[1] if job["exact"] else budget
        caches = KVCacheFactory.create(
            model, policy, max_batch_size=1, cache_length=length, dtype=torch.float32
        )
        model.assign_kv_caches(caches)
        computed = LongContextGradientModel(
            gpt_model=model,
            head_model=CrossEntropyOnLogits(config),
            layers_per_cell=job["layers_per_cell"],
            chunk_size=chunk,
            layercp_qname=checkpoints,
            cachecp_qname=checkpoints,
            train_cache_kwargs={},
            autograd_hooks_kwargs={
                "max_match_trials_pack_arg": 4,
                "may_match_twice": may_match_twice_flex_attention_sdpa,
            },
            verbose=VerbosityLevels.NONE,
        )
        computed.train()
        loss = computed(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return float(loss.detach().sum())

    return model, differentiate


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


# -- all of them ----------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> dict[str, Any]:
    from kvkeep.environment import environment

    torch.set_num_threads(options.threads)
    rows = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        shape = sizes(options)
        _write_inputs(shape, max(*options.tokens, EXACT_TOKENS), folder)
        exact = {"tokens": EXACT_TOKENS, "budget": EXACT_TOKENS, "chunk": 128, "exact": True}
        evicting = [
            {"tokens": n, "budget": options.budget, "chunk": options.chunk, "exact": False}
            for n in options.tokens
        ]
        for job in (exact, *evicting):
            for system in SYSTEMS:
                asked = {
                    **job,
                    "system": system,
                    "sizes": shape,
                    "threads": options.threads,
                    "layers_per_cell": options.layers_per_cell,
                }
                found = [_alone(asked, folder, options) for _ in range(options.repeats)]
                best = min(found, key=lambda one: one.get("seconds", 0))
                rows.append({"system": system, **job, **best})
                if job["exact"] and "failed" not in best:
                    rows[-1]["difference"] = _difference(folder, system)
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    commit = _commit(options.source)
    return {
        "benchmark": "keys_values",
        "keys_values": commit,
        "model": shape,
        "dtype": "float32",
        "layers_per_cell": options.layers_per_cell,
        "environment": environment(),
        "rows": rows,
    }


def _write_inputs(shape: dict[str, Any], tokens: int, folder: Path) -> None:
    from litgpt import GPT, Config

    torch.manual_seed(0)
    model = GPT(Config.from_name(**shape))
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    save_file(model.state_dict(), folder / "weights.safetensors")
    ids = torch.randint(0, shape["padded_vocab_size"], (1, tokens))
    save_file({"ids": ids}, folder / "ids.safetensors")


def _alone(job: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What `measure` finds in a new process; why it failed, if it did."""
    python = sys.executable if job["system"] == KVKEEP else options.python
    place = folder / "job.json"
    place.write_text(json.dumps(job))
    path = os.pathsep.join(filter(None, (options.source, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [python, __file__, "--job", str(place)],
        env=os.environ | ({} if job["system"] == KVKEEP else {"PYTHONPATH": path}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"failed": (done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _difference(folder: Path, system: str) -> float:
    """The norm of the difference from kvkeep's gradients, divided by the norm of those."""
    mine = load_file(folder / f"{KVKEEP}.safetensors")
    theirs = load_file(folder / f"{system}.safetensors")
    if mine.keys() != theirs.keys():
        raise SystemExit(f"{system} has gradients of other weights: {mine.keys() ^ theirs.keys()}")
    squares = [(theirs[name].double() - x.double()).square().sum() for name, x in mine.items()]
    norms = [x.double().square().sum() for x in mine.values()]
    return float((sum(squares) / sum(norms)) ** 0.5)


def _commit(source: str | None) -> str:
    if source is None:
        return "unknown"
    asked = ["git", "-C", source, "rev-parse", "--short", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _line(row: dict[str, Any]) -> str:
    kind = "exact" if row["exact"] else f"h2o:{row['budget']}, chunk {row['chunk']}"
    about = f"{row['system']}, {row['tokens']} tokens, {kind}: "
    if "failed" in row:
        return about + row["failed"]
    difference = f", difference {row['difference']:.1e}" if "difference" in row else ""
    measured = f"{row['peak_bytes'] / 2**20:.0f} MiB, {row['seconds']:.2f} s"
    return f"{about}{measured}, loss {row['loss']:.5f}{difference}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="Python of the environment of keys_values")
    parser.add_argument("--source", help="checkout of keys_values")
    parser.add_argument("--tokens", default="2048,4096,8192")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 192")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--layers-per-cell", type=int, default=1, help="of keys_values")
    parser.add_argument("--repeats", type=int, default=1, help="the fastest is kept")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="where the result is written; else it is printed")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(measure(json.loads(options.job.read_text()), options.job.parent)))
        return
    if options.python is None:
        parser.error("give --python, of an environment of keys_values")
    options.tokens = [int(n) for n in options.tokens.split(",")]
    result = json.dumps(run(options))
    if options.out is None:
        print(result)
    else:
        options.out.write_text(f"{result}\n")


if __name__ == "__main__":
    main()
