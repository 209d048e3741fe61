"""adam: as in `infinity bench`, beside the rivals' whole job; and the error of 8-bit moments."""

from __future__ import annotations

import torch

from infinity.tools.bench import adam
from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.settings import Settings

from . import rivals


def measure(settings: Settings) -> Measured:
    """Measures the rows of :func:`infinity.tools.bench.adam.measure`, and adam.int8.error.

    Notes name absent rivals.
    """
    others = rivals.OPTIMIZER_RIVALS if settings.rivals else ()
    found = adam.measure(settings, rivals=others, limit_threads=rivals.openmp_threads)
    found.rows.append(_int8_error())
    return found


def _int8_error() -> Row:
    """How far a step with 8-bit moments is from a step with fp32 moments over the same gradients.

    The figure is the root mean square of the difference over that of the step, for steps 101 to
    300. Gradients are normal, with scales over four decades.
    """
    count, steps, settled = 64 * 1024, 300, 100
    runs = {
        name: adam.Ours(next(each for each in adam.VARIANTS if each.name == name), count, 1)
        for name in ("int8", "split")
    }
    generator = torch.Generator().manual_seed(0)
    scales = 10 ** (4 * torch.rand(count, generator=generator) - 6)
    errors = []
    for step in range(steps):
        grad = (scales * torch.randn(count, generator=generator)).to(torch.bfloat16)
        moved = {}
        for name, run in runs.items():
            run.tensor("grad", torch.bfloat16).copy_(grad)
            before = run.master()
            run.step()
            moved[name] = run.master() - before
        if step >= settled:
            errors.append(((moved["int8"] - moved["split"]).norm() / moved["split"].norm()).item())
    return row("adam.int8.error", "of the step", errors)
