"""`infinity train`: trains a `transformers` causal language model whose state may exceed memory.

The modules of `training/`. Each imports only modules above it:

  places                      checks of the output files and folders
  options, interrupt          the command line's options; signals, deferred to the end of a step
  ranks, mesh                 the processes that torchrun started, and how they divide a model
  settings, model, compute    the engine's options; the transformers model; its compute time
  job                         the loop and its checkpoints
  progress, report, sample    output: during the job, its numbers, a sample of its result
  inputs                      the model's configuration, its tokenizer, the data
  trackers, push              the figures for other programs; the result on the hub
"""

from __future__ import annotations

import argparse
import contextlib
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import infinity

from ...errors import ConfigError, UsageError
from ...ext.checkpoint.interval import FIRST_SECONDS, FIRST_STEPS
from ...files.outputs import replacing
from ...library_versions import refuse_older
from ..cli.amounts import format_count, format_seconds
from ..cli.answers import print_object
from ..cli.presets import words_of
from .classes import freeze_untouched, touched
from .compute import Compute, compute_time, multiplies_bf16
from .corpus import Corpus
from .counts import EdgeCounts
from .folders import check_packed, is_streamed
from .inputs import Inputs, find_files, read_inputs, tell_skipped
from .interrupt import Interrupt, before_first_step
from .job import (
    Job,
    Measured,
    check_finite,
    held_out,
    make_job,
    measure_stalls,
    resume,
    set_length,
    train,
)
from .mesh import axes_of, check_batches, check_mesh, make_mesh, mesh_sizes
from .model import (
    adapted,
    adapters_config,
    add_adapters,
    build_model,
    checkpoint_activations,
    find_model,
    no_cache,
    packed_base,
    read_model_config,
)
from .of_deepspeed import tell_loop
from .options import OPTIONS as OPTIONS
from .options import check_options, set_defaults
from .pictures import PictureExamples, naming_batches
from .places import (
    check_fixed_values,
    check_places,
    check_room,
    has_checkpoint,
    make_way,
    saved_extra,
    trainer_checkpoint,
)
from .preferences import make_preference_job, read_preference_inputs
from .progress import ProgressBar, ProgressLines, make_progress
from .push import check_push, make_repository, push
from .ranks import Ranks
from .report import (
    LEAST_PREDICTED,
    make_report,
    measure_disks,
    predict_step,
    print_report,
    print_stalls,
)
from .sample import printable, sample
from .saved import check_saved, copy_processors
from .settings import check_device, engine_config, engine_settings, training_state_nbytes
from .trackers import Trackers, begin_trackers, check_trackers

if TYPE_CHECKING:
    from rich.console import Console

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# Compared with a checkpoint's before any data is read
KNOWN_AT_ONCE = (
    *("method", "seed", "batch_size", "lora_rank", "quantize", "dtype"),
    *("optim", "lr", "weight_decay", "betas"),
)
DEFAULT_PROMPT = "def "  # for the default data, which is Python

ABOUT = {
    "description": """\
Trains a causal language model of transformers, with parameters and optimizer state at home on the
device, the host or NVMe, and saves a folder of the same class that from_pretrained loads. Of a
model of images and text it trains what text touches; the rest is saved as it was.
Without --model it is a GPT-2 style model of about 50 M parameters from fresh weights; without
--data it learns the source files of CPython's standard library, byte by byte."""
}


def run(args: argparse.Namespace) -> int:
    """Runs the whole job and returns the exit status. Bad input raises before the model is built.
    Under torchrun, every rank calls this."""
    args.words = words_of(args)
    if args.model is not None:
        args.model = find_model(args.model)
    check_options(args)
    goes_on = args.resume and has_checkpoint(args.checkpoint)
    ranks = Ranks(args.timeout)
    try:
        sizes = mesh_sizes(args, ranks.count)
        with warnings.catch_warnings(), contextlib.ExitStack() as start:
            # What libraries will rename is no news to their users.
            warnings.simplefilter("ignore", FutureWarning)
            start.enter_context(before_first_step(args.checkpoint, goes_on=goes_on))
            return _run(args, ranks, sizes, start)
    finally:
        ranks.end()


