"""Scorer: small networks, one for each kv head, that predict how much later tokens need a token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from kvkeep.errors import ShapeError, SpecError, reason_of
from kvkeep.reading import read_file
from kvkeep.rotary import Rotary

FORMAT = "kvkeep-scorer-2"
_UNSEALED = "kvkeep-scorer-1"  # the format of earlier versions, without a checksum
_MOST_BYTES = 1 << 30  # the largest file that is read
_CHECKSUM = "checksum"
LEVELS = 101
"""Each layer's share is stored for this number of shares of the whole model: 0, 1, ... 100 %."""


def features(keys: Tensor, values: Tensor, position: Tensor, rotary: Rotary | None) -> Tensor:
    """A scorer's input for each token: its key before the rotary embedding, and its value.

    Args:
        keys, values: (B, H, n, Dk), after the rotary embedding, and (B, H, n, Dv).
        position: (n,) or (B, n).

    Returns:
        fp32 (B, H, n, Dk + Dv).
    """
    keys = keys.float()
    if rotary is not None:
        place = position if position.dim() == 1 else position[:, None]
        keys = rotary.turn(keys, -place)
    return torch.cat([keys, values.float()], dim=-1)


class HeadNetworks(nn.Module):
    """A network of two linear layers for each kv head, each with its own weights.

    Args:
        heads: H.
        width: number of features, F.
        hidden: number of hidden units, U.
    """

    def __init__(self, heads: int, width: int, hidden: int) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(heads, 1, width))
        self.first = nn.Parameter(torch.randn(heads, width, hidden) * width**-0.5)
        self.first_bias = nn.Parameter(torch.zeros(heads, 1, hidden))
        self.second = nn.Parameter(torch.randn(heads, hidden, 1) * hidden**-0.5)
        self.second_bias = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Features (..., H, n, F) -> (..., H, n)."""
        inner = (x - self.mean) @ self.first + self.first_bias
        inner = nn.functional.gelu(inner, approximate="tanh")
        found: Tensor = (inner @ self.second + self.second_bias)[..., 0]
        return found


@dataclass(frozen=True, eq=False)
class LayerScorer:
    """The scorer of one layer.

    Args:
        networks: the networks of its heads; they predict the logarithm of kvzip's score.
        shares: this layer's share of slots when the model keeps 0, 1, ... 100 % of all slots.
        name: the hash of the scorer's file, and the layer's index.
    """

    networks: HeadNetworks
    shares: tuple[float, ...]
    name: str

    def __repr__(self) -> str:
        return self.name

    def share_at(self, share: float) -> float:
        """This layer's share of slots when all layers together keep `share`."""
        place = share * (LEVELS - 1)
        low = min(int(place), LEVELS - 2)
        before, after = self.shares[low : low + 2]
        return before + (place - low) * (after - before)

    @torch.inference_mode()
    def predict(
        self, keys: Tensor, values: Tensor, position: Tensor, rotary: Rotary | None
    ) -> Tensor:
        """Scores of tokens, fp32 (B, H, n); see `features`.

        Raises:
            ShapeError: the scorer was made for another number of heads or other widths.
        """
        heads, width = self.networks.first.shape[:2]
        found = (keys.shape[1], keys.shape[3] + values.shape[3])
        if found != (heads, width):
            raise ShapeError(
                f"{found[0]} heads with keys and values of {found[1]} elements, but the scorer was "
                f"made for {heads} heads of {width}; calibrate this model"
            )
        networks = _on(self.networks, keys.device)
        scores: Tensor = networks(features(keys, values, position, rotary))
        return scores


