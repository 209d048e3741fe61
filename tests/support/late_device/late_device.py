"""The late device: builds it, and makes it a device of torch in this process.

Only for a process of its own: torch can rename one backend, and takes the device for the machine's
accelerator from then on.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
NAME = "late"


def install() -> ModuleType:
    """Makes ``late:0`` and ``late:1`` devices of torch and of the engine. Returns the module that
    paces them."""
    late = build()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(late))
    dist.Backend.register_backend(
        NAME,
        lambda store, rank, size, timeout: late.make_backend(
            dist.ProcessGroupGloo(store, rank, size, timeout), rank, size
        ),
        devices=[NAME],
    )
    _teach_engine(late)
    return late


def _device_module(late: ModuleType) -> ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = torch.accelerator.device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.mem_get_info = lambda where=None: (late.free_nbytes(), 6 << 30)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork = lambda: False
    return module


def _teach_engine(late: ModuleType) -> None:
    """Replaces the two calls that the engine makes of a GPU's driver."""
    from infinity.machine.accelerator import Accelerator

    Accelerator.pin = lambda self, region: late.register(region.address, region.nbytes)


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


# --- the build ---


def build() -> ModuleType:
    """Compiles the device, once for all processes and runs with the same sources, and loads it."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in sorted(path for path in HERE.iterdir() if path.suffix in (".h", ".cpp")):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "late-device"
    target = folder / digest.hexdigest()[:16] / "_late.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target.with_name("part"))
            target.with_name("part").rename(target)
    spec = importlib.util.spec_from_file_location("_late", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(target: Path) -> None:
    from torch.utils.cpp_extension import include_paths

    libraries = Path(torch.__file__).parent / "lib"
    command = [
        "g++",
        *"-shared -fPIC -std=c++20 -O1 -w -pthread -DTORCH_EXTENSION_NAME=_late".split(),
        *(f"-isystem{path}" for path in [*include_paths(), sysconfig.get_path("include")]),
        str(HERE / "late_device.cpp"),
        f"-L{libraries}",
        *"-ltorch -ltorch_cpu -lc10 -ltorch_python".split(),
        f"-Wl,-rpath,{libraries}",
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the late device does not compile:\n{done.stderr[-4000:]}")
