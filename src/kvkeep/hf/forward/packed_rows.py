"""Refuses rows that contain several texts, which a cache would compute as one text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")


def require_one_text(given: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if the arguments of a forward, or of `generate()`, describe several
    texts in a row: by positions that restart, by lengths of texts, or by a text index of each
    token."""
    for name in _BOUNDARIES:
        lengths = given.get(name)
        if isinstance(lengths, Tensor) and lengths.numel() > 2:
            raise _packed(f"{name} names {lengths.numel() - 1} texts")
    texts = given.get("seq_idx")
    if isinstance(texts, Tensor) and bool((texts != texts[..., :1]).any()):
        raise _packed("seq_idx names more than one text")
    position = given.get("position_ids")
    if not isinstance(position, Tensor) or position.dim() < 2 or position.shape[-1] == 1:
        return
    restarts = _restarts(position, given.get("attention_mask"))
    if restarts is not None and bool(restarts.any()):
        row, token = restarts.nonzero()[0].tolist()
        place = int(position.expand(*position.shape[:-2], len(restarts), -1)[..., row, token].max())
        raise _packed(f"position_ids of row {row} restart at token {token}, with {place}")


def _packed(found: str) -> UnsupportedError:
    return UnsupportedError(
        f"{found}, but a row of a kvkeep cache is one text; give each text its own row, or "
        "use_cache=False"
    )


def _restarts(position: Tensor, mask: Any) -> Tensor | None:
    """Which tokens begin another text, bool (B, n), judged by positions (B, n) or (parts, B, n);
    None: no token does. Padding does not count. Within an image, some parts of a position may
    decrease, but only the first token of a text has 0 in all parts."""
    if position.dim() == 2 and bool((position.diff(dim=1) == 1).all()):
        return None
    parts = position.reshape(-1, *position.shape[-2:])
    n = position.shape[-1]
    real = torch.ones(1, n, dtype=torch.bool, device=position.device)
    mask = next(iter(mask.values()), None) if isinstance(mask, Mapping) else mask
    if isinstance(mask, Tensor):
        if (
            mask.dim() == 4 and mask.dtype == torch.int32
        ):  # positions, see `kvkeep.hf.forward.masks`
            real = mask[:, 0, 0] >= 0
        elif mask.dim() == 2 and mask.shape[1] >= n:
            real = mask[:, -n:] != 0
        else:  # other code refuses this mask
            return None
        real = real.to(position.device)
    begun = real.cumsum(dim=1) > 1
    restarts = (parts == 0).all(dim=0)
    if len(parts) == 1:
        place = parts[0].masked_fill(~real, -1)
        restarts = restarts | (place < place.cummax(dim=1).values)
    return restarts & begun & real
