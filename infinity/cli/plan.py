"""`infinity plan`: plans a model's homes on a machine and predicts its step time. Runs no training.

A config is enough: the model is built on meta. The budgets may be another machine's.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..machine.outputs import PICTURE, Output, check_outputs
from ..machine.tiers import Tier
from .plan_view import draw, text
from .shapes import SHAPES, find_config
from .training.optimizers import OPTIM, OPTIM_HELP, make_optimizers, muon_cost
from .training.options import FILE, FLAG, FOLDER, HOME, NUMBER, PATH
from .training.settings import AUTO, engine_config, engine_settings, translated
from .values import at_least_two, svg_path

USABLE = 0.9  # share of a machine's memory and disks; the system and libraries use the rest
DEFAULT_SAMPLES = 4
ANY_DISK = [Path(".")]  # stands for another machine's disk, of which only the size matters
STATE = {"weights": "weight", "optimizer": "exp_avg", "gradients": "grad"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "plan", help="where a model's state would live, and how long a step would take"
    )
    add = parser.add_argument
    add(
        "--model",
        **PATH,
        help=f"folder with config.json, a config.json, a name on the Hugging Face hub, or one of"
        f" {', '.join(SHAPES)} (default: the small model of `infinity train` without --model)",
    )
    add("--trust-remote-code", **FLAG, help="run Python code that lies in the folder of --model")
    dtypes = ("bf16", "fp32")
    add("--dtype", choices=dtypes, default="bf16", help="of the model's weights (default bf16)")
    add("--params", **HOME, help="home of the parameters (default auto)")
    add("--optimizer", **HOME, help="home of master weights and moments (default auto)")
    add("--optim", **OPTIM, help=OPTIM_HELP)
    add("--activations", **HOME, help="home of what the forward saves (default auto)")
    add("--nvme-path", action="append", **FOLDER, help="on the disk that swap files would use")
    for tier in ("device-memory", "host-memory", "nvme-capacity"):
        add(f"--{tier}", metavar="BYTES", help='budget, as "80GiB" (default: what is free here)')
    masters, moments = ("split", "fp32", "none"), ("fp32", "bf16", "int8")
    add("--master", choices=masters, help="master weights of bf16 parameters (default split)")
    add("--moments", choices=moments, help="the optimizer's moments (default fp32)")
    add(
        "--config", **FILE, help="engine configuration, TOML, JSON or YAML; options here go over it"
    )
    add("--deepspeed", **FILE, help="plan with a DeepSpeed JSON, and say what changes in bytes")
    _add_batch(add)
    _add_machine(add)
    add("--timetable", **FLAG, help="print when each unit is moved and computed in a step")
    add("--svg", type=svg_path, metavar="FILE", help="draw the memory map")
    add("--overwrite", **FLAG, help="replace a file of --svg that is no picture of ours")
    add("--json", **FLAG, help="the plan as one JSON object on stdout")


def _add_batch(add: Callable[..., Any]) -> None:
    add("--batch-size", **NUMBER, help="samples of a step (default 4)")
    add(
        "--batch-tokens",
        metavar="N",
        help="tokens of a step and rank, as 32768 or 32K, instead of --batch-size",
    )
    length = {"type": at_least_two, "metavar": "N"}
    add("--sequence-length", **length, help="tokens of a sample (default 256)")
    add("--gradient-checkpointing", **FLAG, help="the backward computes activations again")


def _add_machine(add: Callable[..., Any]) -> None:
    add(
        "--machine",
        metavar="FILE",
        help="plan for this kind of machine: a TOML file, or one of a100, dgx-h100, h100, h200,"
        " laptop, rtx3090, rtx4090",
    )
    add(
        "--nodes",
        **NUMBER,
        default=1,
        help="how many of them, with one rank for each device (default 1)",
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
    found = make(args)
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(text(found, timetable=args.timetable)))
    if args.svg is not None:
        args.svg.write_text(draw(found["tiers"]) + "\n")
    return 0


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the plan as plain data; without ``--machine``, measures this machine's rates. Raises
    CapacityError, with the numbers, if nothing fits."""
    import torch
    from transformers.utils import logging

    from ..planning.cluster import Machine
    from .training.model import choose_sequence_length

    logging.set_verbosity_error()
    if args.machine is None and (args.nodes > 1 or args.timetable):
        option = "--nodes" if args.nodes > 1 else "--timetable"
        raise ConfigError(f"{option} is of a machine that is named: add --machine")
    machine = Machine.read(args.machine) if args.machine is not None else None
    settings = _settings(args, machine)
    model_config = find_config(args.model, trust=args.trust_remote_code)
    length = choose_sequence_length(args.sequence_length, model_config)
    if getattr(model_config.get_text_config(), "vocab_size", 1) == 0:
        raise ConfigError(f"{args.model}: a model with a vocabulary of 0 has nothing to predict")
    samples = DEFAULT_SAMPLES if args.batch_size is None else args.batch_size
    if args.batch_tokens is not None and args.batch_size is not None:
        raise ConfigError("--batch-size and --batch-tokens both size a step: give one of them")
    if args.batch_tokens is not None:
        samples = _samples_of(args.batch_tokens, length)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    model = _build(args, model_config, dtype)
    config = engine_config(settings, model)
    optimizers = make_optimizers(model, args.optim, lr=1e-4, weight_decay=0.1)
    checkpointing = args.gradient_checkpointing
    batch = {"batch": samples, "length": length, "checkpointing": checkpointing}
    job = _Job(model, model_config, optimizers, config, batch)
    if machine is not None:
        return _plan_cluster(job, machine, args.nodes)
    found = _plan_here(job, dtype, unknown=_unknown_machine(args, config))
    if args.deepspeed is not None:
        found["deepspeed"] = _deepspeed(model, config)
    return found


