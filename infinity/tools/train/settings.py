"""The settings of `infinity train`: the engine's options by name, before they become a `Config`.

settings  from --config, overridden by the command line; named as `Config`'s fields
share     a host budget in percent, as a fraction; only with the model does it become bytes
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import infinity

from ...errors import ConfigError
from ...untrusted import read_table
from ..cli.presets import TABLE, words_of_table

if TYPE_CHECKING:
    from torch import nn

AUTO = "auto"  # copied from the config room, whose import would load torch
PLACES = (
    "params",
    "optimizer",
    "activations",
    "nvme_paths",
    "device_memory",
    "host_memory",
    "nvme_capacity",
)
OPTIONS = (  # named as the fields of Config that they set
    *(name for name in PLACES if name != "nvme_paths"),
    *("shard", "micro_batch", "compile", "fused_loss", "recompute", "device", "audit"),
    *("master", "moments"),
)
MOMENTS_NBYTES = {"fp32": 8, "bf16": 4, "int8": 2}  # both moments of one parameter
MASTER_NBYTES = {"split": 2, "fp32": 4, "none": 0}  # in addition to a 16-bit weight


def engine_settings(
    args: argparse.Namespace, *, plans: bool = False, has_loop: bool = True
) -> dict[str, Any]:
    """Collects the engine's options by `Config` field name; the command line overrides --config. If
    neither sets a home, folder or budget, or one sets a budget of disks alone, nvme_paths is
    "auto". ``plans``: folders for swap files may be another machine's, and are neither made nor
    looked for. ``has_loop``: the command takes a DeepSpeed JSON's scheduler, too. Raises
    ConfigError."""
    settings = _read_config_file(args.config, plans, has_loop) if args.config else {}
    if getattr(args, "deepspeed", None) is not None:
        settings |= translated(args.deepspeed, "--deepspeed", plans=plans, has_loop=has_loop)
    settings |= given_settings(args)
    if "nvme_capacity" in settings or not any(name in settings for name in PLACES):
        settings.setdefault("nvme_paths", AUTO)
    if args.max_grad_norm is not None:
        settings.pop("max_grad_norm", None)  # the loop clips to the command line's value
    _check_nvme_paths(settings, plans)
    _memory_share(settings)  # raises for an invalid share before heavy imports
    return settings


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the engine's options that were given, of those that the command has."""
    options = {name: getattr(args, name, None) for name in (*OPTIONS, "trace")}
    if (paths := args.nvme_path) is not None:
        options["nvme_paths"] = AUTO if paths == [Path(AUTO)] else [*map(str, paths)]
    return {
        name: str(value) if name == "trace" else value
        for name, value in options.items()
        if value is not None and value is not False
    }


def _read_config_file(path: Path, plans: bool, has_loop: bool) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(
            f"No such configuration: {path}. Give --config a TOML, JSON or YAML file."
        )
    from ...ext.migrate.other_tools import whose

    settings = read_table(path)
    if TABLE in settings:
        words_of_table(path, [])  # `infinity plan` has none of these options, and typos are told
    settings.pop(TABLE, None)  # of `infinity train`: they are on its command line already
    names = [field.name for field in dataclasses.fields(infinity.Config)]
    way_out = f" Options of `infinity train` go into the table {TABLE}."
    tool = whose(settings, [*names, TABLE], f"{path}: ", way_out)
    return settings if tool is None else translated(path, plans=plans, has_loop=has_loop)


def translated(
    path: Path, option: str = "--config", *, plans: bool, has_loop: bool = True
) -> dict[str, Any]:
    """Returns the engine's settings of a DeepSpeed JSON or Accelerate's YAML; logs once what it
    changes, and makes its folder for NVMe unless it only ``plans``. ``--dtype`` and the loop here
    replace its dtype and its optimizer. ``has_loop``: and its scheduler; otherwise a script has the
    loop. Raises ConfigError for a file that is not of the ``option``."""
    changed = path.stat().st_mtime_ns if path.exists() else 0
    return dict(_translated(path, option, plans, has_loop, changed))