def _run(
    args: argparse.Namespace,
    ranks: Ranks,
    sizes: dict[str, int] | None,
    start: contextlib.ExitStack,
) -> int:
    """Reads what is needed, then trains. ``start``: is closed as the first step begins."""
    settings = engine_settings(args)
    check_places(args, settings)
    check_trackers(args.log)
    check_push(args)
    files = find_files(args)
    console = _prepare(args, ranks)
    tell_skipped(files, console)
    _check_engine(args, settings, console)
    saved = saved_extra(args.checkpoint if args.resume else None).get("words")
    if saved and args.repeats is None:
        console.print(f"Options of the checkpoint, unless given anew: {' '.join(map(str, saved))}")
    if args.repeats is None:
        tell_loop(args, console.print)
    config = engine_config(settings)
    ranks.join(make_mesh(sizes, config.device))
    if args.resume:
        _divide_steps(args, ranks, console)
    if axes_of(ranks.mesh):
        model_config = read_model_config(args.model, trust=args.trust_remote_code)
        check_mesh(args, ranks.mesh, model_config, config)
    if args.receipt is not None and (args.method or "pp" in axes_of(ranks.mesh)):
        raise ConfigError("--receipt goes with neither --method nor a mesh with pp: leave it out")
    if args.method is not None:
        return _learn_preferences(args, settings, files, ranks, console, start)
    inputs = read_inputs(args, files, ranks, console)
    check_batches(ranks.mesh, inputs.batches)
    with begin_trackers(args, ranks, console.print) as trackers:
        return _train(args, ranks, settings, inputs, console, trackers, start)


def _train(
    args: argparse.Namespace,
    ranks: Ranks,
    settings: dict[str, Any],
    inputs: Inputs,
    console: Console,
    trackers: Trackers,
    start: contextlib.ExitStack,
) -> int:
    """Makes the job, runs it to its end, and saves what it made. Every rank calls this."""
    shown = isinstance(inputs.batches.corpus, PictureExamples)
    model, _ = _make_model(args, settings, inputs.model_config, console, whole=shown)
    config = engine_config(settings, model)
    compute = _time_compute(args, model, inputs, config)
    parts = math.prod(ranks.mesh[name].size() for name in axes_of(ranks.mesh) if name != "ep")
    with no_cache(model):
        if ranks.is_first:
            _check_room(args, model, config, compute.seconds * args.accumulate / parts)
            make_way(args)
            if args.push is not None:
                make_repository(args.push)
        job = make_job(
            args, model, inputs.batches, config, ranks, inputs.tokenizer, say=console.print
        )
        measured_disk = measure_disks(job)
        predicted = predict_step(job, compute.seconds * args.accumulate / parts)
        if predicted >= LEAST_PREDICTED:
            console.print(
                f"A step should take about {format_seconds(predicted)} (predicted; its compute is"
                f" {compute.said})"
            )
        if args.minutes is not None:
            _set_steps(args, ranks, predicted, console)
        set_length(job, args.steps, args.warmup_steps)
        del model  # the job holds the only reference, so that it can free the model
        _begin(args, job, console)
        trackers.tell_options(args, job)
        trackers.held_out(job, None if job.first_step else job.loss_before)
        if args.stalls is not None:
            job.stalls = measure_stalls(job, args.stalls)
            print_stalls(console, job.stalls)
        if args.receipt is not None:
            from ..verify.receipts import ReceiptFile

            job.receipt = ReceiptFile(args.receipt, args, job)
        if (repeat := args.repeats) is not None:
            repeat.begin(job)
            job.stops_at = repeat.to
        watch = infinity.Watch(job.model, steps=job.steps, first_step=job.first_step)
        with Interrupt() as interrupt, make_progress(console, job) as progress, watch:
            start.close()
            counts = train(
                job,
                interrupt=interrupt,
                show=_watchers(progress, trackers, watch),
                tell=partial(_tell_held_out, job, console, trackers),
            )
        if interrupt.signum is not None:
            return _end_interrupted(args, job, console, interrupt.signum)
        if repeat is not None:
            repeat.end(job)
            return 0
        loss_after = held_out(job)
        check_finite(loss_after, job)
        trackers.held_out(job, loss_after)
    report = make_report(
        job,
        counts=counts,
        config=config,
        measured_disk=measured_disk,
        predicted_step_seconds=predicted,
        loss_after=loss_after,
    )
    return _end(args, job, console, report)


def _tell_held_out(job: Job, console: Console, trackers: Trackers, loss: float) -> None:
    console.print(f"held-out loss {loss:.4f} after step {job.next_step}")
    trackers.held_out(job, loss)


