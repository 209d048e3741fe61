"""The late device: builds it, and makes it a device of torch in this process.

Only for a process of its own: torch can rename one backend, and takes the device for the machine's
accelerator from then on.
"""

from __future__ import annotations

import errno
import sysconfig
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from compiled import compiled, load

HERE = Path(__file__).parent
NAME = "late"
CYCLES = 2e9  # that its clock makes in a second


def install() -> ModuleType:
    """Makes ``late:0`` and ``late:1`` devices of torch and of the engine. Returns the module that
    paces them."""
    late = build()
    if hasattr(torch, NAME):  # this process has it from its start: `everywhere`
        return late
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(late))
    dist.Backend.register_backend(
        NAME,
        lambda store, rank, size, timeout: late.make_backend(
            dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, timeout
        ),
        devices=[NAME],
    )
    _teach_engine(late)
    return late


def _device_module(late: ModuleType) -> ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = torch._C._accelerator_hooks_device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.stream = lambda stream: stream  # which is its own context
    module.mem_get_info = lambda where=None: (late.free_nbytes(), 6 << 30)
    module.memory_allocated = lambda where=None: late.live_nbytes()
    module.max_memory_allocated = lambda where=None: late.peak_nbytes()
    module.memory_stats = lambda: {
        "num_device_alloc": late.counts()["fresh"],
        "num_alloc_retries": 0,
    }
    module.get_device_name = lambda where=None: "late device of the tests"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.set_sync_debug_mode = lambda mode: late.refuse_copies(mode == "error")
    module._sleep = lambda cycles: late.put(0, lambda: time.sleep(cycles / CYCLES))
    module._is_in_bad_fork = lambda: False
    # Its random numbers are the host's
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module.get_rng_state = lambda where=None: torch.get_rng_state()
    module.set_rng_state = lambda state, where=None: torch.set_rng_state(state)
    return module


registered: dict[int, int] = {}  # bytes of regions, by their address


def _teach_engine(late: ModuleType) -> None:
    """Replaces the call that the engine makes of a GPU's driver."""
    from infinity import native
    from infinity.core.machine.accelerator import Accelerator

    real = Accelerator.__init__

    def init(self: Accelerator, where: torch.device, traffic: Any) -> None:
        real(self, where, traffic)
        self.registers = True

    def pin(region: native.Region, device: int) -> None:
        late.register(region.address, region.nbytes)
        registered[region.address] = region.nbytes

    Accelerator.__init__, native.Region.pin = init, pin


@contextmanager
def refusing(late: ModuleType, quota: int) -> Iterator[list[int]]:
    """Has the driver register ``quota`` bytes in the block, and refuse what is beyond. Yields the
    bytes of each region that it refused."""
    from infinity import native
    from infinity.errors import StorageError

    for address in registered:
        late.unregister(address)
    registered.clear()
    real, refused = native.Region.pin, []

    def pin(region: native.Region, device: int) -> None:
        if sum(registered.values()) + region.nbytes > quota:
            refused.append(region.nbytes)
            raise StorageError(errno.ENOMEM, "CUDA refuses to register this much")
        real(region, device)

    with mock.patch.object(native.Region, "pin", pin):
        yield refused


class Kernels:
    """The optimizer's kernels for a GPU, compiled for the processor, as jobs of the current
    stream."""

    def __init__(self, late: ModuleType):
        from gpu_stand_in import build_stand_in

        self._late, self._stand_in = late, build_stand_in()
        self.scan_workspace_nbytes = self._stand_in.scan_workspace_nbytes

    def step(self, layout: Any, *, runs: list, stream: int, **addresses: int) -> None:
        self._put(self._stand_in.step, addresses, layout, runs=runs)

    def scan(self, *, grad_dtype: Any, out_dtype: Any, count: int, stream: int, **addresses: int):
        self._put(
            self._stand_in.scan, addresses, grad_dtype=grad_dtype, out_dtype=out_dtype, count=count
        )

    def checksums(self, address: int, nbytes: int) -> list[int]:
        torch.accelerator.synchronize()
        return self._stand_in.checksums(self._late.usable(address), nbytes)

    def calls(self) -> int:
        return 0

    def _put(self, work: Callable, addresses: dict[str, int], *given: Any, **more: Any) -> None:
        there = {name: self._late.usable(at) if at else 0 for name, at in addresses.items()}
        self._late.put(0, lambda: work(*given, stream=0, **there, **more))


@contextmanager
def kernels(late: ModuleType) -> Iterator[None]:
    """Gives the device kernels in the block."""
    from infinity import native
    from infinity.core.machine.accelerator import Accelerator

    real, own = Accelerator.__init__, Kernels(late)

    def init(self: Accelerator, where: torch.device, traffic: Any) -> None:
        real(self, where, traffic)
        self.kernels, self.kernels_refusal = own, ""

    with (
        mock.patch.object(Accelerator, "__init__", init),
        mock.patch.object(Accelerator, "stream_handle", 0),
        mock.patch.object(native, "gpu_kernels", lambda: (own, "")),
    ):
        yield


# --- paces ---


@contextmanager
def never_late(late: ModuleType) -> Iterator[None]:
    """Has every launch in the block wait for its job."""
    late.set_waits(True)
    try:
        yield
    finally:
        late.set_waits(False)


@contextmanager
def delayed(late: ModuleType, most_us: int = 1500, share: float = 0.4) -> Iterator[None]:
    """Has a ``share`` of the jobs in the block come up to ``most_us`` late, at random."""
    late.set_delays(most_us, share)
    try:
        yield
    finally:
        late.set_delays(0, 0.0)


@contextmanager
def at_rates(late: ModuleType, *, link: float, memory: float, flops: float) -> Iterator[None]:
    """Has jobs in the block last as long as their bytes and operations take at these rates, in
    bytes and operations a second."""
    late.set_rates(link, memory, flops)
    try:
        yield
    finally:
        late.set_rates(0.0, 0.0, 0.0)


# --- memory ---


@contextmanager
def with_room(late: ModuleType, nbytes: int) -> Iterator[None]:
    """Leaves ``nbytes`` of the device's memory in the block."""
    torch.accelerator.synchronize()
    late.leave(nbytes)
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        late.leave(0)


# --- the build ---


def build() -> ModuleType:
    """Compiles the device, and loads it."""
    sources = [path for path in HERE.iterdir() if path.suffix in (".h", ".cpp")]
    return load("_late", compiled("late-device", sources, [torch.__version__], _command))


def _command(target: Path) -> list[str]:
    from torch.utils.cpp_extension import include_paths

    libraries = Path(torch.__file__).parent / "lib"
    return [
        "g++",
        *"-shared -fPIC -std=c++20 -O0 -w -pthread -DTORCH_EXTENSION_NAME=_late".split(),
        *(f"-isystem{path}" for path in [*include_paths(), sysconfig.get_path("include")]),
        str(HERE / "late_device.cpp"),
        f"-L{libraries}",
        *"-ltorch -ltorch_cpu -lc10 -ltorch_python".split(),
        f"-Wl,-rpath,{libraries}",
        "-o",
        str(target),
    ]
