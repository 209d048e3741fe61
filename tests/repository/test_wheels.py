"""What makes wheels and their index, without building one; a slow test builds one."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAIN = """
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>
extern char __libc_single_threaded;
uint32_t arc4random(void);
int main(void) {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
  struct timespec until, after;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += 300000000;  // longer than a busy machine keeps a process waiting
  if (until.tv_nsec >= 1000000000) until.tv_sec += 1, until.tv_nsec -= 1000000000;
  pthread_mutex_lock(&mutex);
  int found = 0;
  while (found == 0) found = pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &until);
  clock_gettime(CLOCK_MONOTONIC, &after);
  int early = after.tv_sec < until.tv_sec ||
              (after.tv_sec == until.tv_sec && after.tv_nsec < until.tv_nsec - 1000000);
  uint32_t differ = 0, first = arc4random();
  for (int i = 0; i < 8; ++i) differ |= arc4random() ^ first;
  return found != ETIMEDOUT ? 1 : early ? 2 : __libc_single_threaded ? 3 : differ == 0 ? 4 : 0;
}
"""


@pytest.mark.parametrize("libc", ["this one", "an older one", "broken"])
def test_wheels_wait_and_draw_numbers_on_an_older_libc(libc, tmp_path):
    """Compiles what wheels are linked with into a program that waits 0.3 s by the monotonic clock:
    with libc's function, and without it as on glibc 2.28. The twin's wait returns early."""
    source = (ROOT / "tools" / "older_glibc.c").read_text()
    if libc != "this one":
        source = source.replace('dlsym(RTLD_DEFAULT, "pthread_cond_clockwait")', "0")
    if libc == "broken":
        for part in ("sec", "nsec"):
            source = source.replace(f"until->tv_{part} - now.tv_{part}", "0")
    (tmp_path / "older.c").write_text(source)
    (tmp_path / "main.c").write_text("#define _GNU_SOURCE\n" + MAIN)
    program = tmp_path / "program"
    command = ["cc", "-O1", "-Wall", "-Werror", tmp_path / "older.c", tmp_path / "main.c"]
    subprocess.run([*command, "-o", program, "-pthread", "-ldl"], check=True)
    assert subprocess.run([program], timeout=280).returncode == (2 if libc == "broken" else 0)


def make_wheel(folder: Path, version: str) -> Path:
    """A wheel with one module and no more."""
    path = folder / f"infinity_engine-{version}-py3-none-any.whl"
    info = f"infinity_engine-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("infinity_of_a_test.py", f"version = {version!r}")
        about = f"Metadata-Version: 2.1\nName: infinity-engine\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", about)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", kind)
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_pip_installs_from_the_index_and_checks_it(tmp_path):
    """Has pip take the newer of two wheels from the folder, and from its pages with their hashes.
    The twin is a wheel that was changed since."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    newest = [make_wheel(folder, version) for version in ("1.0", "1.1")][-1]
    index = runpy.run_path(str(ROOT / "tools" / "index.py"))
    assert len(index["write_index"](folder)) == 2
    sums = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True)
    assert sums.returncode == 0

    def pip(*where: str) -> subprocess.CompletedProcess:
        target = tmp_path / "site"
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target]
        alone = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        return subprocess.run(
            [*command, *where, "infinity-engine"],
            capture_output=True,
            text=True,
            env=alone | {"PIP_CONFIG_FILE": os.devnull},
        )

    pages = ["--index-url", f"file://{folder}/simple"]
    for where in (["--no-index", "--find-links", str(folder)], pages):
        assert (done := pip(*where)).returncode == 0, done.stderr
        assert (tmp_path / "site" / "infinity_engine-1.1.dist-info").exists()
    newest.write_bytes(newest.read_bytes() + b"\0")
    done = pip(*pages)
    assert done.returncode and "HASH" in done.stderr.upper()


def test_what_a_commit_leaves_as_it_is_is_not_compiled_again(tmp_path, monkeypatch):
    """Takes the source of two commits: an unchanged file keeps its time, a changed one is newer,
    and one that was removed is gone. What is not committed is in neither."""
    wheels = runpy.run_path(str(ROOT / "tools" / "wheels.py"))
    updated_source = wheels["updated_source"]
    monkeypatch.setitem(updated_source.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(updated_source.__globals__, "WORK", tmp_path / "work")

    def git(*words: str) -> None:
        name = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for name in ("same.cpp", "changed.cpp", "removed.cpp"):
        (tmp_path / name).write_text("int first;")
    git("add", "same.cpp", "changed.cpp", "removed.cpp")
    git("commit", "-m", "first")
    source = updated_source()
    for path in source.iterdir():
        os.utime(path, ns=(10**9, 10**9))
    (source / "build").mkdir()
    (source / "build" / "object.o").write_text("")
    (tmp_path / "changed.cpp").write_text("int second;")
    (tmp_path / "not_committed.cpp").write_text("")
    git("rm", "removed.cpp")
    git("commit", "-am", "second")
    assert updated_source() == source
    assert {path.name for path in source.iterdir()} == {"same.cpp", "changed.cpp", "build"}
    assert (source / "build" / "object.o").exists()
    assert (source / "same.cpp").stat().st_mtime_ns == 10**9
    assert (source / "changed.cpp").stat().st_mtime_ns > 10**9


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_wheel_is_built_that_needs_no_newer_glibc(tmp_path):
    """Builds the wheel of this Python without the GPU's kernels; the script itself installs it
    without a compiler and loads it. Skipped without a package index."""
    version = ".".join(map(str, sys.version_info[:2]))
    command = [sys.executable, ROOT / "tools" / "wheels.py", tmp_path, "--no-cuda"]
    done = subprocess.run([*command, "--pythons", version], capture_output=True, text=True)
    if "No matching distribution" in done.stderr:
        pytest.skip("there is no package index with ziglang and auditwheel")
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"manylinux_2_28_{os.uname().machine}.whl")
    assert "_C " in done.stdout
