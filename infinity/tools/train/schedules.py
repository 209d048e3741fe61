"""Schedules: the factor of the learning rate at each step of `infinity train`, of its own schedule
and of DeepSpeed's.

scheduler  a type of DeepSpeed's, and its numbers, as the section of that name of its JSON
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import ConfigError

FINAL_LR_SHARE = 0.1  # of the peak learning rate, at the end of the cosine
AUTO = "auto"
DEFAULT_WARMUP = 1000  # DeepSpeed's
# Numbers of each type -> what DeepSpeed takes if there is none
OF_RATES = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": DEFAULT_WARMUP}
OF_RATES |= {"warmup_type": "log"}
OF_COSINE = {"total_num_steps": None, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001}
OF_COSINE |= {"warmup_num_steps": DEFAULT_WARMUP, "warmup_type": "log"}
TYPES: dict[str, dict[str, Any]] = {
    "WarmupLR": OF_RATES,
    "WarmupDecayLR": OF_RATES | {"total_num_steps": None},
    "WarmupCosineLR": OF_COSINE,
}
COUNTS = ("warmup_num_steps", "total_num_steps")
WARMUPS = ("log", "linear")


def a_scheduler(text: str) -> str:
    """Returns a scheduler as JSON with its names in order. Raises ConfigError for one that is
    none."""
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if not isinstance(table, dict) or table.get("type") not in TYPES:
        raise ConfigError(
            f"--scheduler {text}: give the section of a DeepSpeed JSON, with the type"
            f" {', '.join(TYPES)}"
        )
    kind, params = table["type"], table.get("params") or {}
    for name, value in params.items():
        if name not in TYPES[kind]:
            known = ", ".join(TYPES[kind])
            raise ConfigError(f"--scheduler: {kind} has no {name}; it has {known}")
        is_right = value in (None, AUTO) or (
            value in WARMUPS
            if name == "warmup_type"
            else type(value) in ((int,) if name in COUNTS else (int, float))
            and math.isfinite(value)
            and value >= (name in COUNTS)
        )
        if not is_right:
            wanted = "log or linear" if name == "warmup_type" else "a number from 0 on"
            wanted = "a whole number from 1 on" if name in COUNTS else wanted
            raise ConfigError(f"--scheduler: {kind}'s {name} is {value!r}: give {wanted}")
    return json.dumps({"type": kind, "params": params}, sort_keys=True)


def shares(
    scheduler: str | None, *, lr: float, steps: int, warmup_steps: int
) -> Callable[[int], float]:
    """Returns the factor of the peak rate ``lr`` at a step: of a ``scheduler``, whose "auto" is the
    job's value; None: of the loop's own."""
    if scheduler is None:
        return partial(lr_share, steps=steps, warmup_steps=warmup_steps)
    table = json.loads(scheduler)
    numbers = dict(TYPES[table["type"]])
    jobs = {"warmup_num_steps": warmup_steps, "total_num_steps": steps}
    for name, value in table["params"].items():
        if value == AUTO:
            value = jobs.get(name, numbers[name])
        numbers[name] = numbers[name] if value is None else value
    if numbers.get("total_num_steps", 0) is None:
        numbers["total_num_steps"] = steps
    numbers.pop("warmup_max_lr", None)  # --lr is it, or overrides it
    return partial(deepspeed_share, kind=table["type"], lr=lr, **numbers)


def lr_share(step: int, *, steps: int, warmup_steps: int) -> float:
    """Returns the factor of the learning rate at ``step``: linear warm-up, not 0 at step 0, then
    half a cosine."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    passed = (step - warmup_steps) / max(1, steps - warmup_steps)
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, passed)))


def deepspeed_share(
    step: int,
    *,
    kind: str,
    lr: float,
    warmup_num_steps: int,
    warmup_type: str,
    total_num_steps: int = 0,
    warmup_min_lr: float = 0.0,
    warmup_min_ratio: float = 0.0,
    cos_min_ratio: float = 0.0,
) -> float:
    """Returns the factor by which DeepSpeed's scheduler ``kind`` has the rate ``lr`` at ``step``.
    The first step has the least rate, since DeepSpeed's engine counts after it, and so has the
    second, whose count is 0 (deepspeed/runtime/lr_schedules.py)."""
    counted, warmup = step - 1, max(2, warmup_num_steps)
    if counted < 0:
        return 0.0 if kind == "WarmupCosineLR" else warmup_min_lr / lr
    passed = total_num_steps - warmup
    if counted < warmup:
        risen = (
            math.log(counted + 1) / math.log(warmup) if warmup_type == "log" else counted / warmup
        )
    elif kind == "WarmupLR":
        risen = 1.0
    elif kind == "WarmupDecayLR":
        risen = max(0.0, (total_num_steps - counted) / max(1.0, passed))
    else:
        done = min(1.0, (counted - warmup + 1) / max(1, passed))
        return cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2
    if kind == "WarmupCosineLR":
        return warmup_min_ratio + (1 - warmup_min_ratio) * risen
    return (warmup_min_lr + (lr - warmup_min_lr) * risen) / lr
