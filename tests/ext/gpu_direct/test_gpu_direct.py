"""Weights that come from a disk past the host's memory: the same bits, whatever the road does; and
nothing of it where there is no GPU.

Words used here: see `test_device` (the model, `trained`, `same`, devices that stand in).

**road**: cuFile, ours (`fake_cufile`); "the device's memory" is the host's.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import torch
from device_cases import (  # noqa: F401
    STEPS,
    Elsewhere,
    a_model,
    compute_on,
    config_at,
    kernels,
    same,
    train,
    trained,
)
from fake_cufile import cufile, cufile_library  # noqa: F401
from inside import parts_of

import infinity
from bench import past_host as bench
from infinity import native
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.wrap.lay_out import lay_out
from infinity.errors import CorruptionError
from infinity.ext.gpu_direct import direct_storage, gpu_direct
from infinity.ext.gpu_direct.gpu_direct import GpuDirect
from infinity.tools.bench.settings import Settings

SEED = 20261123


@pytest.fixture
def able(compute_on, kernels, cufile, monkeypatch):
    """A device elsewhere on a machine that lacks nothing."""
    monkeypatch.setattr(direct_storage, "missing", lambda folders: [])
    compute_on(Elsewhere, kernels)
    return cufile


def on_disk(tmp_path: Path, **more) -> dict:
    return config_at(("nvme", "host"), tmp_path, **more)


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """What the same run leaves with everything on the host."""
    return trained({"params": "host", "optimizer": "host"}, clip=True)


def test_weights_come_past_the_host_with_the_same_bits(
    able, at_once, tmp_path, caplog, monkeypatch
):
    """Claim: all weights that are fetched come past the host, and that changes no bit; they count
    on an edge of their own. Nothing stays open."""
    with caplog.at_level(logging.WARNING, gpu_direct.__name__):
        found = trained(on_disk(tmp_path), clip=True)
    assert same(found, at_once) and caplog.messages == []
    monkeypatch.setenv("INFINITY_DIRECT", "off")
    through = trained(on_disk(tmp_path), clip=True)[2].edges
    edges, weights = found[2].edges, found[2].tiers["nvme"].planned_nbytes
    assert edges["nvme->device"].nbytes >= STEPS * weights and "nvme->device" not in through
    assert through["nvme->host"].nbytes - edges["nvme->host"].nbytes >= STEPS * weights
    assert able.count("files") == able.count("buffers") == 0


@pytest.mark.parametrize(
    "fault",
    [{"short": 5}, {"refused": 5, "misaligned": 9}, {"changed": 1}, {"half": 1}, {"limit": 0}],
    ids=str,
)
def test_a_road_with_faults_changes_no_bit(fault, able, at_once, tmp_path, caplog):
    """Claim: what the road spoils comes through the host, whole, and is told once for each
    reason."""
    able.set(**fault)
    with caplog.at_level(logging.WARNING, gpu_direct.__name__):
        assert same(trained(on_disk(tmp_path), clip=True), at_once)
    told = [
        record.getMessage()
        for record in caplog.records
        if "past the host's memory was" in record.getMessage()
    ]
    assert told and len(told) == len({message.split(" and came")[0] for message in told})


def test_a_late_road_changes_no_bit(able, at_once, tmp_path, monkeypatch):
    """Claim: training goes on beside a read that the library holds; its memory is nobody's until it
    returns."""
    monkeypatch.setattr(gpu_direct, "LATE_SECONDS", 0.05)
    able.set(late=1)
    release = threading.Timer(1.0, able.set, kwargs={"late": -1})  # the end of the job waits for it
    release.start()
    assert same(trained(on_disk(tmp_path), clip=True), at_once)
    release.join()


def test_memory_that_a_stuck_read_may_write_to_is_never_given_back(able, tmp_path, monkeypatch):
    """Method: the job ends while the library holds a read; the buffer is still kept, and the read
    can end."""
    monkeypatch.setattr(gpu_direct, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(gpu_direct, "never_freed", [])
    able.set(late=1)
    model, optimizer = infinity.wrap_model(*a_model(), on_disk(tmp_path))
    train(model, optimizer, steps=1)
    parts_of(model).shut_down()
    assert len(gpu_direct.never_freed) == 1
    able.set(late=-1)
    while able.count("held"):
        time.sleep(0.001)


def test_a_disk_that_changes_bytes_is_found_out_by_either_way(able, tmp_path, monkeypatch):
    """Failing twin of the bits: bytes that are wrong on the disk itself are refused, not trained
    on."""
    monkeypatch.setenv("INFINITY_FAULTS", "seed=3,lost_write=1,first_piece=8")
    jobs = []
    with pytest.raises(CorruptionError):
        jobs.append(infinity.wrap_model(*a_model(), on_disk(tmp_path)))
        train(*jobs[0], steps=3)
    for model, _ in jobs:
        parts_of(model).shut_down()


def test_it_is_planned_and_charged(able, tmp_path):
    """The counterpart of the staging pool is a term of the device's; where a budget has no room for
    it, nothing comes past the host."""
    model, optimizer = infinity.wrap_model(*a_model(), on_disk(tmp_path))
    engine = parts_of(model).engine
    assert (
        parts_of(engine).planned.plan.terms["device"]["staged weights"]
        == GpuDirect.device_nbytes(parts_of(engine).planned.plan.staging_nbytes)
        > parts_of(engine).planned.plan.staging_nbytes
        > 0
    )
    infinity.unwrap_model(model, optimizer)
    needed = parts_of(engine).planned.plan.planned_nbytes(Tier.DEVICE)
    for tight in range(needed, 0, -16 * 1024):
        plan, *_ = lay_out(*a_model(), infinity.Config(**on_disk(tmp_path, device_memory=tight)))
        assert plan.planned_nbytes(Tier.DEVICE) <= tight
        if plan.staging_backend is not GpuDirect:
            break
    model, optimizer = infinity.wrap_model(*a_model(), on_disk(tmp_path, device_memory=tight))
    assert parts_of(model).store.staging.needs_pieces is False
    infinity.unwrap_model(model, optimizer)


@pytest.fixture
def without_kernels(able, compute_on, monkeypatch):
    """The same, of a wheel: there is CUDA's driver, and nothing that verifies on the device."""
    monkeypatch.setattr(Elsewhere, "driver_calls", able.driver_calls)
    compute_on(Elsewhere)
    return able


