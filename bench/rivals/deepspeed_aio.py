"""DeepSpeed's async I/O (libaio) into its own locked memory, at the best of its own sweep's 32."""

from __future__ import annotations

import importlib.metadata
import itertools
import time
from typing import Any

import torch

from .tuning import Tuned

NAME = "deepspeed"
MIB = 1024 * 1024
BUFFER_NBYTES = 256 * MIB
# Those of its own sweep: block size, queue depth, one submit for all, threads per operation
SETTINGS = list(itertools.product((MIB, 8 * MIB), (32, 128), (False, True), (1, 2, 4, 8)))


class DeepSpeedAio:
    """One handle per setting. A run moves the file a buffer at a time, as its swapper does. A
    setting is tried with one buffer in each direction."""

    def __init__(self, module, path: str, nbytes: int):
        self.path, self.nbytes = path, nbytes
        self.handles = {
            (block, depth, single, threads): module.aio_handle(block, depth, single, True, threads)
            for block, depth, single, threads in SETTINGS
        }
        self.size = min(BUFFER_NBYTES, nbytes // 2)
        template = torch.empty(0, dtype=torch.uint8)
        self._any = next(iter(self.handles.values()))
        self.buffers = [self._any.new_cpu_locked_tensor(self.size, template) for _ in range(2)]
        self.tuned = Tuned(NAME, SETTINGS)

    def run(self, direction: str) -> None:
        self._move(self.tuned.of(direction, lambda each: self._seconds(each, direction)), direction)

    def told(self) -> dict[str, Any]:
        """Returns its version, the chosen settings, and the seconds of all trials."""
        return {"version": importlib.metadata.version("deepspeed")} | self.tuned.told()

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


def find(path: str, nbytes: int) -> DeepSpeedAio | str:
    """Returns a runner, or why there is none."""
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return DeepSpeedAio(AsyncIOBuilder().load(verbose=False), path, nbytes)
    except ImportError:
        return "not installed (pip install deepspeed)"
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever keeps a rival from being built or run is told beside the figures
        return f"its async I/O does not build or run here ({str(error)[:100]!r})"
