"""Fine-tunes an encoder on pairs of sentences by transformers' Trainer, as run_glue does: a
collator that pads, metrics, the best checkpoint, predictions."""

import dataclasses

import numpy as np
import torch
import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclasses.dataclass
class DataArguments:
    count: int = dataclasses.field(default=16)


def rows(count, seed):
    made = torch.Generator().manual_seed(seed)
    for _ in range(count):
        length = int(torch.randint(4, 9, (1,), generator=made))
        ids = torch.randint(5, 40, (length,), generator=made).tolist()
        yield {"input_ids": ids, "label": int(sum(ids) % 3)}


def collate(batch):
    longest = max(len(row["input_ids"]) for row in batch)
    padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch]
    ids = torch.tensor(padded)
    labels = torch.tensor([row["label"] for row in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main():
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data_args, args = parser.parse_args_into_dataclasses()
    args.remove_unused_columns = False
    set_seed(args.seed)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)

    def compute_metrics(found):
        return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=list(rows(data_args.count, 1)),
        eval_dataset=list(rows(8, 2)),
        data_collator=collate,
        compute_metrics=compute_metrics,
    )
    result = trainer.train()
    print(result.training_loss, trainer.state.best_model_checkpoint)
    metrics = trainer.evaluate()
    print(metrics["eval_loss"], metrics["eval_accuracy"])
    print(np.round(trainer.predict(list(rows(4, 3))).predictions, 5).tolist())
    trainer.save_model()


if __name__ == "__main__":
    main()
