"""What each rank does with state dicts, checkpoints and files of weights (see `ranks`)."""

from __future__ import annotations

import errno
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import models
import torch
import torch.distributed as dist
from rank_jobs import adamw, build, cloned, train
from ranks import told
from torch import nn

import infinity
from infinity.ext.checkpoint import manifest


def states(shard: str, folder: str) -> dict[str, Any]:
    """State dicts, full_params, save_pretrained."""
    config = models.at_home("nvme", "nvme", Path(folder)) | {"shard": shard}
    model = build()
    model, optimizer = infinity.wrap_model(model, adamw(model), config)
    train(model, optimizer, steps=2)
    found: dict[str, Any] = {
        "weights": cloned(model.state_dict()),
        "optimizer": optimizer.state_dict(),
    }
    with infinity.full_params(model, "blocks.0") as params:
        found["full"] = cloned(params)
    with infinity.full_params(
        model, ["positions", "blocks.3.feed.0.weight"], writeback=True
    ) as params:
        params["positions"].fill_(0.25)
        params["blocks.3.feed.0.weight"][5, 7] = 9.0
    found["edited"] = cloned(model.state_dict())
    try:
        with infinity.full_params(model, "positions") as params:
            params["positions"].zero_()
    except infinity.UsageError as error:
        found["refused"] = str(error)
    model.load_state_dict(found["weights"])
    found["loaded"] = cloned(model.state_dict())
    infinity.save_pretrained(model, Path(folder) / f"pretrained-{shard}")
    optimizer.load_state_dict(found["optimizer"])
    found["again"] = optimizer.state_dict()
    infinity.unwrap_model(model, optimizer)
    return found


def save(path: str, config: dict, steps: int = 2) -> dict[str, Any]:
    model = build()
    model, optimizer = infinity.wrap_model(model, adamw(model), config)
    torch.manual_seed(100 + dist.get_rank())
    train(model, optimizer, steps=steps)
    infinity.save_checkpoint(path, model, optimizer, extra={"step": steps})
    found = {
        "weights": cloned(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "random": torch.rand(4),
    }
    train(model, optimizer, steps=2, first=steps)
    found["later"] = cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    return found


def load(path: str, config: dict, steps: int = 2) -> dict[str, Any]:
    model = build(9)
    model, optimizer = infinity.wrap_model(model, adamw(model), config)
    train(model, optimizer, steps=1)
    extra = infinity.load_checkpoint(path, model, optimizer)
    found = {
        "extra": extra,
        "weights": cloned(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "random": torch.rand(4),
    }
    train(model, optimizer, steps=2, first=steps)
    found["later"] = cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    return found


def full_disk(path: str, full: int) -> dict[str, str]:
    """Saves once, then again while the disk of rank ``full`` has no room; what that raised, and
    what is loaded then."""
    from infinity.ext.checkpoint import publish as saving

    model = build()
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    infinity.save_checkpoint(path, model, optimizer, extra="first")
    write, me = saving.write_files, dist.get_rank()

    def no_room(draft, *args, **kwargs):
        if me == full:
            raise OSError(
                errno.ENOSPC, "No space left on device", str(draft.data / "unit-00000.safetensors")
            )
        time.sleep(0.5)  # the others still write
        return write(draft, *args, **kwargs)

    saving.write_files = no_room
    try:
        infinity.save_checkpoint(path, model, optimizer, extra="second")
        said = "saved"
    except infinity.InfinityError as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        saving.write_files = write
    loaded = infinity.load_checkpoint(path, model, optimizer)
    infinity.save_checkpoint(path, model, optimizer, extra="third")
    names = sorted(name for name in os.listdir(path) if name.startswith("infinity-"))
    infinity.unwrap_model(model, optimizer)
    return {"said": said, "loaded": loaded, "names": names}


def beside(path: str, full: int | None) -> dict[str, Any]:
    """Saves at step 2 and trains on meanwhile; the disk of rank ``full`` has no room for a second
    save. What that raised, what is loaded then, and the state that was saved."""
    from infinity.ext.checkpoint import background_save

    model = build()
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    train(model, optimizer, steps=2)
    saved = cloned(model.state_dict())
    infinity.save_checkpoint(f"{path}-waited", model, optimizer, extra="first")
    saving = infinity.save_checkpoint(path, model, optimizer, extra="first", wait=False)
    train(model, optimizer, steps=2, first=2)
    saving.wait()
    write, me, said = background_save.write_files, dist.get_rank(), "saved"

    def no_room(draft, *args, **kwargs):
        if me == full:
            raise OSError(errno.ENOSPC, "No space left on device", str(draft.data / "unit"))
        return write(draft, *args, **kwargs)

    background_save.write_files = no_room
    try:
        infinity.save_checkpoint(path, model, optimizer, extra="second", wait=False)
        train(model, optimizer, steps=1, first=4)
        extra = infinity.load_checkpoint(path, model, optimizer)
    except infinity.InfinityError as error:
        said = f"{type(error).__name__}: {error}"
        extra = infinity.load_checkpoint(path, model, optimizer)
    finally:
        background_save.write_files = write
    found = {"said": said, "extra": extra, "saved": saved, "loaded": cloned(model.state_dict())}
    found["names"] = [sorted(os.listdir(each)) for each in (path, f"{path}-waited")]
    found["files"] = [
        {
            file.name: file.read_bytes()
            for each in Path(path).glob("infinity-*")
            for file in each.iterdir()
        }
        for path in (path, f"{path}-waited")
    ]
    infinity.unwrap_model(model, optimizer)
    return found


def running_statistics(path: str) -> dict[str, Any]:
    """Trains with BatchNorm on batches of each rank's own, saves, trains on; then the same from the
    checkpoint."""

    def run(first: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model, optimizer = infinity.wrap_model(
            model, adamw(model), {"params": "host", "optimizer": "host"}
        )
        if first:
            infinity.load_checkpoint(path, model, optimizer)
        for step in range(first, 4):
            x = torch.randn(
                4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
            )
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and not first:
                infinity.save_checkpoint(path, model, optimizer)
        found = cloned(model.state_dict())
        infinity.unwrap_model(model, optimizer)
        return found

    return {"whole": run(0), "resumed": run(2)}


def on_meta(weights: str | None) -> dict[str, Any]:
    """A model on meta: from a file of which each rank reads its part, or drawn, by each rank from
    another seed."""
    torch.manual_seed(50 + dist.get_rank())
    with torch.device("meta"):
        model = (
            models.TinyTransformer(dropout=0.0)
            if weights
            else nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
        )
    before = _read_nbytes()
    model, _ = infinity.wrap_model(model, None, {"params": "host", "weights": weights})
    read = _read_nbytes() - before
    found = {"weights": cloned(model.state_dict()), "read": read}
    infinity.unwrap_model(model)
    return found


def _read_nbytes() -> int:
    return int(
        dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())[
            "read_bytes"
        ]
    )


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
        mock.patch("infinity.ext.checkpoint.load.begin_repair", side_effect=KeyboardInterrupt)
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
