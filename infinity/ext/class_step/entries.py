"""Entries: classes that step by their own code, and what they need of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...core.machine.device import Device
from ...core.machine.tiers import Tier
from ...core.plan.unit_sizes import FlatParamSize, UnitSize
from ...core.seams import Extension, Term
from ...core.step.known import Known, by_class

STEP, SUMS = "a parameter's step", "sums of the optimizer's class"  # the names of bytes in plans


def class_entry(kind: type | str, step: str = "", **others: Any) -> Known:
    """Makes the entry of a class that steps by its own code. Its moments are found by a trial."""
    name = kind if isinstance(kind, str) else kind.__name__
    step = step or name.rpartition(".")[2] + ".step"
    return by_class(Known(None, kind, step, {}, {}, {}, **others))


# Those of torch that step by their own code. In torch, too, Muon's moment has the gradient's dtype.
BY_CLASS = (
    class_entry(torch.optim.Adafactor, needs_whole=True),
    class_entry(torch.optim.Muon, needs_whole=True, splits=True, dtypes=("fp32", "bf16")),
)


class ClassSteps(Extension):
    """The values of parameters that are stepped by their class, where they are read and where they
    are computed with. A step charges them."""

    @classmethod
    def terms(cls, config: Any, units: Sequence[UnitSize], device: Device) -> Iterator[Term]:
        """Yields the bytes of the largest step, and those that the classes keep on every rank."""
        flat_params = [flat for unit in units for flat in unit.flat_params]
        own = [flat for flat in flat_params if flat.spec.stepped and flat.spec.needs is not None]
        if not own:
            return
        nbytes = max(map(_step_nbytes, own))
        yield Term(Tier.HOST, STEP, nbytes)
        kept = (flat.spec.needs.kept_nbytes(shape) for flat in own for shape in flat.shapes)
        yield Term(Tier.HOST, SUMS, sum(kept))
        if not device.is_host:
            yield Term(Tier.DEVICE, STEP, nbytes)


def _step_nbytes(flat: FlatParamSize) -> int:
    """Counts the bytes, in fp32, of pieces of parameters that are stepped by their class: one is
    read, one stepped, with the temporaries of the class, and one written. A stepping rank also
    receives one."""
    arrays = 2 + len(flat.spec.moments)  # elements and gradient
    copies = 3 if flat.shards == 1 else 4
    largest = max((torch.Size(shape).numel() for shape in flat.shapes), default=flat.numel)
    piece = min(largest or flat.numel, flat.spec.needs.numel)
    return 4 * piece * (copies * arrays + flat.spec.needs.temporaries)
