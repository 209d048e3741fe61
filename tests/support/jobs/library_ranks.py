"""A job of several ranks: a run of a library with us and one without (its own data parallelism),
and what both came to.

usage: library_ranks.py <lightning | accelerate | trl> <folder>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import torch
from trainer_cases import SEED, arguments, llama, logged, on_disk, rows, values

Run = tuple[
    list[float], dict[str, torch.Tensor]
]  # losses, and norms where the library shows them; the weights in the end


def of_lightning(folder: Path, ours: bool, *, sums: bool, lr: float = 1e-2) -> Run:
    """Two devices of Lightning's; it starts the second process by itself. ``sums``: with
    accumulation and clipping."""
    import lightning
    from models import seeded
    from torch import nn

    from infinity.integrations import InfinityStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(
                *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
            )
            self.bias = nn.Parameter(torch.zeros(32))
            self.seen: list[float] = []

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss = ((self.blocks(batch) + self.bias - batch.flip(1)) ** 2).mean()
            self.seen.append(loss.item())
            return loss

        def validation_step(self, batch: torch.Tensor, number: int) -> None:
            self.log("val", (self.blocks(batch) + self.bias).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=lr, fused=True)

    data = torch.randn(32, 32, generator=torch.Generator().manual_seed(SEED))
    more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1} if sums else {}
    strategy = InfinityStrategy(on_disk(folder)) if ours else "ddp"
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    job = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, **quiet, **more
    )
    module = seeded(SEED, Module)
    loaders = [
        torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle)
        for shuffle in (True, False)
    ]
    torch.manual_seed(SEED)
    job.fit(module, *loaders)
    return [*module.seen, job.callback_metrics["val"].item()], values(module)


def of_accelerate(folder: Path, ours: bool, *, sums: bool, lr: float = 1e-2) -> Run:
    """The loop of accelerate's documents."""
    import accelerate

    from infinity.integrations import InfinityAccelerator

    given = {"cpu": True, "gradient_accumulation_steps": 2 if sums else 1}
    accelerator = (
        InfinityAccelerator(**given, infinity=on_disk(folder))
        if ours
        else accelerate.Accelerator(**given)
    )
    model = llama(attention_dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    loader = torch.utils.data.DataLoader(rows(16), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if sums and accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return seen, values(accelerator.unwrap_model(model))


def of_trl(folder: Path, ours: bool, *, sums: bool, lr: float = 1e-2) -> Run:
    """SFT on texts of several lengths."""
    import trl
    from sft_cases import texts, tokenizer

    from infinity.integrations import InfinitySFTTrainer

    kind, more = (
        (InfinitySFTTrainer, {"infinity": on_disk(folder)}) if ours else (trl.SFTTrainer, {})
    )
    plain = {} if sums else {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0}
    args = arguments(
        folder / str(ours),
        trl.SFTConfig,
        max_length=16,
        max_steps=3,
        ddp_backend="gloo",
        learning_rate=lr,
        **plain,
    )
    model = llama(attention_dropout=0.0)
    trainer = kind(
        model=model, args=args, train_dataset=texts(text=10), processing_class=tokenizer(), **more
    )
    trainer.train()
    return [entry["loss"] for entry in logged(trainer) if "loss" in entry], values(trainer.model)


LIBRARIES = {"lightning": of_lightning, "accelerate": of_accelerate, "trl": of_trl}


def main(library: str, folder: Path) -> None:
    torch.set_num_threads(1)
    run, told = LIBRARIES[library], {}
    for name, sums, lr in (("plain", False, 1e-2), ("sums", True, 1e-2), ("other", False, 2e-2)):
        ours = run(folder, True, sums=sums)
        theirs = run(folder, False, sums=sums, lr=lr)
        furthest = max((ours[1][name] - theirs[1][name]).abs().max().item() for name in theirs[1])
        told[name] = {"furthest": furthest, "losses": [ours[0], theirs[0]]}
    if torch.distributed.get_rank() == 0:
        (folder / "told.json").write_text(
            json.dumps(told | {"ranks": torch.distributed.get_world_size()})
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
