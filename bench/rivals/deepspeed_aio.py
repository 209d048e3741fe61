"""DeepSpeed's async I/O (libaio) into its own locked memory, at the best of a few settings."""

from __future__ import annotations

import itertools
import time

import torch

NAME = "deepspeed"
MIB = 1024 * 1024
BUFFER_NBYTES = 256 * MIB
# (block size, queue depth, threads per operation)
SETTINGS = list(itertools.product((MIB, 8 * MIB), (32,), (1, 4)))


class DeepSpeedAio:
    """One handle per setting. A run moves the file a buffer at a time, as its swapper does."""

    def __init__(self, module, path: str, nbytes: int):
        self.path, self.nbytes = path, nbytes
        self.handles = [
            module.aio_handle(block, depth, False, True, threads)
            for block, depth, threads in SETTINGS
        ]
        self.size = min(BUFFER_NBYTES, nbytes // 2)
        template = torch.empty(0, dtype=torch.uint8)
        self.buffers = [
            self.handles[0].new_cpu_locked_tensor(self.size, template) for _ in range(2)
        ]
        self.best: dict[str, object] = {}

    def run(self, direction: str) -> None:
        if direction not in self.best:
            self.best[direction] = min(
                self.handles, key=lambda handle: self._seconds(handle, direction)
            )
        self._move(self.best[direction], direction)

    def close(self) -> None:
        for buffer in self.buffers:
            self.handles[0].free_cpu_locked_tensor(buffer)

    def _seconds(self, handle, direction: str) -> float:
        start = time.perf_counter()
        self._move(handle, direction)
        return time.perf_counter() - start

    def _move(self, handle, direction: str) -> None:
        half = self.nbytes // 2 if direction == "mixed" else self.nbytes
        for offset in range(0, half, self.size):
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
