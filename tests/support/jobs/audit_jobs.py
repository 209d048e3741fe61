"""Jobs of ranks whose work is audited (see `ranks`).

**planted flip**: one bit that a job changes on one rank where a broken machine would.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any
from unittest import mock

import models
import torch
import torch.distributed as dist
from inside import parts_of
from rank_jobs import adamw, batch, build, cloned
from ranks import told

import infinity
from infinity.core.units.arrival import Arrival
from infinity.ext.audit import rotation
from infinity.ranks import bulk

HOST = {"params": "host", "optimizer": "host"}
SEED = 640
STEPS, AT = 4, 2  # the flip comes before step AT + 1


def flip(flat: torch.Tensor, element: int) -> None:
    """Flips the lowest bit of an element."""
    flat.view(torch.uint8)[element * flat.dtype.itemsize] ^= 1


def planted(plant: str, is_due: Any) -> Any:
    """Patches the transport of gathered weights, or the sums of gradients, on this rank."""
    finish, add = Arrival.finish, bulk._ordered_sum

    def wrong_weights(self: Any, store: Any) -> None:
        finish(self, store)
        if is_due():
            flat = self._buffers.flats[0]
            shard = flat.numel() // 2
            flip(flat, 5 if plant == "others' weights" else shard + 5)

    def wrong_sum(parts: torch.Tensor, weights: Any = None) -> torch.Tensor:
        total = add(parts, weights)
        if is_due():
            flip(total, 5)
        return total

    if plant == "a sum":
        return mock.patch.object(bulk, "_ordered_sum", wrong_sum)
    return mock.patch.object(Arrival, "finish", wrong_weights)


def audited(
    config: dict[str, Any],
    audit: float,
    plant: str | None = None,
    dtype: Any = None,
    early: bool = False,
) -> dict[str, Any]:
    """Trains a few steps. ``plant``: what is flipped on rank 1. ``early``: by step_in_backward."""
    model = build(dtype=dtype or torch.float32)
    with mock.patch.object(rotation, "PIECE_NUMEL", 4096):
        model, optimizer = infinity.wrap_model(
            model, adamw(model), HOST | {"audit": audit} | config
        )
        steps, rank, done = parts_of(model).steps, dist.get_rank(), []

        def is_due() -> bool:
            if plant is None or rank != 1 or steps.index != AT or done:
                return False
            done.append(1)
            return True

        def run() -> None:
            for number in range(STEPS):
                with optimizer.step_in_backward() if early else contextlib.nullcontext():
                    models.loss_of(model, batch(number, 0, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()

        with planted(plant or "", is_due):
            error = told(run)
        found = infinity.stats(model).audited
        weights = cloned(model.state_dict()) if error == "was taken" else None
    return {"error": error, "audited": found, "weights": weights, "steps": steps.index}


def flipped_sums(count: int) -> list[dict[str, Any]]:
    """Trains ``count`` jobs, and flips one random bit of a random sum of each, on a random rank.
    Returns of each what was flipped, and the error."""
    rng, rank, found = random.Random(SEED), dist.get_rank(), []
    for _ in range(count):
        flipped = {"rank": rng.randrange(2), "step": rng.randrange(2), "early": rng.random() < 0.5}
        call, bit, sums = rng.randrange(4), rng.randrange(1 << 30), [0]
        model = build(dtype=torch.float32)
        with mock.patch.object(rotation, "PIECE_NUMEL", 4096):
            model, optimizer = infinity.wrap_model(model, adamw(model), HOST | {"audit": 1.0})
        steps, add = parts_of(model).steps, bulk._ordered_sum

        def wrong(
            parts: torch.Tensor, weights: Any = None, *, add=add, steps=steps, sums=sums,
            flipped=flipped, call=call, bit=bit,
        ) -> torch.Tensor:  # fmt: skip
            total = add(parts, weights)
            if rank == flipped["rank"] and steps.index - steps.begun == flipped["step"]:
                if sums[0] == call:
                    raw = total.view(torch.uint8)
                    raw[bit // 8 % raw.numel()] ^= 1 << bit % 8
                sums[0] += 1
            return total

        def run(model=model, optimizer=optimizer, early=flipped["early"]) -> None:
            for number in range(3):
                with optimizer.step_in_backward() if early else contextlib.nullcontext():
                    models.loss_of(model, batch(number, 0, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()

        with mock.patch.object(bulk, "_ordered_sum", wrong):
            found.append(flipped | {"error": told(run), "taken": steps.index - steps.begun})
    return found
