"""InfinityTrainer: transformers' Trainer over a model at home.

    home = {"params": "nvme", ...}
    trainer = InfinityTrainer(model=model, args=args, train_dataset=data, infinity=home)

The model is wrapped when the Trainer prepares it, with the Trainer's optimizer. It is never moved
to a device whole before that, so it may be on ``meta``. Checkpoints hold weights that
``from_pretrained`` loads and, in a folder ``infinity``, all state to resume bit for bit. Both are
streamed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.run.registry import is_wrapped, wrapped
from ...core.wrap.agreement import least
from ...errors import ConfigError
from ...library_versions import require
from ..checkpoint.interval import Interval, share_of
from ..checkpoint.load import load_checkpoint
from ..checkpoint.pretrained import adapter_tensors, is_adapted, prompts_in_memory, save_pretrained
from ..checkpoint.random_state import keep_random_state
from ..checkpoint.save import save_checkpoint
from ..migrate.deepspeed import SCHEDULE, SCHEDULES
from .accelerate import AT_HOME, Given, InfinityAccelerator
from .weights import load_weights

transformers = require("transformers")

logger = logging.getLogger(__name__)

SCHEDULER = "scheduler.pt"  # the Trainer's file name


class SaveWhenDue(transformers.TrainerCallback):
    """Asks a Trainer to save as often as a share of its time allows. The first rank chooses."""

    def __init__(self, share: float):
        self._interval = Interval(share)
        self._last: float | None = None  # None: something else than a step has taken time since

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = None
        if args.load_best_model_at_end:
            raise ConfigError(
                "infinity_overhead saves as time allows, and load_best_model_at_end needs a save at"
                " each evaluation: leave out one of them"
            )
        if args.save_strategy != "no":
            logger.info(
                "infinity_overhead says when to save: save_strategy is no, not %s",
                args.save_strategy.value,
            )
            args.save_strategy = type(args.save_strategy)("no")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._last is None:
            self._last = time.monotonic()

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._interval.note_step(now - self._last)
        self._last = now
        due = self._interval.is_due
        if is_wrapped(model):
            collectives = wrapped(model).engine.job.collectives
            asked = int(not (due and collectives.ranks.is_first))
            due = not least(collectives, [asked], "infinity_overhead")[0]
        control.should_save |= due or state.global_step >= state.max_steps

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measures a save."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._interval.note_save(seconds)
            self._last = None


def _known(args: Any) -> dict[str, Any]:
    """Returns what a Trainer's arguments say, by DeepSpeed's keys: an "auto" takes it."""
    total = args.max_steps if args.max_steps > 0 else None
    warmup = args.warmup_steps
    if warmup is not None and 0 < warmup < 1:
        warmup = None if total is None else args.get_warmup_steps(total)
    names = {theirs: ours for ours, theirs in SCHEDULES.items()}
    batch = args.per_device_train_batch_size
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "train_batch_size": batch * args.gradient_accumulation_steps * args.world_size,
        "gradient_clipping": args.max_grad_norm,
        "bf16.enabled": args.bf16,
        "fp16.enabled": args.fp16,
        SCHEDULE: names.get(str(args.lr_scheduler_type.value), args.lr_scheduler_type.value),
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "scheduler.params.warmup_num_steps": warmup,
        "scheduler.params.total_num_steps": total,
    }


class InfinityMixin:
    """Makes any subclass of transformers' Trainer wrap its model: ``class MyTrainer(InfinityMixin,
    SFTTrainer): ...``.

    infinity, infinity_reference
        As for :class:`InfinityAccelerator`: the configurations of the trained model, and of others
        that the Trainer evaluates beside it.
    infinity_overhead
        The share of the time that saving may take, as ``0.02`` or ``"2%"``. It chooses when to
        save, in place of ``save_strategy``; at the end, and when a callback asks for it, it also
        saves.

    Raises ConfigError for options that move or cast the model: FSDP, DeepSpeed,
    ``fp16_full_eval`` and ``bf16_full_eval``.
    """

    def __init__(
        self,
        *args: Any,
        infinity: Given = None,
        infinity_reference: Given = None,
        infinity_overhead: float | str | None = None,
        **kwargs: Any,
    ):
        self._homes = (infinity, infinity_reference)
        self._saves = None
        if infinity_overhead is not None:
            self._saves = SaveWhenDue(share_of(infinity_overhead, "infinity_overhead"))
        super().__init__(*args, **kwargs)
        if self._saves is not None:
            self.add_callback(self._saves)

    @property
    def _is_home(self) -> bool:
        return is_wrapped(self.model)

    # --- preparing ---

    def create_accelerator_and_postprocess(self) -> None:
        """Replaces the Trainer's accelerator by one that wraps models."""
        super().create_accelerator_and_postprocess()
        for option in ("fp16_full_eval", "bf16_full_eval"):
            if getattr(self.args, option):
                raise ConfigError(
                    f"{option} casts the model after it is wrapped: leave it out, and give"
                    " Config(param_dtype=...)"
                )
        # With several, Trainer would use DataParallel. The engine needs one process per GPU.
        self.args._n_gpu = min(self.args.n_gpu, 1)
        InfinityAccelerator.adopt(self.accelerator, *self._homes, loop=_known(self.args))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: units are copied to the device when they are used."""

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        return model

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Runs an evaluation. Before training, wraps the model with its optimizer first, so that
        training need not wrap it again."""
        if not self._is_home and self.train_dataset is not None:
            self.create_optimizer()
            self.model_wrapped, self.optimizer = self.accelerator.prepare(
                self.model, self.optimizer
            )
        return super().evaluation_loop(*args, **kwargs)

    # --- checkpoints ---

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self._saves is None:
            return super()._save_checkpoint(*args, **kwargs)
        with self._saves.timed():
            return super()._save_checkpoint(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self._is_home:
            super()._save(output_dir, state_dict)
            return
        if is_adapted(self.model):
            with wrapped(self.model).engine.uses.begin():
                adapters = adapter_tensors(self.model, saving=True)
            with prompts_in_memory(self.model, adapters):
                super()._save(output_dir, adapters)
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        super()._save(folder, {})  # writes an empty file of weights, which is replaced next
        save_pretrained(self.model, folder, overwrite=True)  # as transformers does

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_home:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_checkpoint(
            Path(output_dir) / AT_HOME, self.model, wrapped(self.model).optimizer, overwrite=True
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Reads the weights. Skips them if the folder ``infinity`` has them too: that is read once
        the model is wrapped."""
        if (Path(resume_from_checkpoint) / AT_HOME).is_dir():
            return
        if not self._load_streamed(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_streamed(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_streamed(self, folder: str) -> bool:
        if (
            not self._is_home
            or is_adapted(self.model)
            or not list(Path(folder).glob("model*.safetensors"))
        ):
            return False
        load_weights(self.model, folder)
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / AT_HOME).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        with keep_random_state():  # the Trainer restores the random state later
            load_checkpoint(Path(checkpoint) / AT_HOME, self.model, wrapped(self.model).optimizer)
        self.lr_scheduler.load_state_dict(
            torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True)
        )


class InfinityTrainer(InfinityMixin, transformers.Trainer):
    """Trains a model at home as transformers' Trainer does. ``infinity``: a Config, a dict, or a
    path."""
