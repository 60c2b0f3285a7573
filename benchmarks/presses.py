"""What kvpress's presses keep of a text, and what kvkeep's specs of the same method keep.

    python -m venv kvpress-env && kvpress-env/bin/pip install torch==2.13.0 kvpress==0.5.5
    python benchmarks/presses.py --python kvpress-env/bin/python
        [--model smollm2-135m] [--tokens 800]

Run it with kvkeep's Python; `--python` is kvpress's. Both get the same weights in float32 and the
same text, in one forward, and keep a fourth. Printed for each spec: the share of heads that keep
exactly the tokens that they keep under the press, and the mean share of tokens in common.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

KEPT = 0.25
SPECS = {
    "StreamingLLMPress": ["window:{rest},sinks=4"],
    "SnapKVPress": ["snapkv:{n}"],
    "TOVAPress": ["tova:{n}"],
    "AdaKVPress": ["adakv(snapkv:{n})"],
    "ExpectedAttentionPress": ["expected_attention:{n},sinks=4,recent=0", "expected_attention:{n}"],
    "ObservedAttentionPress": ["h2o:{n},normalize=1,recent=0", "h2o:{n}"],
    "KeyDiffPress": ["keydiff:{n},recent=0", "keydiff:{n}"],
    "KnormPress": ["knorm:{n},recent=0", "knorm:{n}"],
    "PyramidKVPress": ["snapkv:{n}", "pyramid(snapkv:{n})"],
    "KVzipPress": ["kvzip:25%,recent=0,chunk=2048", "kvzip:25%"],
    "KVzipPress without its prompt": ["kvzip:25%,recent=0,chunk=2048"],
}
"""For each press the specs; the first keeps most of what it keeps. {n}: a fourth of the tokens."""

Kept = list[list[list[int]]]
"""The positions kept in each layer and head."""


def theirs(model, ids, name) -> Kept:
    """What a press keeps: keys are found among all keys, where some are not only masked."""
    import kvpress

    removed = 1 - KEPT
    name, _, bare = name.partition(" ")
    inner = [kvpress.SnapKVPress(removed)] if name == "AdaKVPress" else [removed]
    press = getattr(kvpress, name)(*inner)
    if bare:
        read_bare(press)
    model.set_attn_implementation("eager" if name == "ObservedAttentionPress" else "sdpa")
    caches = DynamicCache(), DynamicCache()
    model(input_ids=ids, past_key_values=caches[0])
    with press(model):
        model.model(input_ids=ids, past_key_values=caches[1])
    found = []
    for module, *layers in zip(model.model.layers, *(one.layers for one in caches), strict=True):
        full, left = (layer.keys[0] for layer in layers)
        masked = getattr(module.self_attn, "masked_key_indices", None)
        found.append([])
        for head in range(full.shape[0]):
            if masked is None:
                kept = torch.cdist(left[head], full[head]).argmin(-1).tolist()
            else:
                gone = set(masked[2][masked[1] == head].tolist())
                kept = [position for position in range(full.shape[1]) if position not in gone]
            found[-1].append(sorted(kept))
        module.self_attn.masked_key_indices = None
    return found


def read_bare(press) -> None:
    """Let kvpress's KVzip read the whole text again, without its prompt and what it leaves out."""
    compress = press._perform_kvzip_compression

    def prepare(model, tokenizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
        heads, layers = model.config.num_key_value_heads, model.config.num_hidden_layers
        press.score_val = torch.zeros(layers, 1, heads, press.context_length)
        return [(part, part) for part in press._chunk_fn(press._context_ids, press.chunk_size)]

    def whole(model, tokenizer) -> None:
        press.prefix_length = 0
        compress(model, tokenizer)

    press.prepare, press._perform_kvzip_compression = prepare, whole


def ours(model, ids, spec) -> Kept:
    """What a spec keeps."""
    from kvkeep.host import host_of
    from kvkeep.host.compress import read

    host = host_of(model)
    cache = host.new_cache(spec)
    read(host, cache, ids)
    found = []
    for layer in cache.layers:
        position = layer.held().position[0].expand(layer.held().keys.shape[1], -1)
        found.append([sorted(x for x in head if x >= 0) for head in position.tolist()])
    return found


def compared(one: Kept, other: Kept) -> tuple[float, float]:
    """The share of heads that keep the same, and the mean share of tokens in common."""
    pairs = [
        (set(a), set(b))
        for layers in zip(one, other, strict=True)
        for a, b in zip(*layers, strict=True)
    ]
    common = [len(a & b) / max(len(a), len(b)) for a, b in pairs]
    return sum(a == b for a, b in pairs) / len(pairs), sum(common) / len(common)


def main() -> None:
    """Run all presses in kvpress's environment, then all specs here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the Python of an environment with kvpress")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=800)
    options = parser.parse_args()
    import pydoc_data.topics

    import kvkeep
    from kvkeep.hf.models import resolve

    place = resolve(options.model)
    text = " ".join(map(str, pydoc_data.topics.topics.values()))
    ids = AutoTokenizer.from_pretrained(place)(text, return_tensors="pt").input_ids
    ids = ids[:, : options.tokens]
    with TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps({"model": str(place), "ids": ids.tolist()}))
        command = [options.python, "-I", __file__, "--within", str(asked), str(answer)]
        subprocess.run(command, check=True)
        kept = json.loads(answer.read_text())
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    n = int(ids.shape[1] * KEPT)
    with torch.inference_mode(), kvkeep.attach(model):
        for press, specs in SPECS.items():
            for spec in (one.format(n=n, rest=n - 4) for one in specs):
                same, common = compared(kept[press], ours(model, ids, spec))
                print(f"{press:31}{spec:43}{same:8.1%} of heads alike {common:8.1%} of tokens")


@torch.no_grad()
def within(asked: str, answer: str) -> None:
    """All presses, in kvpress's environment."""
    request = json.loads(Path(asked).read_text())
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    ids = torch.tensor(request["ids"])
    Path(answer).write_text(json.dumps({name: theirs(model, ids, name) for name in SPECS}))


if __name__ == "__main__":
    within(*sys.argv[2:]) if sys.argv[1] == "--within" else main()
