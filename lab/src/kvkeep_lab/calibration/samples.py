"""Training data from one text: the score of every token, and features of some tokens."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvkeep.files import tensor_file
from kvkeep.host import Host
from kvkeep.host.compress import reread
from kvkeep.policy import KVzip, Share
from kvkeep.policy.scorer import features

_POLICY = KVzip(Share(1.0))
_SAMPLED = 1024  # tokens of a text whose features are kept
_LEAST = 1e-6  # the least score that is told from others


class Samples(NamedTuple):
    """The training data from one text, by layer: `scores`, fp32 (H, n), of all tokens after the
    sinks; `features`, fp16 (H, m, F), and `targets`, fp32 (H, m), of some of them."""

    scores: dict[int, Tensor]
    features: dict[int, Tensor]
    targets: dict[int, Tensor]


def sampled_text(host: Host, ids: Tensor, file: Path, identity: str) -> Samples:
    """Read a text, int64 (n,), twice and sample it; or read the `file` that an interrupted
    calibration of the same model and text left."""
    ids = ids.to(host.device)
    name = f"{identity} {xxhash.xxh3_128_hexdigest(ids.cpu().numpy().tobytes())}"
    tensors = _left(file, name)
    if tensors is None:
        tensors = _sample(host, ids)
        tensor_file.write(file, tensors, {"of": name}, sync=False)
    layers = sorted(int(key[7:]) for key in tensors if key.startswith("scores."))
    return Samples(*({i: tensors[f"{kind}.{i}"] for i in layers} for kind in Samples._fields))


def _left(file: Path, name: str) -> dict[str, Tensor] | None:
    """The tensors that were left in a file of this name; None: it is another's, or not whole."""
    try:
        with safe_open(file, "pt") as opened:
            if (opened.metadata() or {}).get("of") != name:
                return None
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None


@torch.inference_mode()
def _sample(host: Host, ids: Tensor) -> dict[str, Tensor]:
    cache, sinks = host.new_cache("keep_all"), _POLICY.sinks
    host.feed(ids[None], cache)
    rotaries = host.rotaries()
    unbounded = (i for i, kind in enumerate(host.kinds) if kind.window is None)
    scores = reread(host, cache, 0, ids, dict.fromkeys(unbounded, _POLICY.compression))
    draw = torch.Generator().manual_seed(0)
    some = sinks + torch.randperm(len(ids) - sinks, generator=draw)[:_SAMPLED]
    found = {}
    for index, score in scores.items():
        held = cache.layers[index].held()
        assert held is not None
        keys, values = (x[:, :, some.to(x.device)] for x in held[:2])
        x = features(keys, values, some.to(keys.device), rotaries[index])
        limit = torch.finfo(torch.float16).max
        found[f"features.{index}"] = x[0].clamp(-limit, limit).half().cpu()
        found[f"targets.{index}"] = score[0][:, some].clamp(min=_LEAST).log()
        found[f"scores.{index}"] = score[0][:, sinks:].contiguous()
    return found
