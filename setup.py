"""Builds the native core `infinity._C`: C++17, no torch at build time, liburing from the system
where there is one; and, where nvcc is found, the GPU's kernels as `infinity._cuda`.

In a checkout, builds in place (`build_ext --inplace`, `pip install -e`) also make the doubles of
disks that tests and benchmarks use (csrc/tests/doubles). Wheels have none, and source distributions
do not have their sources.

`LIBURING_ROOT` points at a liburing outside the system's paths. Without liburing the build succeeds
with the thread engine and says so. Each SIMD unit is compiled with its own flags; which one runs is
decided at run time.

`INFINITY_CUDA`: "auto" (the default) builds `_cuda` where there is an nvcc, "0" never, "1" always.
`INFINITY_CUDA_ARCH` names other GPUs than sm_80, sm_90 and, by PTX, later ones: "sm_89", say.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import ninja
from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

ROOT = Path(__file__).parent
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "csrc").glob("*/*.cpp")
    if path.parent.name not in {"tests", "cuda"}
)
X86 = platform.machine() in {"x86_64", "AMD64"}
ARM = platform.machine() in {"aarch64", "arm64"}
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
    "csrc/cuda/scan.cu",
    "csrc/cuda/checksums.cu",
    "csrc/cuda/bindings.cpp",
    "csrc/optim/constants.cpp",
]
GPUS = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]"]
DOUBLES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "csrc/tests/doubles").glob("*.cpp")
)
LIGHT = {"bindings.cpp"}  # only converts: optimising it would take half of the build


def find_liburing() -> tuple[list[str], list[str]] | None:
    """Compile and link arguments for liburing, or None when it is not there."""
    if root := os.environ.get("LIBURING_ROOT"):
        include, library = Path(root, "include"), Path(root, "lib")
        if not (include / "liburing.h").exists():
            raise SystemExit(f"LIBURING_ROOT={root}: no include/liburing.h there")
        return [f"-I{include}"], [f"-L{library}", f"-Wl,-rpath,{library}", "-luring"]
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


class BuildExtension(build_ext):
    """Compiles with ninja: every core at once, and only what changed."""

    def run(self) -> None:
        # Not when options are made final: an editable install says only then that it is one.
        is_wheel = not (self.inplace or self.editable_mode)
        if is_wheel:
            self.extensions = [each for each in self.extensions if each.name != DOUBLES_MODULE]
        super().run()
        if (
            is_wheel
        ):  # it has all that lies in build_lib: the doubles of an earlier build must not stay there
            shutil.rmtree(Path(self.build_lib, "tests"), ignore_errors=True)

    def build_extension(self, extension: Pybind11Extension) -> None:
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(shlex.split(compiler)[0]) is None:
            raise SystemExit(
                f"infinity's core is compiled here, and there is no {compiler}: install a C++17"
                " compiler (g++), or set CXX"
            )
        folder = Path(self.build_temp, extension.name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(self._ninja_file(extension, target))
        subprocess.run([Path(ninja.BIN_DIR) / "ninja", "-C", folder], check=True)

    def _ninja_file(self, extension: Pybind11Extension, target: Path) -> str:
        includes = [
            f"-I{path}"
            for path in [*extension.include_dirs, *self.compiler.include_dirs, *self.include_dirs]
        ]
        defines = [f"-D{name}={value}" for name, value in extension.define_macros]
        flags = shlex.join(
            ["-fPIC", "-DNDEBUG", *defines, *includes, *extension.extra_compile_args]
        )
        lines = [
            f"cxx = {os.environ.get('CXX', 'c++')}",
            f"flags = {flags}",
            f"links = {shlex.join(extension.extra_link_args)}",
            "rule compile",
            "  command = $cxx -MMD -MF $out.d $flags $unit -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = $in",
            "rule link",
            "  command = $cxx -shared $in -o $out $links",
            "  description = $out",
            f"nvcc = {find_nvcc()}",
            f"nvflags = {shlex.join([*NVCC_FLAGS, *gpus(), *includes])}",
            "rule cuda",
            "  command = $nvcc -MMD -MF $out.d $nvflags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = $in",
        ]
        objects = []
        for source in extension.sources:
            objects.append(source.replace("/", "_") + ".o")
            name = Path(source).name
            if name.endswith(".cu"):
                lines.append(f"build {objects[-1]}: cuda {ROOT.resolve() / source}")
                continue
            unit = ["-O1"] if name in LIGHT else UNIT_FLAGS.get(name, [])
            lines += [
                f"build {objects[-1]}: compile {ROOT.resolve() / source}",
                f"  unit = {shlex.join(unit)}",
            ]
        lines += [f"build {target}: link {' '.join(objects)}", f"default {target}", ""]
        return "\n".join(lines)


# -fmad=false: no contraction, as on the processor.
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-Xcompiler",
    "-fPIC,-Wall,-pthread",
    "--threads",
    "2",
    "-DNDEBUG",
]


def gpus() -> list[str]:
    """nvcc's arguments for what to compile for."""
    named = os.environ.get("INFINITY_CUDA_ARCH")
    return [f"-arch={named}"] if named else GPUS


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
        include_dirs=[str(ROOT.resolve() / "csrc")],
        cxx_std=17,
        extra_compile_args=["-O2", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=[f"-L{found[0]}", "-lcudart_static", "-ldl", "-lrt", "-pthread"],
        depends=[str(path) for path in (ROOT / "csrc").glob("*/*.h")],
    )


def extension() -> Pybind11Extension:
    """The description of `infinity._C` for this machine."""
    sources = [source for source in SOURCES if Path(source).name not in NOT_HERE]
    core = Pybind11Extension(
        "infinity._C",
        sources,
        include_dirs=[str(ROOT.resolve() / "csrc")],
        cxx_std=17,
        # No contraction: a fused multiply-add that one unit's compiler invents would change its
        # bits.
        extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=["-pthread", "-ldl"],
        depends=[str(path) for path in (ROOT / "csrc").glob("*/*.h")],
    )
    if X86:
        core.define_macros.append(("INFINITY_HAVE_AVX", "1"))
    if ARM:
        core.define_macros.append(("INFINITY_HAVE_NEON", "1"))
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
        include_dirs=[str(ROOT.resolve() / "csrc")],
        cxx_std=17,
        extra_compile_args=["-O2", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=["-pthread"],
        depends=[str(path) for path in (ROOT / "csrc").glob("**/*.h")],
    )


extensions = [extension()]
if DOUBLES:
    extensions.append(doubles_extension())
if (nvcc := find_nvcc()) is not None:
    extensions.append(cuda_extension(nvcc))
else:
    print("infinity._cuda is not built: no nvcc, or INFINITY_CUDA=0")
setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtension})
