"""Shared homes: ranks of one machine read each other's weights where they lie: the same bits, from
nobody who does not show them.

What the memory itself does, with ranks that come late, differ or end, is in
csrc/tests/shared_row.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
import rank_jobs
from ranks import Jobs

import infinity
from infinity import native
from infinity.ext.shared_homes.shared_homes import why_not

pytestmark = pytest.mark.timeout(700)  # what the tests share takes minutes on a busy machine
HOST: dict[str, Any] = {"config": {}}
RUNS: dict[str, dict[str, Any]] = {
    "host": HOST,
    "device": {"config": {"params": "device", "optimizer": "device"}},
    "gradients": {"config": {"shard": "gradients"}},
    "clipped": {"config": {"max_grad_norm": 1e-2}},
    "parked": HOST,
}
REFUSALS = {
    "connect": "no entry",
    "kernel": "several machines",
    "weights": "no weights are in memory",
    "file": "too many files",
    "room": "no weights are in memory",
}


def refusal() -> str:
    """Why this machine lets no process map another's memory, so that weights are sent; or ""."""
    try:
        first, second = native.SharedRow(1), native.SharedRow(1)
        first.connect([first.self(), second.self()], 0)
    except infinity.StorageError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def two(standing_ranks, tmp_path_factory) -> Mapping[str, list[Any]]:
    if why := refusal():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("parked")
    jobs: dict[str, dict] = {}
    for name, run in RUNS.items():
        for shares in (None, False):
            jobs[f"trains:{name}-{shares}"] = run | {
                "config": run["config"] | {"share_homes": shares}
            }
            if name == "parked":
                jobs[f"trains:{name}-{shares}"]["parks"] = str(folder)
    jobs |= {
        f"refused:{how}-{asked}": {"how": how, "asked": asked}
        for how in REFUSALS
        for asked in (True, False)
    }
    jobs |= {f"held_back:{share}": {"share": share} for share in (True, False)}
    jobs |= {
        "partly": {},
        "left": {},
        "struck": {},
        "dropped": {},
        "dropped:fault": {"fault": True},
    }
    jobs["trains:compressed"] = {"config": {"compress_gathers": True}}
    return Jobs(standing_ranks(2), "sharing_jobs", jobs)


@pytest.mark.parametrize("name", RUNS)
def test_weights_that_are_read_where_they_lie_have_the_bits_of_weights_that_were_sent(two, name):
    """The same training with and without: the same weights on both ranks and in both runs, the same
    bytes counted, every gather the one way or the other."""
    shared, sent = two[f"trains:{name}-None"], two[f"trains:{name}-False"]
    for rank in (0, 1):
        assert not models.differing(shared[rank]["weights"], sent[0]["weights"])
        assert not models.differing(sent[rank]["weights"], sent[0]["weights"])
        assert shared[rank]["nbytes"] == sent[rank]["nbytes"] > 0
        assert shared[rank]["ways"][1] == sent[rank]["ways"][0] - shared[rank]["ways"][0] > 0
        assert sent[rank]["ways"][1] == 0


def test_weights_that_pass_as_codes_are_sent(two):
    assert all(of_rank["ways"][1] == 0 for of_rank in two["trains:compressed"])


@pytest.mark.parametrize("how", REFUSALS)
def test_ranks_that_cannot_read_each_other_send_their_weights(two, how):
    """One rank finds that out, and both go on as without: with the same bits, and no memory
    shared."""
    for of_rank in two[f"refused:{how}-False"]:
        assert not of_rank["shares"]
        assert not models.differing(of_rank["weights"], two[f"refused:{how}-False"][0]["weights"])
    first = two["refused:connect-False"][0]["weights"]
    assert not models.differing(two[f"refused:{how}-False"][0]["weights"], first)


@pytest.mark.parametrize("how", REFUSALS)
def test_what_was_asked_for_and_cannot_be_is_told_on_all_ranks(two, how):
    for of_rank in two[f"refused:{how}-True"]:
        assert REFUSALS[how] in of_rank["said"] and "share_homes=True" in of_rank["said"]


def test_a_part_that_another_rank_is_to_read_does_not_change(two):
    """What would update it comes behind the reading. The twin sends its part, and waits for
    nobody."""
    assert two["held_back:True"][0]["free"] == [False, True]
    assert two["held_back:False"][0]["free"] == [True]


def test_what_all_ranks_have_in_memory_is_shared_and_no_more(two):
    """One rank has its first weights elsewhere, and the second ones of all lie beside older ones
    for a while, which are nowhere to be read."""
    for of_rank in two["partly"]:
        first, beside, after = of_rank["shared"]
        assert first == after == [False, *[True] * (len(first) - 1)] and beside == [
            False,
            False,
            *first[2:],
        ]
        assert not models.differing(of_rank["weights"], two["partly"][0]["weights"])


def test_nothing_of_the_memory_is_left(two):
    """Once all have mapped it no descriptor is open, which a forked child would keep; after the
    unwrap nothing is mapped, and no collector is waited for."""
    for of_rank in two["left"]:
        (files, mappings), works = of_rank["wrapped"], of_rank["works"]
        assert files == 0 and mappings > 0 and works
        assert of_rank["after"] == (0, 0)


def test_a_model_that_is_dropped_keeps_no_memory(two):
    """The channel lives until the engine is gone, and must not keep it. Twin: its last sync point
    keeps what it was to do."""
    assert two["dropped"] == [0, 0] and all(left > 0 for left in two["dropped:fault"])


def test_no_group_outlives_the_unwrap(two):
    """Descriptors and threads of all groups are gone with it, without the garbage collector."""
    for of_rank in two["left"]:
        assert of_rank["more"][0] <= 0 and of_rank["more"][1] <= 0


def test_what_was_begun_and_struck_is_waited_for(two):
    """The bytes are on their way when Ctrl-C strikes, and have come before the unit's memory is
    given back."""
    assert two["struck"][0]["seen"] == [1, 0]


def test_what_cannot_be_shared_is_said():
    """On a GPU, and where weights pass as codes; the twin is neither."""
    assert "GPU" in why_not(computes_on_host=False, compresses=False)
    assert "compress_gathers" in why_not(computes_on_host=True, compresses=True)
    assert why_not(computes_on_host=True, compresses=False) == ""


@pytest.mark.parametrize("value", ["yes", 1.5, 3])
def test_another_value_is_refused(value):
    with pytest.raises(infinity.ConfigError, match="share_homes"):
        infinity.Config(share_homes=value)


def test_one_rank_shares_with_nobody():
    """Asked for by a script that runs with any number of ranks: nothing is shared, and nothing is
    refused."""
    model = rank_jobs.build()
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "host", "optimizer": "host", "share_homes": True}
    )
    infinity.unwrap_model(model, optimizer)
