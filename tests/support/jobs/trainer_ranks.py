"""A job of several ranks: one Trainer with us and one without (which puts the model into
DistributedDataParallel), and what both came to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import torch
import transformers
from trainer_cases import arguments, llama, logged, on_disk, rows, values

from infinity.integrations import InfinityTrainer


def run(folder: Path, ours: bool, start: str | None = None) -> transformers.Trainer:
    torch.set_num_threads(1)
    kind, more = (
        (InfinityTrainer, {"infinity": on_disk(folder)}) if ours else (transformers.Trainer, {})
    )
    saving = {
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    args = arguments(folder / ("ours" if ours else "theirs"), ddp_backend="gloo", **saving)
    model = llama(attention_dropout=0.0)
    trainer = kind(model=model, args=args, train_dataset=rows(20), eval_dataset=rows(4), **more)
    trainer.train(resume_from_checkpoint=start)
    return trainer


def main(folder: Path) -> None:
    ours, theirs = run(folder, True), run(folder, False)
    found, expected = values(ours.model), values(theirs.model)
    furthest = max((found[name] - expected[name]).abs().max().item() for name in expected)
    losses = [[entry["loss"] for entry in logged(one) if "loss" in entry] for one in (ours, theirs)]
    evaluated = [
        [entry["eval_loss"] for entry in logged(one) if "eval_loss" in entry]
        for one in (ours, theirs)
    ]
    again = values(run(folder, True, str(folder / "ours" / "checkpoint-2")).model)
    resumed = all(torch.equal(again[name], found[name]) for name in found)
    if torch.distributed.get_rank() == 0:
        told = {"furthest": furthest, "losses": losses, "evaluated": evaluated, "resumed": resumed}
        (folder / "told.json").write_text(json.dumps(told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
