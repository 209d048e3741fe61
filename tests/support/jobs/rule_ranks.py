"""Ranks step by the rules of other libraries' classes, and one process does, and write what they
found.

All ranks have the same batches, so that the mean of their gradients is each one's.

argv: a folder for the answer, what is sharded
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytorch_optimizer
import torch
import torch.distributed as dist

import infinity

sys.path.append(str(Path(__file__).parents[1] / "models"))
from small_net import model, same, steps

NAMES = ("AdEMAMix", "Adan")


def values(net, optimizer) -> tuple[dict, dict]:
    return (
        {name: value.detach().clone() for name, value in net.state_dict().items()},
        {i: dict(of) for i, of in optimizer.state_dict()["state"].items()},
    )


def job(name: str, folder: Path, lr: float = 1e-3, **config):
    net = model()
    kind = getattr(pytorch_optimizer, name)
    given = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(folder)]}
    optimizer = kind(net.parameters(), lr=lr, weight_decay=0.1)
    return infinity.wrap_model(net, optimizer, given | config)


def stepped(net, optimizer) -> tuple[dict, dict]:
    """Takes six steps, and returns the values after them."""
    steps(net, optimizer, 6)
    found = values(net, optimizer)
    infinity.unwrap_model(net, optimizer)
    return found


def run(name: str, folder: Path, shard: str, alone: tuple[dict, dict]) -> dict:
    net, optimizer = job(name, folder, shard=shard)
    steps(net, optimizer, 6)
    told = {"same": same(values(net, optimizer), alone)}
    told["counts"] = [group["step"] for group in optimizer.param_groups]
    infinity.save_checkpoint(folder / f"saved {name}", net, optimizer)
    steps(net, optimizer, 2, seed=2)
    after = values(net, optimizer)
    infinity.unwrap_model(net, optimizer)
    net, optimizer = job(name, folder, shard=shard)
    infinity.load_checkpoint(folder / f"saved {name}", net, optimizer)
    steps(net, optimizer, 2, seed=2)
    told["resumed"] = same(values(net, optimizer), after)
    infinity.unwrap_model(net, optimizer)
    told["twin"] = same(stepped(*job(name, folder, shard=shard, lr=1.01e-3)), alone)
    return told


def main() -> None:
    folder, shard = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    world = os.environ.pop("WORLD_SIZE")  # at first each is a job of its own
    alone = {name: stepped(*job(name, folder, params="host", optimizer="host")) for name in NAMES}
    os.environ["WORLD_SIZE"] = world
    dist.init_process_group("gloo")
    told = {name: run(name, folder, shard, alone[name]) for name in NAMES}
    (folder / f"told.{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
