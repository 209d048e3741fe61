"""The job of `infinity train`: a plain loop (forward, backward, clip, step, schedule, zero_grad)
over a model and an optimizer from `infinity.wrap_model`.

  job            the loop's inputs (model, optimizer, schedule, batches) and its measurements
  counts         bytes and seconds of every edge between two points in time
  held-out loss  the mean over batches that training never reads
  fixed values   options that change the arithmetic: a resumed job must have its checkpoint's
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import infinity

from ...core.machine.traffic import DATA
from ...errors import InfinityError
from ...ext.checkpoint.interval import Interval
from ...files.outputs import replacing
from .corpus import Batches, held_out_share
from .counts import EdgeCounts, traffic_of
from .examples import NOT_LEARNED, ExampleBatches
from .interrupt import Interrupt
from .mesh import axes_of, divide, joined, wrap
from .model import at_model
from .optimizers import betas_of, make_optimizers
from .options import DEFAULT_MAX_GRAD_NORM
from .places import check_fixed_values, check_not_past, saved_extra
from .ranks import Ranks
from .saved import copy_processors
from .schedules import shares

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(kw_only=True)
class Measured:
    """What the loop of a job of any kind measures."""

    args: argparse.Namespace
    ranks: Ranks
    fixed_values: dict[str, Any]
    first_step: int = 0
    saved_step: int | None = None  # of the last save that ended
    loss_before: float | None = None
    load_seconds: float | None = None  # of the checkpoint it goes on from
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    held_out_losses: dict[int, float] = field(default_factory=dict)  # by step, of --eval-every
    stalls: Any = None  # what its data costs (data.stalls.Stalls), if it was measured

    if TYPE_CHECKING:
        model: Any
        steps: int
        next_step: int
        tokens_per_step: int  # of all ranks
        lr: float  # of the last step
        figures: dict[str, float]  # of the last step, beside its loss and rate
        total_save_seconds: float | None

    @property
    def checkpoint(self) -> Path | None:
        return self.args.checkpoint

    @property
    def said(self) -> dict[str, Any]:
        """What each checkpoint says of its job."""
        out = self.args.out
        return {
            "steps": self.steps,
            "loss_before": self.loss_before,
            "fixed_values": self.fixed_values,
            "words": self.args.words,
            "data_ranks": self.ranks.data_count,
            "out": out and os.path.realpath(out),  # a restarted job may replace it
        }

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(self.step_seconds)
        return len(self.step_seconds) * self.tokens_per_step / seconds if seconds else 0.0


@dataclass(kw_only=True)
class Job(Measured):
    """The loop's inputs and measurements."""

    model: Any
    optimizers: list[Any]
    batches: Batches | ExampleBatches
    held_out: list[dict[str, torch.Tensor]]
    max_grad_norm: float | None  # None: the engine clips
    interval: Interval
    pipe: Any = None  # the pipeline of a mesh with stages, whose chunks are then the model
    tokenizer: Any = None  # saved with each checkpoint, for a model made of it
    schedulers: list[Any] = field(default_factory=list)
    steps: int = 0  # set with the schedulers
    next_step: int = 0
    grad_norm: Any = None  # of the last step before clipping, if the loop clips
    saving: Any = None  # infinity.save_checkpoint's, beside the steps
    saving_step: int = 0  # what it saves
    save_seconds: float = 0.0  # of the call that began it
    receipt: Any = None  # the file of --receipt
    stops_at: int | None = None  # of a stretch that is repeated, and saved nowhere

    def waiting_for_data(self) -> AbstractContextManager:
        """Returns a block in which the loop waits for its data, on the record."""
        return traffic_of(self.model).stalled(DATA)

    def let_go(self) -> None:
        """Drops model and optimizer, and with them the engine's memory and swap files."""
        self.model, self.pipe, self.optimizers, self.schedulers = None, None, [], []
        gc.collect()

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        rates = self.schedulers[0]  # it has the rate of the next step already
        return rates.base_lrs[0] * rates.lr_lambdas[0](rates.last_epoch - 1)

    @property
    def figures(self) -> dict[str, float]:
        """What the last step measured beside its loss and rate."""
        return {} if self.grad_norm is None else {"grad_norm": float(self.grad_norm)}

    @property
    def parts(self) -> list[Any]:
        """The modules that are called: the model, or the chunks of this rank's stage."""
        return [self.model] if self.pipe is None else self.pipe.chunks

    @property
    def tokens_per_step(self) -> int:
        return self.batches.tokens_per_batch * self.args.accumulate * self.ranks.data_count

    @property
    def total_save_seconds(self) -> float | None:
        return self.interval.total_seconds or None