def _samples_of(given: str, length: int) -> int:
    """Returns the samples of a step of so many tokens; "32K" is 32 x 1,024. Raises ConfigError
    unless they are whole samples."""
    found = re.fullmatch(r"(\d+)([KM]?)", given.strip(), re.IGNORECASE)
    tokens = int(found[1]) * 1024 ** " KM".index(found[2].upper() or " ") if found else 0
    if tokens < 1 or tokens % length:
        raise ConfigError(
            f"--batch-tokens {given}: give a multiple of --sequence-length {length}, as"
            f" {max(1, tokens // length) * length}"
        )
    return tokens // length


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
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"transformers cannot build a causal LM from {args.model}: {line[:300]}"
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


@dataclass(frozen=True)
class _Job:
    """The training to plan."""

    model: Any  # on meta
    model_config: Any
    optimizers: list[Any]
    config: Any
    batch: dict[str, Any]  # of a step, as compute_time takes it

    @property
    def tokens(self) -> int:
        """Tokens of a step on one rank."""
        return self.batch["batch"] * self.batch["length"]

    def describe(self, plan: Any, units: list[Any], ranks: int = 1) -> dict[str, Any]:
        """Describes where the state is at home, and what Muon costs one of ``ranks``."""
        from .training.compute import step_flops

        if muon := muon_cost(self.optimizers, ranks):
            passes = step_flops(self.model, self.model_config, **self.batch)
            muon["share_of_passes"] = muon["flops"] / passes
        return {
            **({"muon": muon} if muon else {}),
            "parameters": sum(param.numel() for param in self.model.parameters()),
            "units": list(_units(plan, units)),
            "tiers": {
                str(tier): {"nbytes": plan.planned_nbytes(tier), "parts": plan.terms[tier]}
                for tier in Tier
            },
        }


def _unknown_machine(args: argparse.Namespace, config: Any) -> str:
    """Returns which of the sizes that were given are not of this machine, whose rates are then not
    theirs; "" if all are."""
    if args.device_memory is not None and config.device in (None, "cpu"):
        return f"--device-memory {args.device_memory} is a GPU's, and none is here"
    if args.nvme_capacity is not None and args.nvme_path is ANY_DISK:
        return f"--nvme-capacity {args.nvme_capacity} is of a disk that is not here"
    return ""


def _plan_here(job: _Job, dtype: Any, *, unknown: str) -> dict[str, Any]:
    """Plans the training on this machine, and measures its rates. ``unknown``: what of the plan is
    another machine's, for which there is no time."""
    from ..api.lay_out import lay_out
    from ..machine.rates import Rates
    from ..planning.cluster import OnPaper
    from ..planning.predict import predict
    from ..planning.step_traffic import traffic
    from .training.compute import compute_time

    device = OnPaper() if unknown.startswith("--device-memory") else None
    plan, units = lay_out(job.model, job.optimizers, job.config, device=device)
    if unknown:
        return (
            dict.fromkeys(("compute", "step_seconds", "tokens_per_second", "bottleneck"))
            | job.describe(plan, units)
            | {"edges": traffic(plan, units), "tokens_per_step": job.tokens}
            | {"seconds": {}, "rates": {}, "unknown": unknown}
        )
    compute = compute_time(
        job.model, job.model_config, dtype=dtype, device=job.config.device, **job.batch
    )
    on_disk = plan.planned_nbytes(Tier.NVME) > 0
    rates = Rates.measure(job.config.nvme_paths if on_disk else (), job.config.device)
    prediction = predict(plan, units, rates, compute_seconds=compute.seconds)
    return job.describe(plan, units) | {
        "edges": prediction.edges,
        "seconds": prediction.seconds,
        "compute": compute.how,
        "rates": asdict(rates),
        "step_seconds": prediction.step_seconds,
        "tokens_per_step": job.tokens,
        "tokens_per_second": job.tokens / prediction.step_seconds,
        "bottleneck": prediction.bottleneck,
    }


