"""gpu: the kernels, registration and copies of a GPU, each beside its ceiling. Needs one.

ceiling of a kernel         what a copy inside the device moves in the same time
ceiling of copies           the same bytes in one direction, pinned by torch
registration                against torch's own pinned allocation
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from infinity import native
from infinity.bench.results import Measured, row
from infinity.bench.settings import Settings
from infinity.errors import ConfigError

PARAMETERS = 256 * 1024 * 1024
FORMS = {  # name -> weight, master, gradient, moments
    "split": (torch.bfloat16, native.Master.SPLIT, torch.bfloat16, torch.float32),
    "fp32": (torch.float32, native.Master.OWN, torch.float32, torch.float32),
    "int8": (torch.bfloat16, native.Master.SPLIT, torch.bfloat16, torch.uint8),
}


def measure(settings: Settings) -> Measured:
    """Measures rows ``gpu.adam.*``, ``gpu.scan`` (GB/s), ``gpu.pin`` (GiB/s),
    ``gpu.copy.in|out|both`` (GB/s)."""
    kernels, refusal = native.gpu_kernels()
    if kernels is None or not torch.cuda.is_available():
        raise ConfigError(f"bench gpu needs a GPU: {refusal or 'torch sees none'}")
    count = settings.scaled(PARAMETERS, 4096)
    bandwidth = _copy_bandwidth(settings)
    rows = [_adam(kernels, name, count, settings, bandwidth) for name in FORMS]
    rows += [_scan(kernels, count, settings, bandwidth), _pin(settings), *_copies(settings)]
    return Measured(
        rows, [f"device: {torch.cuda.get_device_name(0)}, driver {native.cuda_driver()[0]}"]
    )


def _seconds(work: Callable[[], None], rounds: int) -> list[float]:
    """Of each round, by events on the current stream, after one to warm up."""
    work()
    found = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return found


def _copy_bandwidth(settings: Settings) -> list[float]:
    """GB/s read and written by a copy inside the device."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return [
        2 * source.numel() / seconds / 1e9
        for seconds in _seconds(lambda: target.copy_(source), settings.rounds)
    ]


def _adam(kernels, name: str, count: int, settings: Settings, bandwidth: list[float]):
    weight, master, grad, moments = FORMS[name]
    layout = native.Layout(
        rule=native.Rule.ADAMW,
        weight=native.DTYPES[weight],
        master=master,
        grad=native.DTYPES[grad],
        moments=native.MOMENT_DTYPES[moments],
    )
    arrays = {
        "weight": torch.zeros(count, dtype=weight, device="cuda"),
        "grad": torch.ones(count, dtype=grad, device="cuda"),
    }
    arrays |= {
        moment: torch.zeros(count, dtype=moments, device="cuda")
        for moment in ("exp_avg", "exp_avg_sq")
    }
    if master == native.Master.SPLIT:
        arrays["master"] = torch.zeros(count, dtype=torch.int16, device="cuda")
    if moments == torch.uint8:
        blocks = count // native.MOMENT_BLOCK
        arrays |= {
            f"{moment}_scale": torch.zeros(blocks, dtype=torch.uint8, device="cuda")
            for moment in ("exp_avg", "exp_avg_sq")
        }
    hyper = native.Hyperparameters()
    addresses = {key: array.data_ptr() for key, array in arrays.items()}
    moved = 2 * sum(array.nbytes for array in arrays.values()) - arrays["grad"].nbytes

    def step() -> None:
        kernels.step(
            layout,
            runs=[native.Run(0, count, hyper)],
            stream=torch.cuda.current_stream().cuda_stream,
            **addresses,
        )

    rates = [moved / seconds / 1e9 for seconds in _seconds(step, settings.rounds)]
    return row(f"gpu.adam.{name}", "GB/s", rates, ceiling=("a copy inside the device", bandwidth))


def _scan(kernels, count: int, settings: Settings, bandwidth: list[float]):
    grad, out = (
        torch.ones(count, dtype=torch.bfloat16, device="cuda"),
        torch.empty(count, dtype=torch.float32, device="cuda"),
    )
    total, flag = torch.zeros(1, dtype=torch.float64, device="cuda"), torch.zeros(1, device="cuda")
    workspace = torch.zeros(kernels.scan_workspace_nbytes(count), dtype=torch.uint8, device="cuda")

    def scan() -> None:
        kernels.scan(
            grad=grad.data_ptr(),
            grad_dtype=native.DType.BFLOAT16,
            out=out.data_ptr(),
            out_dtype=native.DType.FLOAT32,
            count=count,
            sum=total.data_ptr(),
            not_finite=flag.data_ptr(),
            workspace=workspace.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
        )

    rates = [
        (grad.nbytes + out.nbytes) / seconds / 1e9 for seconds in _seconds(scan, settings.rounds)
    ]
    return row("gpu.scan", "GB/s", rates, ceiling=("a copy inside the device", bandwidth))


def _pin(settings: Settings):
    """A GiB that is mapped and touched already, against a pinned GiB of torch's."""
    ours, theirs = [], []
    for _ in range(settings.rounds):
        region = native.Region(1 << 30, True, settings.threads)
        start = time.perf_counter()
        region.pin()
        ours.append(1 / (time.perf_counter() - start))
        del region
        start = time.perf_counter()
        pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        theirs.append(1 / (time.perf_counter() - start))
        del pinned
        torch._C._host_emptyCache()  # else the next one costs nothing
    return row(
        "gpu.pin",
        "GiB/s",
        ours,
        ratios={"torch": sorted(a / b for a, b in zip(ours, theirs))[len(ours) // 2]},
    )


def _copies(settings: Settings) -> list:
    """Both ways at once between a registered region and the device, against torch's pinned memory
    in one direction."""
    nbytes = 1 << 30
    region = native.Region(2 * nbytes, True, settings.threads)
    region.pin()
    whole = native.tensor_at(region, region.address, 2 * nbytes, torch.uint8)
    host_in, host_out = whole[:nbytes], whole[nbytes:]
    device_in, device_out = (
        torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    side = torch.cuda.Stream()

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host_out.copy_(device_out, non_blocking=True)
        device_in.copy_(host_in, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    def rates(work: Callable[[], None], moved: int) -> list[float]:
        return [moved / seconds / 1e9 for seconds in _seconds(work, settings.rounds)]

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
