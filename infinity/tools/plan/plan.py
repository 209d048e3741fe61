"""`infinity plan`: plans a model's homes on a machine and predicts its step time. Runs no training.

A config is enough: the model is built on meta. The budgets may be another machine's.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import CapacityError, ConfigError, InfinityError
from ...files.outputs import PICTURE, Output, check_outputs
from ..cli.answers import print_object
from ..cli.options import (
    AXES,
    BYTES,
    FILE,
    FLAG,
    FOLDER,
    HOME,
    LENGTH,
    NUMBER,
    PATH,
    REPEATED,
    one_of,
    rating,
    takes,
)
from ..cli.values import rating_of, svg_path
from ..train.of_deepspeed import deepspeed_of
from ..train.optimizers import OPTIM, make_optimizers
from ..train.options import (
    ADAPTERS,
    DEFAULT_SEQUENCE_LENGTH,
    MASTER,
    MOMENTS,
    TRUST,
    check_adapters,
)
from ..train.settings import AUTO, check_folders, engine_config, engine_settings
from ..train.wording import first_line
from .budgets import USABLE, budgets_of
from .larger_disk import with_larger_disk
from .machine_file import Machine, known_machines
from .mesh_shape import SCHEDULES
from .plan_job import Job, plan_cluster, plan_here
from .plan_next import plan_faster, plan_next
from .plan_view import draw, text
from .saved import saved_on_paper
from .shapes import SHAPES, find_config

MEASURED = ("this", "measured")  # names of this machine
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
DEFAULT_SAMPLES = 4
ANY_DISK = [Path(".")]  # stands for another machine's disk, of which only the size matters


OPTIONS = (
    (
        "--model",
        PATH,
        f"folder with config.json, a config.json, a name on the Hugging Face hub, or one of"
        f" {', '.join(SHAPES)} (default: the small model of `infinity train` without --model)",
    ),
    TRUST,
    *ADAPTERS,
    ("--dtype", one_of(*DTYPES), "of the model's weights", "bf16"),
    ("--params", HOME, "home of the parameters (default auto)"),
    ("--optimizer", HOME, "home of master weights and moments (default auto)"),
    OPTIM,
    ("--activations", HOME, "home of what the forward saves (default auto)"),
    ("--nvme-path", FOLDER | REPEATED, "on the disk that swap files would use"),
    *(
        (f"--{tier}", BYTES, 'budget, as "80GiB" (default: what is free here)')
        for tier in ("device-memory", "host-memory", "nvme-capacity")
    ),
    MASTER,
    MOMENTS,
    ("--config", FILE, "engine configuration, TOML, JSON or YAML; options override it"),
    ("--deepspeed", FILE, "plan with a DeepSpeed JSON, and say what changes in bytes"),
    ("--batch-size", NUMBER, "samples of a step, of all ranks together (default 4 of each)"),
    (
        "--batch-tokens",
        takes("N"),
        "tokens of a step, of all ranks together, as 32768 or 32K, instead of --batch-size",
    ),
    (
        "--sequence-length",
        LENGTH,
        f"tokens of a sample (default {DEFAULT_SEQUENCE_LENGTH})",
    ),
    ("--gradient-checkpointing", FLAG, "the backward computes activations again"),
    ("--recompute", FLAG, "blocks keep what there is room for, and compute the rest again"),
    ("--fused-loss", FLAG, "the loss is computed in parts, without whole logits"),
    (
        "--machine",
        takes("FILE"),
        "plan for this kind of machine: a TOML file, one of"
        f" {', '.join(known_machines())}, or this: the one it runs on, by its own rates",
    ),
    ("--nodes", NUMBER, "how many of them, with one rank for each device", 1),
    ("--mesh", AXES, "compare all meshes of these machines (auto), or plan one, as pp=4,tp=8"),
    (
        "--schedule",
        takes("NAME", choices=SCHEDULES),
        "with --mesh: the pipelines' schedule, one of"
        f" {', '.join(SCHEDULES)} (default: the fastest that changes no training)",
    ),
    rating("default: of the machine file"),
    ("--timetable", FLAG, "print when each unit is moved and computed in a step"),
    (
        "--script",
        FLAG,
        "print what starts the planned job with `infinity train` instead, as lines for bash",
    ),
    ("--svg", takes("FILE", svg_path), "draw the memory map"),
    ("--overwrite", FLAG, "replace a file of --svg that is not a picture of ours"),
    ("--json", FLAG, "the plan as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the table, the memory map and the prediction."""
    if args.svg is not None:
        machine = Path(args.machine) if args.machine is not None else None
        read = {
            "--model": args.model,
            "--config": args.config,
            "--deepspeed": args.deepspeed,
            "--machine": machine,
        }
        check_outputs(
            [Output("--svg", args.svg, made=PICTURE)], read.items(), overwrite=args.overwrite
        )
    check_adapters(args)
    own_args = copy(args)
    with _waiting(args.mesh is None), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of libraries, as in `infinity train`
        answer = make(args)
    from . import plan_mesh  # as torch, which only the plan needs

    if args.script:
        print("\n".join(_script(own_args, answer)))
    elif args.json:
        print_object(answer)
    elif args.mesh is not None:
        print("\n".join(plan_mesh.text(answer)))
    else:
        print("\n".join(text(answer, timetable=args.timetable)))
    if args.svg is not None:
        args.svg.write_text(draw(answer["tiers"]) + "\n")
    return 0


