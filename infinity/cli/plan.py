"""`infinity plan`: plans a model's homes on a machine and predicts its step time. Runs no training.

A config is enough: the model is built on meta. The budgets may be another machine's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import infinity

from ..errors import ConfigError
from ..machine.outputs import PICTURE, Output, check_outputs
from ..machine.sizes import format_nbytes, format_seconds
from ..machine.tiers import Tier
from . import svg
from .training.options import HOMES
from .training.settings import AUTO, engine_config, engine_settings

USABLE = 0.9  # share of a machine's memory and disks; the system and libraries use the rest
BAR = 48  # characters of the memory map
STATE = {"weights": "weight", "optimizer": "exp_avg", "gradients": "grad"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "plan", help="where a model's state would live, and how long a step would take"
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        metavar="PATH",
        help="folder with config.json, or a config.json (default: train's own)",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that lies in the folder of --model",
    )
    add(
        "--dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="of the model's weights (default bf16)",
    )
    add("--params", choices=HOMES, help="home of the parameters (default auto)")
    add("--optimizer", choices=HOMES, help="home of master weights and moments (default auto)")
    add("--activations", choices=HOMES, help="home of what the forward saves (default auto)")
    add(
        "--nvme-path",
        action="append",
        type=Path,
        metavar="FOLDER",
        help="on the disk that swap files would use",
    )
    for tier in ("device-memory", "host-memory", "nvme-capacity"):
        add(f"--{tier}", metavar="BYTES", help='budget, as "80GiB" (default: what is free here)')
    add(
        "--master",
        choices=("split", "fp32", "none"),
        help="master weights of bf16 parameters (default split)",
    )
    add(
        "--moments", choices=("fp32", "bf16", "int8"), help="the optimizer's moments (default fp32)"
    )
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="engine configuration, TOML or JSON; options here go over it",
    )
    add(
        "--deepspeed",
        type=Path,
        metavar="FILE",
        help="plan with a DeepSpeed JSON, and say what changes in memory and bytes",
    )
    add("--batch-size", type=int, default=4, metavar="N", help="samples of a step (default 4)")
    add("--sequence-length", type=int, metavar="N", help="tokens of a sample (default 256)")
    add(
        "--gradient-checkpointing",
        action="store_true",
        help="the backward computes activations again",
    )
    add(
        "--machine",
        metavar="FILE",
        help="plan for this kind of machine: a TOML file, or dgx-h100, which comes along",
    )
    add(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="how many of them, with one rank for each device (default 1)",
    )
    add("--svg", type=Path, metavar="FILE", help="draw the memory map")
    add(
        "--overwrite",
        action="store_true",
        help="replace a file of --svg that is no picture of ours",
    )
    add("--json", action="store_true", help="the plan as one JSON object on stdout")


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
    found = make(args)
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(text(found)))
    if args.svg is not None:
        args.svg.write_text(draw(found["tiers"]) + "\n")
    return 0


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the plan as plain data; without ``--machine``, measures this machine's rates. Raises
    CapacityError, with the numbers, if nothing fits."""
    import torch
    from transformers.utils import logging

    from ..api.lay_out import lay_out
    from ..machine.rates import Rates
    from ..planning.cluster import Machine
    from ..planning.predict import predict
    from .training.compute import compute_time
    from .training.job import make_optimizer
    from .training.model import choose_sequence_length, read_model_config

    logging.set_verbosity_error()
    if args.nodes < 1:
        raise ConfigError(f"--nodes {args.nodes}: give at least 1")
    machine = Machine.read(args.machine) if args.machine is not None else None
    settings = _settings(args, machine)
    model_config = read_model_config(args.model, trust=args.trust_remote_code)
    length = choose_sequence_length(args.sequence_length, model_config)
    if getattr(model_config.get_text_config(), "vocab_size", 1) == 0:
        raise ConfigError(f"{args.model}: a model with a vocabulary of 0 has nothing to predict")
    _check_at_least((("batch-size", args.batch_size, 1), ("sequence-length", length, 2)))
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    model = _build(args, model_config, dtype)
    config = engine_config(settings, model)
    optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.1)
    if machine is not None:
        return _plan_cluster(args, machine, model, model_config, optimizer, config, length)
    plan, units = lay_out(model, optimizer, config)
    compute = compute_time(
        model,
        model_config,
        batch=args.batch_size,
        length=length,
        dtype=dtype,
        checkpointing=args.gradient_checkpointing,
    )
    on_disk = plan.planned_nbytes(Tier.NVME) > 0
    rates = Rates.measure(config.nvme_paths if on_disk else (), config.device)
    prediction = predict(plan, units, rates, compute_seconds=compute.seconds)
    tokens = args.batch_size * length
    return _described(model, plan, units) | {
        "edges": prediction.edges,
        "seconds": prediction.seconds,
        "compute": compute.how,
        "rates": asdict(rates),
        "step_seconds": prediction.step_seconds,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / prediction.step_seconds,
        "bottleneck": prediction.bottleneck,
        **({"deepspeed": _deepspeed(model, config)} if args.deepspeed is not None else {}),
    }