def _learn_preferences(
    args: argparse.Namespace,
    settings: dict[str, Any],
    files: Any,
    ranks: Ranks,
    console: Console,
    start: contextlib.ExitStack,
) -> int:
    """Learns from preferred answers with a trainer of TRL, and returns the exit status."""
    quiet = type(console)(quiet=True)
    job = make_preference_job(
        args,
        settings,
        read_preference_inputs(args, files, console),
        lambda config, again: _make_model(args, settings, config, quiet if again else console),
        lambda model, config: _check_room(args, model, config),
        ranks,
    )
    if args.push is not None and ranks.is_first:
        make_repository(args.push)
    with begin_trackers(args, ranks, console.print) as trackers:
        trackers.tell_options(args, job)
        with Interrupt() as interrupt:
            start.close()
            job.train(interrupt, console, trackers)
        if interrupt.signum is not None:
            return _end_interrupted(args, job, console, interrupt.signum)
        report = job.report(measure_disks(job))
        trackers.held_out(job, report["held_out_loss_after"])
    return _end(args, job, console, report)


def _set_steps(
    args: argparse.Namespace, ranks: Ranks, step_seconds: float, console: Console
) -> None:
    """Sets ``args.steps`` to what fits into ``--minutes``, the same on all ranks. A resumed job has
    the steps that were chosen at its start. Every rank calls this."""
    seconds, saved = 60 * args.minutes, saved_extra(args.checkpoint if args.resume else None)
    in_time = max(1, round(seconds / max(ranks.mean(step_seconds), 1e-6)))
    args.steps = saved.get("steps") or saved.get("step", 0) + in_time
    console.print(
        f"--minutes {args.minutes:g}: {format_count(args.steps, 'step')}, which should take about"
        f" {format_seconds(args.steps * step_seconds)}; then the model is measured and saved"
    )
    set_defaults(args)
    args.warmup_steps = min(args.warmup_steps, args.steps)


def _check_engine(args: argparse.Namespace, settings: dict[str, Any], console: Console) -> None:
    """Chooses the dtype. Raises ConfigError for engine options that are wrong, and UsageError if
    the job is not its checkpoint's, before the data is prepared."""
    device = engine_config(settings).device
    check_device(args.device)
    _choose_dtype(args, device, console)
    if args.resume:
        known = {name: getattr(args, name) for name in KNOWN_AT_ONCE}
        if args.lr is None:  # it is chosen later
            del known["lr"]
        check_fixed_values(args.checkpoint, known, saved_extra(args.checkpoint))


def _divide_steps(args: argparse.Namespace, ranks: Ranks, console: Console) -> None:
    """Divides the micro-batches of a checkpoint's steps over the ranks, if it was saved by another
    number of them: under an elastic torchrun the options stay. Raises UsageError."""
    saved = saved_extra(args.checkpoint)
    before, count = saved.get("data_ranks"), ranks.data_count
    if before in (None, count):
        return
    total = saved["fixed_values"]["accumulate"]
    if total % count:
        raise UsageError(
            f"The steps of {args.checkpoint} have {total} micro-batches, which"
            f" {count} ranks do not divide. Start it on {before} ranks, or on another number that"
            " does."
        )
    args.accumulate = total // count
    console.print(
        f"{format_count(count, 'rank')} in place of {before}: --accumulate {args.accumulate}"
        " keeps the samples of a step"
    )


def _time_compute(
    args: argparse.Namespace, model: Any, inputs: Inputs, config: infinity.Config
) -> Compute:
    import torch

    return compute_time(
        model,
        inputs.model_config,
        batch=args.batch_size,
        length=inputs.batches.tokens_per_batch // args.batch_size,
        dtype=getattr(torch, DTYPES[args.dtype]),
        checkpointing=args.gradient_checkpointing,
        limits=config,
        adapt=partial(adapted, rank=args.lora_rank, quantize=args.quantize, text=None),
    )


