"""Trains and evaluates a causal language model by transformers' Trainer, as run_clm does: arguments
by HfArgumentParser, checkpoints, the last one found and resumed, metrics."""

import os
from dataclasses import dataclass, field

import torch
import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    layers: int = field(default=2)
    tied: bool = field(default=False)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        made = torch.Generator().manual_seed(count)
        self.rows = torch.randint(3, 67, (count, 12), generator=made)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main():
    model_args, args = HfArgumentParser(
        (ModelArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    set_seed(args.seed)
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=model_args.layers,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=model_args.tied,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    print(
        f"Training new model from scratch - Total size={sum(p.numel() for p in model.parameters())}"
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Rows(24) if args.do_train else None,
        eval_dataset=Rows(8) if args.do_eval else None,
    )
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=last)
        trainer.save_model()
        print({"train_loss": result.training_loss, "steps": trainer.state.global_step})
        for entry in trainer.state.log_history:
            print(
                {
                    name: value
                    for name, value in entry.items()
                    if name in ("loss", "grad_norm", "learning_rate", "eval_loss")
                }
            )
    if args.do_eval:
        metrics = trainer.evaluate()
        print(
            {"eval_loss": metrics["eval_loss"], "perplexity": 2.718281828 ** metrics["eval_loss"]}
        )
    saved = transformers.AutoModelForCausalLM.from_pretrained(args.output_dir)
    print(sum(p.double().sum().item() for p in saved.parameters()))


if __name__ == "__main__":
    main()
