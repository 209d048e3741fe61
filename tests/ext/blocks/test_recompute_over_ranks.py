"""Recompute over ranks: they choose together, and have the bits of one process that keeps all.

**one process**: given every rank's batch in turn, each loss divided by their number. In fp32 and
with a power of two of ranks that is the same sum in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import recompute_jobs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Jobs
from recompute_jobs import BLOCKS, STEPS

from infinity.errors import UsageError
from infinity.ext.blocks.activation_choice import ActivationChoice, Measured, choose
from infinity.ext.blocks.agreement import Agreement, SharedPlanner, Told, choose_for_all

pytestmark = pytest.mark.timeout(300)

NVME = {"params": "nvme", "optimizer": "nvme", "device_memory": "24MiB"}
HOST = {"params": "host", "optimizer": "host", "device_memory": "24MiB"}
TILES = HOST | {"device_memory": "1100KiB"}
NEVER = {"recompute": False}
ONE_IN_TILES = HOST | {"device_memory": "400KiB"}  # of the same size: nothing is averaged
UNLIKE = ["kept", "recomputed"]  # what the ranks have measured
CHOICES = ["kept", "sent", "recomputed", "products_kept", "products_sent"]
SHAPES: dict[str, dict[str, Any]] = {
    "parameters": {"config": NVME},
    "gradients": {"config": HOST | {"shard": "gradients"}},
    "optimizer": {"config": HOST | {"shard": "optimizer"}},
    "replicas": {"config": HOST, "replicas": True},
    "tiles": {"config": TILES},
    "tiles of replicas": {"config": TILES | {"device_memory": "1300KiB"}, "replicas": True},
    "another's weight": {"config": HOST, "effect": "anothers_weight"},
    "meets": {"config": HOST, "effect": "meets"},
    "compiled": {"config": HOST | {"compile": {"backend": "eager"}}},
}
CASES = [
    *((shape, choice) for shape in SHAPES for choice in ("recomputed", "products_kept")),
    *(("parameters", choice) for choice in CHOICES[:2] + CHOICES[4:]),
    *(("tiles", choice) for choice in CHOICES[:2] + CHOICES[4:]),
]
LOOPS: dict[str, dict[str, Any]] = {
    "lengths": {},
    "accumulates": {},
    "two_forwards": {},
    "evaluates": {},
    "evaluates_alone": {"replicas": True},
    "in_the_backward": {},
    "modes": {},
    "raises": {},
    "raises in replicas": {"replicas": True},
    "interrupted": {},
    "interrupted in replicas": {"replicas": True},
}
OTHERS: dict[str, dict[str, Any]] = {
    "hooks": {"loop": "hooks"},
    "hooks in a pass": {"loop": "hooks_in_a_pass"},
    "counts on one rank": {"effect": "counts_on_one_rank"},
    "meets, and counts on one rank": {"effect": "meets_and_counts"},
    "grows": {"loop": "lengths", "effect": "grows"},
    "in pieces": {"loop": "in_pieces"},
    "counts long ones": {"loop": "lengths_tried", "effect": "counts_long_ones"},
}
PLAIN: dict[str, dict] = {}


def expected(swap: Any, config: dict, *, effect: str = "nothing", loop: str = "plain", **_: Any):
    """What one process has that keeps all; with tiles as small."""
    key = repr((sorted(config.items()), effect, loop))
    if key not in PLAIN:
        is_tiled = config["device_memory"] != HOST["device_memory"]
        config = (ONE_IN_TILES if is_tiled else config) | {"nvme_paths": [str(swap)]}
        PLAIN[key] = recompute_jobs.train(config, range(2), effect=effect, loop=loop)
    return PLAIN[key]


@pytest.fixture(scope="module")
def two(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("two"))
    jobs: dict[str, dict] = {}
    for shape, choice in CASES:
        jobs[f"over_all:{shape}, {choice}"] = SHAPES[shape] | {"choice": choice}
    for name, shape in SHAPES.items():
        jobs[f"over_all:{name}, unlike"] = shape | {"told": UNLIKE}
    jobs["parted:tiles"] = SHAPES["tiles"] | {"told": UNLIKE}
    for name, more in LOOPS.items():
        loop = name.partition(" ")[0]
        jobs[f"over_all:{name}"] = {"config": HOST, "loop": loop} | more
        jobs[f"over_all:{name}, plain"] = jobs[f"over_all:{name}"] | {"config": HOST | NEVER}
    jobs["over_all:as they are, plain"] = {"config": HOST | NEVER}
    for name, more in OTHERS.items():
        jobs[f"over_all:{name}"] = {"config": HOST} | more
    for job in jobs.values():
        job["config"] = job["config"] | {"nvme_paths": [folder]}
    return Jobs(standing_ranks(2), "recompute_jobs", jobs)


def assert_same_bits(found: list[dict], right: dict) -> None:
    """Both ranks have the losses of their batches, and the weights of the one process."""
    for number, rank in enumerate(found):
        assert rank["losses"] == right["losses"][number::2]
        assert rank["tiled"] == right["tiled"]
        assert rank["weights"].keys() == right["weights"].keys()
        for name, value in right["weights"].items():
            assert value.equal(rank["weights"][name]), name


@pytest.mark.parametrize("shape, choice", CASES)
def test_each_choice_of_two_ranks_has_the_bits_of_one_process(shape, choice, two, swap):
    """Two passes measure, the others do what was chosen: blocks run twice, or once. What is kept,
    sent and made again is told, and adds up to what is saved."""
    found = two[f"over_all:{shape}, {choice}"]
    assert_same_bits(found, expected(swap, **SHAPES[shape]))
    again = "recomputed" in choice or "products" in choice
    for rank in found:
        assert rank["choices"] == [choice] * BLOCKS and rank["blocks"][choice] == BLOCKS
        if shape != "compiled":  # whose graph counts nothing
            assert rank["runs"] == [BLOCKS] * 2 + [BLOCKS * (1 + again)] * (STEPS - 2)
        nbytes = {
            place: rank["blocks"][f"{place}_nbytes"] for place in ("kept", "sent", "recomputed")
        }
        places = {place for place in nbytes if nbytes[place]}
        assert (
            places
            == {
                "kept": {"kept"},
                "sent": {"sent"},
                "recomputed": {"recomputed"},
                "products_kept": {"kept", "recomputed"},
                "products_sent": {"sent", "recomputed"},
            }[choice]
        )
    assert found[0]["blocks"] == found[1]["blocks"]


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_that_measure_otherwise_choose_the_same(shape, two, swap):
    """One believes to have room for all, the other for nothing."""
    found = two[f"over_all:{shape}, unlike"]
    assert_same_bits(found, expected(swap, **SHAPES[shape]))
    assert [rank["choices"] for rank in found] == [["recomputed"] * BLOCKS] * 2
    assert found[0]["runs"] == found[1]["runs"]


def test_ranks_that_choose_for_themselves_part(two):
    """The failing twin: each takes its own figures alone. What one brings again, the other does
    not."""
    assert all("rank 0 is at" in said or "rank 1 is at" in said for said in two["parted:tiles"])


@pytest.mark.parametrize("name", LOOPS)
def test_ranks_agree_whatever_is_done_around_the_passes(name, two, swap):
    """All end with the bits of ranks that keep all, and with blocks that run again on both."""
    found = two[f"over_all:{name}"]
    loop = name.partition(" ")[0]
    is_struck = loop in ("raises", "interrupted")
    plain = two["over_all:as they are, plain" if is_struck else f"over_all:{name}, plain"]
    for rank, right in zip(found, plain):
        assert rank["losses"] == right["losses"]
        for name_of, value in right["weights"].items():
            assert value.equal(rank["weights"][name_of]), name_of
        assert right["choices"] == [] and rank["choices"] == ["recomputed"] * BLOCKS
        assert bool(rank["said"]) == is_struck
    assert any("struck" in said for said in found[1]["said"]) == is_struck


def test_a_hook_that_comes_later_is_called_once(two, swap):
    """The second rank listens from the fifth step on: from then on no rank runs that block again.
    Twin: the blocks without a hook."""
    found = two["over_all:hooks"]
    assert_same_bits(found, expected(swap, HOST))
    assert [rank["choices"] for rank in found] == [["recomputed", "sent", "recomputed"]] * 2
    assert [rank["heard"] for rank in found] == [0, STEPS - 4]


def test_a_hook_that_comes_in_a_pass_is_refused(two, swap):
    """It would be called twice. The next pass goes on without running the block again."""
    found = two["over_all:hooks in a pass"]
    assert_same_bits(found, expected(swap, HOST))
    assert "got a hook in a pass" in found[1]["said"][0] and "is at '" in found[0]["said"][0]
    assert [rank["choices"] for rank in found] == [["recomputed", "sent", "recomputed"]] * 2


@pytest.mark.parametrize("name", ["counts on one rank", "meets, and counts on one rank"])
def test_a_block_that_one_rank_cannot_run_again_runs_once_on_all(name, two, swap):
    """Twin: without the side effect, above, it runs twice."""
    found = two[f"over_all:{name}"]
    assert_same_bits(found, expected(swap, HOST))
    for rank in found:
        assert rank["choices"] == ["sent"] * BLOCKS and rank["runs"] == [BLOCKS] * STEPS


def test_a_cache_that_grows_with_a_longer_input_is_no_error(two, swap):
    """It grows on the second rank, in a block that both have agreed to run again: they do. From
    the next pass on none does."""
    found = two["over_all:grows"]
    assert_same_bits(found, expected(swap, HOST, loop="lengths"))
    for rank in found:
        assert rank["runs"] == [3, 3, 6, 6, 6, 3, 3] and rank["choices"] == ["sent"] * BLOCKS


def test_a_block_that_counts_its_longer_inputs_is_an_error_and_no_wrong_gradient(two):
    """Twin: a cache, which grows once."""
    first, second = two["over_all:counts long ones"]
    assert "each time that it runs" in second["said"][0] and "is at '" in first["said"][0]
    assert first["choices"] == second["choices"] == ["sent"] * BLOCKS


def test_parts_of_a_model_that_are_called_one_by_one_keep_all(two, swap):
    """Their ranks need not begin a pass together. Twin: calls of the model, above."""
    found = two["over_all:in pieces"]
    assert_same_bits(found, expected(swap, HOST))
    assert all(rank["runs"] == [BLOCKS] * STEPS and rank["blocks"] == {} for rank in found)


# --- what is computed from everyone's figures ---

MEASURED = st.builds(
    Measured,
    st.integers(0, 100),
    st.sampled_from([0.0, 0.5, 1.0, 5.0]),
    st.booleans(),
    st.integers(0, 20),
    st.integers(0, 50),
    st.sampled_from([0.0, 0.5]),
)
TOLD = st.builds(
    Told,
    st.lists(st.one_of(st.none(), MEASURED), min_size=4, max_size=4),
    st.integers(0, 400),
    st.integers(0, 300),
    st.sampled_from([0.1, 10.0, 1e9]),
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(TOLD, min_size=1, max_size=4), st.booleans())
def test_what_all_choose_fits_each_and_repeats_nothing_that_one_cannot(told, is_beside):
    """Any figures of any ranks. Twins: a block that one has not measured is not chosen for; with
    one rank it is that rank's own choice."""
    found = choose_for_all(told, is_beside=is_beside)
    for number, choice in enumerate(found):
        of_all = [each.blocks[number] for each in told]
        assert (choice is None) == (None in of_all)
        if choice is not None and choice.repeats:
            assert all(each.is_repeatable for each in of_all)
    for each in told:
        kept = sum(
            max(0, block.nbytes - block.input_nbytes)
            for block, choice in zip(each.blocks, found)
            if choice is ActivationChoice.KEEP
        )
        assert kept <= max(0, each.device_nbytes)
    if len(told) == 1:
        known = [block for block in told[0].blocks if block is not None]
        own = choose(
            known,
            device_nbytes=told[0].device_nbytes,
            host_nbytes=told[0].host_nbytes,
            send_rate=told[0].send_rate,
            is_beside=is_beside,
        )
        whole = all(block.nbytes >= block.input_nbytes for block in known)
        assert [each for each in found if each is not None] == own or not whole


