"""The GPU's kernels on a GPU: the processor's bits, and registered memory that torch copies without
waiting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [
    str(path)
    for pattern in ("support/*/", "native")
    for path in Path(__file__).parents[1].glob(pattern)
]

from test_gpu_kernels import FORMS, MOMENTS, RULES, compare_or_refuse, on_module

from infinity import native
from infinity.core.machine.accelerator import make_device
from infinity.core.machine.traffic import Traffic

KERNELS, REFUSAL = native.gpu_kernels()
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
pytestmark = pytest.mark.skipif(
    KERNELS is None or DEVICE is None,
    reason=f"no GPU: {REFUSAL or 'torch sees none'}",
)


def stream() -> int:
    """The handle of the current stream; 0 for what is not CUDA's."""
    return torch.cuda.current_stream().cuda_stream if DEVICE.type == "cuda" else 0


def on_device(layout, arrays, runs) -> None:
    there = {name: array.to(DEVICE) for name, array in arrays.items()}
    on_module(KERNELS, layout, there, runs, stream=stream())
    for name, array in there.items():
        arrays[name].copy_(array)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize(("weight", "master", "grad"), FORMS, ids=str)
def test_a_step_has_the_processors_bits(weight, master, grad, moments, rule):
    compare_or_refuse(on_device, weight, master, grad, moments, rule)


def test_a_scan_is_that_of_torch():
    """Sum of squares, cast and flag of ten million elements."""
    grad = torch.randn(10_000_003, device=DEVICE).bfloat16()
    out, total = (
        torch.empty(grad.numel(), device=DEVICE),
        torch.zeros(1, dtype=torch.float64, device=DEVICE),
    )
    flag = torch.zeros(1, device=DEVICE)
    workspace = torch.zeros(
        KERNELS.scan_workspace_nbytes(grad.numel()), dtype=torch.uint8, device=DEVICE
    )
    for spoiled in (False, True):
        if spoiled:
            grad[-1] = float("inf")
        KERNELS.scan(
            grad=grad.data_ptr(),
            grad_dtype=native.DType.BFLOAT16,
            out=out.data_ptr(),
            out_dtype=native.DType.FLOAT32,
            count=grad.numel(),
            sum=total.data_ptr(),
            not_finite=flag.data_ptr(),
            workspace=workspace.data_ptr(),
            stream=stream(),
        )
        assert torch.equal(out, grad.float()) and bool(flag) == spoiled
        if not spoiled:
            assert total.item() == pytest.approx(grad.double().square().sum().item(), rel=1e-12)


def test_checksums_are_those_of_the_processor():
    """Of 200 blocks of 64 KiB and a shorter one; failing twin: one bit."""
    data = torch.randint(
        0, 256, (200 * native.CHECKSUM_NBYTES + 5 * native.BLOCK_NBYTES,), dtype=torch.uint8
    )
    expected = [native.crc32c(block) for block in data.split(native.CHECKSUM_NBYTES)]
    there = data.to(DEVICE)
    assert KERNELS.checksums(there.data_ptr(), there.numel()) == expected
    there[native.CHECKSUM_NBYTES + 7] ^= 1
    found = KERNELS.checksums(there.data_ptr(), there.numel())
    assert [i for i, sum_of in enumerate(found) if sum_of != expected[i]] == [1]


def test_registered_memory_is_pinned_and_copies_do_not_wait():
    """``is_pinned()`` of a view; a copy returns before the work that it waits for on the stream is
    done, by events."""
    region = native.Region(256 * 1024 * 1024, True, 4)
    device = make_device(DEVICE, Traffic())
    device.pin(region)
    host = native.tensor_at(region, region.address, region.nbytes // 4, torch.float32)
    assert host.is_pinned()
    host.fill_(1.0)
    there = torch.zeros(host.numel(), device=DEVICE)
    torch.accelerator.synchronize()
    torch.get_device_module(DEVICE)._sleep(1_000_000_000)
    there.copy_(host, non_blocking=True)
    assert not device.now().done, "the copy waited for the stream"
    torch.accelerator.synchronize()
    assert bool((there == 1).all())
    device.close()
