"""Preferences: a job that learns from preferred answers. TRL's trainer has the loop, the losses and
the reference; here are its options, its data and what the job tells."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import infinity

from ...errors import ConfigError
from ..cli.amounts import format_count
from .corpus import held_out_share
from .counts import EdgeCounts
from .example_files import ExampleFiles
from .examples import libraries
from .inputs import find_eval_files, of_eval_data
from .interrupt import Interrupt
from .job import Measured, check_finite, fixed_values
from .methods import METHODS, Method, optimizer_of
from .model import choose_sequence_length, name_base, no_cache, read_for
from .optimizers import betas_of
from .options import DEFAULT_MAX_GRAD_NORM, DEFAULT_ROW_LENGTH, set_defaults
from .places import (
    NOTED,
    OF_TRAINER,
    check_fixed_values,
    check_not_past,
    saved_extra,
    trainer_checkpoint,
)
from .preferred import Preferred, read_preferred
from .progress import make_progress
from .ranks import Ranks
from .report import measurements
from .schedules import FINAL_LR_SHARE
from .settings import engine_config
from .trackers import Trackers

if TYPE_CHECKING:
    from rich.console import Console


ADAM_BETAS = ("adam_beta1", "adam_beta2")  # of the trainer's arguments
END_NBYTES = 1 << 20  # of each end of a file, by which it is known


@dataclass(frozen=True, kw_only=True)
class PreferenceInputs:
    """What is read for a job: the model's configuration, its tokenizer and the rows."""

    model_config: Any
    tokenizer: Any
    preferred: Preferred
    evaluated: Preferred | None  # of --eval-data
    length: int


def read_preference_inputs(
    args: argparse.Namespace, files: Any, console: Console
) -> PreferenceInputs:
    """Reads the model's configuration, its tokenizer and the data. Raises ConfigError for data that
    the method cannot learn of."""
    if not isinstance(files, ExampleFiles):
        raise ConfigError(
            f"--method {args.method} learns from {METHODS[args.method].data}, and {files.source} is"
            " running text. Leave out --method to learn it."
        )
    model_config, tokenizer = read_for(args)
    if tokenizer is not None and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # as TRL's DPO has it
    length = choose_sequence_length(args.sequence_length, model_config, DEFAULT_ROW_LENGTH)
    preferred = read_preferred(files, tokenizer, args.method, share=held_out_share(args))
    evaluated = None
    if (held_out := find_eval_files(args, files)) is not None:
        with of_eval_data():
            evaluated = read_preferred(held_out, tokenizer, args.method, share=1.0)
    for line in preferred.told:
        console.print(line)
    if not preferred.has_own_template:
        console.print(
            "The tokenizer has no chat template: it gets a plain one, which is saved with the model"
        )
    return PreferenceInputs(
        model_config=model_config,
        tokenizer=tokenizer,
        preferred=preferred,
        evaluated=evaluated,
        length=length,
    )


