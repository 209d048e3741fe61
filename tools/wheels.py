"""Builds wheels of the last commit, one for each Python from 3.11 to 3.14 whose headers are here.
They have the GPU's kernels and load on glibc 2.28 or newer. No GPU is needed, and nvcc comes from
the package index if there is none.

    python tools/wheels.py build/wheels                      # for this machine
    python tools/wheels.py build/wheels --machine aarch64    # cross-compiled

What does not need Python is compiled once for all of them, under `build/wheels-work`, and stays
for the next call. Headers are those of pythons on the PATH or in pyenv. Those of others lie in
`build/headers/<machine>` as Debian's packages have them (`libpython3.14-dev`), and so does another
machine's liburing-dev. docs/publishing.md has the commands.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels-work"
HEADERS = ROOT / "build" / "headers"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
GLIBC = "2.28"  # torch's wheels need it, too
TARGETS = "sm_80,sm_90,compute_90,sm_100,sm_120"
TOOLS = [
    "setuptools>=77.0.3",
    "wheel",
    "pybind11>=2.12",
    "ninja",
    "ziglang",
    "auditwheel",
]
CUDART = "nvidia-cuda-runtime"
NVCC = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", CUDART]
CUDA = "13.0"
LIBRARIES = ("c", "m", "pthread", "dl", "rt")
HERE = os.uname().machine


def main() -> int:
    about = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(allow_abbrev=False, description=about)
    parser.add_argument("out", type=Path, help="folder for the wheels")
    parser.add_argument("--machine", default=HERE, choices=("x86_64", "aarch64"))
    parser.add_argument("--pythons", default=",".join(VERSIONS), help="3.11,3.12, say")
    parser.add_argument("--no-cuda", action="store_true", help="leave the GPU's kernels out")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    headers = {version: include_dirs(version, args.machine) for version in args.pythons.split(",")}
    for version in [version for version, found in headers.items() if not found]:
        print(f"Python {version}: no headers for {args.machine}, no wheel", flush=True)
        del headers[version]
    if not headers:
        return 1
    source = updated_source()
    python = tools()
    environment = build_environment(args.machine, python, has_cuda=not args.no_cuda)
    for version, includes in headers.items():
        start = time.monotonic()
        wheel = build(source, python, args, version, includes, environment)
        megabytes = wheel.stat().st_size / 1e6
        print(f"{wheel.name}: {megabytes:.1f} MB, {time.monotonic() - start:.0f} s", flush=True)
        if args.machine == HERE:
            print(f"  {check(wheel, version)}", flush=True)
    command = [python, "setup.py", "-q", "sdist", "--dist-dir", args.out.resolve()]
    subprocess.run(command, cwd=source, check=True, env=os.environ | {"INFINITY_CUDA": "0"})
    return 0


def interpreter(version: str) -> Path | None:
    """Returns the Python of this version on the PATH or in pyenv, if it runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for path in [path for path in found if path]:
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return Path(path)
    return None


def include_dirs(version: str, machine: str) -> list[Path]:
    """Returns the folders of this Python's headers for ``machine``; none if they are not here."""
    debian = HEADERS / machine / "usr" / "include"
    if (debian / f"python{version}" / "Python.h").exists():
        return [debian / f"python{version}", debian]  # its pyconfig.h includes that of the machine
    if python := interpreter(version):  # pyconfig.h is alike on both: they are 64-bit Linux
        query = "import sysconfig; print(sysconfig.get_path('include'))"
        told = subprocess.run([python, "-c", query], capture_output=True, text=True).stdout.strip()
        if Path(told, "Python.h").exists():
            return [Path(told)]
    return []


def updated_source() -> Path:
    """Returns a folder with the last commit. A file that has not changed keeps its time, so that it
    is not compiled again."""
    fresh, kept = WORK / "fresh", WORK / "source"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    archive = subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE)
    subprocess.run(["tar", "xm"], stdin=archive.stdout, cwd=fresh, check=True)
    if archive.wait():
        raise SystemExit("wheels are built from a clone: git archive failed")
    for path in [path for path in fresh.rglob("*") if path.is_file()]:
        target = kept / path.relative_to(fresh)
        if not target.exists() or target.read_bytes() != path.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    for path in [path for path in kept.rglob("*") if path.is_file()]:
        inside = path.relative_to(kept)
        if inside.parts[0] != "build" and not (fresh / inside).exists():
            path.unlink()
    shutil.rmtree(fresh)
    return kept


