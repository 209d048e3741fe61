"""Trains a transformers folder on preferred answers (DPO). The reference model streams its weights
and has no state.

python examples/dpo.py MODEL PAIRS OUT [--steps N]

PAIRS: JSON lines with `prompt`, `chosen` and `rejected`: text, or lists of messages.
"""

import argparse

import datasets
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

from infinity.integrations import InfinityDPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("pairs")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()

    model, reference = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype="auto") for _ in range(2)
    )
    trainer = InfinityDPOTrainer(
        model=model,
        ref_model=reference,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=datasets.load_dataset("json", data_files=args.pairs, split="train"),
        args=trl.DPOConfig(
            output_dir=args.out,
            max_steps=args.steps,
            max_length=args.length,
            per_device_train_batch_size=2,
            learning_rate=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        infinity={"nvme_paths": "auto"},  # homes follow from what is free
        infinity_reference={"params": "host"},
    )
    trainer.train()
    trainer.save_model(args.out)  # with the tokenizer; from_pretrained loads it


if __name__ == "__main__":
    main()