def _check_at_least(options: Iterable[tuple[str, int, int]]) -> None:
    for option, value, least in options:
        if value < least:
            raise ConfigError(f"--{option} {value}: give at least {least}")


def _build(args: argparse.Namespace, model_config: Any, dtype: Any) -> Any:
    """Builds the model of a config on ``meta``. Raises ConfigError if transformers cannot."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, trust_remote_code=args.trust_remote_code
            )
        except Exception as error:  # noqa: BLE001 - a config may be wrong in every way
            raise ConfigError(
                f"transformers cannot build a causal LM from {args.model}: {error!r}"
            ) from None


def _deepspeed(model, config) -> dict[str, Any]:
    """Counts the bytes that DeepSpeed would keep and move with the same homes."""
    from ..planning.deepspeed_bytes import deepspeed_bytes

    sizes = [param.numel() for param in model.parameters()]
    homes = {
        name: "device" if getattr(config, name) == "auto" else getattr(config, name)
        for name in ("params", "optimizer")
    }
    return asdict(deepspeed_bytes(sum(sizes), max(sizes), **homes))


def _described(model: Any, plan: Any, units: list[Any]) -> dict[str, Any]:
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        "units": list(_units(plan, units)),
        "tiers": {
            str(tier): {"nbytes": plan.planned_nbytes(tier), "parts": plan.terms[tier]}
            for tier in Tier
        },
    }


def _plan_cluster(
    args: argparse.Namespace,
    machine: Any,
    model: Any,
    model_config: Any,
    optimizer: Any,
    config: Any,
    length: int,
) -> dict[str, Any]:
    """Plans one rank of ``args.nodes`` machines. Measures nothing on this machine."""
    from ..api.lay_out import lay_out
    from ..distributed.data_ranks import DataRanks
    from ..planning.cluster import predict_cluster
    from .training.compute import step_flops

    ranks = DataRanks(size=args.nodes * machine.devices, local_size=machine.devices)
    plan, units = lay_out(model, optimizer, config, ranks)
    flops = step_flops(
        model,
        model_config,
        batch=args.batch_size,
        length=length,
        checkpointing=args.gradient_checkpointing,
    )
    found = predict_cluster(plan, units, machine, args.nodes, flops=flops)
    tokens = args.batch_size * length * found.ranks
    return _described(model, plan, units) | {
        "machine": machine.name,
        "nodes": args.nodes,
        "ranks": found.ranks,
        "edges": found.edges,
        "seconds": found.seconds,
        "compute": "assumed",
        "rates": {
            key: value for key, value in asdict(machine).items() if isinstance(value, (int, float))
        },
        "step_seconds": found.step_seconds,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / found.step_seconds,
        "bottleneck": found.bottleneck,
        "assumptions": [
            *found.assumptions,
            "what the forward saves is not counted: give its room with --device-memory",
        ],
        "sources": list(machine.sources),
    }


def _settings(args: argparse.Namespace, machine: Any | None) -> dict[str, Any]:
    from ..machine import scratch

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
        args.nvme_path = [Path(".")]  # stands for another machine's disk: only its size matters
    settings = engine_settings(args)
    if args.deepspeed is not None:
        settings = {
            **_translated(args.deepspeed),
            **{name: value for name, value in settings.items() if value != AUTO},
        }
    if settings.get("nvme_paths") == AUTO:
        found = scratch.choose(scratch.candidates(), 0)
        settings["nvme_paths"] = [found.folder] if found is not None else []
    if args.nvme_capacity is not None:
        settings["nvme_capacity"] = args.nvme_capacity
        settings.setdefault("nvme_paths", ["."])
    return settings


def _translated(path: Path) -> dict[str, Any]:
    """Returns the settings of a DeepSpeed JSON; logs the result for each key. Its disk folder need
    not exist here: only its size counts."""
    config = infinity.Config.from_deepspeed(path, strict=False)  # only bytes are planned
    given = {
        name: getattr(config, name)
        for name in (
            "params",
            "optimizer",
            "max_grad_norm",
            "grad_dtype",
            "master",
            "moments",
            "weights_on_host",
        )
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if "nvme" in (config.params, config.optimizer):
        settings["nvme_paths"] = [
            path if Path(path).is_dir() else "." for path in config.nvme_paths
        ][:1]
    return settings


def _units(plan, units) -> Iterator[dict[str, Any]]:
    """Yields an entry per run of units with the same homes and sizes."""

    def entry(index: int) -> tuple:
        unit, tiers, kept = units[index], plan.tiers_of(index), plan.kept_of(index)
        homes = {}
        for what, array in STATE.items():
            held = any(shard.nbytes(array) for shard in unit.shards)
            homes[what] = (
                str(tiers[array]) + (" (kept on host)" if array in kept else "") if held else "-"
            )
        return sum(shard.numel for shard in unit.shards), tuple(homes.items()), unit.tile_nbytes

    for (count, homes, tile), run_of in groupby(range(len(units)), key=entry):
        indices = list(run_of)
        yield {
            "first": units[indices[0]].name,
            "last": units[indices[-1]].name,
            "units": len(indices),
            "parameters": count,
            "tile_nbytes": tile,
            **dict(homes),
        }


def text(found: dict[str, Any]) -> Iterator[str]:
    """Yields the plan's lines for a terminal."""
    yield f"{found['parameters']:,} parameters"
    yield f"{'unit':<42}{'parameters':>15}  {'weights':<22}{'optimizer':<22}gradients"
    for row in found["units"]:
        name = (
            row["first"]
            if row["units"] == 1
            else f"{row['first']} .. {row['last'].rsplit('.', 1)[-1]}"
        )
        tile = f" in tiles of {format_nbytes(row['tile_nbytes'])}" if row["tile_nbytes"] else ""
        count = (
            f"{row['units']} x {row['parameters']:,}"
            if row["units"] > 1
            else f"{row['parameters']:,}"
        )
        yield (
            f"{name:<42}{count:>15}"
            f"  {row['weights'] + tile:<22}{row['optimizer']:<22}{row['gradients']}"
        )
    for tier, of_tier in found["tiers"].items():
        yield f"{tier}: {format_nbytes(of_tier['nbytes'])}"
        for what, nbytes in sorted(of_tier["parts"].items(), key=lambda part: -part[1]):
            if nbytes:
                filled = max(1, round(BAR * nbytes / of_tier["nbytes"]))
                yield f"  {what:<28}{format_nbytes(nbytes):>11}  {'#' * filled}"
    moved = ", ".join(
        f"{edge} {format_nbytes(nbytes)}" for edge, nbytes in found["edges"].items() if nbytes
    )
    whose = " of each rank" if "ranks" in found else ""
    if "ranks" in found:
        yield f"{found['nodes']} x {found['machine']}, {found['ranks']} ranks; above is one of them"
    yield f"a step of {found['tokens_per_step']:,} tokens moves {moved}{whose}"
    needs = ", ".join(
        f"{what} {format_seconds(seconds)}" for what, seconds in found["seconds"].items() if seconds
    )
    yield (
        f"and needs {needs} (compute"
        f" {found['compute']}{'' if 'ranks' in found else ' on this machine'})"
    )
    if (theirs := found.get("deepspeed")) is not None:
        yield f"{'beside DeepSpeed, by its own layout':<42}{'DeepSpeed':>12}{'Infinity':>12}"
        for tier, nbytes in theirs["tiers"].items():
            ours = format_nbytes(found["tiers"][tier]["nbytes"])
            yield f"  {'kept on ' + tier:<40}{format_nbytes(nbytes):>12}{ours:>12}"
        for edge, nbytes in theirs["edges"].items():
            ours = format_nbytes(found["edges"][edge])
            yield f"  {'moved in a step, ' + edge:<40}{format_nbytes(nbytes):>12}{ours:>12}"
    yield (
        f"predicted: {format_seconds(found['step_seconds'])} per step,"
        f" {found['tokens_per_second']:,.1f} tokens/s; {found['bottleneck']} decides"
    )
    for name in ("assumptions", "sources"):
        yield from [f"{name}:", *(f"  {line}" for line in found[name])] if name in found else []