def make_job(
    args: argparse.Namespace,
    model: nn.Module,
    batches: Batches | ExampleBatches,
    config: infinity.Config,
    ranks: Ranks,
    tokenizer: Any = None,
    say: Callable[[str], None] = lambda line: None,
) -> Job:
    """Divides the model over the mesh, if there is one, and wraps it with its optimizers. The job
    has no length yet (:func:`set_length`)."""
    from ...ext.packed.packed import dense_numel

    if args.lora_rank is None:
        model.config.architectures = [type(model).__name__]
    parameters_count = sum(map(dense_numel, model.parameters()))
    model = divide(model, ranks.mesh, say)
    rates = {"lr": args.lr, "weight_decay": args.weight_decay, "betas": betas_of(args.betas)}
    optimizers = make_optimizers(model, args.optim, **rates)
    model, optimizers, pipe = wrap(args, model, optimizers, config, ranks.mesh, say)
    max_grad_norm = args.max_grad_norm or (None if config.max_grad_norm else DEFAULT_MAX_GRAD_NORM)
    return Job(
        args=args,
        model=model,
        optimizers=optimizers,
        batches=batches,
        held_out=batches.held_out(args.eval_batches),
        max_grad_norm=max_grad_norm,
        interval=Interval(args.checkpoint_overhead),
        ranks=ranks,
        pipe=pipe,
        tokenizer=tokenizer,
        fixed_values=fixed_values(
            args, batches.corpus.fingerprint, batches.sequence_length, config, ranks
        )
        | {
            "parameters": parameters_count,
            "max_grad_norm": max_grad_norm or config.max_grad_norm,
        },
    )


def fixed_values(
    args: argparse.Namespace, data: str, length: int, config: infinity.Config, ranks: Ranks
) -> dict[str, Any]:
    """Returns the fixed values of every job. ``data``: its fingerprint."""
    return {
        "data": data,
        "seed": args.seed,
        "dtype": args.dtype,
        "master": str(config.master),
        "moments": str(config.moments),
        "batch_size": args.batch_size,
        "sequence_length": length,
        "eval_share": held_out_share(args),
        # A job can resume on fewer ranks with more micro-batches each, and on another mesh.
        "accumulate": args.accumulate * ranks.data_count,
        "optim": args.optim,
        "lr": args.lr,
        "weight_decay": args.weight_decay,
        "betas": args.betas,
        "scheduler": args.scheduler,
        "lora_rank": args.lora_rank,
        "quantize": args.quantize,
    }


def set_length(job: Job, steps: int, warmup_steps: int) -> None:
    """Sets the job's number of steps, and the learning rates along them."""
    import torch

    job.steps, job.fixed_values["warmup_steps"] = steps, warmup_steps
    fixed = job.fixed_values
    share = shares(fixed["scheduler"], lr=fixed["lr"], steps=steps, warmup_steps=warmup_steps)
    job.schedulers = [torch.optim.lr_scheduler.LambdaLR(each, share) for each in job.optimizers]


def train(
    job: Job,
    *,
    interrupt: Interrupt,
    show: Callable[[Job, EdgeCounts], None],
    tell: Callable[[float], None] = lambda loss: None,
) -> EdgeCounts:
    """Steps until done or interrupted; then saves a checkpoint if the job has a folder for it.
    ``tell`` gets held-out losses between the steps. Every rank calls this."""
    for part in job.parts:
        part.train()
    start = EdgeCounts.of(job.model)
    last = job.steps if job.stops_at is None else job.stops_at
    while job.next_step < last and not interrupt.is_told(job.ranks):
        started_at = time.perf_counter()
        job.losses.append(train_step(job, job.next_step))
        job.step_seconds.append(time.perf_counter() - started_at)
        job.interval.note_step(job.step_seconds[-1])
        job.next_step += 1
        show(job, EdgeCounts.of(job.model).since(start))
        if job.next_step < last and _is_evaluated(job):
            job.held_out_losses[job.next_step] = loss = held_out(job)
            check_finite(loss, job)
            tell(loss)
        if job.saving is not None and job.ranks.largest(
            int(job.ranks.is_first and job.saving.done)
        ):
            finish_save(job)
        if job.next_step < last and _is_save_due(job, interrupt):
            save_checkpoint(job, wait=False)
    finish_save(job, raises=False)
    if job.losses or job.next_step == 0:  # otherwise the checkpoint it resumed from is current
        save_checkpoint(job)
    return EdgeCounts.of(job.model).since(start)


