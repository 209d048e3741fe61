"""What users change on one rank, and others have to change alike: two ranks over gloo.

**apart**: the second rank alone makes the change, or makes another one. The twin is the same change
on both ranks, which nobody is told of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ranks import Jobs
from user_edit_jobs import GRADIENTS

from infinity.ranks.attempt import BARRIERS

CASES = {
    **{f"gradients:{how}": {"how": how} for how in GRADIENTS},
    "scaler:": {},
    **{f"state:{how}": {"how": how} for how in ("momentum", "clear")},
    **{
        f"forwards:{what}": {"what": what}
        for what in ("NumPy", "Python", "buffer", "argument", "autocast")
    },
    **{f"sequences:{what}": {"what": what} for what in ("length", "mode")},
    **{f"stages:{what}": {"what": what} for what in ("clipping", "zero_grad", "zeros", "mode")},
    **{
        f"table:{what}": {"what": what}
        for what in ("momentum", "state", "value", "gradient", "frozen", "buffers")
    },
}
SAID = {
    "gradients": "UsageError: rank {rank} is at 'a step",
    "scaler": "UsageError: rank {rank} is at 'overflow of gradients that are multiplied by",
    "state": "UsageError: rank {rank} is at 'a step",
    "forwards:NumPy": "UsageError: a step: the state of NumPy's generator before what was drawn",
    "forwards:Python": "UsageError: a step: the state of Python's generator before what was drawn",
    "forwards:buffer": "UsageError: a forward: buffer gain is float32",
    "forwards:argument": "UsageError: a forward: argument scale is 1.0 on rank 0 and 2.0 on rank 1",
    "forwards:autocast": (
        "UsageError: a forward: the mode is training, with gradients on rank 0 and training, with"
        " gradients, in autocast"
    ),
    "sequences:length": (
        "UsageError: a forward: argument 0 is float32 of (2, 4, 16) on rank 0 and float32 of (2, 3,"
        " 16) on rank 1"
    ),
    "sequences:mode": (
        "UsageError: a forward: the mode is training, with gradients on rank 0 and evaluation, with"
        " gradients on rank 1"
    ),
    "stages:clipping": "UsageError: step(): the clipping of rank 0 and of rank 1 differ.",
    "stages:zeros": "UsageError: step(): the gradients of rank 0 and of rank 1 differ.",
    "stages:zero_grad": "UsageError: step(): the gradients of rank 0 and of rank 1 differ.",
    "stages:mode": "UsageError: rank 0 is in train() and rank 1 in eval()",
    "table": "UsageError: step(): the shared table of rank 0 and of rank 1 differ.",
    "table:buffers": "ConfigError: pipeline: buffer model.rotary_emb.inv_freq is",
}
RIGHT = 1e-6


@pytest.fixture(scope="module")
def two(standing_ranks) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    jobs = {
        f"{case}{'-apart' if apart else ''}": {**given, "apart": apart}
        for case, given in CASES.items()
        for apart in (True, False)
    }
    jobs |= {f"unfreezing:{schedule}": {"schedule": schedule} for schedule in ("1F1B", "LoopedBFS")}
    jobs |= {
        f"wraps:{at}{'-apart' if apart else ''}": {"barrier": at, "apart": apart}
        for at in BARRIERS
        for apart in (True, False)
    }
    jobs |= {f"summed:{how}": {"how": how} for how in ("summed", "averaged", "asynchronous")}
    return Jobs(standing_ranks(2), "user_edit_jobs", jobs)


def said_by(told: Any) -> str:
    return told if isinstance(told, str) else told["said"]


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_told_what_one_of_them_has_changed(two, case):
    """On both, before the step; where gradients were changed, or a stage came another way, a right
    step follows."""
    start = SAID.get(case, SAID.get(case.partition(":")[0], ""))
    for rank, told in enumerate(two[f"{case}-apart"]):
        assert said_by(told).startswith(start.format(rank=rank)), said_by(told)
        assert isinstance(told, str) or told.get("goes on", "was taken") == "was taken", told


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_change_the_same_are_told_nothing(two, case):
    """The twin: the bits are those of one process, and both copies of a table stay equal."""
    for told in two[case]:
        assert said_by(told) == "was taken" or case in ("stages:zero_grad",), said_by(told)
        if not isinstance(told, str):
            assert (
                told.get("off", 0) <= RIGHT
                and told.get("equal", True)
                and told.get("goes on", "was taken") == "was taken"
            ), told


@pytest.mark.parametrize("barrier", BARRIERS)
def test_an_exception_on_one_rank_ends_the_attempt_to_wrap_on_all(two, barrier):
    """At once, and the next wrap works. Twin: nothing strikes."""
    first, second = two[f"wraps:{barrier}-apart"]
    assert first["said"].startswith(
        "PeerError: rank 1 failed: ValueError: struck, in wrap_model"
    ), first
    assert second["said"] == "struck" and first["goes on"] == second["goes on"] == "was taken"
    assert all(
        told == {"said": "was taken", "goes on": "was taken"} for told in two[f"wraps:{barrier}"]
    )


@pytest.mark.parametrize("how", ["summed", "averaged", "asynchronous"])
def test_collectives_of_the_users_own_reach_the_gradients(two, how):
    assert two[f"summed:{how}"] == [True, True]


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS"])
def test_stages_that_are_trained_later_train_as_one_process(two, schedule):
    for told in two[f"unfreezing:{schedule}"]:
        assert told["said"] == "was taken" and told["off"] <= RIGHT, told