@pytest.mark.parametrize(
    ("has_news", "is_compared", "forgets"),
    [(True, False, True), (False, True, True), (False, False, False)],
)
def test_a_pass_that_may_go_another_way_is_not_verified(has_news, is_compared, forgets):
    """Its ranks would leave the last one's sequence at other times. Twin: one without news. What a
    rank may not run again is exchanged before a pass that is compared."""
    said, known = [], {"the last pass": []}
    planner = SimpleNamespace(
        begin_pass=lambda: "what blocks keep",
        has_news=lambda: has_news,
        is_open=is_compared,
        measures_room=is_compared,
        tell=lambda: Told([], 0, 0, 1.0),
        take=lambda choices: None,
        refused=lambda: [True],
        refuse=said.append,
    )
    collectives = SimpleNamespace(
        meet=lambda what, flags=(), then=None: flags,
        collect=lambda mine, what: [mine],
        ranks=SimpleNamespace(
            dp_group=SimpleNamespace(collective_trace=SimpleNamespace(known=known))
        ),
    )
    running = SimpleNamespace(is_accumulating=False, has_begun=True)
    Agreement(planner, collectives, running).begin(torch.nn.Identity(), (), {})
    assert (not known) == forgets and (said == [[[True]]]) == is_compared


def test_ranks_that_would_run_other_blocks_again_are_told_before_the_backward():
    """Twins: all alike, and a block that did not run on one rank."""
    SharedPlanner.compare([[(True,), (True, False), ()], [(True,), (True, False), (False,)]])
    with pytest.raises(UsageError, match="data rank 1 cannot run block 1 again"):
        SharedPlanner.compare([[(True,), (True,)], [(True,), (False,)]])
