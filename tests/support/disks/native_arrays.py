"""The native core, arranged for tests: engines, swap files, arrays at their homes, single optimizer
steps.

Words used here:

**home**: where an array's extent lies, ``"memory"`` or ``"file"``.
**form**: a rule and the dtypes of its arrays; what `native.Layout` says, in torch's words.
**arrays**: name -> flat tensor of everything one step reads and writes.
**same bits**: equal bytes; a NaN equals itself and 0.0 differs from -0.0.
"""

from __future__ import annotations

import gc
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import doubles
import pytest
import torch

from infinity import native
from infinity.core.units.flat_param_spec import EVERY_MOMENT
from infinity.ext.class_step.known_elsewhere import BY_RULE

MIB = 1024 * 1024
CHUNK_GRAIN = native.CHECKSUM_NBYTES // 2  # elements: the updater cuts at multiples of it

needs_uring = pytest.mark.skipif(
    bool(native.uring_refusal()), reason=f"io_uring: {native.uring_refusal()}"
)
ENGINES = [pytest.param("uring", marks=needs_uring), "threads"]

Arrays = dict[str, torch.Tensor]


def seeded(seed: int) -> torch.Generator:
    """A generator that tells its seed, for the report of a failed test."""
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------------------------------
# Bytes
# --------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def different(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the arrays whose bits differ."""
    assert left.keys() == right.keys()
    return [name for name in left if not same_bits(left[name], right[name])]


