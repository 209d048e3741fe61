"""gpu: the kernels, registration and copies of a GPU, each beside its ceiling. Needs one.

ceiling of a kernel         what a copy inside the device moves in the same time
ceiling of copies           the same bytes in one direction, pinned by torch
registration                against torch's own pinned allocation

Arrays have random values: zeros and ones are faster than what a training has. Moments begin as
zeros; the step that warms up gives them values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from infinity import native

from ...core.machine.accelerator import Accelerator, make_device
from ...core.machine.traffic import Traffic
from ...errors import ConfigError
from .results import Measured, row
from .settings import Settings

TABLE_ELEMENTS = 1 << 20  # of random values, which are repeated
PARAMETERS = 256 * 1024 * 1024
FORMS = {  # name -> weight, master, gradient, moments
    "split": (torch.bfloat16, native.Master.SPLIT, torch.bfloat16, torch.float32),
    "fp32": (torch.float32, native.Master.OWN, torch.float32, torch.float32),
    "int8": (torch.bfloat16, native.Master.SPLIT, torch.bfloat16, torch.uint8),
}


def measure(settings: Settings) -> Measured:
    """Measures rows ``gpu.adam.*``, ``gpu.scan`` (GB/s), ``gpu.pin`` (GiB/s),
    ``gpu.copy.in|out|both`` (GB/s)."""
    with closing(this_machines("gpu")) as gpu:
        count = settings.scaled(PARAMETERS, 4096)
        bandwidth = _copy_bandwidth(gpu, settings)
        rows = [_adam(gpu, name, count, settings, bandwidth) for name in FORMS]
        rows += [_scan(gpu, count, settings, bandwidth), _pin(gpu, settings)]
        rows += _copies(gpu, settings)
        name = torch.get_device_module(gpu.where).get_device_name(0)
        return Measured(rows, [f"device: {name}, driver {native.cuda_driver()[0]}"])


def this_machines(theme: str) -> Any:
    """Makes the device of this machine's accelerator, for ``theme``. Raises ConfigError if there is
    none, or no kernels for it."""
    if not torch.accelerator.is_available():
        raise ConfigError(f"bench {theme} needs a GPU: torch sees none")
    device = make_device(torch.accelerator.current_accelerator(), Traffic())
    if device.kernels is None:
        device.close()
        raise ConfigError(f"bench {theme} needs a GPU: {device.kernels_refusal}")
    return device


def _seconds(gpu: Accelerator, work: Callable[[], None], rounds: int) -> list[float]:
    """Of each round, by events on the current stream, after one to warm up."""
    work()
    seconds = []
    for _ in range(rounds):
        start, end = (gpu.streams.event(timing=True) for _ in range(2))
        start.record(gpu.streams.current())
        work()
        end.record(gpu.streams.current())
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return seconds


def _copy_bandwidth(gpu: Accelerator, settings: Settings) -> list[float]:
    """GB/s read and written by a copy inside the device."""
    source = _random(gpu, settings.scaled(1 << 30, 1), torch.uint8, 4)
    target = torch.empty_like(source)
    return [
        2 * source.numel() / seconds / 1e9
        for seconds in _seconds(gpu, lambda: target.copy_(source), settings.rounds)
    ]


def _random(gpu: Accelerator, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A table of random values, repeated, on the device: drawing all would take the host long."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        table = torch.randn(min(count, TABLE_ELEMENTS), generator=generator).mul_(0.02).to(dtype)
    else:
        info = torch.iinfo(dtype)
        shape = (min(count, TABLE_ELEMENTS),)
        table = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=dtype)
    made = torch.empty(count, dtype=dtype, device=gpu.where)
    table = table.to(gpu.where)
    for part in made.split(TABLE_ELEMENTS):
        part.copy_(table[: part.numel()])
    return made


def _adam(gpu: Accelerator, name: str, count: int, settings: Settings, bandwidth: list[float]):
    weight, master, grad, moments = FORMS[name]
    layout = native.Layout(
        rule=native.Rule.ADAMW,
        weight=native.DTYPES[weight],
        master=master,
        grad=native.DTYPES[grad],
        moments=native.MOMENT_DTYPES[moments],
    )
    arrays = {"weight": _random(gpu, count, weight, 1), "grad": _random(gpu, count, grad, 2)}
    arrays |= {
        moment: torch.zeros(count, dtype=moments, device=gpu.where)
        for moment in ("exp_avg", "exp_avg_sq")
    }
    if master == native.Master.SPLIT:
        arrays["master"] = _random(gpu, count, torch.int16, 3)
    if moments == torch.uint8:
        blocks = count // native.MOMENT_BLOCK
        arrays |= {
            f"{moment}_scale": torch.zeros(blocks, dtype=torch.uint8, device=gpu.where)
            for moment in ("exp_avg", "exp_avg_sq")
        }
    hyper = native.Hyperparameters()
    addresses = {key: array.data_ptr() for key, array in arrays.items()}
    moved = 2 * sum(array.nbytes for array in arrays.values()) - arrays["grad"].nbytes

    def step() -> None:
        gpu.kernels.step(
            layout,
            runs=[native.Run(0, count, hyper)],
            stream=gpu.stream_handle,
            **addresses,
        )

    rates = [moved / seconds / 1e9 for seconds in _seconds(gpu, step, settings.rounds)]
    return row(f"gpu.adam.{name}", "GB/s", rates, ceiling=("a copy inside the device", bandwidth))


def _scan(gpu: Accelerator, count: int, settings: Settings, bandwidth: list[float]):
    grad = _random(gpu, count, torch.bfloat16, 2)
    out = torch.empty(count, dtype=torch.float32, device=gpu.where)
    total, flag = (
        torch.zeros(1, dtype=torch.float64, device=gpu.where),
        torch.zeros(1, device=gpu.where),
    )
    workspace = torch.zeros(
        gpu.kernels.scan_workspace_nbytes(count), dtype=torch.uint8, device=gpu.where
    )

    def scan() -> None:
        gpu.kernels.scan(
            grad=grad.data_ptr(),
            grad_dtype=native.DType.BFLOAT16,
            out=out.data_ptr(),
            out_dtype=native.DType.FLOAT32,
            count=count,
            sum=total.data_ptr(),
            not_finite=flag.data_ptr(),
            workspace=workspace.data_ptr(),
            stream=gpu.stream_handle,
        )

    rates = [
        (grad.nbytes + out.nbytes) / seconds / 1e9
        for seconds in _seconds(gpu, scan, settings.rounds)
    ]
    return row("gpu.scan", "GB/s", rates, ceiling=("a copy inside the device", bandwidth))


def _pin(gpu: Accelerator, settings: Settings):
    """Memory that is mapped and touched already, against as much pinned memory of torch's."""
    ours, theirs, nbytes = [], [], settings.scaled(1 << 28, 1 << 20)
    held = []  # torch gives memory that was dropped again, which costs nothing
    gib = nbytes / (1 << 30)
    for _ in range(settings.rounds):
        region = native.Region(nbytes, True, settings.threads)
        start = time.perf_counter()
        gpu.pin(region)
        ours.append(gib / (time.perf_counter() - start))
        del region
        start = time.perf_counter()
        held.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        theirs.append(gib / (time.perf_counter() - start))
    return row(
        "gpu.pin",
        "GiB/s",
        ours,
        ratios={"torch": sorted(a / b for a, b in zip(ours, theirs))[len(ours) // 2]},
    )


def _copies(gpu: Accelerator, settings: Settings) -> list:
    """Both ways at once between a registered region and the device, against torch's pinned memory
    in one direction."""
    nbytes = settings.scaled(1 << 30, 1 << 20)
    region = native.Region(2 * nbytes, True, settings.threads)
    gpu.pin(region)
    whole = native.tensor_at(region, region.address, 2 * nbytes, torch.uint8)
    host_in, host_out = whole[:nbytes], whole[nbytes:]
    device_in, device_out = (
        torch.empty(nbytes, dtype=torch.uint8, device=gpu.where) for _ in range(2)
    )
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def both() -> None:
        out = gpu.put(
            "out", lambda: host_out.copy_(device_out, non_blocking=True), after=[gpu.now()]
        )
        device_in.copy_(host_in, non_blocking=True)
        out.precede()

    def rates(work: Callable[[], None], moved: int) -> list[float]:
        return [moved / seconds / 1e9 for seconds in _seconds(gpu, work, settings.rounds)]

    limit_in = rates(lambda: device_in.copy_(pinned, non_blocking=True), nbytes)
    limit_out = rates(lambda: pinned.copy_(device_out, non_blocking=True), nbytes)
    return [
        row(
            "gpu.copy.in",
            "GB/s",
            rates(lambda: device_in.copy_(host_in, non_blocking=True), nbytes),
            ceiling=("torch's pinned memory", limit_in),
        ),
        row(
            "gpu.copy.out",
            "GB/s",
            rates(lambda: host_out.copy_(device_out, non_blocking=True), nbytes),
            ceiling=("torch's pinned memory", limit_out),
        ),
        row(
            "gpu.copy.both",
            "GB/s",
            rates(both, 2 * nbytes),
            ceiling=("each direction alone, added", [a + b for a, b in zip(limit_in, limit_out)]),
        ),
    ]