def _is_evaluated(job: Job) -> bool:
    """Whether the held-out loss is measured after this step, which is not the last one."""
    every = job.args.eval_every if job.stops_at is None else None
    return every is not None and job.next_step % every == 0


def _is_save_due(job: Job, interrupt: Interrupt) -> bool:
    """Whether to save after this step: as the first rank's interval says, or SIGUSR1 to any rank. A
    collective."""
    if job.checkpoint is None or job.stops_at is not None:
        return False
    if job.args.checkpoint_every is not None:
        is_due = job.next_step % job.args.checkpoint_every == 0
    else:
        is_due = job.ranks.is_first and job.interval.is_due
    return bool(job.ranks.largest(interrupt.taken_save() or is_due))


def train_step(job: Job, step: int) -> float:
    """Takes one optimizer step and returns the mean loss over ranks. Raises InfinityError for a
    loss that is not finite, before the weights change. Every rank calls this."""
    import torch

    with job.waiting_for_data():
        batches = batches_of(job, step)
    counts = [learned_count(batch) for batch in batches]
    # Of a micro-batch in a step, so that every learned token counts the same
    mean = job.ranks.mean(float(sum(counts)))
    loss_sum = 0.0
    # Dropout depends on (seed, step, turn) alone: a resumed job repeats it, also on other ranks.
    seeds = [job.args.seed * 1_000_003 + step + 7_919 * turn for turn in _turns(job)]
    torch.manual_seed(seeds[0] % 2**63)
    if job.pipe is not None:
        loss_sum = job.pipe.step(**_joined(job, batches), num_items_in_batch=mean).item()
        check_finite(loss_sum, job)
    for batch, count, seed in zip(batches, counts, seeds) if job.pipe is None else ():
        torch.manual_seed(seed % 2**63)
        loss = _loss(job.model, batch) / (mean / count)
        loss_sum += loss.item()
        check_finite(loss_sum, job)  # the other ranks' next collective raises too
        loss.backward()
    if job.max_grad_norm is not None:
        job.grad_norm = _clip(job)
    for stepping in (*job.optimizers, *job.schedulers):
        stepping.step()
    for optimizer in job.optimizers:
        optimizer.zero_grad()
    return job.ranks.mean(loss_sum)


def _clip(job: Job) -> torch.Tensor:
    """Clips the gradients, and returns their norm before."""
    import torch

    if {"pp", "ep", "tp"} & {*axes_of(job.ranks.mesh)}:  # over all parts and stages
        return infinity.clip_grad_norm_(job.optimizers[0], job.max_grad_norm)
    return torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.max_grad_norm)