@functools.cache
def _translated(
    path: Path, option: str, plans: bool, has_loop: bool, changed: int
) -> dict[str, Any]:
    from ...ext.migrate import reader
    from ...ext.migrate.accelerate import is_accelerate
    from ...ext.migrate.deepspeed import is_deepspeed

    read, table = reader.from_deepspeed, read_table(path)
    if is_accelerate(table) and not is_deepspeed(table):
        if option == "--deepspeed":
            raise ConfigError(f"--deepspeed {path} is Accelerate's file: give it as --config")
        read = reader.from_accelerate
    elif table and not is_deepspeed(table):
        raise ConfigError(
            f"{path} is not a DeepSpeed configuration: it has the keys"
            f" {', '.join(list(table)[:5])}. Give one that has zero_optimization."
        )
    config = read(
        infinity.Config,
        path,
        strict=False,
        loop=None,
        makes_folders=not plans,
        tells_loop=not has_loop,
    )
    default = infinity.Config()
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    }
    for name in ("param_dtype", "expects_optimizer"):
        settings.pop(name, None)
    if "nvme" not in (config.params, config.optimizer):
        settings.pop("nvme_paths", None)
    return settings


def _check_nvme_paths(settings: dict[str, Any], plans: bool) -> None:
    homes = [
        name for name in ("params", "optimizer", "activations") if settings.get(name) == "nvme"
    ]
    paths = settings.get("nvme_paths") or []
    if paths == AUTO:
        return
    paths = [paths] if isinstance(paths, str) else paths
    if homes and not paths:
        settings["nvme_paths"] = AUTO  # a scratch folder, which the log names
    if not plans:
        check_folders(paths)


def check_folders(paths: Iterable[str]) -> None:
    """Raises ConfigError unless all ``paths`` are folders."""
    for path in paths:
        if Path(path).exists() and not Path(path).is_dir():
            raise ConfigError(f"--nvme-path {path} is a file: give a folder for swap files.")
        if not Path(path).is_dir():
            raise ConfigError(
                f"No such folder for swap files: {path!r}. Create it first: mkdir -p {quote(path)}"
            )


def _memory_share(settings: dict[str, Any]) -> float | None:
    """Returns a host budget in percent as a fraction; None for a budget in bytes, which the engine
    parses."""
    budget = settings.get("host_memory")
    if not isinstance(budget, str) or not budget.strip().endswith("%"):
        return None
    try:
        percent = float(budget.strip()[:-1])
    except ValueError:
        percent = math.nan
    if not 0 < percent < math.inf:
        raise ConfigError(
            f'--host-memory {budget} is not a share. Give more than 0, as "25%", or bytes, as'
            ' "256MiB".'
        )
    return percent / 100


def engine_config(settings: dict[str, Any], model: nn.Module | None = None) -> infinity.Config:
    """Makes the engine's `Config`; this machine's GPU computes, if it has one and no other is
    given. A host budget in percent needs the model; without one it is left as None."""
    settings = {"device": _device_here(), **settings}
    share = _memory_share(settings)
    if share is None:
        return infinity.Config.make(settings)
    rest = infinity.Config.make({**settings, "host_memory": None})
    if model is None:
        return rest
    return dataclasses.replace(rest, host_memory=int(share * training_state_nbytes(model, rest)))


def check_device(device: str | None) -> None:
    """Raises ConfigError for a device that is not here, before anything is read."""
    import torch

    if device is None or (kind := device.partition(":")[0]) == "cpu":
        return
    if (index := device.partition(":")[2]) and not index.isdecimal():
        return  # no device at all, which Config tells
    here = _device_here() == kind or (kind == "cuda" and torch.cuda.is_available())
    if here and not (index and int(index) >= torch.accelerator.device_count()):
        return
    if kind in ("cuda", "mps", "xpu", "hpu", "npu"):
        what = "GPU" if kind == "cuda" and not here else f"device {device}"
        raise ConfigError(
            f"--device {device}: torch {torch.__version__} finds no {what} here (`infinity env`"
            " tells more). Leave it out, or give --device cpu"
        )


def _device_here() -> str | None:
    import torch

    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator().type


def training_state_nbytes(model: nn.Module, config: infinity.Config) -> int:
    """Counts the bytes of weights, masters and moments, without scales and gradients. Frozen
    parameters have only their weights."""
    from ...core.units.inner import nbytes_of

    total = 0
    for parameter in model.parameters():
        total += nbytes_of(parameter)
        if parameter.requires_grad:
            per_element = MOMENTS_NBYTES[config.moments]
            if parameter.element_size() == 2:
                per_element += MASTER_NBYTES[config.master]
            total += per_element * parameter.numel()
    return total
