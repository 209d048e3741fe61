"""What the compiler makes of the GPU's kernels: nothing spilled, nothing contracted, vectors moved
whole. No GPU is needed, only nvcc.

Words used here:

**unit**: what is compiled at once: a source, or the step of one rule
**image**: a unit as PTX, and what ptxas says of each kernel for each GPU. PTX is of two kinds: the
older one is built where no GPU is at hand, the newer one into wheels
"""

from __future__ import annotations

import functools
import re
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
GPUS = {  # of PTX
    "compute_80": ("sm_80", "sm_89"),
    "compute_90": ("sm_90", "sm_100", "sm_120"),
}
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
# Operations whose result is rounded, with their qualifiers
ROUNDS = re.compile(
    r"\b(add|sub|mul|fma|mad|div|sqrt|rcp|rsqrt|ex2|lg2)\.([a-z0-9.]*f(?:16|32|64)\S*)"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),  # the first test compiles them all
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="not run: there is no nvcc here"),
]


@dataclass
class Image:
    ptx: str
    told: dict[str, str]  # by GPU, as ptxas tells it

    def kernels(self) -> dict[str, str]:
        """Returns the PTX of each kernel by its name."""
        parts = re.split(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+(\w+)\(", self.ptx, flags=re.M)
        return dict(zip(parts[1::2], parts[2::2], strict=True))


@functools.cache
def build() -> dict[str, Any]:
    """Returns what `setup.py` defines."""
    with mock.patch("setuptools.setup"):
        return runpy.run_path(str(ROOT / "setup.py"))


def compiled(source: Path, unit: str, kind: str, folder: Path) -> Image:
    ptx = folder / f"{source.stem}{unit}.{kind}.ptx"
    defined = [f"-DINFINITY_UNIT=k{unit}"] if unit else []
    command = ["nvcc", *build()["NVCC_FLAGS"], *defined, f"-I{ROOT / 'csrc'}", f"-arch={kind}"]
    command += ["-ptx", str(source), "-o", str(ptx)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    told = {}
    for gpu in GPUS[kind]:
        command = ["nvcc", f"-arch={gpu}", "-cubin", "-Xptxas", "-v", ptx, "-o", f"{ptx}.{gpu}"]
        done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
        told[gpu] = done.stderr
    return Image(ptx.read_text(), told)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> dict[str, Image]:
    """Those of all units, by source, unit and kind."""
    folder, units = tmp_path_factory.mktemp("images"), build()["UNITS"]
    wanted = [
        (source, unit, kind)
        for source in SOURCES
        for unit in units.get(source.name, [""])
        for kind in GPUS
    ]
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda each: compiled(*each, folder), wanted)
        return {(source.name, unit, kind): one for (source, unit, kind), one in zip(wanted, made)}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Image:
    """That of a kernel with each fault."""
    folder = tmp_path_factory.mktemp("faulty")
    source = folder / "faulty.cu"
    source.write_text(
        "struct Table { float x[32]; };\n"
        "__global__ void step_quads(float* p, const float* g, int at, Table given) {\n"
        "  Table t = given;\n"
        "  for (int i = 0; i < 32; ++i) t.x[(i * at) % 32] += g[i];\n"
        "  p[0] = __fdividef(p[0], t.x[at]) + __fsqrt_rz(p[1]);\n"
        "}\n"
    )
    return compiled(source, "", "compute_80", folder)


def frames(told: str) -> list[int]:
    return [int(found) for found in re.findall(r"(\d+) bytes stack frame", told)]


def spills(told: str) -> list[int]:
    return [int(found) for found in re.findall(r"(\d+) bytes spill stores", told)]


def inexact(ptx: str) -> set[str]:
    """Returns the operations that round other than to the nearest, or flush subnormals."""
    return {
        match[0] for match in ROUNDS.finditer(ptx) if not re.match(r"rn\.(?!.*(ftz|sat))", match[2])
    }


def widest(body: str) -> int:
    """Returns the bits of the widest load from global memory."""
    loads = re.findall(r"ld\.global[a-z.]*?(?:\.v(\d))?\.[a-z]+(\d+)\b", body)
    return max(int(count or 1) * int(bits) for count, bits in loads)


def test_every_gpu_is_compiled_for(images):
    for name, image in images.items():
        assert image.kernels(), name
        for gpu, told in image.told.items():
            assert told.count(f"for '{gpu}'") == len(image.kernels()), (name, gpu)


def test_a_unit_has_the_kernels_of_its_rule_alone(images):
    """As many as each other one, and all with the rule's name: at the first use of a rule a driver
    compiles no other's."""
    counts = set()
    for (source, unit, kind), image in images.items():
        if source == "step.cu":
            names = list(image.kernels())
            assert all(f"{len(unit)}{unit}" in name for name in names), (unit, kind)
            counts.add(len(names))
    assert len(counts) == 1 and counts.pop() > 20


def test_no_kernel_has_a_stack_frame(images, faulty):
    for name, image in images.items():
        for gpu, told in image.told.items():
            assert set(frames(told)) == {0}, (name, gpu)
    assert max(frames(faulty.told["sm_80"])) > 0


def test_no_kernel_spills(images):
    for name, image in images.items():
        for gpu, told in image.told.items():
            assert spills(told), (name, gpu)
            assert max(spills(told)) == 0, (name, gpu)
    assert spills("    0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads") == [8]


def test_every_operation_rounds_to_the_nearest(images, faulty):
    """So neither nvcc nor a driver that compiles the PTX may contract or flush."""
    for name, image in images.items():
        assert not inexact(image.ptx), name
    assert ROUNDS.search(images["step.cu", "AdamW", "compute_80"].ptx)
    assert any("div" in each for each in inexact(faulty.ptx))
    assert any("sqrt.rz" in each for each in inexact(faulty.ptx))


def test_every_step_moves_vectors(images, faulty):
    """A lane loads four elements of an array at once: 128 bits, and 64 where no array is fp32."""
    steps = [image for (source, *_), image in images.items() if source == "step.cu"]
    for name, body in [kernel for image in steps for kernel in image.kernels().items()]:
        assert widest(body) == (128 if ".f32" in _loads(body) else 64), name
    assert widest(faulty.kernels()["_Z10step_quadsPfPKfi5Table"]) == 32


def _loads(body: str) -> str:
    return " ".join(re.findall(r"ld\.global\S*", body))
