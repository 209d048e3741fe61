"""DeepSpeed's async I/O (libaio) into its own locked memory, at the best of the 64 settings of its
own sweep (ds_nvme_tune). The best is kept for the disk: see tuning.py."""

from __future__ import annotations

import importlib.metadata
import itertools
import time
from typing import Any

import torch

from .tuning import Tuned, key_of

NAME = "deepspeed"
MIB = 1024 * 1024
BUFFER_NBYTES = 256 * MIB
# Block size, queue depth, one submit for all, overlapped events, threads per operation
EITHER = (False, True)
SETTINGS = list(itertools.product((MIB, 8 * MIB), (32, 128), EITHER, EITHER, (1, 2, 4, 8)))


class DeepSpeedAio:
    """One handle per setting. A run moves the file a buffer at a time, as its swapper does. A
    setting is tried with one buffer in each direction."""

    def __init__(self, module, path: str, nbytes: int, *, version: str, retune: bool = False):
        self.path, self.nbytes, self.version = path, nbytes, version
        self.handles = {setting: module.aio_handle(*setting) for setting in SETTINGS}
        self.size = min(BUFFER_NBYTES, nbytes // 2)
        template = torch.empty(0, dtype=torch.uint8)
        self._any = next(iter(self.handles.values()))
        self.buffers = [self._any.new_cpu_locked_tensor(self.size, template) for _ in range(2)]
        key = key_of(path, NAME, version, f"{self.size} bytes")
        self.tuned = Tuned(NAME, SETTINGS, key, retune)

    def run(self, direction: str) -> None:
        self._move(self.tuned.of(direction, lambda each: self._seconds(each, direction)), direction)

    def told(self) -> dict[str, Any]:
        """Returns its version, the chosen settings, and the seconds of all trials or the dates of
        those of an earlier run."""
        return {"version": self.version} | self.tuned.told()

    def close(self) -> None:
        for buffer in self.buffers:
            self._any.free_cpu_locked_tensor(buffer)

    def _seconds(self, setting: tuple, direction: str) -> float:
        start = time.perf_counter()
        self._move(setting, direction, buffers=1)
        return time.perf_counter() - start

    def _move(self, setting: tuple, direction: str, buffers: int | None = None) -> None:
        handle = self.handles[setting]
        half = self.nbytes // 2 if direction == "mixed" else self.nbytes
        for offset in range(0, half, self.size)[:buffers]:
            length = min(self.size, half - offset)
            parts = [buffer.narrow(0, 0, length) for buffer in self.buffers]
            started = 0
            if direction != "write":
                handle.async_pread(parts[0], self.path, offset)
                started += 1
            if direction != "read":
                handle.async_pwrite(
                    parts[1], self.path, offset + (half if direction == "mixed" else 0)
                )
                started += 1
            done = handle.wait()
            assert done == started, f"{done} of {started} operations"


def find(path: str, nbytes: int, *, retune: bool = False) -> DeepSpeedAio | str:
    """Returns a runner, or why there is none. ``retune``: without the settings that are kept."""
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        version = importlib.metadata.version("deepspeed")
        module = AsyncIOBuilder().load(verbose=False)
        return DeepSpeedAio(module, path, nbytes, version=version, retune=retune)
    except ImportError:
        return "not installed (pip install deepspeed)"
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever keeps a rival from being built or run is told beside the figures
        return f"its async I/O does not build or run here ({str(error)[:100]!r})"