def from_bits(words: Sequence[int] | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unsigned integers -> the floats that they are the representation of."""
    words = torch.as_tensor(words, dtype=torch.int64)
    if dtype.itemsize == 2:
        return (
            words.sub(1 << 16, alpha=1).where(words >= 1 << 15, words).to(torch.int16).view(dtype)
        )
    return words.sub(1 << 32, alpha=1).where(words >= 1 << 31, words).to(torch.int32).view(dtype)


def random_bytes(nbytes: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


# --------------------------------------------------------------------------------------------------
# Memory and disk
# --------------------------------------------------------------------------------------------------


class Staging:
    """A region and the uint8 tensor over it."""

    def __init__(self, nbytes: int):
        self.region = native.Region(nbytes, huge_pages=False, touch_threads=0)
        self.bytes = native.tensor_at(
            self.region, self.region.address, self.region.nbytes, torch.uint8
        )

    @property
    def address(self) -> int:
        return self.region.address

    @property
    def nbytes(self) -> int:
        return self.region.nbytes


class Disk:
    """An engine with one swap file, and moves of whole tensors that wait and verify. With ``pages``
    the checksums of extents lie in tables behind them, and so many blocks of them in memory."""

    def __init__(
        self,
        folder: Path,
        kind: str = "threads",
        *,
        nbytes: int = 4 * MIB,
        faults: doubles.FaultPlan | None = None,
        pages: int = 0,
        **options,
    ):
        self.path = folder / f"swap{len(list(folder.iterdir()))}"
        self.engine = native.IoEngine(kind=kind, layer=doubles.layer(faults), **options)
        self.file = self.engine.create_file(str(self.path), nbytes)
        self._used, self._sums = (
            0,
            native.make_sum_cache(pages * native.BLOCK_NBYTES) if pages else None,
        )

    def extent(self, nbytes: int, *, gap: int = 0) -> native.Extent:
        """The next ``nbytes`` of the file, ``gap`` bytes behind the last extent."""
        at, taken = self._used + gap, nbytes
        if self._sums is None:
            extent = native.Extent.in_file(self.file, at, nbytes)
        else:
            volume = native.Volume()
            volume.lay_out(MIB, [1 << 20], 0, 1 << 40)
            volume.set_files([self.file])
            extent, taken = native.extent_in(volume, at, nbytes, self._sums)
        self._used = at + taken
        return extent

    def write(self, extent: native.Extent, data: torch.Tensor, offset: int = 0) -> None:
        data = data.view(torch.uint8)
        staging = Staging(data.numel())
        staging.bytes[: data.numel()] = data
        self.engine.write(extent, offset, staging.address, data.numel()).wait()

    def read(
        self, extent: native.Extent, offset: int = 0, nbytes: int | None = None
    ) -> torch.Tensor:
        """Verified bytes, as uint8."""
        nbytes = extent.nbytes - offset if nbytes is None else nbytes
        staging = Staging(nbytes)
        self.engine.read(extent, offset, staging.address, nbytes).wait()
        self.engine.verify(extent, offset, staging.address, nbytes)
        return staging.bytes[:nbytes].clone()

    def raw(self, extent: native.Extent) -> torch.Tensor:
        """What the file holds, read by the operating system: neither checksums nor injected
        faults."""
        with open(self.path, "rb") as file:
            file.seek(extent.offset)
            return torch.frombuffer(bytearray(file.read(extent.nbytes)), dtype=torch.uint8)

    def change_byte(self, at: int) -> None:
        """Flips one bit of the byte at ``at`` of the file, behind the engine's back."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            value = os.pread(descriptor, 1, at)[0]
            os.pwrite(descriptor, bytes([value ^ 0x10]), at)
        finally:
            os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# Optimizer steps
# --------------------------------------------------------------------------------------------------

MASTER_DTYPES = {native.Master.SPLIT: torch.int16, native.Master.FLOAT32: torch.float32}


@dataclass(frozen=True)
class Form:
    """A rule and the dtypes of its arrays."""

    rule: native.Rule = native.Rule.ADAMW
    weight: torch.dtype = torch.float32
    master: native.Master = native.Master.OWN
    grad: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32

    def __str__(self) -> str:
        short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        dtypes = f"{short[self.weight]}-grad_{short[self.grad]}-moments_{short[self.moments]}"
        return f"{self.rule.name}-{self.master.name}-{dtypes}"

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        dtypes = {"weight": self.weight}
        if self.master != native.Master.OWN:
            dtypes["master"] = MASTER_DTYPES[self.master]
        known = BY_RULE[self.rule]
        its = {
            array
            for name, array in known.moments.items()
            if known.only_with.get(name) not in known.instead
        }
        dtypes |= {name: self.moments for name in EVERY_MOMENT if name in its}
        return dtypes | {"grad": self.grad}

    @property
    def layout(self) -> native.Layout:
        return native.Layout(
            rule=self.rule,
            weight=native.DTYPES[self.weight],
            master=self.master,
            grad=native.DTYPES[self.grad],
            moments=native.DTYPES[self.moments],
        )


def every_form() -> list[Form]:
    """Every combination that has a kernel."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    own, split, whole = native.Master.OWN, native.Master.SPLIT, native.Master.FLOAT32
    weights = [(fp32, own, fp32)]
    weights += [(bf16, master, grad) for master in (own, split, whole) for grad in (bf16, fp32)]
    weights += [(fp16, master, grad) for master in (own, whole) for grad in (fp16, fp32)]
    return [
        Form(rule, *weight, moments)
        for rule in BY_RULE
        for weight in weights
        for moments in (fp32, bf16)
    ]


def encode(form: Form, master: torch.Tensor) -> Arrays:
    """fp32 masters -> weight and, where there is one, master."""
    if form.master == native.Master.OWN:
        return {"weight": master.to(form.weight)}
    if form.master == native.Master.FLOAT32:
        return {"weight": master.to(form.weight), "master": master.clone()}
    weight, low = (
        torch.empty_like(master, dtype=torch.bfloat16),
        torch.empty_like(master, dtype=torch.int16),
    )
    native.split_master(master, weight, low)
    return {"weight": weight, "master": low}


def decode(form: Form, arrays: Arrays) -> torch.Tensor:
    """The fp32 masters of ``arrays``."""
    if form.master == native.Master.OWN:
        return arrays["weight"].float()
    if form.master == native.Master.FLOAT32:
        return arrays["master"]
    return native.join_master(arrays["weight"], arrays["master"])


def random_arrays(form: Form, numel: int, generator: torch.Generator) -> Arrays:
    """Ordinary values: weights near 1, gradients near 0.1, moments as after some steps."""
    arrays = encode(form, torch.randn(numel, generator=generator))
    scales = {"exp_avg": 0.1, "exp_avg_sq": 0.01, "moment_3": 0.02, "moment_4": 0.1, "grad": 0.1}
    for name, dtype in form.dtypes.items():
        if name in scales:
            value = scales[name] * torch.randn(numel, generator=generator)
            arrays[name] = (value.abs() if name == "exp_avg_sq" else value).to(dtype)
    return arrays


def hyper(**values) -> native.Hyperparameters:
    """`native.Hyperparameters` with these fields."""
    made = native.Hyperparameters()
    for name, value in values.items():
        setattr(made, name, value)
    return made


Runs = Sequence[tuple[int, int, native.Hyperparameters]]


class Unit:
    """One unit's arrays at their homes; memory homes live as long as this does."""

    def __init__(
        self, form: Form, arrays: Arrays, *, disk: Disk | None = None, in_file: Sequence[str] = ()
    ):
        self.form, self.disk = form, disk
        self.count = arrays["weight"].numel()
        self.extents: dict[str, native.Extent] = {}
        self._tensors: Arrays = {}
        for name, dtype in form.dtypes.items():
            assert arrays[name].dtype == dtype and arrays[name].numel() == self.count
            nbytes = self.count * dtype.itemsize
            if name in in_file:
                self.extents[name] = disk.extent(nbytes)
                disk.write(self.extents[name], arrays[name])
            else:
                staging = Staging(nbytes)
                staging.bytes[:nbytes] = arrays[name].view(torch.uint8)
                self._tensors[name] = staging.bytes.view(dtype)
                self.extents[name] = native.Extent.in_memory(staging.address, nbytes)

    def update(
        self, runs: Runs, *, version: int = 1, after: native.Ticket | None = None, label: int = 0
    ) -> native.UnitUpdate:
        get = self.extents.get
        return native.UnitUpdate(
            layout=self.form.layout,
            count=self.count,
            weight=get("weight"),
            master=get("master"),
            grad=get("grad"),
            **{name: get(name) for name in EVERY_MOMENT},
            runs=[native.Run(*run) for run in runs],
            version=version,
            after=after,
            label=label,
        )

    def whole(self, made: native.Hyperparameters, **options) -> native.UnitUpdate:
        """An update of every element with one set of hyperparameters."""
        return self.update([(0, self.count, made)], **options)

    def arrays(self, *, raw: bool = False) -> Arrays:
        """Copies of all arrays; ``raw`` takes those in the file as they are there, unverified."""
        found = {}
        for name, dtype in self.form.dtypes.items():
            if name in self._tensors:
                found[name] = self._tensors[name].clone()
            else:
                read = self.disk.raw if raw else self.disk.read
                found[name] = read(self.extents[name]).view(dtype)
        return found


class MemorySteps:
    """Steps arrays at home in memory: no slots, no disk. One updater per thread count, kept for the
    next call."""

    def __init__(self) -> None:
        self._engine = native.IoEngine(kind="threads", threads=1)
        self._updaters: dict[int, native.Updater] = {}

    def __call__(self, form: Form, arrays: Arrays, runs: Runs, *, threads: int = 1) -> Arrays:
        """The arrays after one step; ``arrays`` themselves stay."""
        if threads not in self._updaters:
            self._updaters[threads] = native.Updater(self._engine, 0, 0, 0, threads)
        unit = Unit(form, arrays)
        self._updaters[threads].submit(unit.update(runs)).wait()
        return unit.arrays()

    def whole(
        self, form: Form, arrays: Arrays, made: native.Hyperparameters, *, threads: int = 1
    ) -> Arrays:
        return self(form, arrays, [(0, arrays["weight"].numel(), made)], threads=threads)


# --------------------------------------------------------------------------------------------------
# Calls that may kill the process
# --------------------------------------------------------------------------------------------------


def is_mapped(address: int) -> bool:
    """Tells whether this process has memory at ``address``."""
    spans = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def outcome_in_child(action: Callable[[], object], *, seconds: float = 60) -> str:
    """Runs ``action`` in a forked child: its result as text, ``"<error's type>: <message>"``, or
    how it died."""
    reading, writing = os.pipe()
    gc.collect()
    pid = os.fork()
    if pid == 0:
        gc.disable()  # the parent's engines have no threads here: they must not be collected
        torch.set_num_threads(
            1
        )  # torch's own threads are the parent's too: work for them would never be done
        os.close(reading)
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 2
        )  # "terminate called after ..." is what we report, not stderr
        try:
            text = str(action())
        except BaseException as error:  # noqa: BLE001 - the outcome is the error
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:60000])
        os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
            return f"hung: no end within {seconds:.0f} s"
        text = os.read(reading, 65536).decode()
    finally:
        os.close(reading)
        _, status = os.waitpid(pid, 0)
    return (
        f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else text
    )