@dataclass(kw_only=True)
class PreferenceJob(Measured):
    """A trainer of TRL over a model at home, and what the job measured."""

    method: Method
    trainer: Any
    tokenizer: Any
    preferred: Preferred
    config: infinity.Config
    closing: ExitStack
    tokens_per_step: int  # of all ranks, on average
    counts: EdgeCounts | None = None
    figures: dict[str, float] = field(default_factory=dict)  # of the last step, as TRL logs them
    unlearned: int = 0  # samples whose prompt leaves no room for an answer
    cut: int = 0  # answers whose end is not learned
    total_save_seconds: float | None = None

    @property
    def model(self) -> Any:
        """The trained model."""
        return self.trainer.model

    @property
    def next_step(self) -> int:
        """The number of steps that were taken."""
        return self.trainer.state.global_step

    @property
    def steps(self) -> int:
        return self.args.steps

    @property
    def lr(self) -> float:
        return self.figures["learning_rate"]

    def held_out(self) -> dict[str, float]:
        """Measures the held-out rows, as TRL does, without a trace in what follows. Every rank
        calls this. Raises InfinityError for a loss that is not finite."""
        from ...ext.checkpoint.random_state import keep_random_state  # imports torch

        if not len(self.trainer.eval_dataset):
            return {}
        with keep_random_state(), no_cache(self.model), quiet():
            metrics = self.trainer.evaluate()
        check_finite(metrics["eval_loss"], self)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def train(self, interrupt: Interrupt, console: Console, trackers: Trackers) -> None:
        """Steps until done or interrupted. Every rank calls this."""
        self.trainer.add_callback(_watching(self, interrupt, console, trackers))
        if self.unlearned:
            console.print(
                f"Of {format_count(self.unlearned, 'answer')} nothing is learned: the prompt leaves"
                " no room for it in --sequence-length"
            )
        if self.cut:
            console.print(
                f"Answers beyond {self.trainer.args.max_length} tokens are not learned:"
                f" {format_count(self.cut, 'answer')} cut at --sequence-length"
            )
        checkpoint = self.args.checkpoint
        if checkpoint is not None and self.ranks.is_first:
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / OF_TRAINER).write_text(json.dumps({"method": self.method.name}))
        saved = trainer_checkpoint(checkpoint) if self.args.resume else None
        if self.args.resume:
            console.print(
                f"Continuing from {saved}"
                if saved
                else f"No checkpoint in {checkpoint}: starting fresh"
            )
        if saved:
            self.loss_before = saved_extra(checkpoint).get("loss_before")
        elif measured := self.held_out():
            self.loss_before = measured["eval_loss"]
            console.print(f"held-out loss {self.loss_before:.4f}")
            trackers.held_out(self, self.loss_before)
        else:
            console.print("No held-out loss: the prompts held out leave no room for an answer")
        with self.closing, no_cache(self.model), quiet(), suppress(_NothingLeft):
            self.trainer.train(resume_from_checkpoint=saved and str(saved))

    def report(self, measured_disk: dict[str, float] | None) -> dict[str, Any]:
        """Measures the held-out rows, and returns the job's numbers. Every rank calls this."""
        assert self.counts is not None
        after = self.held_out()
        held_out, batch = len(self.trainer.eval_dataset), self.args.batch_size
        # Otherwise TRL's means, of batches, are not the rows'.
        is_even = self.ranks.count == 1 and (held_out <= batch or held_out % batch == 0)
        last = next((e for e in reversed(self.trainer.state.log_history) if "loss" in e), {})
        return {
            "method": self.method.name,
            "data": {
                "source": self.preferred.source,
                "samples": len(self.preferred.rows),
                "rows": len(self.trainer.train_dataset),
                "held_out_rows": held_out,
                "held_out_evenly": is_even,
                "unlearned_answers": self.unlearned,
                "cut_answers": self.cut,
            },
            "held_out_loss_after": after.get("eval_loss"),
            "held_out": after,
            "last": last,
            **measurements(self, self.counts, self.config, measured_disk),
        }


def _without_unlearned(rows: Any) -> Any:
    """Returns the rows of ORPO's and CPO's of which something is learned: others make nan."""
    if "chosen_labels" not in rows.column_names:
        return rows
    labels = zip(rows["chosen_labels"], rows["rejected_labels"])
    learned = [
        at for at, each in enumerate(labels) if all(max(its, default=-100) >= 0 for its in each)
    ]
    return rows if len(learned) == len(rows) else rows.select(learned)


