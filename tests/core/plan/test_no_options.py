"""No options: `wrap_model(model, optimizer)` chooses homes by what the machine has, finds a scratch
folder where it needs one, and says so in one line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from inside import parts_of
from torch import nn

import infinity
from infinity.core.machine import limits, scratch
from infinity.core.machine.limits import GIB
from infinity.core.wrap import lay_out
from infinity.core.wrap.described_model import read_model
from infinity.ranks.collectives import Collectives
from infinity.ranks.parallel_dims import ParallelDims

MIB = 1024**2
WIDTH, BLOCKS = 512, 12  # 48 MiB of weights, moments and gradients


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(3):
        loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().numpy().tobytes())
    return found


@pytest.fixture
def tight(monkeypatch):
    """Memory is said to have 30 MiB left: 20 for the engine."""
    monkeypatch.setattr(limits, "tightest", lambda *roots: (30 * MIB, "a limit"))


def lines(caplog) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if "homes chosen" in record.getMessage()
    ]


def test_what_fits_stays_in_memory_and_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        model, _ = infinity.wrap_model(*make())
    (line,) = lines(caplog)
    assert (
        "on nvme" not in line and "swap files" not in line and "weights 12.2 MiB on device" in line
    )
    assert parts_of(model).config.nvme_paths == ()


def test_homes_that_were_all_named_are_no_warning(caplog):
    """Twin: one of them left to the engine is told."""
    named = {"params": "host", "optimizer": "host", "nvme_paths": "auto"}
    for given, count in ((named, 0), (named | {"optimizer": "auto"}, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model, _ = infinity.wrap_model(*make(), given)
        assert len(lines(caplog)) == count
        assert parts_of(model).config.nvme_paths == ()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_gpu_that_is_not_used_is_told(device, monkeypatch):
    """Twin: a device that was asked for is used without a word."""
    told: list[str] = []
    logger = logging.Logger("of this test")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: told.append(record.getMessage())
    monkeypatch.setattr(lay_out, "logger", logger)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    described = read_model(make()[0])
    lay_out.choose_device(described, infinity.Config(device=device), Collectives(ParallelDims()))
    assert ["Config(device='cuda')" in line for line in told] == [True] * (device is None)


def test_what_does_not_fit_goes_to_a_folder_that_is_found(tight, tmp_path, monkeypatch, caplog):
    """Method: with 20 MiB for 48 the rest goes to the scratch folder, without a name there; the
    losses have the bits of a run in memory."""
    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        model, optimizer = infinity.wrap_model(*make())
    (line,) = lines(caplog)
    assert (
        f"swap files in {tmp_path}" in line
        and "a limit leaves 30.0 MiB" in line
        and "on nvme" in line
    )
    engine = parts_of(model).engine
    assert parts_of(engine).config.nvme_paths == (str(tmp_path),) and not list(tmp_path.iterdir())
    assert (
        parts_of(engine).planned.plan.planned_nbytes(infinity.core.machine.tiers.Tier.HOST)
        <= 20 * MIB
    )
    assert losses(model, optimizer) == losses(
        *infinity.wrap_model(*make(), {"params": "host", "optimizer": "host", "host_memory": GIB})
    )


def test_without_a_folder_one_error_names_the_option(tight, tmp_path, monkeypatch):
    """The twin: the only folder does not exist. Model and optimizer stay as they were."""
    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path / "gone"))
    model, optimizer = make()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(
        infinity.ConfigError, match=r"(?s)48.* MiB.*30.0 MiB.*gone \(is no folder\).*nvme_paths="
    ):
        infinity.wrap_model(model, optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters()))


def test_a_configuration_is_not_added_to(tight, caplog):
    """The twin: with a configuration, an empty one too, nothing is found and nothing is told."""
    for config in ({}, infinity.Config()):
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(infinity.CapacityError, match="host_memory was not given"),
        ):
            infinity.wrap_model(*make(), config)
    assert not lines(caplog)


def test_auto_is_a_choice_like_others(tmp_path, monkeypatch):
    """`nvme_paths="auto"` beside a home on NVMe, whatever memory has left."""
    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path))
    model, _ = infinity.wrap_model(*make(), {"optimizer": "nvme", "nvme_paths": "auto"})
    assert parts_of(model).config.nvme_paths == (str(tmp_path),)


JOB = """
import resource, sys
limit = int(sys.argv[2])
resource.setrlimit(getattr(resource, sys.argv[1]), (limit, limit))
import torch
from torch import nn
import infinity
torch.set_num_threads(1)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(int(sys.argv[3]))))
model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()))
for step in range(2):
    model(torch.randn(8, 2048)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", sum(param.numel() for param in model.parameters()) * 16)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_six_gib_of_state_train_under_a_ulimit_of_two(limit, tmp_path):
    """Method: a child under `ulimit -v` or `-d` of 2 GiB, a model of 6.3 GiB of weights, moments
    and gradients, and no option."""
    done = subprocess.run(
        [sys.executable, "-c", JOB, limit, str(2 * GIB), "100"],
        capture_output=True,
        text=True,
        timeout=880,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    word, state = done.stdout.split()
    assert (
        word == "trained"
        and int(state) > 6 * GIB
        and done.stderr.count("homes chosen") == 1
        and "ulimit" in done.stderr
    )
