"""Writes on from several prompts at once with a model whose weights stay on a disk: each pass reads
them once, for all prompts.

python examples/streaming_inference.py MODEL PROMPT [PROMPT ...] [--tokens N] [--scratch FOLDER]
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import infinity


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--scratch", help="folder on a disk; without it one is found")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    config = infinity.Config(params="nvme", nvme_paths=args.scratch or "auto", weights=args.model)
    model, _ = infinity.wrap_model(model, None, config)  # without an optimizer nothing is updated
    model.eval()

    inputs = tokenizer(args.prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        written = model.generate(
            **inputs,
            max_new_tokens=args.tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    for text in tokenizer.batch_decode(written, skip_special_tokens=True):
        print(text)
    print(f"{infinity.stats(model).edges['nvme->host'].nbytes} bytes read from the disk")


if __name__ == "__main__":
    main()
