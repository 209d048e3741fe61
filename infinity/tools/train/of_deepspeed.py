"""The loop of a DeepSpeed JSON, or of Accelerate's file with one, as options of `infinity train`.

Its homes are the engine's settings (:mod:`.settings`). Here are the numbers that a loop has: the
optimizer's, the sizes of batches, clipping that is off.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...untrusted import read_table
from ..cli.values import value_of
from .ranks import count_of
from .schedules import TYPES, a_scheduler

AUTO = "auto"
NEVER_CLIPS = "1e9"  # multiplies by 1
DEEPSPEED_BETAS, EPS = (0.9, 0.999), 1e-8


def deepspeed_of(path: Path) -> dict[str, Any]:
    """Returns the DeepSpeed JSON that a file is, or names; empty if it has none."""
    if not path.is_file():
        return {}  # which is told where the file is read
    from ...ext.migrate.accelerate import is_accelerate
    from ...ext.migrate.deepspeed import is_deepspeed

    settings = read_table(path)
    if is_deepspeed(settings):
        return settings
    table = settings.get("deepspeed_config") if is_accelerate(settings) else None
    if not isinstance(table, Mapping):
        return {}
    named = table.get("deepspeed_config_file")
    return read_table(Path(named)) if isinstance(named, str) else dict(table)


def words_of_deepspeed(path: Path, given: Sequence[str]) -> list[str]:
    """Returns the options of `infinity train` that a file's loop stands for. Those that are
    ``given`` override them. Raises ConfigError, with the options to paste, for what has none."""
    settings = deepspeed_of(path)
    words = [*_optimizer(path, settings, given), *_batch(path, settings, given)]
    if settings.get("gradient_clipping") == 0 and settings["gradient_clipping"] is not False:
        words.append(f"--max-grad-norm={NEVER_CLIPS}")
    return [*words, *_scheduler(path, settings, given)]


def tell_loop(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Tells which options are, or stand in place of, those of a DeepSpeed JSON."""
    anew = ["--optim", "adamw", "--batch-size", "1"]
    if args.scheduler is None:
        anew += ["--warmup-steps", "0"]
    for path in (args.config, args.deepspeed):
        words = [] if path is None else words_of_deepspeed(path, anew)
        options = [word.partition("=")[0] for word in words]
        values = [(name, getattr(args, name[2:].replace("-", "_"))) for name in options]
        if values:
            said = " ".join(f"{name} {value}" for name, value in values)
            say(f"{path}: its loop becomes {said}")
        table = {} if path is None else deepspeed_of(path).get("scheduler") or {}
        if table.get("type") in TYPES and not _numbers(table) and args.scheduler is None:
            say(
                f"{path}: its {table['type']} has no numbers, and the loop's own schedule runs, a"
                " cosine to a tenth of the rate. For the JSON's add"
                f" --scheduler '{json.dumps(table)}'"
            )


def _optimizer(path: Path, found: Mapping, given: Sequence[str]) -> list[str]:
    from ...ext.migrate.deepspeed_optimizer import read_optimizer

    table = found.get("optimizer")
    if not isinstance(table, Mapping) or table.get("type") is None:
        return []
    params = table.get("params") or {}
    if not isinstance(params, Mapping):
        return []  # which is told where the file is read
    wanted = read_optimizer(table["type"], params, unknown=lambda *_: None)
    betas = wanted.get("betas", AUTO if params.get("betas") == AUTO else DEEPSPEED_BETAS)
    words = [
        f"--{name.replace('_', '-')}={wanted[name]!r}"
        for name in ("lr", "weight_decay")
        if name in wanted
    ]
    optim = value_of("--optim", given)
    decays = wanted["type"] == "AdamW" or not wanted.get("weight_decay")
    is_adam = wanted["type"] in ("AdamW", "Adam")
    if optim is None and not (is_adam and decays):
        kind = "Adam with weight decay in its gradients" if not decays else wanted["type"]
        raise ConfigError(
            f"{path}: its optimizer is {kind}, and `infinity train` has AdamW, Adafactor and Muon."
            f" To take one in its place, add: --optim adamw {' '.join(words)}".rstrip()
        )
    if optim is None and wanted.get("eps", EPS) != EPS:
        raise ConfigError(
            f"{path}: its optimizer has eps={wanted['eps']!r}, and `infinity train` has {EPS!r}."
            f" Leave eps out, or take that one: --optim adamw {' '.join(words)}".rstrip()
        )
    if betas != AUTO and is_adam and optim != "adafactor":
        words.append(f"--betas={','.join(map(repr, betas))}")
    return words


def _batch(path: Path, found: Mapping, given: Sequence[str]) -> list[str]:
    """Returns the sizes of a batch as DeepSpeed completes them. Raises ConfigError if they do not
    agree."""
    sizes = []
    for name in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ):
        value = found.get(name, AUTO)
        if value not in (None, AUTO) and (type(value) is not int or value < 1):
            raise ConfigError(f"{path}: {name}={value!r} is not a number from 1 on")
        sizes.append(None if value in (None, AUTO) else value)
    whole, micro, accumulate = sizes
    shared = re.findall(r"\b(?:tp|pp|cp)=(\d+)", value_of("--mesh", given) or "")
    ranks = max(1, count_of() // prod(map(int, shared)))
    if whole is not None:
        if micro is None:
            micro = whole // (ranks * (accumulate or 1))
        if accumulate is None:
            accumulate = whole // (ranks * max(micro, 1))
        if whole != micro * accumulate * ranks and not {"--batch-size", "--accumulate"} & {
            word.partition("=")[0] for word in given
        }:
            raise ConfigError(
                f"{path}: train_batch_size={whole} is not {micro} samples x {accumulate}"
                f" micro-batches x {ranks} data ranks. Give both: --batch-size, --accumulate"
            )
    sized = {"--batch-size": micro, "--accumulate": accumulate}
    return [f"{option}={value}" for option, value in sized.items() if value]


def _numbers(scheduler: Any) -> dict[str, Any]:
    params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    return {name: value for name, value in (params or {}).items() if value not in (None, AUTO)}


def _scheduler(path: Path, found: Mapping, given: Sequence[str]) -> list[str]:
    """Returns the options of a scheduler with numbers, whose peak is the rate; none beside
    --warmup-steps, which asks for the loop's. Raises ConfigError for one that is not known."""
    table = found.get("scheduler")
    params = table.get("params") if isinstance(table, Mapping) else None
    numbers = _numbers(table)
    if not numbers or {"--warmup-steps", "--scheduler"} & {w.partition("=")[0] for w in given}:
        return []
    try:
        scheduler = a_scheduler(json.dumps({"type": table.get("type"), "params": params}))
    except ConfigError as error:
        why = str(error).removeprefix("--scheduler").lstrip(": ")
        raise ConfigError(
            f"{path}: its scheduler cannot be taken: {why}. For the loop's own, which warms up"
            " linearly and follows a cosine to a tenth of the rate, add: --warmup-steps"
            f" {numbers.get('warmup_num_steps', 10)}"
        ) from None
    peak = numbers.get("warmup_max_lr")
    return [*([] if peak is None else [f"--lr={peak!r}"]), f"--scheduler={scheduler}"]
