"""Trains low-rank adapters of peft on a transformers folder: the base is frozen, and at home where
it fits.

python examples/lora.py MODEL TEXT OUT [--steps N]
"""

import argparse
import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    if os.path.exists(args.out):
        parser.error(
            f"{args.out} is there already: save_pretrained would refuse it, after the training"
        )

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = tokenizer(open(args.text).read(), return_tensors="pt").input_ids[0]
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    model = get_peft_model(
        base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=2e-4
    )
    model, optimizer = infinity.wrap_model(model, optimizer)  # no option: what fits stays in memory
    model.train()

    for step in range(args.steps):
        starts = torch.randint(
            0, len(tokens) - args.length, (2,), generator=torch.Generator().manual_seed(step)
        )
        batch = torch.stack([tokens[start : start + args.length] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {loss.item():.4f}")

    infinity.save_pretrained(model, args.out)  # the adapters, as peft saves them


if __name__ == "__main__":
    main()
