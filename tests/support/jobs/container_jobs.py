"""Jobs of ranks whose models have parts that are never called (see `ranks`)."""

from __future__ import annotations

from typing import Any

import containers
import torch
from models import differing, seeded

import infinity
from infinity.errors import CapacityError


def _made(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = seeded(1, getattr(containers, kind))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def kinds(names: list[str]) -> dict[str, Any]:
    """Trains each kind with the least device memory that the wrap accepts. Every rank has the
    same batches, so that the average is what one process computes."""
    found = {}
    for name in names:
        plain = _made(name)
        right = containers.trained(*plain)
        config = {"params": "host", "optimizer": "host", "shard": "parameters"}
        try:
            infinity.wrap_model(*_made(name), config | {"device_memory": 1})
        except CapacityError as error:
            config["device_memory"] = budget = error.needed["device_memory"]
        model, optimizer = infinity.wrap_model(*_made(name), config)
        same = containers.trained(model, optimizer) == right
        differ = differing(dict(model.state_dict()), dict(plain[0].state_dict()))
        device = infinity.stats(model).tiers["device"]
        found[name] = same, differ, device.peak_nbytes <= device.planned_nbytes <= budget
    return found
