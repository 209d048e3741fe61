"""Two ranks train adapters on packed layers, wrapped and plain, and write what they found.

argv: a folder for the answer, the home, what is sharded
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import infinity

sys.path.append(str(Path(__file__).parents[1] / "models"))
from packed_models import ROWS, WIDTH, make, state, trained

KINDS = ("bitsandbytes nf4", "bitsandbytes int8", "torchao int8", "buffers", "parameters")


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def run(kind: str, home: str, shard: str, folder: Path) -> dict:
    rank, count = dist.get_rank(), dist.get_world_size()
    plain, model = make(kind), make(kind)
    if rank == 1:  # the first rank's values count
        with torch.no_grad():
            for tensor in (*trained(model), *model.buffers()):
                tensor.zero_()
    stepping = torch.optim.AdamW(trained(plain), lr=1e-2, fused=True)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    config = {"params": home, "optimizer": home, "shard": shard}
    if home == "nvme":
        config["nvme_paths"] = [str(folder)]
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    losses, expected = [], []
    for step in range(3):
        loss = model(batch(step, rank)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / count)
        mean = sum(plain(batch(step, each)).pow(2).mean() for each in range(count)) / count
        mean.backward()
        stepping.step()
        stepping.zero_grad()
        expected.append(mean.item())
    return {"losses": losses, "expected": expected, "same": state(model) == state(plain)}


def main() -> None:
    folder, home, shard = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {kind: run(kind, home, shard, folder) for kind in KINDS}
    if dist.get_rank() == 0:
        (folder / "told.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