def _make_model(
    args: argparse.Namespace,
    settings: dict[str, Any],
    model_config: Any,
    console: Console,
    *,
    whole: bool = False,
) -> tuple[Any, Any]:
    """Makes the model, with adapters if it shall have them; with ``--method`` these are a
    configuration beside it. Weights that are streamed go into ``settings``. ``whole``: trains what
    text alone does not touch, too. Raises ConfigError."""
    check_packed(args.model, model_config, args.quantize, trains_all=args.lora_rank is None)
    text = None
    if not whole:
        text = touched(model_config, args.model, trust=args.trust_remote_code)
    model = build_model(
        args.model,
        model_config,
        dtype=args.dtype,
        seed=args.seed,
        say=console.print,
        trust=args.trust_remote_code,
    )
    if is_streamed(model, args.model):
        settings["weights"] = str(args.model)
    freeze_untouched(model, text, console.print)
    packed_base(model, args.quantize)
    adapters = None
    if args.lora_rank is not None:
        adapters = adapters_config(model, args.lora_rank, text=text)
    if args.method is not None:
        return model, adapters  # TRL's trainer adds them, and checkpoints activations
    if adapters is not None:
        model = add_adapters(model, adapters, args.model)
    if args.gradient_checkpointing:
        checkpoint_activations(model)
    return model, None


def _end(args: argparse.Namespace, job: Any, console: Console, report: dict[str, Any]) -> int:
    """Prints the report, saves the trained model to ``--out``, and then sends it, which may
    fail."""
    print_report(console, report)
    if args.out is not None:
        report["out"] = str(args.out)
        _save(args, job.model, job.tokenizer, job.ranks, console)
        if args.method is None:
            report.update(_sample(args, job, console))
    elif where := trainer_checkpoint(args.checkpoint):
        console.print(f"The trained model is in {where}")
    else:
        how = f": `infinity export {args.checkpoint} OUT` writes it" if args.checkpoint else ""
        console.print(f"The trained model is not saved, without --out{how}")
    if args.json and job.ranks.is_first:
        print_object(report)
    if args.push is not None and job.ranks.is_first:
        console.print(f"Sent to {push(args.push, args.out)}")
    return 0


def _watchers(
    progress: ProgressBar | ProgressLines, trackers: Trackers, watch: infinity.Watch
) -> Callable[[Job, EdgeCounts], None]:
    def show(job: Job, counts: EdgeCounts) -> None:
        progress.show(job, counts)
        watch.update(loss=job.losses[-1], tokens=job.tokens_per_step)
        trackers.show(job, counts)

    return show


def _prepare(args: argparse.Namespace, ranks: Ranks) -> Console:
    """Imports the heavy libraries and silences transformers. Returns the console, which only prints
    on the first rank."""
    refuse_older("transformers")
    try:
        import torch
        import transformers
        from rich.console import Console
    except ImportError as error:
        raise ConfigError(
            f"{error}: `infinity train` needs it. pip install transformers rich"
        ) from None

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    return Console(
        stderr=args.json, quiet=not ranks.is_first, highlight=False, markup=False, soft_wrap=True
    )


def _choose_dtype(args: argparse.Namespace, device: str | None, console: Console) -> None:
    """Replaces ``--dtype auto`` by a dtype, and warns if the given one is slow."""
    fast = multiplies_bf16(device)
    if args.dtype == "auto":
        args.dtype = "bf16" if fast else "fp32"
        args.words.append(f"--dtype={args.dtype}")  # the job may go on on another machine
        if not fast:
            console.print("--dtype auto: fp32, for this processor has no fast bf16 products")
    elif args.dtype == "bf16" and not fast:
        console.print(
            "This processor has no fast bf16 products: --dtype fp32 may be many times faster"
        )


def _check_room(
    args: argparse.Namespace,
    model: Any,
    config: infinity.Config,
    step_seconds: float | None = None,
) -> None:
    """Raises CapacityError if what the job will save does not fit. ``step_seconds``: of a step, at
    least; None: unknown."""
    from ...core.units.inner import nbytes_of

    weights = sum(map(nbytes_of, model.parameters()))
    if args.out is not None:
        check_room("--out", args.out, weights, "the trained model")
    if args.checkpoint is not None and args.repeats is None:
        state = training_state_nbytes(model, config)
        if has_checkpoint(args.checkpoint):
            both = "the next checkpoint, while the old one is there,"
            check_room("--checkpoint", args.checkpoint, state, both)
        elif _saves_again(args, step_seconds):
            why = "the old one stands until the new one is whole"
            check_room("--checkpoint", args.checkpoint, 2 * state, "a checkpoint", why)
        else:
            check_room("--checkpoint", args.checkpoint, state, "a checkpoint")


