"""Regions: draws a different dropout mask on every rank inside a tensor-parallel region, and the
same one outside.

region   from the first layer of a pair, sharded by columns, to the one sharded by rows: each rank
         has other heads there

A region's generators are seeded by the rank, and by a number drawn from the CPU's generator at its
start, which is the same on all ranks. So no state needs to be saved, and a checkpointed block draws
the same masks again when it is recomputed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .plans import general

SEEDS = 2**62


class _Region:
    """The generators of one block's region, while it runs."""

    def __init__(self, rank: int, device_type: str):
        self._rank, self._device_type = rank, device_type
        self._outside: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Begins the region at its first column layer."""
        if module.training:
            seed = int(torch.randint(SEEDS, (), device="cpu", dtype=torch.int64))
            device = getattr(torch, self._device_type) if self._device_type != "cpu" else None
            self._outside = (
                torch.get_rng_state(),
                device.get_rng_state() if device is not None else None,
            )
            torch.manual_seed((seed + self._rank) % SEEDS)

    def leave(self, module: nn.Module, *_: Any) -> None:
        """Ends the region at its row layer."""
        if self._outside is not None:
            (host, device), self._outside = self._outside, None
            torch.set_rng_state(host)
            if device is not None:
                getattr(torch, self._device_type).set_rng_state(device)


def install_regions(model: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> None:
    """Hooks the pairs of layers that have dropout between them."""
    first = None
    for name, module in model.named_modules():
        style = plan.get(name, plan.get(general(name)))
        if style == "colwise" and not isinstance(module, nn.Embedding):
            first = first or (name, module)
        elif style == "rowwise" and first is not None:
            if _drops(model, name):
                region = _Region(mesh.get_rank(), mesh.device_type)
                first[1].register_forward_pre_hook(region.enter)
                module.register_forward_pre_hook(region.leave)
                around = model.get_submodule(
                    os.path.commonprefix([f"{first[0]}.", f"{name}."]).rpartition(".")[0]
                )
                # In case of an exception.
                around.register_forward_hook(region.leave, always_call=True)
            first = None


def _drops(model: nn.Module, name: str) -> bool:
    """Returns whether there is dropout around the layer of this name."""
    path = name
    for _ in range(2):  # the attention, and its parent
        path = path.rpartition(".")[0]
        for module in model.get_submodule(path).modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                return True
            if any(
                isinstance(p, float) and p > 0
                for key, p in vars(module).items()
                if "dropout" in key
            ):
                return True
    return False
