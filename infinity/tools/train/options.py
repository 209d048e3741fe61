"""The options of `infinity train`: definitions, and the checks that need no data or model.

fresh weights  weights of a model built from its configuration alone, initialised from the seed
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...core.machine.tiers import home_of
from ...errors import ConfigError
from ...ext.audit.told import DEFAULT_SHARE
from ...ext.checkpoint.interval import share_of
from ..cli.presets import PRESETS
from ..cli.values import (
    a_count,
    a_pair,
    a_path,
    a_seed,
    at_least_two,
    positive_real,
    real_from_zero,
    zero_or_more,
)
from ..watch.run_files import job_name
from .methods import METHODS, check_method
from .optimizers import OPTIM, OPTIM_HELP
from .places import TENSORBOARD, has_checkpoint, saved_extra
from .schedules import a_scheduler

HOMES = ("auto", "device", "host", "nvme")
HOME: dict[str, Any] = {"type": home_of, "choices": HOMES}
# Arguments that several options have.
FLAG: dict[str, Any] = {"action": "store_true"}
PATH: dict[str, Any] = {"type": a_path, "metavar": "PATH"}
FILE: dict[str, Any] = {"type": a_path, "metavar": "FILE"}
FOLDER: dict[str, Any] = {"type": a_path, "metavar": "FOLDER"}
NUMBER: dict[str, Any] = {"type": a_count, "metavar": "N"}
COUNT: dict[str, Any] = {"type": zero_or_more, "metavar": "N"}
QUANTIZE: dict[str, Any] = {"choices": ("nf4", "int8", "fp8")}
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(repeats=None)  # the stretch that `infinity verify` repeats
    _add_model_and_data_options(parser.add_argument_group("model and data"))
    add_memory_options(parser.add_argument_group("where the state lives"))
    _add_training_options(parser.add_argument_group("training"))
    _add_result_options(parser.add_argument_group("results"))


def _add_model_and_data_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        **PATH,
        help="folder with config.json and safetensors, a name on the Hugging Face hub, or a"
        " config.json alone for fresh weights",
    )
    add("--trust-remote-code", **FLAG, help="run Python code that lies in the folder of --model")
    add(
        "--data",
        **PATH,
        help="text files, or conversations, prompts with completions or texts as JSON, JSON lines,"
        " Parquet, CSV or a datasets folder: a file, or a folder of them",
    )
    add(
        "--data-limit",
        default=DEFAULT_DATA_LIMIT,
        metavar="BYTES",
        help=f"of text: no more (default {DEFAULT_DATA_LIMIT})",
    )
    add(
        "--method",
        choices=tuple(METHODS),
        help="learn from preferred answers in --data: pairs of chosen and rejected, or a label"
        " (kto), by TRL's trainer",
    )
    add("--pack", **FLAG, help="several samples of --data in one row of --sequence-length tokens")
    add(
        "--dtype",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="of the model's weights (default auto: bf16, or fp32 on a processor that has no fast"
        " bf16 products)",
    )
    add("--preset", choices=tuple(PRESETS), help="a preset; other options override it")
    add_adapter_options(add)
    add("--gradient-checkpointing", **FLAG, help="recompute activations in the backward")


def add_adapter_options(add: Callable[..., Any]) -> None:
    """Adds the options of adapters, which `infinity plan` has, too."""
    add(
        "--lora-rank",
        **NUMBER,
        help="train adapters of this rank (needs peft) and save them, not the model",
    )
    add("--lora", nargs="?", const=LORA_RANK, **NUMBER, help=f"--lora-rank (default {LORA_RANK})")
    add("--quantize", **QUANTIZE, help=f"pack the base under the adapters in fewer bits: {PACKED}")


def check_adapters(args: argparse.Namespace) -> None:
    """Settles the rank of the adapters. Raises ConfigError for a packed base without any."""
    args.lora_rank = args.lora_rank or args.lora
    if args.quantize is not None and args.lora_rank is None:
        raise ConfigError(
            f"--quantize {args.quantize} packs a base that is not trained, but its adapters are:"
            " add --lora"
        )


def add_memory_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options of the engine, which `infinity run` has, too."""
    add = group.add_argument
    add("--params", **HOME, help="where the parameters live, their home (default auto)")
    add("--optimizer", **HOME, help="home of master weights and moments (default auto)")
    add(
        "--shard",
        choices=("optimizer", "gradients", "parameters"),
        help="under torchrun, what is split over the ranks: optimizer = ZeRO-1, gradients = ZeRO-2,"
        " parameters = ZeRO-3 (default)",
    )
    add(
        "--activations",
        **HOME,
        help="home of what the forward saves for the backward (default auto)",
    )
    add("--micro-batch", **NUMBER, help="run each layer on N samples at a time (default all)")
    add("--compile", **FLAG, help="compile each repeated block by itself, by torch.compile")
    add(
        "--fused-loss", **FLAG, help="compute the loss in parts of the tokens, without whole logits"
    )
    add(
        "--nvme-path",
        action="append",
        **FOLDER,
        help="swap files go here (default: a scratch folder); repeat it to stripe over several"
        " disks",
    )
    add(
        "--host-memory",
        metavar="BYTES",
        help='budget, as "256MiB", or "25%%" of weights, gradients and optimizer state, not of the'
        " RAM",
    )
    add("--device-memory", metavar="BYTES", help='budget, as "8GiB"')
    add(
        "--nvme-capacity",
        metavar="BYTES",
        help='budget of swap files, as "1TiB" (default: what is free there)',
    )
    masters, moments = ("split", "fp32", "none"), ("fp32", "bf16", "int8")
    add("--master", choices=masters, help="master weights of bf16 parameters (default split)")
    add("--moments", choices=moments, help="the optimizer's moments (default fp32)")
    add(
        "--config",
        **FILE,
        help=(
            "TOML, JSON or YAML: the engine's fields, options in a table train; options here"
            " override it"
        ),
    )
    add(
        "--deepspeed",
        **FILE,
        help="homes of a DeepSpeed JSON, its optimizer's numbers, batches and clipping; options"
        " here override it",
    )
    add(
        "--audit",
        type=real_from_zero,
        nargs="?",
        const=DEFAULT_SHARE,
        metavar="SHARE",
        help="do this share of the work twice, to find a machine that gives wrong bits (alone:"
        f" {DEFAULT_SHARE:g})",
    )
    add("--trace", **FILE, help="write a timeline here, for `infinity trace` or Perfetto")


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--steps", **NUMBER, help="optimizer steps (default: one epoch of samples; 80 of text)")
    add("--epochs", type=positive_real, metavar="N", help="of samples, instead of --steps")
    add(
        "--minutes",
        type=positive_real,
        metavar="N",
        help="as many steps as this machine should take in about so long, instead of --steps",
    )
    add("--batch-size", **NUMBER, default=4, help="samples in a micro-batch (default 4)")
    add(
        "--sequence-length",
        type=at_least_two,
        metavar="N",
        help=(
            f"tokens in a sample, at most (default {DEFAULT_SEQUENCE_LENGTH} of text,"
            f" {DEFAULT_ROW_LENGTH} of samples, or what the model takes if less)"
        ),
    )
    add("--accumulate", **NUMBER, default=1, help="micro-batches in a step (default 1)")
    add(
        "--lr",
        type=positive_real,
        help="peak learning rate (default 0.0002; 0.00002 for all weights of a trained model; a"
        " twentieth of that with --method)",
    )
    add("--weight-decay", type=real_from_zero, default=0.1, help="of weight matrices (default 0.1)")
    add(
        "--betas",
        type=a_pair,
        metavar="B1,B2",
        help="of AdamW (default 0.9,0.95; with --method TRL's)",
    )
    add(
        "--warmup-steps",
        **COUNT,
        help="linear warm-up, then cosine (default 10, or a fifth of the steps if less)",
    )
    add(
        "--scheduler",
        metavar="JSON",
        help="in place of warm-up and cosine: the scheduler of a DeepSpeed JSON, as --deepspeed"
        " takes it",
    )
    add(
        "--max-grad-norm",
        type=positive_real,
        metavar="NORM",
        help=f"clip to it (default {DEFAULT_MAX_GRAD_NORM})",
    )
    add(
        "--device",
        metavar="DEVICE",
        help='what computes: "cuda", "cuda:1" or "cpu" (default: cuda where there is one)',
    )
    add("--beta", type=positive_real, help="of --method (default: TRL's, 0.1)")
    add(
        "--precompute-reference",
        **FLAG,
        help="of --method dpo or kto: ask the reference model once, before the first step",
    )
    add("--optim", **OPTIM, help=OPTIM_HELP)
    add(
        "--timeout",
        type=positive_real,
        metavar="SECONDS",
        help="under torchrun, how long a rank waits for the others (default: torch's)",
    )
    add(
        "--mesh",
        metavar="AXES",
        help="divide the model over torchrun's ranks, as tp=2,pp=2,dp=4: tensors (tp), layers (pp),"
        " experts (ep), sequences (cp) and batches (dp, the rest)",
    )
    add(
        "--pipeline-schedule",
        choices=SCHEDULES,
        help="of the stages of pp, with a micro-batch for each of --accumulate (default LoopedBFS)",
    )
    add("--pipeline-chunks", **NUMBER, help="of the model on each rank of pp (default: as it fits)")
    add(
        "--seed",
        type=a_seed,
        default=0,
        help="of fresh weights, batches, dropout and the sample (default 0)",
    )
    add("--threads", **NUMBER, help="torch's compute threads (default: torch's choice)")


