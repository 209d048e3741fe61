"""Trains a transformers folder on a reward (GRPO). While answers are sampled, the optimizer's state
is parked, and its memory is free.

python examples/grpo.py MODEL PROMPTS OUT [--steps N]

PROMPTS: JSON lines with `prompt` and `answer`. The reward of a completion that has the answer is 1.
"""

import argparse

import datasets
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

from infinity.integrations import InfinityGRPOTrainer


def has_answer(completions: list, answer: list[str], **columns) -> list[float]:
    """The reward: 1 for a completion that has the answer in it."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(right in text) for text, right in zip(texts, answer)]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=256, help="of a completion")
    parser.add_argument("--park", default="nvme", help="where the state waits: nvme or host")
    args = parser.parse_args()

    trainer = InfinityGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype="auto"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=has_answer,
        train_dataset=datasets.load_dataset("json", data_files=args.prompts, split="train"),
        args=trl.GRPOConfig(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=args.length,
            learning_rate=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        infinity={"nvme_paths": "auto"},
        infinity_park=args.park,
    )
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