def _count_unlearned(
    trainer: Any, given: int, inputs: PreferenceInputs, method: Method
) -> tuple[int, int]:
    """Counts the rows whose prompt leaves no room for an answer: all of the ``given``, and those
    among the trainer's rows. TRL leaves them out, or learns nothing of them."""
    rows = trainer.train_dataset
    is_unpaired = not method.paired and "rejected" in inputs.preferred.rows.column_names
    left_out = given * (1 + is_unpaired) - len(rows)
    if "prompt_ids" not in rows.column_names:
        return left_out, 0 if len(rows) else 1
    kept = sum(len(prompt) >= inputs.length for prompt in rows["prompt_ids"])
    return left_out + kept, kept if len(rows) else 1


def _count_cut(rows: Any, tokenizer: Any, length: int) -> int:
    """Counts the answers of the trainer's rows that are learned without their end."""
    count = 0
    names = rows.column_names
    for name in ("chosen_ids", "rejected_ids", "completion_ids"):  # cut when they are batched
        if name in names:
            sizes = [(len(asked), len(said)) for asked, said in zip(rows["prompt_ids"], rows[name])]
            count += sum(asked < length < asked + said for asked, said in sizes)
    for name in ("chosen_input_ids", "rejected_input_ids", "completion_input_ids"):  # cut already
        if name in names:  # else they end with that token
            count += sum(
                len(row) >= length and row[-1] != tokenizer.eos_token_id for row in rows[name]
            )
    return count


def _ntokens(rows: Any, length: int) -> int:
    """Counts the tokens that the model sees of the trainer's rows, each answer with its prompt."""
    names, count = rows.column_names, 0
    for name in ("chosen_ids", "rejected_ids", "completion_ids"):
        if name in names:
            pairs = zip(rows["prompt_ids"], rows[name])
            count += sum(min(length, len(asked) + len(said)) for asked, said in pairs)
    for name in ("chosen_input_ids", "rejected_input_ids", "completion_input_ids"):
        if name in names:
            count += sum(min(length, len(row)) for row in rows[name])
    return count


def _held_out(rows: Any, inputs: PreferenceInputs, args: argparse.Namespace) -> Any:
    """Returns the rows that are measured and not learned: of the last ones as many as
    ``--eval-batches`` says, as without ``--method``."""
    if inputs.evaluated is not None:
        rows, first = inputs.evaluated.rows, 0
    else:
        first = inputs.preferred.train_count
    return rows.select(range(first, min(len(rows), first + args.eval_batches * args.batch_size)))


