"""What all ranks write to the tensors of state dicts is the model's and the optimizer's; ranks that
write otherwise are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
import rank_jobs
import state_dict_jobs
import torch
from ranks import Jobs, launch_without
from torch import nn

import infinity

MODES = ("parameters", "gradients", "optimizer")
HOMES = ("device", "host", "nvme")


@pytest.fixture(scope="module")
def two(standing_ranks, launch_folder) -> Mapping[str, list[Any]]:
    where = str(launch_folder / "swap")
    jobs: dict[str, dict] = {
        f"written:{mode}-{home}": {"shard": mode, "home": home, "folder": where}
        for mode in MODES
        for home in HOMES
    }
    jobs |= {f"averaged:{mode}": {"shard": mode} for mode in MODES}
    jobs |= {f"cut:{home}": {"home": home, "folder": where} for home in HOMES}
    return Jobs(standing_ranks(2), "state_dict_jobs", jobs)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("mode", MODES)
def test_what_all_ranks_write_has_the_bits_of_one_process(two, mode, home):
    """Method: one process writes the same. What is older than a step is refused on each rank."""
    model = rank_jobs.build()
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "device", "optimizer": "device"}
    )
    rank_jobs.in_turn(model, optimizer, 2, steps=1)
    state_dict_jobs.write(model, optimizer)
    rank_jobs.in_turn(model, optimizer, 2, steps=2, first=1)
    for rank in two[f"written:{mode}-{home}"]:
        assert "UsageError" in rank["refused"] and "snapshot" in rank["refused"]
        assert not models.differing(rank["weights"], dict(model.state_dict()))


@pytest.mark.parametrize("mode", MODES)
def test_what_all_ranks_write_to_an_average_has_the_bits_of_one_process(two, mode):
    """Method: as above, and the average is updated once more. Twin: unwritten, it would be the
    weights."""
    model = rank_jobs.build()
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "device", "optimizer": "device"}
    )
    expected = state_dict_jobs.average(model)
    assert models.differing(expected, dict(model.state_dict()))
    for rank in two[f"averaged:{mode}"]:
        assert not models.differing(rank["average"], expected)


@pytest.mark.parametrize("home", HOMES)
def test_what_is_written_to_layers_that_are_cut_is_theirs(two, home):
    """Method: plain torch in one process, with the whole layer, writes the same to its live
    tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for turn in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if turn < 2:
            with torch.no_grad():
                for value in model.state_dict().values():
                    value.mul_(0.5)
            for entry in optimizer.state_dict()["state"].values():
                entry["exp_avg"].zero_()
    for rank in two[f"cut:{home}"]:
        off = max(
            (rank["weights"][name] - value).abs().max().item()
            for name, value in model.state_dict().items()
        )
        assert off < 1e-7  # products of parts are added up in another order


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("values", "taking over state_dict() values with 1 tensors"),
        ("moments", "optimizer.state) with learning rates"),
        ("averages", "writing the average of positions"),
    ],
)
def test_ranks_that_write_otherwise_are_told(tmp_path, how, told):
    """The failing twin, in a launch of its own: such a job is over."""
    jobs = {"apart": {"how": how}}
    results, _ = launch_without(
        tmp_path, 2, jobs, environment={"RANK_TIMEOUT": "20"}, script="state_dict_jobs.py"
    )
    said = [found["said"] for found in results["apart"]]
    assert all(text.startswith(("UsageError", "PeerError", "RuntimeError")) for text in said), said
    assert any(told in text for text in said), said
