"""Expected: compares an optimizer with the one that a configuration names (a DeepSpeed JSON has
one)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...core.seams import Extension
from ...errors import ConfigError


class ExpectedOptimizer(Extension):
    """The optimizer that a configuration names."""

    @classmethod
    def check_optimizers(cls, optimizers: Sequence[torch.optim.Optimizer], config: Any) -> None:
        expected = config.expects_optimizer
        for optimizer in optimizers:
            check_expected(optimizer, expected if expected is None else dict(expected).items())


def check_expected(
    optimizer: torch.optim.Optimizer, expected: Iterable[tuple[str, Any]] | None
) -> None:
    """Raises ConfigError if the class or the hyperparameters of ``optimizer`` differ from
    ``Config.expects_optimizer``."""
    if expected is None:
        return
    wanted = dict(expected)
    kind = wanted.pop("type")
    names = [base.__name__ for base in type(optimizer).__mro__]
    own = next((name for name in ("AdamW", "Adam", "SGD", "Lion") if name in names), names[0])
    if own == "Adam" and any(
        group.get("decoupled_weight_decay") for group in optimizer.param_groups
    ):
        own = "AdamW"
    is_decayed = wanted.get("weight_decay") != 0 or any(
        group.get("weight_decay") for group in optimizer.param_groups
    )
    is_same = own == kind or ({own, kind} <= {"Adam", "AdamW"} and not is_decayed)
    # A group may differ from what the optimizer is made with, as it may with DeepSpeed's.
    settings = [optimizer.defaults, *optimizer.param_groups]
    values_of = {name: [_plain(each[name]) for each in settings if name in each] for name in wanted}
    # Trainers give the weight decay to the groups alone: 0 where biases and norms have none.
    if "weight_decay" in values_of and any(decays := values_of["weight_decay"][1:]):
        values_of["weight_decay"] = [value for value in decays if value]
    if not is_same or any(value not in values_of[name] for name, value in wanted.items()):
        said = ", ".join(f"{name}={value}" for name, value in wanted.items())
        has = ", ".join(f"{name}={(values or [None])[-1]}" for name, values in values_of.items())
        raise ConfigError(
            f"the optimizer is {own}({has}), and the configuration expects {kind}({said}), as its"
            " DeepSpeed JSON says. Give that one, or leave it to the loop:"
            " dataclasses.replace(config, expects_optimizer=None)."
        )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value
