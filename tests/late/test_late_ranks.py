"""Two ranks on late devices. Their collectives are jobs of streams of their own, as NCCL's are:
waiting for one orders the compute, and not the host."""

from __future__ import annotations

import pytest
from marks import few
from ranks import launch

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
    "shares-fast": {"way": "shared", "config": {**HOST, "reduction": "fast"}},
    "activations": {"way": "accumulated", "config": {**NVME, "activations": "host"}},
}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """What all jobs of this run answer, from one launch."""
    asked = {
        item.callspec.params["case"]
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }
    jobs = {f"late_runs:{case}": CASES[case] for case in CASES if case in asked}
    jobs["without_order"] = {}
    jobs["host_is_ahead"] = {"config": NVME}
    found, done = launch(tmp_path_factory.mktemp("late"), 2, jobs, script="late_rank_jobs.py")
    assert done.returncode == 0, done.stderr[-3000:]
    return found


@pytest.mark.parametrize("case", few(CASES, 2))
def test_late_ranks_have_the_bits_of_punctual_ones(case, answers):
    """Method: twice, with other delays, on both ranks."""
    assert answers[f"late_runs:{case}"] == [[True, True]] * 2


def test_collectives_before_their_bytes_are_found(answers):
    """The twin: they do not wait for the gradients that they send."""
    assert not all(answers["without_order"][0] + answers["without_order"][1])


def test_the_host_launches_compute_while_gathers_run(answers):
    assert answers["host_is_ahead"] == [[True, True]] * 2
