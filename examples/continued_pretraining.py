"""Goes on training a model on packed tokens: a file of 32-bit token ids, one text after the other.

    python examples/continued_pretraining.py MODEL TOKENS CHECKPOINT [--steps N]

Called again it goes on from its checkpoint, with the same bits. Ctrl-C and SIGTERM let it finish
its step and save.
"""

import argparse
import os
import signal

import numpy
import torch
from transformers import AutoModelForCausalLM

import infinity


def batch_of(tokens: numpy.ndarray, step: int, samples: int, length: int) -> torch.Tensor:
    """The batch of a step follows from its number alone: a resumed job reads what one that was left
    alone reads."""
    starts = numpy.random.default_rng(step).integers(0, len(tokens) - length, samples)
    return torch.from_numpy(
        numpy.stack([tokens[start : start + length] for start in starts]).astype(numpy.int64)
    )


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

    tokens = numpy.memmap(args.tokens, dtype=numpy.uint32, mode="r")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    model, optimizer = infinity.wrap_model(model, optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=100)
    model.train()

    step = 0
    if os.path.exists(os.path.join(args.checkpoint, "manifest.json")):
        extra = infinity.load_checkpoint(args.checkpoint, model, optimizer)
        step = extra["step"]
        schedule.load_state_dict(extra["schedule"])
        print(f"continuing from step {step}")

    while step < args.steps and not stopping:
        batch = batch_of(tokens, step, 2, args.length)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        if step % args.every == 0 or step == args.steps or stopping:
            infinity.save_checkpoint(
                args.checkpoint,
                model,
                optimizer,
                extra={"step": step, "schedule": schedule.state_dict()},
            )


if __name__ == "__main__":
    main()
