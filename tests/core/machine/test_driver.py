"""CUDA's driver is found when it is there, and its absence or refusal is told: with a driver of our
own that refuses.

Words used here:

**driver**: `fake_driver.c` as libcuda.so.1, in a folder that only a child process looks into.
"""

from __future__ import annotations

import ctypes.util
import subprocess
from pathlib import Path

import prepared
import pytest

from infinity import native

HERE = Path(__file__).parents[2] / "support" / "devices"
PINNING = """
from infinity import native
region = native.Region(3 * 1024 * 1024 + 5, True, 1)
print(native.cuda_driver())
region.pin()
region.pin()
print(region.pinned, hex(region.address), region.nbytes)
del region
"""

COPYING = """
import ctypes
from infinity import native
print(native.cuda_driver()[0])
enter, checksums, copy_out = ctypes.cast(native.driver_calls(), ctypes.POINTER(ctypes.c_void_p * 3)).contents
call = lambda address, *kinds: ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(address)
source, target = ctypes.create_string_buffer(b"of the device", 14), ctypes.create_string_buffer(14)
copy = call(copy_out, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
print(copy(target, source, 14), call(enter, ctypes.c_int)(7), call(enter, ctypes.c_int)(0), copy(target, source, 14), checksums)
print(target.value.decode())
"""  # noqa: E501


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """A folder with the driver in it."""
    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a driver, and torch loads it first")
    folder = tmp_path_factory.mktemp("driver")
    target = folder / "libcuda.so.1"
    command = [
        "cc",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{target.name}",
        "-o",
        str(target),
        str(HERE / "fake_driver.c"),
    ]
    subprocess.run(command, check=True)
    return folder


def run(
    script: str, folder: Path | None, log: Path, **variables: str
) -> subprocess.CompletedProcess:
    """Runs ``script`` in a process that has loaded the driver in ``folder``: whoever asks for it by
    name gets this one."""
    loads = f"import ctypes; ctypes.CDLL({str(folder / 'libcuda.so.1')!r})\n" if folder else ""
    return prepared.run("-c", loads + script, variables={"FAKE_CUDA_LOG": str(log)} | variables)


def test_a_region_is_registered_once_and_unregistered_when_it_goes(driver, tmp_path):
    """The calls that the driver gets, with the region's own address and length: nothing is
    padded."""
    done = run(PINNING, driver, tmp_path / "log")
    assert done.returncode == 0, done.stderr
    said, last = done.stdout.splitlines()
    pinned, address, nbytes = last.split()
    assert said == "(13000, '')" and pinned == "True"
    assert (tmp_path / "log").read_text().splitlines() == [
        f"register {address} {nbytes}",
        f"unregister {address} 0",
    ]


@pytest.mark.parametrize(
    ("refused", "kind", "told"),
    [
        pytest.param(
            "init",
            "UsageError",
            "the CUDA driver does not start: refused (CUDA error 100)",
            marks=pytest.mark.slow,
        ),
        ("old", "UsageError", "the CUDA driver is of CUDA 11.4, but 12.0 or newer is needed"),
        pytest.param(
            "device", "UsageError", "the CUDA driver finds no device", marks=pytest.mark.slow
        ),
        ("memory", "StorageError", "`ulimit -l unlimited` before the job raises it"),
        pytest.param(
            "mapped",
            "StorageError",
            "does not register memory that is mapped already",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_the_driver_refuses_is_a_typed_error_that_says_what_to_change(
    driver, tmp_path, refused, kind, told
):
    done = run(PINNING, driver, tmp_path / "log", FAKE_CUDA=refused)
    assert done.returncode == 1
    assert kind in done.stderr and told in done.stderr, done.stderr
    assert not (tmp_path / "log").exists()


def test_the_driver_copies_out_of_a_device_for_a_thread_that_entered_it(driver, tmp_path):
    """What sampled checksums need of it. Failing twins: a thread that has entered none, and a
    device that there is not."""
    done = run(COPYING, driver, tmp_path / "log")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["13000", "1 7 0 0 None", "of the device"]


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (None, "CUDA 13.0, registers host memory"),
        pytest.param("old", "CUDA 11.4", marks=pytest.mark.slow),
        pytest.param("memory", "does not register host memory", marks=pytest.mark.slow),
    ],
)
def test_env_tells_which(driver, tmp_path, refused, told):
    variables = {"FAKE_CUDA": refused} if refused else {}
    done = run(
        "from infinity.tools.cli import main; main(['env'])", driver, tmp_path / "log", **variables
    )
    assert done.returncode == 0 and told in done.stdout, done.stdout + done.stderr


def test_without_a_driver_that_is_told(tmp_path):
    """The usual case here; where this machine has a driver, there is nothing to see."""
    done = run("from infinity import native; print(native.cuda_driver())", None, tmp_path / "log")
    if "(0," not in done.stdout:
        pytest.skip("this machine has a CUDA driver")
    assert "no CUDA driver: libcuda.so.1" in done.stdout
    assert native.driver_calls() == 0
