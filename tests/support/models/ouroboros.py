"""Ouroboros (Yang et al., 2019), written down from its update rule, to compare with.

module   one of K parts of a model, by the names of its parameters; 0 is the first

In iteration t all modules compute a gradient with the weights that they have. Module k is updated
with the gradient of iteration t - (K - 1 - k): errors reach the first module K - 1 iterations late.
When the samples are used up, K - 1 more iterations apply what is under way. K = 1 is plain SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Gradients = dict[str, Any]


def ouroboros(
    modules: Sequence[Sequence[str]],
    gradients: Callable[[int], Gradients],
    update: Callable[[Gradients], None],
    samples: Sequence[int],
    *,
    ties: dict[str, str] | None = None,
) -> None:
    """Trains on ``samples``.

    ``gradients(sample)``: of all parameters, with the weights as they are. ``update(found)``
    applies one for each name in it. ``ties``: names in the last module, each with the name in the
    first one of the same weights. They have one update: the sum of both gradients.
    """
    ties, last = ties or {}, len(modules) - 1
    kept: list[Gradients] = []
    for iteration in range(len(samples) + last):
        if iteration < len(samples):
            kept.append(gradients(samples[iteration]))
        found: Gradients = {}
        for module, names in enumerate(modules):
            late = iteration - (last - module)
            if 0 <= late < len(samples):
                found |= {name: kept[late][name] for name in names}
        for name, first in ties.items():
            if name in found:
                ahead = found.pop(name)
                found[first] = found[first] + ahead if first in found else ahead
        update(found)