def _fingerprint_of(model: str) -> str:
    """Returns what tells a model from another of the same shape: the ends of its weight files, or
    its name on the hub."""
    digest = hashlib.sha256()
    files = sorted(Path(model).glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            digest.update(file.read(END_NBYTES))
            file.seek(max(0, path.stat().st_size - END_NBYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16] if files else str(model)


def _fixed_values(
    args: argparse.Namespace, inputs: PreferenceInputs, config: infinity.Config, ranks: Ranks
) -> dict[str, Any]:
    """Returns the options that change the arithmetic."""
    names = ("method", "beta", "precompute_reference", "warmup_steps")
    known = fixed_values(args, inputs.preferred.fingerprint, inputs.length, config, ranks)
    return (
        {name: getattr(args, name) for name in names}
        | known
        | {
            "base": _fingerprint_of(args.model),
            "max_grad_norm": args.max_grad_norm or config.max_grad_norm or DEFAULT_MAX_GRAD_NORM,
        }
    )


def make_preference_job(
    args: argparse.Namespace,
    settings: dict[str, Any],
    inputs: PreferenceInputs,
    make_model: Callable[[Any, bool], tuple[Any, Any]],
    check_room: Callable[[Any, infinity.Config], None],
    ranks: Ranks,
) -> PreferenceJob:
    """Makes the trainer, with the model and, if the method needs one, a reference model at the same
    homes. Raises ConfigError if no sample is short enough."""
    import transformers

    from ...ext.integrations.trl import asked_at_home, real_adapters, trainer_over_home

    method = METHODS[args.method]
    kind, arguments = trainer_over_home(method.kind)
    set_defaults(args)
    model, adapters = make_model(inputs.model_config, False)
    if adapters is None:
        model.config.architectures = [type(model).__name__]
    config = engine_config({"master": "split", "moments": "fp32"} | settings, model)
    if ranks.is_first:
        check_room(model, config)
    options: dict[str, Any] = {"peft_config": adapters} if adapters is not None else {}
    asked = None
    if method.refers and adapters is None:
        options["ref_model"], _ = make_model(inputs.model_config, True)
        options["infinity_reference"] = engine_config(settings | {"trace": None}, model)
        asked = options["ref_model"] if args.precompute_reference else None
    closing = ExitStack()
    folder = args.checkpoint or closing.enter_context(
        tempfile.TemporaryDirectory(prefix="infinity-train-")
    )
    rows = inputs.preferred.rows
    learned, held = rows.select(range(inputs.preferred.train_count)), _held_out(rows, inputs, args)
    transformers.set_seed(args.seed)  # TRL 1.1 draws adapters without doing so itself
    with (
        quiet(),
        real_adapters(model) if adapters is not None else nullcontext(),
        asked_at_home(asked, options.get("infinity_reference")),
    ):
        trainer = kind(
            model=model,
            args=arguments(**_arguments(args, method, config, inputs.length, str(folder))),
            train_dataset=learned,
            eval_dataset=held,
            processing_class=inputs.tokenizer,
            infinity=config,
            infinity_overhead=_overhead(args),
            **options,
        )
    if asked is not None:  # its memory is free for the training
        trainer.ref_model = None
        trainer.accelerator._models.remove(asked)
        del asked, options
    trainer.create_model_card = lambda *_, **__: None  # it would replace the folder's README.md
    trainer.remove_callback(transformers.PrinterCallback)  # standard output is the command's
    name_base(trainer.model, args.model)
    trainer.train_dataset = _without_unlearned(trainer.train_dataset)
    trainer.eval_dataset = _without_unlearned(trainer.eval_dataset)
    unlearned, kept = _count_unlearned(trainer, len(learned), inputs, method)
    if kept >= len(trainer.train_dataset):
        raise ConfigError(
            f"--data: no prompt of {inputs.preferred.source} leaves room for an answer in"
            f" {inputs.length} tokens. Give a larger --sequence-length"
        )
    count = len(trainer.train_dataset)
    per_step = args.batch_size * args.accumulate * ranks.count
    args.steps = args.steps or max(1, math.ceil((args.epochs or 1.0) * count / per_step))
    set_defaults(args)
    trainer.args.max_steps, trainer.args.warmup_steps = args.steps, args.warmup_steps
    fixed = _fixed_values(args, inputs, config, ranks)
    if args.resume:
        saved = saved_extra(args.checkpoint)
        check_fixed_values(args.checkpoint, fixed, saved)
        check_not_past(args.checkpoint, saved.get("step", 0), args.steps)
    return PreferenceJob(
        args=args,
        fixed_values=fixed,
        tokens_per_step=per_step * _ntokens(trainer.train_dataset, inputs.length) // count,
        unlearned=unlearned,
        cut=_count_cut(trainer.train_dataset, inputs.tokenizer, inputs.length),
        method=method,
        trainer=trainer,
        tokenizer=inputs.tokenizer,
        preferred=inputs.preferred,
        config=config,
        ranks=ranks,
        closing=closing,
    )


def _overhead(args: argparse.Namespace) -> float | None:
    """Returns the share of the time that saving may take; None if it is not that which says when to
    save."""
    by_time = args.checkpoint is not None and args.checkpoint_every is None
    return args.checkpoint_overhead if by_time else None


def _arguments(
    args: argparse.Namespace, method: Method, config: infinity.Config, length: int, folder: str
) -> dict[str, Any]:
    """Returns the options as the trainer's arguments. What no option says is TRL's default."""
    clipped = args.max_grad_norm or (0.0 if config.max_grad_norm else DEFAULT_MAX_GRAD_NORM)
    arguments = {
        "output_dir": folder,
        "per_device_train_batch_size": args.batch_size,
        "per_device_eval_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.accumulate,
        "learning_rate": args.lr,
        "weight_decay": args.weight_decay,
        **(dict(zip(ADAM_BETAS, betas_of(args.betas))) if args.betas else {}),
        "max_grad_norm": clipped,
        "optim": optimizer_of(args.optim),
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": FINAL_LR_SHARE},
        "max_length": length,
        "seed": args.seed,
        "bf16": False,  # --dtype is of the weights, which are computed with as they are
        "gradient_checkpointing": args.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "use_cpu": (config.device or "cpu").startswith("cpu"),
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no" if args.checkpoint_every is None else "steps",
        "save_steps": args.checkpoint_every or 1,
        "save_total_limit": 1,
        "report_to": [],
        "disable_tqdm": True,
        **method.settings,
    }
    if args.beta is not None:
        arguments["beta"] = args.beta
    if args.precompute_reference:
        arguments["precompute_ref_log_probs"] = True
    return arguments


class quiet(ExitStack):
    """Context: keeps the libraries from drawing bars, and from telling their users what we should
    change."""

    def __enter__(self) -> quiet:
        self.enter_context(libraries())
        self.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in ("trl", "accelerate"):
            logger = logging.getLogger(name)
            self.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        return self


class _NothingLeft(Exception):
    """Ends a trainer that has loaded a checkpoint of the last step."""


def _watching(
    job: PreferenceJob, interrupt: Interrupt, console: Console, trackers: Trackers
) -> Any:
    """Returns the callback that tells the steps, notes the losses and ends an interrupted job."""
    import transformers
    from transformers.trainer_callback import ExportableState

    class Watching(transformers.TrainerCallback, ExportableState):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            job.first_step = state.global_step
            self.start = EdgeCounts.of(job.model)
            job.counts = self.start.since(self.start)
            if state.global_step >= state.max_steps:
                console.print("Nothing is left to do")
                raise _NothingLeft  # the trainer's loop would take a step before it looks
            rows = format_count(len(job.trainer.train_dataset), "row")
            console.print(
                f"TRL's {job.method.trainer}: {rows}, {len(job.trainer.eval_dataset):,} held out,"
                f" {format_count(state.max_steps, 'step')}, learning rate {job.args.lr:g}"
            )
            self.progress = job.closing.enter_context(make_progress(console, job))
            self.watch = job.closing.enter_context(
                infinity.Watch(job.model, steps=job.steps, first_step=job.first_step)
            )

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if "loss" not in (logs or {}):
                return
            loss = float(logs["loss"])
            check_finite(loss, job)
            job.losses.append(loss)
            job.figures = {
                name: float(value) for name, value in logs.items() if not isinstance(value, str)
            }
            assert job.counts is not None
            self.progress.show(job, job.counts)
            self.watch.update(loss=loss, tokens=job.tokens_per_step)
            trackers.show(job, job.counts)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            job.step_seconds.append(time.perf_counter() - self.began)
            job.counts = EdgeCounts.of(job.model).since(self.start)
            ends, asked = interrupt.is_told(job.ranks), interrupt.taken_save()
            if job.args.checkpoint is not None:
                control.should_save |= bool(job.ranks.largest(ends or asked))
            control.should_training_stop |= ends
            every, step = job.args.eval_every, state.global_step
            if every is not None and step % every == 0 and step < state.max_steps:
                logs = control.should_log  # the log of what was measured is not the step's
                measured, control.should_log = job.held_out(), logs
                if measured:
                    loss = job.held_out_losses[step] = measured["eval_loss"]
                    console.print(f"held-out loss {loss:.4f} after step {step}")
                    trackers.held_out(job, loss)

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": job.said}

    Watching.__name__ = NOTED
    return Watching()
