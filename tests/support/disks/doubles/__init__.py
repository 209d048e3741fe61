"""Doubles of disks and networks, for tests and benchmarks. They are in no wheel: only a checkout
that is built in place has them.

Words used here:

**double**: a backend below the I/O engine that stands in for a disk (csrc/tests/doubles): one with
seeded faults, one as fast as a model says, one that moves nothing. **layer**: what an engine takes
its doubles from.

:func:`install` has every engine of this process read two environment variables as it is made:

``INFINITY_FAULTS="seed=1,short_transfer=0.5"``: faults below the engine that moves the training
state. ``INFINITY_MODEL_DISKS=model.json``: folders that stand for disks, with their bytes per
second: ``{"/scratch/a": 1e9}``. Every engine moves their files no faster, in all processes
together.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from infinity import native
from infinity.errors import UsageError

try:
    from ._native import Doubles, FaultPlan
except ImportError as error:
    raise ImportError(
        "the doubles are not built: run `python setup.py build_ext --inplace` in the repository."
        f" ({error})"
    ) from error

__all__ = ["Doubles", "FaultPlan", "fault_plan", "install", "layer", "modelled_disks"]


def fault_plan(seed: int = 0, **probabilities: float) -> FaultPlan:
    """Makes a plan of faults from its fields."""
    plan = FaultPlan()
    plan.seed = seed
    for name, value in probabilities.items():
        setattr(plan, name, value)
    return plan


def layer(faults: FaultPlan | None = None, *, instant: bool = False) -> Doubles:
    """Makes the layer of an engine with ``faults`` on the modelled disks, if there are any.
    ``instant``: nothing is moved."""
    models = modelled_disks()
    clocks = f"{os.environ['INFINITY_MODEL_DISKS']}.clocks" if models else ""
    return Doubles(faults=faults, models=list(models.items()), clocks=clocks, instant=instant)


def modelled_disks() -> dict[str, float]:
    """Reads the bytes per second of each folder that stands for a disk. Raises UsageError."""
    path = os.environ.get("INFINITY_MODEL_DISKS")
    if not path:
        return {}
    try:
        found = {
            os.path.abspath(folder): float(rate)
            for folder, rate in json.loads(Path(path).read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"INFINITY_MODEL_DISKS={path} is not a JSON file of folders and bytes per second:"
            f" {error}"
        ) from error
    if not all(0 < rate < 1e15 for rate in found.values()):
        raise UsageError(
            f"INFINITY_MODEL_DISKS={path}: rates {list(found.values())} are not all bytes per"
            " second above 0"
        )
    return found


def faults_of_environment() -> FaultPlan | None:
    """Reads ``INFINITY_FAULTS``. Raises UsageError."""
    text = os.environ.get("INFINITY_FAULTS")
    if not text:
        return None
    plan = FaultPlan()
    for part in text.split(","):
        name, _, value = part.partition("=")
        if not hasattr(plan, name):
            raise UsageError(f"INFINITY_FAULTS: no fault {name!r}")
        kind = type(getattr(plan, name))
        try:
            setattr(plan, name, kind(value))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"INFINITY_FAULTS: {part!r} is not {name}=<{kind.__name__}>"
            ) from error
    return plan


class DoubledDisks(native.Disks):
    """The disks that the environment's variables describe."""

    def layer(self) -> Doubles | None:
        return layer() if modelled_disks() else None

    def state_layer(self) -> Doubles | None:
        faults = faults_of_environment()
        return self.layer() if faults is None else layer(faults)

    def modelled(self, folder: str) -> str | None:
        disks = modelled_disks()
        return next(
            (disk for disk in disks if os.path.commonpath([disk, os.path.abspath(folder)]) == disk),
            None,
        )


def install() -> None:
    """Has all later engines of this process, and of its forks, use the doubles that the environment
    describes."""
    native.disks = DoubledDisks()
