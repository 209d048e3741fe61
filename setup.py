"""Builds the native core `infinity._C`: C++17, no torch at build time, liburing from the system
where there is one; and, where nvcc is found, the GPU's kernels as `infinity._cuda`.

In a checkout, builds in place (`build_ext --inplace`, `pip install -e`) also make the doubles of
disks that tests and benchmarks use (csrc/tests/doubles). Wheels have none, and source distributions
do not have their sources.

`LIBURING_ROOT` points at a liburing outside the system's paths. Without liburing the build succeeds
with the thread engine and says so. Each SIMD unit is compiled with its own flags; which one runs is
decided at run time.

`INFINITY_CUDA`: "auto" (the default) builds `_cuda` where there is an nvcc, "0" never, "1" always.
`INFINITY_CUDA_ARCH` names other GPUs than those of this machine: "sm_89", say, or
"sm_80,sm_100,compute_100". If there is none, PTX is built, which the driver of any GPU from an
A100 on compiles at its first use, rule by rule in seconds. `LDFLAGS` is honoured.
"""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import ninja
import pybind11
from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

ROOT = Path(__file__).parent
CSRC = str(ROOT.resolve() / "csrc")
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "csrc").glob("*/*.cpp")
    if path.parent.name not in {"tests", "cuda"}
)
# of what is built: _PYTHON_HOST_PLATFORM names another machine than this
MACHINE = sysconfig.get_platform().rpartition("-")[2]
X86 = MACHINE in {"x86_64", "AMD64"}
ARM = MACHINE in {"aarch64", "arm64"}
# gcc 12 reports the undefined source operand inside its own AVX-512 headers.
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
UNIT_FLAGS = {
    "unit_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "unit_avx512.cpp": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mfma",
        "-mf16c",
        *QUIET,
    ],
}
NOT_HERE = (set() if X86 else set(UNIT_FLAGS)) | (set() if ARM else {"unit_neon.cpp"})
CUDA_SOURCES = [
    "csrc/cuda/step.cu",
    "csrc/cuda/step.cpp",
    "csrc/cuda/scan.cu",
    "csrc/cuda/checksums.cu",
    "csrc/cuda/bindings.cpp",
    "csrc/optim/constants.cpp",
]
ANY_GPU = "compute_80"  # PTX for those that have the kernels' instructions
# Sources that are compiled once for each of some units, and what names the unit
UNITS = {
    "step.cu": re.findall(r"X\((\w+), [A-Z0-9]+\)", Path(CSRC, "optim", "kernel.h").read_text())
}
DOUBLES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "csrc/tests/doubles").glob("*.cpp")
)
# of a processor, by file; of kernels for each GPU; the others take some 2
SECONDS = {
    "step.cu": 6,
    "scan.cu": 5,
    "unit_avx2.cpp": 30,
    "unit_avx512.cpp": 25,
    "unit_neon.cpp": 25,
    "bindings.cpp": 14,
    "unit_scalar.cpp": 10,
}
# Only converts: optimising it would take half of the build. The one source that needs Python.
BINDINGS = "bindings.cpp"