@dataclass(frozen=True, eq=False)
class Scorer:
    """The scorers of a model's layers.

    Args:
        layers: scorers by the layer's index; layers with a sliding window have none.
        model: identifies the model's weights; see `kvkeep.host.fingerprint.sampled`.
        count: number of layers of the model.
    """

    layers: dict[int, LayerScorer]
    model: str
    count: int

    def content(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and metadata of the scorer's file; matrices are in float16."""
        tensors = {}
        for index, layer in self.layers.items():
            for name, x in layer.networks.state_dict().items():
                half = name in ("first", "second")
                tensors[f"{index}.{name}"] = x.to(torch.float16 if half else x.dtype).cpu()
            tensors[f"{index}.shares"] = torch.tensor(layer.shares)
        metadata = {"format": FORMAT, "model": self.model, "count": str(self.count)}
        return tensors, metadata | {_CHECKSUM: checksum(tensors, metadata)}

    @classmethod
    def read(cls, path: str) -> Scorer:
        """Read a scorer's file, or return the result of an earlier read if the file is unchanged.

        Raises:
            SpecError: the file does not exist or is not a scorer.
        """
        try:
            stat = Path(path).stat()
            return _read(path, stat.st_mtime_ns, stat.st_size)
        except (OSError, ValueError, MemoryError, RecursionError, SafetensorError) as error:
            raise SpecError(
                f"scorer {path!r}: {error}; make one with kvkeep calibrate --out {path}"
            ) from error


@lru_cache(maxsize=8)
def _read(path: str, changed: int, size: int) -> Scorer:
    """Read a file, once for each modification time `changed` and `size`."""
    data = bytes(read_file(Path(path), _MOST_BYTES))
    stop = 8 + int.from_bytes(data[:8], "little")
    tensors = load(data)  # also checks that the header fits the data
    metadata = json.loads(data[8:stop]).get("__metadata__", {})
    known = metadata.get("format") in (FORMAT, _UNSEALED)
    if not known or not {"model", "count"} <= metadata.keys():
        raise ValueError("it is not a kvkeep scorer")
    if metadata["format"] == FORMAT and metadata.get(_CHECKSUM) != checksum(tensors, metadata):
        raise ValueError("it is damaged: its checksum does not match")
    count, digest = int(metadata["count"]), xxhash.xxh3_64_hexdigest(data)
    layers = {}
    for index in sorted({name.partition(".")[0] for name in tensors}, key=int):
        if index != str(int(index)):
            raise ValueError(f"there is no layer {index[:20]!r}")
        mine = {name: x for name, x in tensors.items() if name.startswith(f"{index}.")}
        layers[int(index)] = _layer(index, mine, f"{digest}.{index}")
    if not layers or not 0 <= min(layers) <= max(layers) < count:
        raise ValueError(f"layers {sorted(layers)} of {count}")
    return Scorer(layers, metadata["model"], count)


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """The checksum of a scorer's file: of its tensors, its model and its number of layers."""
    found = xxhash.xxh3_128(json.dumps([metadata["model"], metadata["count"]]).encode())
    for name, x in sorted(tensors.items()):
        found.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        found.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    digest: str = found.hexdigest()
    return digest


def _layer(index: str, tensors: dict[str, Tensor], name: str) -> LayerScorer:
    own = {name.partition(".")[2]: x.float() for name, x in tensors.items()}
    shares = own.pop("shares", torch.empty(0))
    first = own.get("first", torch.empty(0))
    # `first` is the largest tensor, so its size bounds the memory of the networks.
    if shares.shape != (LEVELS,) or first.dim() != 3 or not first.numel():
        raise ValueError(f"layer {index} lacks shares or weights")
    if bool(((shares < 0) | (shares > 1)).any()) or bool((shares.diff() < 0).any()):
        raise ValueError(f"the shares of layer {index} are not ascending from 0 to 1")
    if not all(bool(x.isfinite().all()) for x in own.values()):
        raise ValueError(f"the weights of layer {index} are not finite")
    networks = HeadNetworks(*first.shape)
    try:
        networks.load_state_dict(own)
    except RuntimeError as error:
        raise ValueError(f"layer {index}: {reason_of(error)}") from error
    return LayerScorer(networks.requires_grad_(False), tuple(shares.tolist()), name)


@lru_cache(maxsize=1024)
def _on(networks: HeadNetworks, device: torch.device) -> HeadNetworks:
    """Networks on a device; each device gets one copy."""
    here = networks.first.device == device
    if here:
        return networks
    copy = HeadNetworks(*networks.first.shape)
    copy.load_state_dict(networks.state_dict())
    return copy.requires_grad_(False).to(device)