def tools() -> Path:
    """Returns a Python that has what builds wheels, from the package index."""
    python = WORK / "tools" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", WORK / "tools"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *TOOLS], check=True)
    return python


def build_environment(machine: str, python: Path, *, has_cuda: bool) -> dict[str, str]:
    """Returns the environment of setup.py for ``machine``: what compiles, and what is linked."""
    cross = "" if machine == HERE else f"{machine}-linux-gnu-"
    place = WORK / machine
    flags = [place / "older_glibc.o", f"-L{stubs(machine, python)}", "-static-libstdc++", "-s"]
    asked = ["git", "describe", "--always", "--abbrev=7"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    environment = os.environ | {
        "INFINITY_COMMIT": commit.strip(),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "CXX": f"{cross}g++",
        "INFINITY_CUDA": "1" if has_cuda else "0",
        "INFINITY_CUDA_ARCH": TARGETS,
        "LIBURING_ROOT": str(static_liburing(machine)),
    }
    nvcc = find_nvcc(python) if has_cuda else None
    if nvcc is not None:
        environment["PATH"] = f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}"
    if cross and nvcc is not None:
        told = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
        ).stderr
        # CUDA's headers are alike for all machines, and nvcc looks for those of the other one
        places = dict.fromkeys(re.findall(r"/[^\s\"]*/include(?:/cccl)?(?=\")", told))
        environment["NVCC_APPEND_FLAGS"] = " ".join(
            [f"-ccbin {cross}g++", *(f"-I{place}" for place in places)]
        )
        flags.append(f"-L{runtime_of_cuda(machine, python, nvcc)}")
    command = [f"{cross}gcc", "-O2", "-fPIC", "-c", ROOT / "tools" / "older_glibc.c"]
    subprocess.run([*command, "-o", place / "older_glibc.o"], check=True)
    environment["LDFLAGS"] = " ".join(map(str, [*flags, "-Wl,--exclude-libs,ALL"]))
    return environment


def stubs(machine: str, python: Path) -> Path:
    """Returns a folder with libraries that zig makes: they have the symbols of glibc 2.28 alone.
    What is linked against them needs no newer one."""
    kept, cache = WORK / machine / f"glibc-{GLIBC}", WORK / machine / "zig"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "none.c").write_text("")
        command = [python, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}"]
        command += ["-shared", cache / "none.c", "-o", cache / "none.so"]
        command += [f"-l{name}" for name in LIBRARIES]
        told = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
        subprocess.run(command, check=True, env=os.environ | told)
        partial = WORK / machine / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for pattern in ("libc_nonshared.a", *(f"lib{name}.so.*" for name in (*LIBRARIES, "ld"))):
            (found,) = cache.glob(f"o/*/{pattern}")
            shutil.copy(found, partial)
        for name in LIBRARIES[1:]:
            (library,) = partial.glob(f"lib{name}.so.*")
            (partial / f"lib{name}.so").symlink_to(library.name)
        (loader,) = partial.glob("libld.so.*")
        (partial / "libc.so").write_text(
            f"GROUP ( libc.so.6 libc_nonshared.a AS_NEEDED ( {loader.name} ) )\n"
        )
        partial.rename(kept)
    return kept


def static_liburing(machine: str) -> Path:
    """Returns a folder with liburing's headers and its static library alone: modules contain it."""
    root = Path("/") if machine == HERE else HEADERS / machine
    place = WORK / machine / "liburing"
    library = root / "usr" / "lib" / f"{machine}-linux-gnu" / "liburing.a"
    if not library.exists():
        raise SystemExit(f"{library} is not here: install liburing-dev (docs/publishing.md)")
    shutil.rmtree(place, ignore_errors=True)
    (place / "include").mkdir(parents=True)
    (place / "lib").mkdir()
    shutil.copy(library, place / "lib")
    for name in ("liburing.h", "liburing"):
        (place / "include" / name).symlink_to(root / "usr" / "include" / name)
    return place


