"""Two ranks on late devices. Their collectives are jobs of streams of their own, as NCCL's are:
waiting for one orders the compute, and not the host."""

from __future__ import annotations

import pytest
from marks import few
from ranks import launch, launch_without

HOST = {"params": "host", "optimizer": "host"}
NVME = {"params": "nvme", "optimizer": "nvme", "shard": "parameters"}
# Weights at home on the host are read where they lie; those on disk are gathered by collectives.
CASES = {
    "nvme": {"way": "clipped_micro_batches", "config": NVME},
    "host": {"way": "plain", "config": HOST},
    "gradients": {"way": "plain", "config": {**NVME, "shard": "gradients"}},
    "optimizer": {"way": "plain", "config": {**HOST, "shard": "optimizer"}},
    "window": {"way": "plain", "config": {**NVME, "device_memory": "480KiB"}},
    "shares": {"way": "shared", "config": NVME},
    "shares-host": {"way": "shared", "config": HOST},
    "activations": {"way": "accumulated", "config": {**NVME, "activations": "host"}},
}

# What one rank reads while the other raises
RAISES = {
    "item": {"reads": "item"},
    "nonzero": {"reads": "nonzero"},
    "copy": {"reads": "copy"},
    "tolist in a backward": {"reads": "tolist", "in_backward": True},
}

# Of two ranks' cards, by what torch's checkpoint takes of one
ROOMS = {
    "little and much": {"rooms": [1.2, 30.0]},
    "little and much, two batches": {"rooms": [1.2, 30.0], "micro": 2},
}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """What all jobs of this run answer, from one launch."""
    asked = {
        item.callspec.params.get("case")
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }
    jobs = {f"late_runs:{case}": CASES[case] for case in CASES if case in asked}
    jobs["without_order"] = {}
    jobs["host_is_ahead"] = {"config": NVME}
    jobs["aborted_by_a_limit"] = {}
    jobs |= {f"one_raises:{case}": RAISES[case] for case in RAISES if case in asked}
    jobs |= {f"chosen_alone:{case}": ROOMS[case] for case in ROOMS if case in asked}
    found, done = launch(tmp_path_factory.mktemp("late"), 2, jobs, script="late_rank_jobs.py")
    assert done.returncode == 0, done.stderr[-3000:]
    return found


@pytest.mark.parametrize("case", few(CASES, 2))
def test_late_ranks_have_the_bits_of_punctual_ones(case, answers):
    """Method: twice, with other delays, on both ranks."""
    assert answers[f"late_runs:{case}"] == [[True, True]] * 2


@pytest.mark.parametrize("case", few(RAISES, 1))
def test_a_rank_that_reads_a_value_hears_of_one_that_raises(case, answers):
    """Rank 0 waits in CUDA's own wait, behind a gather that rank 1 does not start. Both are told,
    and train on with equal weights; no collective was aborted."""
    first, second = answers[f"one_raises:{case}"]
    assert len(first["said"]) == 1 and first["said"][0].startswith("UsageError: rank 0 is at")
    assert second["said"][0] == "ValueError: the user's own" and len(second["said"]) == 2
    assert first["steps"] == second["steps"] == 5
    assert first["weights"].isfinite().all() and first["weights"].equal(second["weights"])
    assert first["aborts"] == second["aborts"] == 0
    assert first["listening"] == second["listening"] == []


@pytest.mark.parametrize("case", ROOMS)
def test_each_rank_recomputes_what_its_own_card_has_no_room_for(case, answers):
    """Until there is a choice every block runs again, on both. Twin: the second rank, with much
    room, keeps all blocks."""
    first, second = answers[f"chosen_alone:{case}"]
    assert first["same"] and second["same"] and first["fits"] and second["fits"]
    assert first["blocks"]["recomputed_nbytes"] > 0
    assert second["blocks"]["kept"] == 8 and not second["blocks"]["recomputed_nbytes"]


@pytest.mark.slow
def test_without_a_listener_both_ranks_wait(tmp_path):
    """The failing twin: until the group's timeout, whose end is that of the processes."""
    jobs = {"one_raises": {"reads": "item", "fault": True}}
    found, ends = launch_without(
        tmp_path, 2, jobs, script="late_rank_jobs.py", environment={"RANK_TIMEOUT": "8"}
    )
    assert None in found["one_raises"] and all(status for status, _ in ends)


def test_the_late_device_aborts_at_the_end_of_a_limit(answers):
    """As NCCL does, so that other tests would see a wait with a limit. Its groups tell their
    timeout."""
    first, second = answers["aborted_by_a_limit"]
    assert first == ["0:00:30", *["late: the communicator was aborted"] * 2]
    assert second == ["0:00:30", "over", "over"]


def test_collectives_before_their_bytes_are_found(answers):
    """The twin: they do not wait for the gradients that they send."""
    assert not all(answers["without_order"][0] + answers["without_order"][1])


def test_the_host_launches_compute_while_gathers_run(answers):
    assert answers["host_is_ahead"] == [[True, True]] * 2
