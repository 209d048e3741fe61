"""The bytes that pass between ranks, however: what a plan predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def passed(collectives: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by kind, of a traffic's collectives or those of ``stats().as_dict()``. All-gathers have
    what is read in shared memory, too; reduce-scatters the sums over replicas."""
    nbytes = {
        name: counted["nbytes"] if isinstance(counted, Mapping) else counted.nbytes
        for name, counted in collectives.items()
    }
    nbytes["all-gather"] += nbytes.pop("shared memory")
    nbytes["reduce-scatter"] += nbytes.pop("all-gather over replicas")
    return nbytes
