"""Trains over ranks: each has its part of weights, gradients and state, and its own part of the
data.

torchrun --nproc-per-node 2 examples/ranks.py CHECKPOINT [--steps N]
"""

import argparse

import torch
import torch.distributed as dist

import infinity


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("checkpoint")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = infinity.wrap_model(
        model, optimizer, {"params": "host", "optimizer": "host"}
    )

    for step in range(args.steps):
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = model(data).square().mean()
        loss.backward()
        infinity.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
    infinity.save_checkpoint(
        args.checkpoint, model, optimizer, extra={"step": args.steps}
    )  # loads at any number of ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