def find_nvcc(python: Path) -> Path:
    """Returns CUDA's compiler: the one that is here, or that of the package index."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    if found := shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc"))):
        return Path(found)
    wanted = [f"{name}=={CUDA}.*" for name in NVCC]
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    (nvcc,) = python.parent.parent.glob("lib/python*/site-packages/nvidia/cu*/bin/nvcc")
    return nvcc


def runtime_of_cuda(machine: str, python: Path, nvcc: Path) -> Path:
    """Returns the folder of CUDA's static runtime for another machine, from the package index."""
    place = WORK / machine / "cudart"
    if not place.exists():
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = told.partition("release ")[2].partition(",")[0]
        command = [python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", f"manylinux2014_{machine}", "--dest", place.with_suffix(".whl")]
        subprocess.run([*command, f"{CUDART}=={release}.*"], check=True)
        (wheel,) = place.with_suffix(".whl").glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            content.extractall(place)
    (library,) = place.rglob("libcudart_static.a")
    return library.parent


def build(
    source: Path,
    python: Path,
    args: argparse.Namespace,
    version: str,
    includes: list[Path],
    environment: dict[str, str],
) -> Path:
    """Builds one wheel, and returns its path in the folder that was named."""
    number = version.replace(".", "")
    raw = WORK / "raw"
    for place in (raw, *source.glob("build/lib*"), *source.glob("build/bdist*")):
        shutil.rmtree(place, ignore_errors=True)
    suffix = f".cpython-{number}-{args.machine}-linux-gnu.so"
    # setup.py's own command line would forget the options of build_ext halfway
    config = WORK / "python.cfg"
    config.write_text(
        f"[build_ext]\ninclude_dirs={os.pathsep.join(map(str, includes))}\n"
        f"[bdist_wheel]\nplat_name=linux_{args.machine}\n"
    )
    call = (
        f"from setuptools.build_meta import build_wheel; build_wheel({str(raw)!r}, {{'quiet': 1}})"
    )
    command = [python, "-c", call]
    told = environment | {"SETUPTOOLS_EXT_SUFFIX": suffix, "DIST_EXTRA_CONFIG": str(config)}
    subprocess.run(command, cwd=source, check=True, env=told)
    (built,) = raw.glob("*.whl")
    told = subprocess.run(
        [python, "-m", "auditwheel", "show", built], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r'tag:\s+"manylinux_(\d+)_(\d+)_', told)
    if found is None or (int(found[1]), int(found[2])) > tuple(map(int, GLIBC.split("."))):
        raise SystemExit(f"the wheel needs more than glibc {GLIBC}:\n{told}")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{args.machine}"
    command = [python, "-m", "wheel", "tags", "--python-tag", f"cp{number}"]
    command += ["--abi-tag", f"cp{number}", "--platform-tag", tag, "--remove", built]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (built,) = raw.glob("*.whl")
    return Path(shutil.copy(built, args.out))


def check(wheel: Path, version: str) -> str:
    """Installs the wheel in an environment of its own, without a compiler on the PATH, and loads
    what is compiled. If the project's own environment has that Python, its torch is lent, and a
    step is trained. Returns what was done."""
    if (python := interpreter(version)) is None:
        return f"not tried: Python {version} does not run here"
    place = WORK / "clean"
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([python, "-m", "venv", place], check=True)
    clean = place / "bin" / "python"
    alone = {"PATH": "/nowhere", "HOME": str(place), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [clean, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel.resolve()]
    subprocess.run(command, check=True, env=alone)
    query = (
        "import importlib.util, pathlib, sys\n"
        "folder = pathlib.Path(importlib.util.find_spec('infinity').origin).parent\n"
        "for name in ('_C', '_cuda'):\n"
        "    for path in folder.glob(name + '.*.so'):\n"
        "        spec = importlib.util.spec_from_file_location('infinity.' + name, path)\n"
        "        module = importlib.util.module_from_spec(spec)\n"
        "        spec.loader.exec_module(module)\n"
        "        print(name, getattr(module, 'targets', None) or module.simd_unit(), end='; ')\n"
        "print(folder)\n"
    )
    told = subprocess.run(
        [clean, "-c", query], check=True, capture_output=True, text=True, env=alone, cwd=place
    ).stdout.strip()
    packages = next(place.glob("lib/python*/site-packages"))
    lent = list((ROOT / ".venv").glob(f"lib/python{version}/site-packages"))
    if not lent:
        return told
    (packages / "lent.pth").write_text(str(lent[0]))
    first_step = ROOT / "tools" / "first_step.py"
    trained = subprocess.run([clean, first_step, packages], env=alone, cwd=place, check=True)
    return f"{told}; trained a step: {trained.returncode == 0}"


if __name__ == "__main__":
    sys.exit(main())