@pytest.mark.parametrize("checksums", ["sampled", False])
def test_without_kernels_weights_come_past_the_host_where_that_is_chosen(
    checksums, without_kernels, at_once, tmp_path, monkeypatch
):
    """Claim: the same bits. Sampling copies out its share of what came, and no sums nothing.
    Failing twin: by default the road is not taken."""
    monkeypatch.setattr(gpu_direct, "SAMPLED_READS", 2)
    found = trained(on_disk(tmp_path, checksums=checksums), clip=True)
    assert same(found, at_once)
    came, copied = found[2].edges["nvme->device"].nbytes, without_kernels.count("copied")
    assert (came / 4 < copied < came) if checksums else copied == 0 < came
    assert "nvme->device" not in trained(on_disk(tmp_path))[2].edges


def test_sampling_with_kernels_verifies_everything(able, tmp_path, monkeypatch):
    """Where the device can verify, the choice takes nothing away: the first wrong read is found."""
    able.set(changed=1)
    model, optimizer = infinity.wrap_model(*a_model(), on_disk(tmp_path, checksums="sampled"))
    train(model, optimizer, steps=1)
    assert (
        parts_of(model).store.staging.backend._reader.refused["changed"][0] == 1
        and able.count("copied") == 0
    )
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("why", ["processor", "off", "missing", "no kernels", "driver"])
def test_it_is_off_where_something_is_missing(why, able, compute_on, monkeypatch, tmp_path):
    """Without a GPU, asked to, on a machine that lacks something, without kernels that verify,
    without a driver: no file is opened."""
    if why == "processor":
        monkeypatch.undo()
    elif why == "off":
        monkeypatch.setenv("INFINITY_DIRECT", "off")
    elif why == "missing":
        monkeypatch.setattr(
            direct_storage,
            "missing",
            lambda folders: [direct_storage.Missing("kernel", "old", "a new one")],
        )
    elif why == "no kernels":
        monkeypatch.setattr(Elsewhere, "driver_calls", able.driver_calls)
        compute_on(Elsewhere)
    else:
        able.set(driver=5001)
    model, optimizer = infinity.wrap_model(*a_model(), on_disk(tmp_path))
    train(model, optimizer, steps=1)
    assert parts_of(model).store.staging.needs_pieces is False and able.count("reads") == 0
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("way", ["past", "through"])
def test_the_benchmark_measures_both_ways(way, able, kernels, monkeypatch, tmp_path):
    """Rows of each way that there is, below the disk alone; where there is none past the host it
    says why."""
    if way == "through":
        monkeypatch.setenv("INFINITY_DIRECT", "off")
    device = Elsewhere(torch.device("cpu"), Traffic())
    device.kernels = kernels
    monkeypatch.setattr(bench, "PIECE_NBYTES", native.CHECKSUM_NBYTES)
    measured = bench.measure_on(
        device, Settings(str(tmp_path), rounds=1, scale=10 * native.CHECKSUM_NBYTES / bench.NBYTES)
    )
    device.close()
    ways = ["through", "past"] if way == "past" else ["through"]
    assert [row.name for row in measured.rows] == [
        f"past_host.{name}" for name in (*ways, "checksums")
    ]
    assert (able.count("reads") > 0) == (way == "past") and any(
        "INFINITY_DIRECT" in note for note in measured.notes
    ) == (way == "through")
    assert list(tmp_path.iterdir()) == []


def test_a_choice_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("INFINITY_DIRECT", "on")
    with pytest.raises(
        infinity.errors.UsageError, match="INFINITY_DIRECT=on is not one of auto, off"
    ):
        direct_storage.chosen()