@contextmanager
def _waiting(is_silent: bool) -> Iterator[None]:
    """Shows on a terminal that a plan, which is ``is_silent`` itself, is under way."""
    if not (is_silent and sys.stderr.isatty()):
        yield
        return
    print("planning: large models take up to a minute", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _script(args: argparse.Namespace, found: dict[str, Any]) -> Iterator[str]:
    """Yields the script of a plan. ``args``: as they were given, without a machine's budgets."""
    from ..train.model import choose_sequence_length
    from .script import script

    args.micro_batch = args.trace = args.max_grad_norm = None
    settings = engine_settings(args, plans=True)
    if settings.get("nvme_paths") == AUTO:
        del settings["nvme_paths"]
    plan = found["meshes"][0] if "meshes" in found else found
    settings["device_memory"] = plan["device_memory"]
    model_config = find_config(args.model, trust=args.trust_remote_code)
    train = {
        "dtype": args.dtype,
        "optim": args.optim,
        "sequence_length": choose_sequence_length(args.sequence_length, model_config),
    }
    if args.trust_remote_code:
        train["trust_remote_code"] = True
    if plan.get("gradient_checkpointing", args.gradient_checkpointing):
        train["gradient_checkpointing"] = True
    for option in ("lora_rank", "quantize"):
        if getattr(args, option) is not None:
            train[option] = getattr(args, option)
    model = args.model
    if str(model) in SHAPES and not model.exists():
        model = model_config
    elif model is not None and model.exists():
        has_weights = model.is_file() or any(model.glob("*.safetensors"))
        model = (model if has_weights else model / "config.json").resolve()
    if args.lora_rank is not None and not (isinstance(model, Path) and model.is_dir()):
        raise ConfigError(
            "--script: --lora trains adapters of a model that has weights: give --model a folder"
        )
    return script(found, settings, train, model)


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the plan as plain data; without ``--machine``, measures this machine's rates. Raises
    CapacityError, with the numbers, if nothing fits."""
    import torch
    from transformers.utils import logging

    from ..train.classes import freeze_untouched, touched
    from ..train.model import adapted, choose_sequence_length, packed_base
    from .plan_mesh import plan_meshes

    logging.set_verbosity_error()
    check_adapters(args)
    machine = _machine_of(args)
    own_args = copy(args)
    settings = _settings(args, machine)
    model_config = find_config(args.model, trust=args.trust_remote_code)
    length = choose_sequence_length(args.sequence_length, model_config)
    if getattr(model_config.get_text_config(), "vocab_size", 1) == 0:
        raise ConfigError(f"{args.model}: a model with a vocabulary of 0 has nothing to predict")
    ranks = _ranks_of(args, machine)
    samples = args.batch_size or DEFAULT_SAMPLES * ranks
    if args.batch_tokens is not None and args.batch_size is not None:
        raise ConfigError("--batch-size and --batch-tokens both size a step: give one of them")
    if args.batch_tokens is not None:
        samples = _samples_of(args.batch_tokens, length)
    if args.mesh is None:
        samples = _samples_each(samples, ranks)
    dtype = getattr(torch, DTYPES[args.dtype])
    model = _build(args, model_config, dtype)
    text = touched(model_config, args.model, trust=args.trust_remote_code)
    freeze_untouched(model, text, lambda line: None)
    checkpointing, chooses = args.gradient_checkpointing, False
    saved = recomputed = blocks = None
    adapt = partial(adapted, rank=args.lora_rank, quantize=args.quantize, text=text)
    if args.mesh is None:  # before its base is packed, which does not run on meta
        saved, recomputed, blocks = saved_on_paper(
            model, fused_loss=args.fused_loss, adapt=partial(adapt, quantize=None)
        )
        chooses = bool(settings.get("recompute")) and machine is not None and not checkpointing
        saved = recomputed if checkpointing or chooses else saved
    has_adapters = args.mesh is not None and args.lora_rank is not None
    unpacked = deepcopy(model) if has_adapters else None
    model = packed_base(model, args.quantize)
    with torch.device("meta"):
        model = adapt(model, quantize=None)
        if unpacked is not None:
            adapt(unpacked, quantize=None)
    config = engine_config(settings, model)

    def configure(machine: Machine, **options: Any) -> Any:
        anew = argparse.Namespace(**vars(own_args) | options)
        return engine_config(_settings(anew, machine), model)

    make_all = partial(make_optimizers, name=args.optim, lr=1e-4, weight_decay=0.1)
    batch = {"batch": samples, "length": length, "checkpointing": checkpointing}
    job = Job(
        model,
        model_config,
        make_all(model),
        config,
        batch,
        saved,
        adapt=adapt,
        unpacked=unpacked,
        blocks=blocks if chooses else None,
    )
    made = {"lora_rank": args.lora_rank, "quantize": args.quantize}
    made["budgets"] = budgets_of(own_args, config, machine is not None)
    if machine is not None and args.mesh is None and config.activations not in (AUTO, "device"):
        raise ConfigError(
            "--machine without --mesh plans with what forwards save on the device: add --mesh auto"
            " or leave out --activations"
        )
    if machine is not None and args.mesh is not None:
        answer = plan_meshes(job, machine, args.nodes, args.mesh, make_all, args.schedule)
        return answer | made
    try:
        if machine is not None:
            answer = plan_cluster(job, machine, args.nodes)
            answer |= plan_next(job, answer, machine, args.nodes, configure)
            answer |= plan_faster(job, answer, machine, args.nodes, configure, recomputed, blocks)
        else:
            unknown = _unknown_machine(args, config)
            answer = plan_here(job, dtype, unknown=unknown, rating=rating_of(args))
    except CapacityError as error:
        recomputes = checkpointing or config.recompute
        if machine is not None and not recomputes and _fits_recomputed(own_args):
            plain = error.__context__  # before remedies were added, which are no better
            raise CapacityError(
                "It fits with --gradient-checkpointing and not without it:"
                f" {plain if isinstance(plain, CapacityError) else error}"
                " Add --gradient-checkpointing"
            ) from None
        raise with_larger_disk(error, job, machine, args.nodes) from None
    if args.deepspeed is not None:
        answer["deepspeed"] = _deepspeed(model, config)
    return answer | made


def _fits_recomputed(given: argparse.Namespace) -> bool:
    """Tells whether the same plan fits if the backward computes activations again."""
    given = copy(given)
    given.gradient_checkpointing = True
    try:
        return bool(make(given))
    except InfinityError:
        return False


def _machine_of(args: argparse.Namespace) -> Machine | None:
    """Reads the machine that is planned for; None: this one. Raises ConfigError for options that
    do not fit it or each other."""
    if args.recompute and (args.mesh is not None or args.gradient_checkpointing):
        other = "--gradient-checkpointing" if args.gradient_checkpointing else "--mesh"
        raise ConfigError(f"--recompute and {other} do not go together: give one of them")
    if args.schedule is not None and args.mesh is None:
        raise ConfigError("--schedule is of a mesh: add a mesh with pp, or --mesh auto")
    switches = {"--nodes": args.nodes > 1, "--mesh": args.mesh is not None}
    switches |= {"--timetable": args.timetable, "--script": args.script}
    if args.machine is None and any(switches.values()):
        option = next(option for option, is_given in switches.items() if is_given)
        raise ConfigError(f"{option} is of a machine that is named: add --machine")
    if args.machine is None:
        return None
    if args.script and args.json:
        raise ConfigError("--script and --json both print the plan: give one of them")
    for option in ("svg", "deepspeed", "timetable") if args.mesh is not None else ():
        if getattr(args, option):
            raise ConfigError(f"--{option} is of one rank: leave out --mesh")
    if args.machine in MEASURED:
        from .plan_measured import measured_machine

        machine = measured_machine(args.nvme_path or [], DTYPES[args.dtype])
    else:
        machine = Machine.read(args.machine)
    rating = rating_of(args)
    return machine if rating is None else replace(machine, drive_rating=rating)


def _ranks_of(args: argparse.Namespace, machine: Machine | None) -> int:
    return args.nodes * machine.devices if machine is not None else 1


def _samples_of(given: str, length: int) -> int:
    """Returns the samples of a step of so many tokens; "32K" is 32 x 1,024. Raises ConfigError
    unless they are whole samples."""
    match = re.fullmatch(r"(\d+)([KM]?)", given.strip(), re.IGNORECASE)
    tokens = int(match[1]) * 1024 ** " KM".index(match[2].upper() or " ") if match else 0
    if tokens < 1 or tokens % length:
        raise ConfigError(
            f"--batch-tokens {given}: give a multiple of --sequence-length {length} as"
            f" {max(1, tokens // length) * length}"
        )
    return tokens // length


def _samples_each(samples: int, ranks: int) -> int:
    """Returns the samples of a step on each rank. Raises ConfigError for a rest."""
    if samples % ranks:
        raise ConfigError(
            f"{samples} samples of a step do not divide by the {ranks} ranks: give --batch-size"
            f" {max(1, samples // ranks) * ranks} or another multiple of {ranks}, or --mesh auto"
        )
    return samples // ranks


def _build(args: argparse.Namespace, model_config: Any, dtype: Any) -> Any:
    """Builds the model of a config on ``meta``. Raises ConfigError if transformers cannot."""
    import torch

    from ..train.classes import auto_class

    auto = auto_class(model_config, args.model)
    with torch.device("meta"):
        try:
            return auto.from_config(
                model_config, dtype=dtype, trust_remote_code=args.trust_remote_code
            )
        except Exception as error:  # noqa: BLE001 - a config may be wrong in every way
            raise ConfigError(
                f"transformers cannot build the model of {args.model}: {first_line(error)}"
            ) from None


def _deepspeed(model, config) -> dict[str, Any]:
    """Counts the bytes that DeepSpeed would keep and move with the same homes."""
    from .deepspeed_bytes import deepspeed_bytes

    sizes = [param.numel() for param in model.parameters()]
    homes = {
        name: "device" if getattr(config, name) == "auto" else getattr(config, name)
        for name in ("params", "optimizer")
    }
    return asdict(deepspeed_bytes(sum(sizes), max(sizes), **homes))


def _unknown_machine(args: argparse.Namespace, config: Any) -> str:
    """Returns which of the sizes that were given are not of this machine, whose rates are then not
    theirs; "" if all are."""
    if args.device_memory is not None and config.device in (None, "cpu"):
        return f"--device-memory {args.device_memory} is a GPU's, and none is here"
    if args.nvme_capacity is not None and args.nvme_path is ANY_DISK:
        return f"--nvme-capacity {args.nvme_capacity} is of a disk that is not here"
    return ""


def _settings(args: argparse.Namespace, machine: Any | None) -> dict[str, Any]:
    from ...core.machine import scratch

    if machine is not None:  # each rank's share of its node
        each = {
            "device_memory": machine.device_memory,
            "host_memory": machine.host_memory // machine.devices,
        }
        each["nvme_capacity"] = machine.disks * machine.disk_capacity // machine.devices
        for name, nbytes in each.items():
            if getattr(args, name) is None:
                setattr(args, name, str(int(USABLE * nbytes)))
    args.micro_batch = args.trace = args.max_grad_norm = None
    if args.nvme_capacity is not None and not args.nvme_path and args.config is None:
        args.nvme_path = ANY_DISK
    settings = engine_settings(args, plans=True)
    paths = settings.get("nvme_paths") or AUTO
    if paths != AUTO:
        paths = [paths] if isinstance(paths, str) else list(paths)
        if args.machine not in (None, *MEASURED):  # of that machine: only their size counts here
            paths = ["."]
        elif not args.nvme_path and any(
            map(deepspeed_of, filter(None, (args.deepspeed, args.config)))
        ):
            paths = [path if Path(path).is_dir() else "." for path in paths]
        check_folders(paths)
        settings["nvme_paths"] = paths
    if settings.get("nvme_paths") == AUTO:
        disk = scratch.choose(scratch.candidates(), 0)
        settings["nvme_paths"] = [disk.folder] if disk is not None else []
    if args.nvme_capacity is not None:
        settings["nvme_paths"] = settings["nvme_paths"] or ["."]
    return settings
