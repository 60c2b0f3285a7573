"""Train the networks of one layer, and divide shares of slots among layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvkeep.policy.scorer import LEVELS, HeadNetworks

_BATCH, _RATE = 1024, 3e-3


@torch.inference_mode(False)
@torch.enable_grad()
def trained(
    inputs: Tensor, targets: Tensor, hidden: int, steps: int, device: torch.device
) -> HeadNetworks:
    """Networks that predict targets (H, n) from inputs (H, n, F), by least squares; on the CPU.

    The random numbers are the same each time, and the global generator is left as it was.
    """
    x, y = inputs.to(device).float(), targets.to(device)
    mean, spread = x.mean(dim=1, keepdim=True), x.std(dim=1, keepdim=True).clamp(min=1e-6)
    middle, width = y.mean(dim=1, keepdim=True), y.std(dim=1, keepdim=True).clamp(min=1e-6)
    x, y = (x - mean) / spread, (y - middle) / width
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        networks = HeadNetworks(x.shape[0], x.shape[2], hidden).to(device)
        optimizer = torch.optim.AdamW(networks.parameters(), lr=_RATE, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps + 1)
        for _ in range(steps):
            some = torch.randint(x.shape[1], (_BATCH,), device=device)
            loss = nn.functional.mse_loss(networks(x[:, some]), y[:, some])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    with torch.no_grad():  # undo the normalisation
        networks.mean.copy_(mean)
        networks.first.div_(spread.transpose(1, 2))
        networks.second.mul_(width[..., None])
        networks.second_bias.mul_(width[..., None]).add_(middle[..., None])
    return networks.cpu().requires_grad_(False)


def divided(scores: dict[int, list[Tensor]]) -> dict[int, list[float]]:
    """How layers divide the slots: for each layer its share of slots (0 to 1) where the model's
    share is 0, 1, ... 100 %, if the slots of greatest score are kept.

    Args:
        scores: (H, n) of each text, by layer.
    """
    flat = {index: torch.cat([x.flatten() for x in some]) for index, some in scores.items()}
    ordered = torch.cat(list(flat.values())).sort(descending=True).values
    total = len(ordered)
    least = [ordered[max(0, total * p // (LEVELS - 1) - 1)] for p in range(LEVELS)]
    own = {index: x.sort().values for index, x in flat.items()}
    found = {}
    for index, x in own.items():
        below = torch.searchsorted(x, torch.stack(least))
        shares = 1 - below / len(x)
        shares[0], shares[-1] = 0.0, 1.0
        found[index] = shares.tolist()
    return found
