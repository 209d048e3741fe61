"""DistributedDataParallel under torchrun, or in processes that it spawns: a seed of its own on each
rank, buffers, accumulation by no_sync, a file from the first rank."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

accumulate = int(sys.argv[1]) if len(sys.argv) > 1 else 1


def main(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(7 + rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model = DDP(model.to("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=world, rank=rank)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader):
            last = step % accumulate == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            print(f"[{rank}] epoch {epoch} step {step}: {loss.item():.6f}", flush=True)
    if rank == 0:
        state = model.module.state_dict()
        torch.save({"model": state, "optimizer": optimizer.state_dict()}, "ddp.pt")
        sums = {name: round(value.double().sum().item(), 5) for name, value in state.items()}
        print("[0]", sorted(model.state_dict()), sums, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        mp.spawn(main, args=(2,), nprocs=2)
