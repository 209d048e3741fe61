"""A loop that saves itself and resumes, and says which samples each step had.

argv: the folder, the steps, the workers. One line of JSON a step to `log.<rank>` in the folder; at
the end the weights' sum in `done.<rank>`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import infinity
from infinity.data import Order, Seeded
from infinity.ext.checkpoint import interval

interval.FIRST_STEPS, interval.FIRST_SECONDS = 2, 0.0


class Samples(Dataset):
    def __len__(self) -> int:
        return 48

    def at(self, index: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed >> 1)
        return torch.tensor(index), torch.randn(16, generator=generator)


def main() -> None:
    folder, steps, workers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(folder)]}
    net, optimizer = infinity.wrap_model(net, optimizer, config)
    rank = dist.get_rank() if dist.is_initialized() else 0
    saver = infinity.Checkpoints(
        folder / "saved", net, optimizer, overhead=0.4, extra=lambda: {"of": "loop"}
    )
    order = Order(48, batch_size=8, seed=3, consumed=saver.resume().steps)
    loader = DataLoader(Seeded(Samples(), order), batch_sampler=order, num_workers=workers)
    with open(folder / f"log.{rank}", "a") as log:
        while saver.steps < steps:
            for indices, x in loader:
                loss = (net(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                told = {"step": saver.steps, "samples": indices.tolist(), "loss": loss.item()}
                print(json.dumps(told), file=log, flush=True)
                saver.after_step()
                if saver.steps == steps:
                    break
    saver.close()
    digest = hashlib.sha256()
    for value in net.state_dict().values():
        digest.update(value.numpy().tobytes())
    (folder / f"done.{rank}").write_text(digest.hexdigest())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
