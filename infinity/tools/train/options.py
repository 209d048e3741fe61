"""The options of `infinity train`: definitions, and the checks that need no data or model.

fresh weights  weights of a model built from its configuration alone, initialised from the seed
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...errors import ConfigError
from ...ext.audit.told import DEFAULT_SHARE
from ...ext.checkpoint.interval import share_of
from ..cli.options import (
    AXES,
    BYTES,
    COUNT,
    FILE,
    FLAG,
    FOLDER,
    HOME,
    LENGTH,
    NUMBER,
    PATH,
    QUANTIZE,
    REPEATED,
    SEED,
    SHARE,
    TEXT,
    defaults,
    one_of,
    takes,
)
from ..cli.presets import PRESETS
from ..cli.values import a_pair, positive_real, real_from_zero
from ..watch.run_files import job_name
from .methods import METHODS, check_method
from .optimizers import OPTIM
from .places import TENSORBOARD, has_checkpoint, saved_extra
from .schedules import a_scheduler

POSITIVE = {"type": positive_real}
PACKED = "nf4 has 4 (needs bitsandbytes), int8 and fp8 have 8 (need torchao)"
DEFAULT_SEQUENCE_LENGTH = 256
DEFAULT_ROW_LENGTH = 1024
DEFAULT_DATA_LIMIT = "64MiB"
DEFAULT_STEPS = 80
DEFAULT_CHECKPOINT_OVERHEAD = "2%"
DEFAULT_LR, TUNING_LR = 2e-4, 2e-5
PREFERENCE_SHARE = 20  # of it with --method: 1e-6 for all weights, as TRL has it; 1e-5 for adapters
DEFAULT_WARMUP_STEPS = 10
DEFAULT_MAX_GRAD_NORM = 1.0
LORA_RANK = 16
# Of torch's, those that evaluate as well, which the held-out loss needs.
SCHEDULES = ("auto", "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS")


TRUST = ("--trust-remote-code", FLAG, "run Python code that lies in the folder of --model")
MASTER = (
    "--master",
    one_of("split", "fp32", "none"),
    "master weights of bf16 parameters (default split)",
)
MOMENTS = ("--moments", one_of("fp32", "bf16", "int8"), "the optimizer's moments (default fp32)")
ADAPTERS = (  # which `infinity plan` has, too
    (
        "--lora-rank",
        NUMBER,
        "train adapters of this rank (needs peft) and save them, not the model",
    ),
    ("--lora", NUMBER | {"nargs": "?", "const": LORA_RANK}, f"--lora-rank (default {LORA_RANK})"),
    ("--quantize", QUANTIZE, f"pack the base under the adapters in fewer bits: {PACKED}"),
)
MEMORY = (  # which `infinity run` has, too
    ("--params", HOME, "where the parameters live, their home (default auto)"),
    ("--optimizer", HOME, "home of master weights and moments (default auto)"),
    (
        "--shard",
        one_of("optimizer", "gradients", "parameters"),
        "under torchrun, what is split over the ranks: optimizer = ZeRO-1, gradients = ZeRO-2,"
        " parameters = ZeRO-3 (default)",
    ),
    ("--activations", HOME, "home of what the forward saves for the backward (default auto)"),
    ("--micro-batch", NUMBER, "run each layer on N samples at a time (default all)"),
    ("--compile", FLAG, "compile each repeated block by itself, by torch.compile"),
    ("--fused-loss", FLAG, "compute the loss in parts of the tokens, without whole logits"),
    ("--recompute", FLAG, "keep, send or compute again what blocks save, by what is measured"),
    (
        "--nvme-path",
        FOLDER | REPEATED,
        "swap files go here (default: a scratch folder); repeat it to stripe over several disks",
    ),
    (
        "--host-memory",
        BYTES,
        'budget, as "256MiB", or "25%%" of weights, gradients and optimizer state, not of the RAM',
    ),
    ("--device-memory", BYTES, 'budget, as "8GiB"'),
    ("--nvme-capacity", BYTES, 'budget of swap files, as "1TiB" (default: what is free there)'),
    MASTER,
    MOMENTS,
    (
        "--config",
        FILE,
        "TOML, JSON or YAML: the engine's fields, options in a table train; options here"
        " override it",
    ),
    (
        "--deepspeed",
        FILE,
        "homes of a DeepSpeed JSON, its optimizer's numbers, batches and clipping; options"
        " here override it",
    ),
    (
        "--audit",
        takes("SHARE", real_from_zero, nargs="?", const=DEFAULT_SHARE),
        "do this share of the work twice, to find a machine that gives wrong bits (alone:"
        f" {DEFAULT_SHARE:g})",
    ),
    ("--trace", FILE, "write a timeline here, for `infinity trace` or Perfetto"),
)
OPTIONS = (
    "model and data",
    (
        "--model",
        PATH,
        "folder with config.json and safetensors, a name on the Hugging Face hub, or a"
        " config.json alone for fresh weights",
    ),
    TRUST,
    (
        "--data",
        PATH,
        "text files, or conversations, prompts with completions or texts as JSON, JSON lines,"
        " Parquet, CSV or a datasets folder: a file, or a folder of them",
    ),
    ("--data-limit", BYTES, "of text: no more", DEFAULT_DATA_LIMIT),
    (
        "--method",
        one_of(*METHODS),
        "learn from preferred answers in --data: pairs of chosen and rejected, or a label"
        " (kto), by TRL's trainer",
    ),
    ("--pack", FLAG, "several samples of --data in one row of --sequence-length tokens"),
    (
        "--dtype",
        one_of("auto", "bf16", "fp32", default="auto"),
        "of the model's weights (default auto: bf16, or fp32 on a processor that has no fast"
        " bf16 products)",
    ),
    ("--preset", one_of(*PRESETS), "a preset; other options override it"),
    *ADAPTERS,
    ("--gradient-checkpointing", FLAG, "recompute activations in the backward"),
    "where the state lives",
    *MEMORY,
    "training",
    ("--steps", NUMBER, "optimizer steps (default: one epoch of samples; 80 of text)"),
    ("--epochs", takes("N", positive_real), "of samples, instead of --steps"),
    (
        "--minutes",
        takes("N", positive_real),
        "as many steps as this machine should take in about so long, instead of --steps",
    ),
    ("--batch-size", NUMBER, "samples in a micro-batch", 4),
    (
        "--sequence-length",
        LENGTH,
        f"tokens in a sample, at most (default {DEFAULT_SEQUENCE_LENGTH} of text,"
        f" {DEFAULT_ROW_LENGTH} of samples, or what the model takes if less)",
    ),
    ("--accumulate", NUMBER, "micro-batches in a step", 1),
    (
        "--lr",
        POSITIVE,
        "peak learning rate (default 0.0002; 0.00002 for all weights of a trained model; a"
        " twentieth of that with --method)",
    ),
    ("--weight-decay", {"type": real_from_zero}, "of weight matrices", 0.1),
    ("--betas", takes("B1,B2", a_pair), "of AdamW (default 0.9,0.95; with --method TRL's)"),
    (
        "--warmup-steps",
        COUNT,
        "linear warm-up, then cosine (default 10, or a fifth of the steps if less)",
    ),
    (
        "--scheduler",
        takes("JSON"),
        "in place of warm-up and cosine: the scheduler of a DeepSpeed JSON, as --deepspeed"
        " takes it",
    ),
    (
        "--max-grad-norm",
        takes("NORM", positive_real),
        f"clip to it (default {DEFAULT_MAX_GRAD_NORM})",
    ),
    (
        "--device",
        takes("DEVICE"),
        'what computes: "cuda", "cuda:1" or "cpu" (default: cuda where there is one)',
    ),
    ("--beta", POSITIVE, "of --method (default: TRL's, 0.1)"),
    (
        "--precompute-reference",
        FLAG,
        "of --method dpo or kto: ask the reference model once, before the first step",
    ),
    OPTIM,
    (
        "--timeout",
        takes("SECONDS", positive_real),
        "under torchrun, how long a rank waits for the others (default: torch's)",
    ),
    (
        "--mesh",
        AXES,
        "divide the model over torchrun's ranks, as tp=2,pp=2,dp=4: tensors (tp), layers (pp),"
        " experts (ep), sequences (cp) and batches (dp, the rest)",
    ),
    (
        "--pipeline-schedule",
        one_of(*SCHEDULES),
        "of the stages of pp, with a micro-batch for each of --accumulate (default LoopedBFS)",
    ),
    ("--pipeline-chunks", NUMBER, "of the model on each rank of pp (default: as it fits)"),
    ("--seed", SEED, "of fresh weights, batches, dropout and the sample", 0),
    ("--threads", NUMBER, "torch's compute threads (default: torch's choice)"),
    "results",
    ("--out", FOLDER, "save the trained model here, and print a sample of it"),
    ("--checkpoint", FOLDER, "keep the last resumable checkpoint here, the final one too"),
    (
        "--checkpoint-overhead",
        SHARE,
        "save as often as this share of the time allows (default 2%%)",
    ),
    ("--checkpoint-every", NUMBER, "save after so many steps instead"),
    ("--resume", FLAG, "continue from --checkpoint bit for bit; without one start fresh"),
    ("--overwrite", FLAG, "replace what --checkpoint, --out and --trace hold"),
    (
        "--receipt",
        FILE,
        "write versions, options, losses and a digest of each weight here at each save, for"
        " `infinity verify`",
    ),
    (
        "--stalls",
        NUMBER,
        "measure what the data costs in three times so many passes, before the first step",
    ),
    (
        "--eval-data",
        FILE,
        "measure the loss on this file or folder (of that kind), and learn all of the data",
    ),
    ("--eval-share", SHARE, "hold out so much of --data (default 3%%)"),
    ("--eval-batches", NUMBER, "held-out batches", 4),
    ("--eval-every", NUMBER, "measure the held-out loss after so many steps, too"),
    ("--prompt", TEXT, "start of the sample (default: the start of the held-out text)"),
    ("--sample-bytes", COUNT, "bytes or tokens to sample, for at most a minute", 200),
    ("--tensorboard", FOLDER, "log by TensorBoard, with its files in this folder"),
    (
        "--log",
        REPEATED | takes("TRACKER"),
        "log loss, speed and memory by a tracker of accelerate: tensorboard, wandb, mlflow,"
        " trackio or another; repeat it for several",
    ),
    (
        "--push",
        takes("NAME"),
        "send what --out holds to this private repository on the Hugging Face hub",
    ),
    ("--json", FLAG, "the report as one JSON object on stdout, all else on stderr"),
    defaults(repeats=None),  # the stretch that `infinity verify` repeats
)


def check_adapters(args: argparse.Namespace) -> None:
    """Settles the rank of the adapters. Raises ConfigError for a packed base without any."""
    args.lora_rank = args.lora_rank or args.lora
    if args.quantize is not None and args.lora_rank is None:
        raise ConfigError(
            f"--quantize {args.quantize} packs a base that is not trained, but its adapters are:"
            " add --lora"
        )


def set_defaults(args: argparse.Namespace) -> None:
    """Sets what depends on the model and on ``args.steps``. With ``--minutes`` these are known
    later, and this is called again."""
    if args.lr is None:
        has_weights = args.model is not None and args.model.is_dir()
        args.lr = TUNING_LR if has_weights and args.lora_rank is None else DEFAULT_LR
        args.lr /= 1 if args.method is None else PREFERENCE_SHARE
    if args.warmup_steps is None and args.steps is not None:
        args.warmup_steps = min(DEFAULT_WARMUP_STEPS, args.steps // 5)
        saved = saved_extra(args.checkpoint if args.resume else None).get("fixed_values")
        if isinstance(saved, dict) and isinstance(saved.get("warmup_steps"), int):
            args.warmup_steps = saved["warmup_steps"]  # --steps may have changed


def _check_companions(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that do nothing without another one, or beyond it."""
    if args.checkpoint_every is not None and args.checkpoint is None:
        raise ConfigError("--checkpoint-every needs a folder: add --checkpoint FOLDER")
    if args.checkpoint_overhead is not None:
        if args.checkpoint is None:
            raise ConfigError("--checkpoint-overhead needs a folder: add --checkpoint FOLDER")
        if args.checkpoint_every is not None:
            raise ConfigError(
                "--checkpoint-every and --checkpoint-overhead both say how often to save: give one"
                " of them."
            )
    args.checkpoint_overhead = share_of(
        args.checkpoint_overhead or DEFAULT_CHECKPOINT_OVERHEAD, "--checkpoint-overhead"
    )
    if args.eval_share is not None:
        share_of(args.eval_share, "--eval-share", "the data")  # raises
        if args.eval_data is not None:
            raise ConfigError(
                "--eval-share holds out a part of the data, and with --eval-data all of it is"
                " learned: give one of them."
            )
    if args.prompt is not None and args.out is None:
        raise ConfigError("--prompt is of the sample of a saved model: add --out FOLDER")
    if args.micro_batch is not None and args.micro_batch > args.batch_size:
        raise ConfigError(
            f"--micro-batch {args.micro_batch} is more than --batch-size {args.batch_size}: it is a"
            " part of it. Give less, or leave it out."
        )
    if args.scheduler is not None:
        args.scheduler = a_scheduler(args.scheduler)
    if args.scheduler is not None and args.warmup_steps is not None and not args.resume:
        raise ConfigError(
            "--scheduler has a warm-up of its own, and --warmup-steps is of the loop's schedule:"
            " give one of them."
        )
    known = None not in (args.warmup_steps, args.steps) and not args.resume
    if known and args.warmup_steps > args.steps:
        raise ConfigError(
            f"--warmup-steps {args.warmup_steps} is more than --steps {args.steps}: give at most as"
            " many."
        )


