"""Builds the native core `infinity._C`: C++17, no torch at build time, liburing from the system where there is one.

`LIBURING_ROOT` points at a liburing outside the system's paths. Without liburing the build succeeds with the thread
engine and says so. Each SIMD unit is compiled with its own flags; which one runs is decided at run time.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path

import ninja
from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

ROOT = Path(__file__).parent
SOURCES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*/*.cpp") if path.parent.name not in {"tests", "cuda"}
)
X86 = platform.machine() in {"x86_64", "AMD64"}
ARM = platform.machine() in {"aarch64", "arm64"}
# gcc 12 reports the undefined source operand inside its own AVX-512 headers.
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
UNIT_FLAGS = {
    "unit_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "unit_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", *QUIET],
}
NOT_HERE = (set() if X86 else set(UNIT_FLAGS)) | (set() if ARM else {"unit_neon.cpp"})
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
        flags = shlex.split(subprocess.run(query, check=True, capture_output=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return None
    links = [flag for flag in flags if flag.startswith(("-l", "-L", "-Wl"))]
    return [flag for flag in flags if flag not in links], links


class BuildExtension(build_ext):
    """Compiles with ninja: every core at once, and only what changed."""

    def build_extension(self, extension: Pybind11Extension) -> None:
        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(self._ninja_file(extension, target))
        subprocess.run([Path(ninja.BIN_DIR) / "ninja", "-C", folder], check=True)

    def _ninja_file(self, extension: Pybind11Extension, target: Path) -> str:
        includes = [f"-I{path}" for path in [*extension.include_dirs, *self.compiler.include_dirs, *self.include_dirs]]
        defines = [f"-D{name}={value}" for name, value in extension.define_macros]
        flags = shlex.join(["-fPIC", "-DNDEBUG", *defines, *includes, *extension.extra_compile_args])
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
        ]
        objects = []
        for source in extension.sources:
            objects.append(source.replace("/", "_") + ".o")
            name = Path(source).name
            unit = ["-O1"] if name in LIGHT else UNIT_FLAGS.get(name, [])
            lines += [f"build {objects[-1]}: compile {ROOT.resolve() / source}", f"  unit = {shlex.join(unit)}"]
        lines += [f"build {target}: link {' '.join(objects)}", f"default {target}", ""]
        return "\n".join(lines)


def extension() -> Pybind11Extension:
    """The description of `infinity._C` for this machine."""
    sources = [source for source in SOURCES if Path(source).name not in NOT_HERE]
    core = Pybind11Extension(
        "infinity._C",
        sources,
        include_dirs=[str(ROOT.resolve() / "csrc")],
        cxx_std=17,
        # No contraction: a fused multiply-add that one unit's compiler invents would change its bits.
        extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=["-pthread"],
        depends=[str(path) for path in (ROOT / "csrc").glob("*/*.h")],
    )
    if X86:
        core.define_macros.append(("INFINITY_HAVE_AVX", "1"))
    if ARM:
        core.define_macros.append(("INFINITY_HAVE_NEON", "1"))
    if (liburing := find_liburing()) is None:
        print("liburing was not found: building with the thread I/O engine only (install liburing-dev for io_uring)")
    else:
        compile_args, link_args = liburing
        core.extra_compile_args += compile_args
        core.extra_link_args += link_args
        core.define_macros.append(("INFINITY_HAVE_URING", "1"))
    return core


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