def _saves_again(args: argparse.Namespace, step_seconds: float | None) -> bool:
    """Tells whether a job saves more than once, the last time at its end."""
    seconds = None if args.minutes is None else 60 * args.minutes
    steps = math.inf if args.steps is None else args.steps
    if step_seconds and seconds is not None:
        steps = seconds / step_seconds
    elif step_seconds:
        seconds = steps * step_seconds
    if args.checkpoint_every is not None:
        return steps > args.checkpoint_every
    return steps > FIRST_STEPS and (seconds is None or seconds > FIRST_SECONDS)


def _begin(args: argparse.Namespace, job: Job, console: Console) -> None:
    """Prints the job's size, and sets its first step: the checkpoint's, or step 0 with its held-out
    loss."""
    from ...ext.packed.packed import dense_numel

    corpus, options = job.batches.corpus, job.fixed_values
    console.print(
        f"{options['parameters']:,} parameters in {options['dtype']}, {job.tokens_per_step:,}"
        f" tokens per step, {format_count(job.steps, 'step')}, learning rate {options['lr']:g}"
    )
    if isinstance(corpus, Corpus):  # of samples it was told already
        measured = job.batches.held_out_corpus
        of = "" if measured is corpus else f" of {measured.source}"
        console.print(
            f"{corpus.source}: {corpus.train_ntokens:,} tokens to train on,"
            f" {measured.held_out_ntokens:,}{of} held out"
        )
    trained, whole = (
        sum(
            dense_numel(param)
            for part in job.parts
            for param in part.parameters()
            if param.requires_grad or every
        )
        for every in (False, True)
    )
    if trained < whole:  # as PEFT tells it
        console.print(
            f"trainable params: {trained:,} || all params: {whole:,} || trainable%:"
            f" {100 * trained / whole:.4f}"
        )
    if args.resume and has_checkpoint(args.checkpoint):
        resume(job)
        left = "" if job.first_step < job.steps else ": nothing is left to do"
        console.print(f"Continuing from step {job.first_step} of {args.checkpoint}{left}")
        return
    if args.resume:
        console.print(f"No checkpoint in {args.checkpoint}: starting fresh")
    elif has_checkpoint(args.checkpoint):
        console.print(f"Starting fresh; the checkpoint in {args.checkpoint} will be replaced")
    with naming_batches(corpus):
        job.loss_before = held_out(job)
    console.print(f"held-out loss {job.loss_before:.4f}")


def _end_interrupted(args: argparse.Namespace, job: Measured, console: Console, signum: int) -> int:
    saved = (
        f"saved to {args.checkpoint}; --resume continues"
        if args.checkpoint and args.repeats is None
        else "nothing saved (no --checkpoint)"
    )
    console.print(f"Interrupted after step {job.next_step} of {job.steps}: {saved}")
    if args.json and job.ranks.is_first:
        print_object({"interrupted": True, "steps": job.next_step, "losses": job.losses})
    return 128 + signum


def _save(
    args: argparse.Namespace, model: Any, tokenizer: Any, ranks: Ranks, console: Console
) -> None:
    """Saves the trained model to ``--out``, with its tokenizer. Every rank calls this."""
    from ..export.serving import next_command  # imports torch, which a command's help does without

    infinity.save_pretrained(model, args.out, overwrite=True)  # checked before the first step
    if ranks.is_first:
        with replacing(args.out) as made:
            if tokenizer is not None:
                tokenizer.save_pretrained(made)
            copy_processors(args.model, made)
        count = check_saved(args.out, model, trust=args.trust_remote_code)
        console.print(
            f"Saved to {args.out}: {format_count(count, 'tensor')}, by name and shape what"
            f" {'PEFT' if args.lora_rank else 'transformers'} reads"
        )
    if tokenizer is not None and tokenizer.chat_template:
        console.print(f"Talk to it: infinity generate {args.out} --chat")
    if tokenizer is not None and ranks.is_first:
        console.print(f"Serve it: {next_command(args.out, args.model)}")


def _sample(args: argparse.Namespace, job: Job, console: Console) -> dict[str, str]:
    """Prints a sample, and lets go of the model."""
    result = {}
    if {"cp", "pp"} & {*axes_of(job.ranks.mesh)}:
        console.print(f"Not sampled on this mesh: infinity generate {args.out}")
    elif args.sample_bytes:
        text_of_prompt = args.prompt or (DEFAULT_PROMPT if args.data is None else None)
        prompt, text = sample(job, prompt=text_of_prompt, ntokens=args.sample_bytes)
        console.print(f"A sample of it:\n{printable(prompt + text)}")
        result.update(prompt=prompt, sample=text)
    job.let_go()
    return result
