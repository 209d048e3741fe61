"""Fine-tunes all weights of a transformers folder on a text, on a machine whose memory they may
exceed.

python examples/full_finetune.py MODEL TEXT OUT [--steps N]
"""

import argparse
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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

    # On meta the model takes no memory. Its weights are read from the folder into their homes, a
    # few blocks at a time.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    config = infinity.Config(
        weights=args.model, nvme_paths="auto"
    )  # homes and a scratch folder follow from what is here
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    model.train()

    with infinity.Watch(model, steps=args.steps) as watch:  # `infinity top` shows it
        for step in range(args.steps):
            starts = torch.randint(
                0, len(tokens) - args.length, (2,), generator=torch.Generator().manual_seed(step)
            )
            batch = torch.stack([tokens[start : start + args.length] for start in starts])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watch.update(loss=loss.item(), tokens=batch.numel())
            print(f"step {step + 1} loss {loss.item():.4f}")

    infinity.save_pretrained(model, args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