def find_liburing() -> tuple[list[str], list[str]] | None:
    """Compile and link arguments for liburing, or None when it is not there."""
    if root := os.environ.get("LIBURING_ROOT"):
        include, library = Path(root, "include"), Path(root, "lib")
        if not (include / "liburing.h").exists():
            raise SystemExit(f"LIBURING_ROOT={root}: no include/liburing.h there")
        rpath = [f"-Wl,-rpath,{library}"] if (library / "liburing.so").exists() else []
        return [f"-I{include}"], [f"-L{library}", *rpath, "-luring"]
    try:
        query = ["pkg-config", "--cflags", "--libs", "liburing"]
        flags = shlex.split(
            subprocess.run(query, check=True, capture_output=True, text=True).stdout
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    links = [flag for flag in flags if flag.startswith(("-l", "-L", "-Wl"))]
    return [flag for flag in flags if flag not in links], links


def find_nvcc() -> str | None:
    """The CUDA compiler, or None where `_cuda` is not to be built."""
    wanted = os.environ.get("INFINITY_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"INFINITY_CUDA={wanted} is not one of auto, 0, 1")
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc")))
    if wanted == "1" and nvcc is None:
        raise SystemExit("INFINITY_CUDA=1, but there is no nvcc on the PATH or in CUDA_HOME")
    return nvcc if wanted != "0" else None


COMMIT = "infinity/tools/bench/commit"  # of a wheel: results of its benchmarks name it


class BuildExtension(build_ext):
    """Compiles with ninja, every core at once, and only what changed: objects stay in `build/`, and
    the next build has the same paths. What needs no Python is compiled once for all of them."""

    def run(self) -> None:
        # Not when options are made final: an editable install says only then that it is one.
        is_wheel = not (self.inplace or self.editable_mode)
        if is_wheel:
            self.extensions = [each for each in self.extensions if each.name != DOUBLES_MODULE]
        super().run()
        if is_wheel:  # it has all that lies in build_lib, and no doubles of an earlier build
            shutil.rmtree(Path(self.build_lib, "tests"), ignore_errors=True)
            kept = Path(self.build_lib, COMMIT)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(self._commit())

    def _commit(self) -> str:
        """Returns the commit that is built: INFINITY_COMMIT or the checkout's; "" without."""
        if known := os.environ.get("INFINITY_COMMIT"):
            return known
        told = []
        for asked in (["rev-parse", "--show-toplevel"], ["describe", "--always", "--dirty"]):
            command = ["git", "-C", ROOT, *asked]
            try:
                done = subprocess.run(command, capture_output=True, text=True)
            except OSError:
                return ""
            told.append(done.stdout.strip())
        return told[1] if told[0] == str(ROOT.resolve()) else ""

    def build_extensions(self) -> None:
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(shlex.split(compiler)[0]) is None:
            raise SystemExit(
                f"infinity's core is compiled here, and there is no {compiler}: install a C++17"
                " compiler (g++), or set CXX"
            )
        folder = ROOT.resolve() / "build" / "objects" / self.plat_name
        folder.mkdir(parents=True, exist_ok=True)
        rules = folder / f"{self._python()}.ninja"
        rules.write_text(self._ninja_file())
        command = [Path(ninja.BIN_DIR) / "ninja", "-C", folder, "-f", rules.name]
        self._tell(subprocess.run([*command, "-n"], capture_output=True, text=True).stdout)
        environment = {"NINJA_STATUS": "[%f/%t, %es] ", **os.environ}
        subprocess.run(command, check=True, env=environment)
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a process that has it open keeps what it has
            shutil.copy2(folder / self._module(extension), target)

    def _tell(self, dry_run: str) -> None:
        """Prints what is going to be compiled, and how long it takes."""
        sources = re.findall(r"^\[.*\] (\S+\.(?:cpp|cu))(?: \w+)?$", dry_run, re.MULTILINE)
        if not sources:
            return
        cores = len(os.sched_getaffinity(0))
        times = {".cu": len(gpus())}
        seconds = sum(
            SECONDS.get(each.name, 2) * times.get(each.suffix, 1) for each in map(Path, sources)
        )
        minutes = math.ceil(seconds / cores / 60)
        print(
            f"files to compile: {len(sources)}, on {cores} processors: about {minutes} min"
            + (
                ", INFINITY_CUDA=0 leaves the GPU's kernels out"
                if any(each.endswith(".cu") for each in sources)
                else ""
            ),
            flush=True,
        )

    def _python(self) -> str:
        """Returns the name of the Python that is built for, as its modules have it."""
        return self.get_ext_filename("_").split(".")[1]

    def _module(self, extension: Pybind11Extension) -> Path:
        """Returns where the linked module is kept, below the folder of objects."""
        return Path(self._python(), Path(self.get_ext_filename(extension.name)).name)

    def _ninja_file(self) -> str:
        includes = [
            f"-I{path}"
            for path in [kept_pybind11(), *self.compiler.include_dirs, *self.include_dirs]
        ]
        targets = [f"-gencode=arch=compute_{each.partition('_')[2]},code={each}" for each in gpus()]
        lines = [
            f"cxx = {os.environ.get('CXX', 'c++')}",
            f"python = {shlex.join(includes)}",
            f"nvcc = {find_nvcc()}",
            f"nvflags = {shlex.join([*NVCC_FLAGS, *targets, f'-I{CSRC}'])}",
            "rule compile",
            "  command = $cxx -MMD -MF $out.d $flags $unit -c $in -o $out",
            "  depfile = $out.d",
            "  description = $name",
            "rule cuda",
            "  command = $nvcc -MMD -MF $out.d $nvflags $unit -c $in -o $out",
            "  depfile = $out.d",
            "  description = $name",
            "rule link",
            f"  command = $cxx -shared $in -o $out {os.environ.get('LDFLAGS', '')} $links",
            "  description = $out",
        ]
        for extension in self.extensions:
            defines = [f"-D{name}={value}" for name, value in extension.define_macros]
            paths = [f"-I{path}" for path in extension.include_dirs]
            flags = ["-fPIC", "-DNDEBUG", *defines, *paths, *extension.extra_compile_args]
            objects = []
            for source in extension.sources:
                name = Path(source).name
                place = self._python() if name == BINDINGS else "any"
                rule = "cuda" if name.endswith(".cu") else "compile"
                own = ["-O1"] if name == BINDINGS else UNIT_FLAGS.get(name, [])
                for unit in UNITS.get(name, [""]):
                    known = f"{source.replace('/', '_')}{unit}"
                    objects.append(f"{place}/{extension.name}/{known}.o")
                    lines += [
                        f"build {objects[-1]}: {rule} {ROOT.resolve() / source}",
                        f"  name = {source} {unit}".rstrip(),
                        f"  flags = {shlex.join(flags)}{' $python' if name == BINDINGS else ''}",
                        f"  unit = {shlex.join([f'-DINFINITY_UNIT=k{unit}'] if unit else own)}",
                    ]
            lines += [
                f"build {self._module(extension)}: link {' '.join(objects)}",
                f"  links = {shlex.join(extension.extra_link_args)}",
            ]
        return "\n".join([*lines, ""])


def kept_pybind11() -> Path:
    """Returns a folder with pybind11's headers whose path stays: pip installs them to another one
    for each build, and then everything that includes them would be compiled again."""
    kept = ROOT.resolve() / "build" / f"pybind11-{pybind11.__version__}"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            shutil.copytree(pybind11.get_include(), Path(folder, "include")).rename(kept)
    return kept


# -fmad=false: no contraction, as on the processor.
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-Xcompiler",
    "-fPIC,-Wall,-pthread",
    "-DNDEBUG",
]


def gpus() -> list[str]:
    """What nvcc compiles for: sm_* machine code, compute_* PTX."""
    return (os.environ.get("INFINITY_CUDA_ARCH") or present_gpus()).replace(" ", "").split(",")


@functools.cache
def present_gpus() -> str:
    """This machine's GPUs, as far as nvcc makes machine code for them; else PTX."""
    told = []
    for command in (
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
        [find_nvcc() or "nvcc", "--list-gpu-code"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            return ANY_GPU
        found = re.findall(r"^(?:sm_)?(\d+)$", done.stdout.replace(".", ""), re.MULTILINE)
        told.append({f"sm_{number}" for number in found if int(number) >= 80})
    here, known = told
    return ",".join(sorted(here)) if here and here <= known else ANY_GPU


def toolkit(nvcc: str) -> Path:
    """The folder that nvcc takes its own parts from; the one on the PATH may be a script."""
    told = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True
    ).stderr
    top = next(
        (line.partition("TOP=")[2].strip() for line in told.splitlines() if "TOP=" in line), ""
    )
    return Path(top or Path(nvcc).resolve().parent.parent).resolve()


def cuda_extension(nvcc: str) -> Pybind11Extension:
    """The description of `infinity._cuda`. The runtime is linked in: nothing of CUDA has to be
    there to import it."""
    places = ("lib64", "lib", "targets/*/lib")
    found = [
        path.parent
        for place in places
        for path in toolkit(nvcc).glob(f"{place}/libcudart_static.a")
    ]
    if not found:
        raise SystemExit(
            f"{toolkit(nvcc)} has no libcudart_static.a: install CUDA's runtime, or build with"
            " INFINITY_CUDA=0"
        )
    return Pybind11Extension(
        "infinity._cuda",
        CUDA_SOURCES,
        include_dirs=[CSRC],
        cxx_std=17,
        include_pybind11=False,
        define_macros=[("INFINITY_CUDA_TARGETS", '"' + " ".join(gpus()) + '"')],
        extra_compile_args=["-O2", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=[f"-L{found[0]}", "-lcudart_static", "-ldl", "-lrt", "-pthread"],
    )


def extension() -> Pybind11Extension:
    """The description of `infinity._C` for this machine."""
    sources = [source for source in SOURCES if Path(source).name not in NOT_HERE]
    core = Pybind11Extension(
        "infinity._C",
        sources,
        include_dirs=[CSRC],
        cxx_std=17,
        include_pybind11=False,
        # No contraction: a fused multiply-add that one unit's compiler invents would change its
        # bits.
        extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=["-pthread", "-ldl"],
    )
    if X86:
        core.define_macros.append(("INFINITY_HAVE_AVX", "1"))
    if ARM:
        core.define_macros.append(("INFINITY_HAVE_NEON", "1"))
        core.extra_compile_args.append("-Wno-psabi")  # notes on what changed in gcc 10
    if (liburing := find_liburing()) is None:
        print(
            "liburing was not found: building with the thread I/O engine only (install liburing-dev"
            " for io_uring)"
        )
    else:
        compile_args, link_args = liburing
        core.extra_compile_args += compile_args
        core.extra_link_args += link_args
        core.define_macros.append(("INFINITY_HAVE_URING", "1"))
    return core


DOUBLES_MODULE = "tests.support.disks.doubles._native"


def doubles_extension() -> Pybind11Extension:
    """The description of the doubles of disks. They share the core's headers, and none of its
    objects."""
    return Pybind11Extension(
        DOUBLES_MODULE,
        DOUBLES,
        include_dirs=[CSRC],
        cxx_std=17,
        include_pybind11=False,
        extra_compile_args=["-O2", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=["-pthread"],
    )


extensions = [extension()]
if DOUBLES:
    extensions.append(doubles_extension())
if (nvcc := find_nvcc()) is not None:
    extensions.append(cuda_extension(nvcc))
else:
    print("infinity._cuda is not built: no nvcc, or INFINITY_CUDA=0")
setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtension})
