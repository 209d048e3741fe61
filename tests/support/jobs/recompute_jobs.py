"""Jobs of ranks that choose for themselves what to do with their blocks' activations (see
`ranks`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.ext.blocks import recompute
from infinity.ext.blocks.activation_choice import ActivationChoice

WIDTH, BLOCKS, STEPS = 256, 4, 6


class Block(nn.Module):
    """Saves several times what it is given. ``meets``: adds up over the ranks inside."""

    def __init__(self, meets: bool) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.meets, self.runs = nn.Linear(4 * WIDTH, WIDTH), meets, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTS[0] += 1
        hidden = self.down(nn.functional.gelu(self.up(self.norm(x))))
        if self.meets:
            scale = hidden.detach().abs().amax()
            dist.all_reduce(scale, op=dist.ReduceOp.MAX)
            hidden = hidden / (1 + scale)
        return x + hidden


COUNTS = [0]


def _train(choices: list[str] | None, meets: bool, shard: str, nvme: str) -> dict[str, Any]:
    """Trains with a choice for each rank; None: as it is without the option."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(meets) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [nvme], "shard": shard}
    config |= {"device_memory": "48 MiB", "recompute": choices is not None}
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    if choices is not None:
        mine = ActivationChoice(choices[dist.get_rank()])

        def choose(blocks: list, **_: Any) -> list[ActivationChoice]:
            fallback = ActivationChoice.SEND
            return [
                mine if block.is_repeatable or not mine.repeats else fallback for block in blocks
            ]

        recompute.choose = choose
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(STEPS):
        COUNTS[0] = 0
        loss = model(torch.randn(128, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    values = [value.double().sum().item() for value in model.state_dict().values()]
    blocks = infinity.stats(model).blocks
    infinity.unwrap_model(model, optimizer)
    return {"losses": losses, "values": values, "runs": COUNTS[0], "blocks": blocks}


def chosen(shard: str, choices: list[str], meets: bool, nvme: str) -> dict[str, Any]:
    """Returns what two runs have, without and with ``choices``."""
    real = recompute.choose
    try:
        return {
            "plain": _train(None, meets, shard, nvme),
            "chosen": _train(choices, meets, shard, nvme),
        }
    finally:
        recompute.choose = real