def check_options(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that can be checked without reading the data or building the
    model."""
    check_adapters(args)
    if args.lora_rank is not None and (args.model is None or args.model.is_file()):
        raise ConfigError(
            "--lora-rank trains adapters of a model that has weights: give --model a folder."
        )
    lengths = {f"--{name}": getattr(args, name) for name in ("steps", "epochs", "minutes")}
    chosen = [name for name, value in lengths.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} both say how long to train: give one of them.")
    if args.resume and args.checkpoint is None:
        raise ConfigError("--resume has nowhere to look. Add --checkpoint FOLDER")
    names_a_job = args.model is not None or args.data is not None or args.config is not None
    if args.resume and not names_a_job and not has_checkpoint(args.checkpoint):
        raise ConfigError(
            f"--resume: {args.checkpoint} has no checkpoint, and nothing says what to train. A job"
            " that ended before its first save left none: start it with its first command, without"
            " --resume (give --model and --data). Otherwise check the folder"
        )
    if args.resume and args.overwrite:
        raise ConfigError(
            "--resume continues a checkpoint and --overwrite replaces it: give one of them."
        )
    _check_companions(args)
    if args.betas is not None and args.optim == "adafactor":
        raise ConfigError("--betas is of AdamW, which --optim adafactor has not: leave it out")
    check_method(args)
    names = [*(args.log or ()), *([TENSORBOARD] if args.tensorboard else ())]
    args.log = list(dict.fromkeys(names))
    if TENSORBOARD in args.log and args.tensorboard is None:
        args.tensorboard = Path("runs", job_name())  # TensorBoard's own default, and one per job
