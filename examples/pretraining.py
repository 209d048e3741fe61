"""Trains a model on packed tokens: a file of 32-bit token ids, one text after the other.

    python examples/pretraining.py MODEL TOKENS CHECKPOINT [--steps N]

MODEL is a config.json, for fresh weights, or a folder, whose weights are trained further. Called
again it goes on from its checkpoint, with the same bits. Ctrl-C and SIGTERM let it finish its step
and save. On two machines, each with as many processes as GPUs, and a folder that both see:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 \
        examples/pretraining.py MODEL TOKENS CHECKPOINT
"""

import argparse
import os
import signal

import numpy
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import infinity


def batch_of(tokens: numpy.ndarray, step: int, rank: int, samples: int, length: int):
    """The batch of a step follows from its number and the rank alone: a resumed job reads what one
    that was left alone reads."""
    starts = numpy.random.default_rng((step, rank)).integers(0, len(tokens) - length, samples)
    return torch.from_numpy(
        numpy.stack([tokens[start : start + length] for start in starts]).astype(numpy.int64)
    )


def make_model(given: str):
    """The model, its weights fresh or of a folder; on meta, so that they are never whole in
    memory."""
    config = AutoConfig.from_pretrained(given)
    if os.path.isfile(given):
        torch.manual_seed(0)  # the same weights on every rank
        return AutoModelForCausalLM.from_config(config), infinity.Config(nvme_paths="auto")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, infinity.Config(weights=given, nvme_paths="auto")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("checkpoint")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()

    stopping = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: stopping.append(signum))
    rank = 0
    if "RANK" in os.environ:  # torchrun started it
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        rank = dist.get_rank()

    tokens = numpy.memmap(args.tokens, dtype=numpy.uint32, mode="r")
    model, config = make_model(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=100)
    model.train()
    device = next(model.parameters()).device

    step = 0
    if os.path.exists(os.path.join(args.checkpoint, "manifest.json")):
        extra = infinity.load_checkpoint(args.checkpoint, model, optimizer)
        step = extra["step"]
        schedule.load_state_dict(extra["schedule"])
        print(f"continuing from step {step}")

    while step < args.steps:
        batch = batch_of(tokens, step, rank, 2, args.length).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        infinity.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        stops = torch.tensor(len(stopping))
        if dist.is_initialized():
            dist.all_reduce(stops)  # a signal to one rank stops all of them
        if step % args.every == 0 or step == args.steps or stops:
            infinity.save_checkpoint(
                args.checkpoint,
                model,
                optimizer,
                extra={"step": step, "schedule": schedule.state_dict()},
            )
        if stops:
            break
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
