"""What each rank does where several load one checkpoint (see `ranks`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import models
import torch.distributed as dist
from rank_jobs import adamw, build, cloned
from ranks import told

import infinity
from infinity.checkpoint import manifest, read_once
from infinity.checkpoint.file_reader import WholeFile


def checked_together(path: str) -> dict[str, Any]:
    """Loads a checkpoint, with room for what is replaced and without: which of its files this rank read once, and which it summed before
    anything changed; and both ways what it is told of one with a bit of another."""
    model = build()
    model, optimizer = infinity.wrap_model(model, adamw(model), {"params": "host", "optimizer": "host"})
    infinity.save_checkpoint(path, model, optimizer)
    summed, once, sum_of_part, read_files = set(), set(), manifest._sum_of_part, read_once.read_files

    def note(file: Path, begin: int, end: int) -> int:
        summed.add(file.name)
        return sum_of_part(file, begin, end)

    def note_whole(files: list[WholeFile], **more: Any) -> None:
        once.update(file.path.name for file in files)
        read_files(files, **more)

    found = {}
    with mock.patch.object(manifest, "_sum_of_part", note), mock.patch.object(read_once, "read_files", note_whole):
        for room in (1 << 30, 0):
            summed.clear()
            once.clear()
            with mock.patch.object(read_once, "memory_left", lambda room=room: room):
                infinity.load_checkpoint(path, model, optimizer)
            found[bool(room)] = {"summed": set(summed), "once": set(once)}
    damaged = sorted(Path(path).glob("infinity-*/unit-*"))[0]
    if dist.get_rank() == 0:
        raw = bytearray(damaged.read_bytes())
        raw[-1] ^= 1
        damaged.write_bytes(raw)
    dist.barrier()
    before, said, same = cloned(model.state_dict()), [], []
    for room in (1 << 30, 0):
        with mock.patch.object(read_once, "memory_left", lambda room=room: room):
            said.append(told(lambda: infinity.load_checkpoint(path, model, optimizer)))
        same.append(not models.differing(before, cloned(model.state_dict())))
    infinity.unwrap_model(model, optimizer)
    return {"found": found, "all": {file.name for file in damaged.parent.glob("*.safetensors")}, "told": said, "same": all(same)}
