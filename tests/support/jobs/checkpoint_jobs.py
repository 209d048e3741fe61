"""What each rank does where several load one checkpoint (see `ranks`)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import models
import torch.distributed as dist
from rank_jobs import adamw, build, cloned, train
from ranks import told

import infinity
from infinity.checkpoint import manifest


def checked_together(path: str) -> dict[str, Any]:
    """Loads a checkpoint: which of its files this rank summed; and what it is told of one with a
    bit of another."""
    model = build()
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    infinity.save_checkpoint(path, model, optimizer)
    summed, sum_of_stretch = set(), manifest._sum_of_stretch

    def note(file: Path, begin: int, end: int) -> int:
        summed.add(file.name)
        return sum_of_stretch(file, begin, end)

    with mock.patch.object(manifest, "_sum_of_stretch", note):
        infinity.load_checkpoint(path, model, optimizer)
    damaged = sorted(Path(path).glob("infinity-*/unit-*"))[0]
    if dist.get_rank() == 0:
        raw = bytearray(damaged.read_bytes())
        raw[-1] ^= 1
        damaged.write_bytes(raw)
    dist.barrier()
    before = cloned(model.state_dict())
    said = told(lambda: infinity.load_checkpoint(path, model, optimizer))
    same = not models.differing(before, cloned(model.state_dict()))
    infinity.unwrap_model(model, optimizer)
    return {
        "summed": summed,
        "all": {file.name for file in damaged.parent.glob("*.safetensors")},
        "told": said,
        "same": same,
    }


def struck_before_it_begins(path: str, again: bool) -> dict[str, Any]:
    """Loads a checkpoint as far into training as this job is, of other values: Ctrl-C comes on the
    first rank when all have agreed to and before it begins. What each rank is told, by that load,
    by a forward behind it, and by a second load; and whether the values are then the saved ones.
    ``again``: it was loaded before, and its values were changed."""
    model = build()
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    train(model, optimizer, steps=1)
    infinity.save_checkpoint(path, model, optimizer)
    saved = cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)

    model = build()
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    train(model, optimizer, steps=1, first=1)
    if again:
        infinity.load_checkpoint(path, model, optimizer)
        with infinity.full_params(model, writeback=True) as params:
            for value in params.values():
                value.add_(1.0)
    strike = (
        mock.patch("infinity.checkpoint.load.begin_repair", side_effect=KeyboardInterrupt)
        if dist.get_rank() == 0
        else nullcontext()
    )
    with strike:
        try:
            load = told(lambda: infinity.load_checkpoint(path, model, optimizer))
        except KeyboardInterrupt:
            load = "struck"
    forward = told(lambda: train(model, optimizer, steps=1, first=2))
    again = told(lambda: infinity.load_checkpoint(path, model, optimizer))
    same = not models.differing(saved, cloned(model.state_dict()))
    train(model, optimizer, steps=1, first=2)
    infinity.unwrap_model(model, optimizer)
    return {"load": load, "forward": forward, "again": again, "same": same}