def _joined(job: Job, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Joins micro-batches into a pipeline's batch, on its device."""
    return at_model(job.parts[0], joined(batches, job.args.accumulate * job.batches.batch_size))


def batches_of(job: Job, step: int) -> list[dict[str, torch.Tensor]]:
    """Returns the micro-batches of this rank in a step: those that it shares with others, if a mesh
    divides the model."""
    return [job.batches.train(step, turn) for turn in _turns(job)]


def _turns(job: Job) -> list[int]:
    """Returns which micro-batches of a step are this rank's: with other ranks, the step has the
    same ones."""
    return [at * job.ranks.data_count + job.ranks.data_rank for at in range(job.args.accumulate)]


def measure_stalls(job: Job, steps: int) -> Any:
    """Measures what a step waits for its data, without changing the job. Every rank calls this."""
    from ...ext.data.stalls import measure_stalls

    job.model.train()

    def passes(batches: list[dict[str, torch.Tensor]]) -> None:
        for batch in batches:
            _loss(job.model, batch).backward()
        for optimizer in job.optimizers:
            optimizer.zero_grad()

    return measure_stalls(
        job.model,
        lambda index: batches_of(job, job.next_step + index),
        passes,
        steps,
        job.batches.corpus.mapped,
    )


def check_finite(loss: float, job: Measured) -> None:
    """Raises InfinityError for a loss that is not finite."""
    if not math.isfinite(loss):
        raise InfinityError(
            f"The loss is {loss} at step {job.next_step}. Lower --lr or lengthen --warmup-steps"
        )


def learned_count(batch: dict[str, torch.Tensor]) -> int:
    """Counts the tokens of a batch that the model learns to predict."""
    return int((batch["labels"][:, 1:] != NOT_LEARNED).sum())


def _loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(**at_model(model, batch)).loss


def held_out_loss(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    """Computes the mean loss per predicted token in nats."""
    import torch

    was_training = model.training
    model.eval()
    loss_sum, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            if learned := learned_count(batch):  # else the mean over none is nan
                loss_sum += _loss(model, batch).item() * learned
                count += learned
    model.train(was_training)
    return loss_sum / count


def held_out(job: Job) -> float:
    """Computes the held-out loss of the job's model: of a pipeline by batches as large as its
    steps'. Every rank calls this."""
    if job.pipe is None:
        return held_out_loss(job.model, job.held_out)
    modes = [part.training for part in job.parts]
    for part in job.parts:
        part.eval()
    loss_sum, counted = 0.0, 0
    for at in range(0, len(job.held_out), job.args.accumulate):
        batches = job.held_out[at : at + job.args.accumulate]
        if learned := sum(map(learned_count, batches)):
            loss_sum += job.pipe.eval(**_joined(job, batches)).item() * learned
            counted += learned
    for part, mode in zip(job.parts, modes):
        part.train(mode)
    return loss_sum / counted


def save_checkpoint(job: Job, *, wait: bool = True) -> None:
    """Saves the job if it has a folder for it; without ``wait`` beside the next step. Every rank
    calls this."""
    from ...ext.checkpoint.export import ELSEWHERE, OF_MODEL
    from ...ext.checkpoint.pretrained import CARRIED

    if job.receipt is not None:
        job.receipt.note(job)
    if job.checkpoint is None or job.stops_at is not None:
        return
    finish_save(job, raises=False)
    job.interval.begin_save()
    job.saving_step = job.next_step
    schedulers = [scheduler.state_dict() for scheduler in job.schedulers]
    extra = job.said | {"step": job.next_step, "schedulers": schedulers}
    began = time.perf_counter()
    job.saving = infinity.save_checkpoint(
        job.checkpoint, job.model, job.optimizers, extra=extra, overwrite=True, wait=wait
    )
    job.save_seconds = time.perf_counter() - began
    if job.saving is None:
        job.interval.end_save(job.save_seconds, job.save_seconds)
    if job.ranks.is_first:
        with replacing(job.checkpoint / OF_MODEL) as made:
            for part in (job.tokenizer, *getattr(job.parts[0], "peft_config", {}).values()):
                if part is not None:
                    part.save_pretrained(made)
            copy_processors(job.args.model, made)
            if carried := job.parts[0].__dict__.get(CARRIED):
                rest = {"folder": os.path.realpath(str(job.args.model)), "tensors": list(carried)}
                (made / ELSEWHERE).write_text(json.dumps(rest))


def finish_save(job: Job, *, raises: bool = True) -> None:
    """Waits until the save beside the last steps is over. Raises its error, unless a new save
    follows. Every rank calls this."""
    if job.saving is None:
        return
    saving, job.saving, began = job.saving, None, time.perf_counter()
    try:
        saving.wait()
    except InfinityError:
        job.interval.end_save(None, None)
        if raises:
            raise
    else:
        stall = job.save_seconds + time.perf_counter() - began
        job.interval.end_save(stall, saving.seconds)
        job.saved_step = job.saving_step


def resume(job: Job) -> None:
    """Restores the job from its checkpoint. Raises `UsageError` if the options do not match it, or
    it is past the last step. Every rank calls this."""
    check_fixed_values(job.checkpoint, job.fixed_values, saved_extra(job.checkpoint))
    began = time.perf_counter()
    extra = infinity.load_checkpoint(job.checkpoint, job.model, job.optimizers)
    job.load_seconds = time.perf_counter() - began
    check_not_past(job.checkpoint, extra["step"], job.steps)
    schedulers = extra.get("schedulers") or [extra["scheduler"]]  # of before there were several
    for optimizer, scheduler, saved in zip(job.optimizers, job.schedulers, schedulers):
        scheduler.load_state_dict(saved)
        # Computed from the step, not read from the checkpoint: if --steps has changed, so has the
        # curve. Otherwise the bits are the same.
        for group, base_lr, share in zip(
            optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base_lr * share(extra["step"])
    job.first_step = job.next_step = extra["step"]
    job.loss_before = extra["loss_before"]