def _plan_cluster(job: _Job, machine: Any, nodes: int) -> dict[str, Any]:
    """Plans one rank of ``nodes`` machines. Measures nothing on this machine."""
    from ..api.lay_out import lay_out
    from ..distributed.parallel_dims import ParallelDims
    from ..planning.cluster import OnPaper, predict_cluster, timeline_of
    from .training.compute import step_flops

    ranks = ParallelDims(size=nodes * machine.devices, local_size=machine.devices)
    plan, units = lay_out(job.model, job.optimizers, job.config, ranks, OnPaper())
    lookup, tied = _embedding_of(job.model)
    flops = step_flops(job.model, job.model_config, **job.batch)
    found = predict_cluster(plan, units, machine, nodes, flops=flops, tied=tied)
    tokens, step_seconds = job.tokens * found.ranks, found.step_seconds
    described, bound, seconds = (
        job.describe(plan, units, found.ranks),
        found.bottleneck,
        found.seconds,
    )
    if found.ranks == 1:
        timeline = timeline_of(
            plan,
            units,
            machine,
            flops=flops,
            recomputes=job.batch["checkpointing"],
            clips=job.config.max_grad_norm is not None,
            lookup=lookup,
            tied=tied,
        )
        step_seconds, bound, seconds = timeline.seconds, timeline.bound, timeline.busy
        described["timeline"] = {name: spans for name, spans in timeline.spans()}
    rates = {key: value for key, value in asdict(machine).items() if type(value) in (int, float)}
    return described | {
        "machine": machine.name,
        "nodes": nodes,
        "ranks": found.ranks,
        "edges": found.edges,
        "seconds": seconds,
        "compute": "assumed",
        "rates": rates,
        "step_seconds": step_seconds,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / step_seconds,
        "bottleneck": bound,
        "assumptions": list(found.assumptions),
        "sources": list(machine.sources),
    }


def _embedding_of(model: Any) -> tuple[str, str]:
    """Returns the name of the module that looks tokens up, and the same if its weight is also the
    head's: ("name", "") or ("", "name")."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is inputs), "")
    is_tied = outputs is not None and getattr(outputs, "weight", None) is inputs.weight
    return ("", name) if is_tied else (name, "")


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
        args.nvme_path = ANY_DISK
    settings = engine_settings(args)
    if args.deepspeed is not None:
        given = {name: value for name, value in settings.items() if value != AUTO}
        found = translated(args.deepspeed, "--deepspeed")
        if folders := found.get("nvme_paths"):  # of that machine: only their size counts here
            found["nvme_paths"] = [path if Path(path).is_dir() else "." for path in folders][:1]
        settings = {**found, **given}
    if settings.get("nvme_paths") == AUTO:
        found = scratch.choose(scratch.candidates(), 0)
        settings["nvme_paths"] = [found.folder] if found is not None else []
    if args.nvme_capacity is not None:
        settings["nvme_capacity"] = args.nvme_capacity
        settings.setdefault("nvme_paths", ["."])
    return settings


def _units(plan, units) -> Iterator[dict[str, Any]]:
    """Yields an entry per run of units with the same homes and sizes."""

    def entry(index: int) -> tuple:
        unit, tiers, kept = units[index], plan.tiers_of(index), plan.kept_of(index)
        homes = {}
        for what, array in STATE.items():
            held = any(flat.nbytes(array) for flat in unit.flat_params)
            homes[what] = (
                str(tiers[array]) + (" (kept on host)" if array in kept else "") if held else "-"
            )
        return (
            sum(flat.numel for flat in unit.flat_params),
            tuple(homes.items()),
            unit.tile_nbytes,
        )

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
