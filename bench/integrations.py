"""integrations: what other libraries' training loops cost beside the bare loop, over one model at
home.

Each system trains a model of its own with its state on the host: the same batches, clipping and
optimizer. They take turns, a few steps at a time, so that ratios are of pairs. The same loops
without us stand beside them: what a library costs itself is not ours. What a user changes, and the
seconds to a first step, are those of short scripts (:mod:`bench.first_steps`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.rounds import Times, paired
from infinity.tools.bench.settings import Settings

from .first_steps import HOME, rows_of

STEPS, BATCH, LENGTH = 4, 2, 128
LIBRARIES = ("transformers", "accelerate", "lightning")


def measure(settings: Settings) -> Measured:
    """Measures rows ``integrations.<library>`` and ``integrations.<library>.plain`` (tokens/s),
    whose ratios ``loop`` are to the bare loop with us, and to the one without; and those of
    :func:`bench.first_steps.rows_of`. ``integrations.loop`` has the ratio ``plain``, to the bare
    loop without us."""
    try:
        import accelerate  # noqa: F401
        import lightning  # noqa: F401
        import transformers
    except ImportError as error:
        return Measured([], [f"integrations: {error}"])
    width, layers = (512, 8) if settings.scale >= 1 else (64, 2)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=LENGTH,
    )
    rows = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(4096, (STEPS * BATCH, LENGTH))
    ]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    makers = {
        "loop": _loop,
        "transformers": _trainer,
        "accelerate": _accelerate,
        "lightning": _lightning,
    }
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        jobs = {
            f"{name}{end}": make(model(), rows, folder, not end)
            for name, make in makers.items()
            for end in ("", ".plain")
        }
        named = settings.alternate(jobs)
        first_steps = rows_of(("loop", *LIBRARIES), folder, min(3, settings.rounds))
    return Measured([*_rows(named), *first_steps])


def _rows(named: dict[str, Times]) -> Iterator[Row]:
    for name, times in named.items():
        loop = named["loop.plain" if name.endswith(".plain") else "loop"]
        ratios = {"loop": paired(times.wall, loop.wall)} if times is not loop else {}
        if name == "loop":
            ratios = {"plain": paired(times.wall, named["loop.plain"].wall)}
        speeds = [STEPS * BATCH * LENGTH / each for each in times.wall]
        yield row(f"integrations.{name}", "tokens/s", speeds, ratios=ratios)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _batches(rows: list) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)


def _loop(model: nn.Module, rows: list, folder: str, ours: bool) -> Callable[[], Times]:
    import infinity

    optimizer = _adamw(model)
    if ours:
        model, optimizer = infinity.wrap_model(model, optimizer, HOME)

    def run() -> Times:
        clock = _Clock()
        for batch in _batches(rows):
            clock.begin()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return clock.end()

    return run


def _trainer(model: nn.Module, rows: list, folder: str, ours: bool) -> Callable[[], Times]:
    import transformers

    from infinity.integrations import InfinityTrainer

    class Clocked(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.stop()

    clock = _Clock()
    args = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1000,
        max_grad_norm=1.0,
    )
    kind, more = (InfinityTrainer, {"infinity": HOME}) if ours else (transformers.Trainer, {})
    trainer = kind(model=model, args=args, train_dataset=rows, callbacks=[Clocked()], **more)
    trainer.remove_callback(transformers.PrinterCallback)

    def run() -> Times:
        clock.reset()
        trainer.train()
        return clock.end()

    return run


def _accelerate(model: nn.Module, rows: list, folder: str, ours: bool) -> Callable[[], Times]:
    import accelerate

    from infinity.integrations import InfinityAccelerator

    accelerator = (
        InfinityAccelerator(cpu=True, infinity=HOME) if ours else accelerate.Accelerator(cpu=True)
    )
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), _batches(rows))

    def run() -> Times:
        clock = _Clock()
        for batch in loader:
            clock.begin()
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return clock.end()

    return run


def _lightning(model: nn.Module, rows: list, folder: str, ours: bool) -> Callable[[], Times]:
    import lightning

    from infinity.integrations import InfinityStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _adamw(self)

        def on_train_batch_start(self, *args: Any) -> None:
            clock.begin()

        def on_train_batch_end(self, *args: Any) -> None:
            clock.stop()

    clock, module = _Clock(), Module()

    def run() -> Times:
        clock.reset()
        strategy = {"strategy": InfinityStrategy(HOME)} if ours else {}
        job = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            gradient_clip_val=1.0,
            **strategy,
        )
        job.fit(module, _batches(rows))
        return clock.end()

    return run


class _Clock:
    """Seconds from the begin of the first step to the end of the last: what is before and behind is
    not a step's."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._began = self._ended = None

    def begin(self) -> None:
        if self._began is None:
            self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self._ended = time.perf_counter(), time.process_time()

    def end(self) -> Times:
        if self._ended is None:
            self.stop()
        return Times([self._ended[0] - self._began[0]], [self._ended[1] - self._began[1]])
