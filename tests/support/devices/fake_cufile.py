"""A cuFile of our own (`fake_cufile.c`), loaded under the real one's name: what the core looks up
is then this."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "fake_cufile.c"


class FakeCuFile:
    """The library, and what it is told to do wrong."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        self._library.fake_count.restype = ctypes.c_long
        self._library.fake_calls.restype = self._library.fake_driver_calls.restype = ctypes.c_void_p
        self.calls = self._library.fake_calls()  # the address of what the GPU's module gives
        self.driver_calls = (
            self._library.fake_driver_calls()
        )  # of what its driver does without that

    def set(self, **settings: int) -> None:
        """Has the next so many reads fail ("short", "refused", "misaligned", "late", "changed",
        "half"), or ("driver", "buffer", "device", "enter": an error, "limit": of files) what is
        opened or asked. Late reads go on with ``late=-1``."""
        for name, value in settings.items():
            self._library.fake_set(name.encode(), ctypes.c_long(value))

    def count(self, what: str) -> int:
        """Counts "drivers", "files", "buffers" that are open, "reads", reads that are "held" as
        late, bytes "copied" out of the device, "misuses" of the library."""
        return self._library.fake_count(what.encode())

    def reset(self) -> None:
        self._library.fake_reset()


def skip_beside_real() -> None:
    """Leaves a test out if torch has loaded the real cuFile, whose name ours would need."""
    if "/libcufile.so" in Path("/proc/self/maps").read_text():
        pytest.skip("the real cuFile is loaded")


def build_cufile(tmp_path_factory) -> Path:
    """Compiles it, once for all of a run's workers."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    target = folder / "libcufile.so.0"
    with open(folder / "cufile.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            command = [
                "cc",
                "-shared",
                "-fPIC",
                "-pthread",
                "-Wl,-soname,libcufile.so.0",
                "-o",
                str(target),
                str(SOURCE),
            ]
            subprocess.run(command, check=True)
    return target


@pytest.fixture(scope="session")
def cufile_library(tmp_path_factory) -> FakeCuFile:
    skip_beside_real()
    return FakeCuFile(build_cufile(tmp_path_factory))


@pytest.fixture
def cufile(cufile_library) -> Iterator[FakeCuFile]:
    """A machine with cuFile. Afterwards it has none again, as far as anybody can tell."""
    cufile_library.reset()
    yield cufile_library
    cufile_library.set(late=-1)
    misuses = cufile_library.count("misuses")
    cufile_library.set(driver=5001)
    assert misuses == 0, "the library was called in a way that the real one refuses"
    until = time.monotonic() + 60
    while any(
        cufile_library.count(what) for what in ("files", "buffers", "drivers")
    ):  # a reader's last thread may be on its way out
        assert time.monotonic() < until, "left open"
        time.sleep(0.001)