def _add_result_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--out", **FOLDER, help="save the trained model here, and print a sample of it")
    add(
        "--checkpoint",
        **FOLDER,
        help="keep the last resumable checkpoint here, the final one too",
    )
    add(
        "--checkpoint-overhead",
        metavar="SHARE",
        help="save as often as this share of the time allows (default 2%%)",
    )
    add("--checkpoint-every", **NUMBER, help="save after so many steps instead")
    add(
        "--resume",
        **FLAG,
        help="continue from --checkpoint bit for bit; without one start fresh",
    )
    add("--overwrite", **FLAG, help="replace what --checkpoint, --out and --trace hold")
    add(
        "--receipt",
        **FILE,
        help="write versions, options, losses and a digest of each weight here at each save, for"
        " `infinity verify`",
    )
    add(
        "--stalls",
        **NUMBER,
        help="measure what the data costs in three times so many passes, before the first step",
    )
    add(
        "--eval-data",
        **FILE,
        help="measure the loss on this file or folder (of that kind), and learn all of the data",
    )
    add("--eval-share", metavar="SHARE", help="hold out so much of --data (default 3%%)")
    add("--eval-batches", **NUMBER, default=4, help="held-out batches (default 4)")
    add("--eval-every", **NUMBER, help="measure the held-out loss after so many steps, too")
    add(
        "--prompt",
        metavar="TEXT",
        help="start of the sample (default: the start of the held-out text)",
    )
    add(
        "--sample-bytes",
        **COUNT,
        default=200,
        help="bytes or tokens to sample, for at most a minute (default 200)",
    )
    add(
        "--tensorboard",
        **FOLDER,
        help="log by TensorBoard, with its files in this folder",
    )
    add(
        "--log",
        action="append",
        metavar="TRACKER",
        help="log loss, speed and memory by a tracker of accelerate: tensorboard, wandb, mlflow,"
        " trackio or another; repeat it for several",
    )
    add(
        "--push",
        metavar="NAME",
        help="send what --out holds to this private repository on the Hugging Face hub",
    )
    add(
        "--json",
        **FLAG,
        help="the report as one JSON object on stdout, all else on stderr",
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
