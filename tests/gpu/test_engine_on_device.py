"""Training on a GPU: the same bits from every home, nothing allocated, nobody standing still,
within the plan.

Words used here: see `test_device` (the model, `trained`, `same`), which runs the same on a device
that stands in.

**warm**: after the first steps, which allocate what the rest uses again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from inside import parts_of

sys.path[:0] = [
    str(path)
    for pattern in ("support/*/", "native")
    for path in Path(__file__).parents[1].glob(pattern)
]

import device_cases as on_stand_in

import infinity
from infinity import native
from infinity.ext.gpu_direct import direct_storage

KERNELS, REFUSAL = native.gpu_kernels()
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
GPU = torch.get_device_module(DEVICE)
pytestmark = pytest.mark.skipif(DEVICE is None, reason=f"no GPU: {REFUSAL or 'torch sees none'}")
needs_kernels = pytest.mark.skipif(KERNELS is None, reason=f"no kernels: {REFUSAL}")

WITHOUT_KERNELS = [("host", "host"), ("nvme", "nvme"), ("host", "nvme"), ("nvme", "host")]
WITH_KERNELS = [("device", "device"), ("device", "host"), ("host", "device"), ("auto", "auto")]
HOMES = [*WITHOUT_KERNELS, *(pytest.param(homes, marks=needs_kernels) for homes in WITH_KERNELS)]


def config_at(homes, tmp_path, **more) -> dict:
    return on_stand_in.config_at(homes, tmp_path, device=str(DEVICE), **more)


def train(
    model, optimizer, *, steps: int = 4, micro: int = 1, clip: bool = False
) -> list[torch.Tensor]:
    """`test_device.train` with its batches on the GPU, without reading anything back before the
    end."""
    generator = torch.Generator().manual_seed(on_stand_in.SEED)
    told = []
    for _ in range(steps):
        for _ in range(micro):
            ids = (
                torch.randint(0, on_stand_in.VOCABULARY, (16, 32), generator=generator)
                .pin_memory()
                .to(DEVICE, non_blocking=True)
            )
            loss = torch.nn.functional.cross_entropy(
                model(ids).float().flatten(0, 1), ids.flatten()
            )
            loss.backward()
            told.append(loss.detach())
        if clip:
            told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return told


def trained(config, **how):
    model, optimizer = infinity.wrap_model(*on_stand_in.a_model(), config)
    told = [value.cpu() for value in train(model, optimizer, **how)]
    state = optimizer.state_dict()["state"]
    moments = {
        f"{index}.{name}": value
        for index, of_one in state.items()
        for name, value in of_one.items()
    }
    weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    infinity.unwrap_model(model, optimizer)
    return told, weights | moments, None


@pytest.mark.parametrize("how", [{}, {"clip": True, "micro": 2}], ids=["plain", "accumulate"])
@pytest.mark.parametrize("homes", HOMES, ids=str)
def test_homes_change_no_bit(homes, how, tmp_path):
    """Claim: on one GPU every home gives the same bits, whoever steps. Method: against everything
    on the host."""
    assert on_stand_in.same(
        trained(config_at(homes, tmp_path), **how),
        trained(config_at(("host", "host"), tmp_path), **how),
    )


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_activations_change_no_bit(home, tmp_path):
    config = config_at(("host", "host"), tmp_path, nvme_paths=[str(tmp_path)])
    assert on_stand_in.same(
        trained({**config, "activations": home}, micro=2), trained(config, micro=2)
    )


@needs_kernels
def test_weights_past_the_host_change_no_bit(tmp_path, monkeypatch):
    """Claim: with cuFile and everything that it needs, weights on disk come past the host with the
    same bits as through it."""
    if why := direct_storage.refusal([str(tmp_path)]):
        pytest.skip(f"no way past the host: {why}")
    config = config_at(("nvme", "host"), tmp_path)
    model, optimizer = infinity.wrap_model(*on_stand_in.a_model(), config)
    train(model, optimizer, steps=2)
    assert infinity.stats(model).edges["nvme->device"].nbytes > 0
    infinity.unwrap_model(model, optimizer)
    past = trained(config)
    monkeypatch.setenv("INFINITY_DIRECT", "off")
    assert on_stand_in.same(past, trained(config))


def test_parameters_are_on_the_gpu_and_come_back_where_they_were(tmp_path):
    model, optimizer = on_stand_in.a_model()
    model.register_buffer("seen", torch.zeros(3))
    model, optimizer = infinity.wrap_model(model, optimizer, config_at(("host", "host"), tmp_path))
    assert (
        {param.device.type for param in model.parameters()}
        == {DEVICE.type}
        == {model.seen.device.type}
    )
    train(model, optimizer, steps=1)
    infinity.unwrap_model(model, optimizer)
    assert (
        {param.device.type for param in model.parameters()} == {"cpu"} == {model.seen.device.type}
    )


def test_host_homes_are_registered(tmp_path):
    model, optimizer = infinity.wrap_model(
        *on_stand_in.a_model(), config_at(("host", "host"), tmp_path)
    )
    for unit in parts_of(model).units:
        for flat_param in unit.flat_params:
            assert all(array.flat.is_pinned() for array in flat_param.arrays.values())
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("homes", HOMES, ids=str)
def test_a_warm_step_allocates_nothing_and_waits_for_nothing(homes, tmp_path):
    """Claim: no cudaMalloc and no retry; the training thread makes no call that waits (torch raises
    for those it knows), but for a disk. Failing twin: reading a loss."""
    model, optimizer = infinity.wrap_model(*on_stand_in.a_model(), config_at(homes, tmp_path))
    train(model, optimizer, steps=4)
    torch.accelerator.synchronize()
    before = GPU.memory_stats()
    GPU.set_sync_debug_mode("error")
    try:
        told = train(model, optimizer, steps=3)
        with pytest.raises(RuntimeError, match="synchroniz"):
            told[0].item()
    finally:
        GPU.set_sync_debug_mode("default")
    torch.accelerator.synchronize()
    after = GPU.memory_stats()
    assert after["num_alloc_retries"] == before["num_alloc_retries"] == 0
    assert after.get("num_device_alloc", 0) == before.get("num_device_alloc", 0)
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("homes", HOMES, ids=str)
def test_the_engine_stays_within_its_plan(homes, tmp_path):
    """What a forward without gradients adds to the device is the engine's, but for a few
    activations."""
    model, optimizer = infinity.wrap_model(*on_stand_in.a_model(), config_at(homes, tmp_path))
    train(model, optimizer, steps=2)
    tier = infinity.stats(model).tiers["device"]
    assert tier.peak_nbytes <= tier.planned_nbytes
    infinity.unwrap_model(model, optimizer)


def test_copies_run_beside_the_compute(tmp_path):
    """By events: the second half of a chain of copies is done before a long computation that was
    started first."""
    model, optimizer = infinity.wrap_model(
        *on_stand_in.a_model(), config_at(("host", "host"), tmp_path)
    )
    device = parts_of(model).device
    region = native.Region(64 << 20, True, 4)
    device.pin(region)
    host = native.tensor_at(region, region.address, 16 << 20, torch.float32)
    there = torch.empty(16 << 20, device=DEVICE)
    torch.accelerator.synchronize()
    GPU._sleep(2_000_000_000)
    computed = device.now()
    copied = device.put("in", lambda: there.copy_(host, non_blocking=True))
    copied.wait()
    assert not computed.done, "the copy waited for the compute"
    infinity.unwrap_model(model, optimizer)