WIDTH, ROW, LEFT = 900, 64, 70
COLOURS = {"weights": "#1f6fb2", "optimizer state": "#8a6d1b", "gradients": "#7a4fb0"}
OTHER_COLOUR = "#2a8c4a"


def draw(tiers: dict[str, dict]) -> str:
    """Draws the memory map as an SVG picture: a bar per tier, all on one scale. Parts have their
    names if they fit."""
    largest = max(of_tier["nbytes"] for of_tier in tiers.values()) or 1
    marks = []
    for number, (tier, of_tier) in enumerate(tiers.items()):
        y, x = 12 + number * ROW, float(LEFT)
        marks.append(svg.text(LEFT - 8, y + 20, tier, anchor="end"))
        for what, nbytes in sorted(of_tier["parts"].items(), key=lambda part: -part[1]):
            width = (WIDTH - LEFT - 20) * nbytes / largest
            colour = next(
                (colour for kind, colour in COLOURS.items() if what.startswith(kind)), OTHER_COLOUR
            )
            title = f"{what}, {format_nbytes(nbytes)}"
            marks.append(svg.bar(x, y, max(0.5, width), 30, colour, title=title, edged=True))
            if width > 7.5 * len(what):
                marks.append(svg.text(x + 5, y + 19, what, colour="#fff"))
            x += width
        marks.append(svg.text(LEFT, y + 45, format_nbytes(of_tier["nbytes"])))
    return svg.picture(WIDTH, 12 + ROW * len(tiers), marks)
