"""Recompute over ranks: each chooses for itself, and all have the bits of one process that keeps
all.

**one process**: given every rank's batch in turn, each loss divided by their number. In fp32 and
with a power of two of ranks that is the same sum in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import recompute_jobs
from ranks import Jobs
from recompute_jobs import BLOCKS, STEPS

pytestmark = pytest.mark.timeout(300)

NVME = {"params": "nvme", "optimizer": "nvme", "device_memory": "24MiB"}
HOST = {"params": "host", "optimizer": "host", "device_memory": "24MiB"}
TILES = HOST | {"device_memory": "1100KiB"}
NEVER = {"recompute": False}
ONE_IN_TILES = HOST | {"device_memory": "400KiB"}  # of the same size: nothing is averaged
CHOICES = [
    ["kept", "recomputed"],
    ["recomputed", "recomputed"],
    ["products_kept", "sent"],
    ["products_sent", "recomputed"],
]
SHAPES: dict[str, dict[str, Any]] = {
    "parameters": {"config": NVME},
    "gradients": {"config": HOST | {"shard": "gradients"}},
    "optimizer": {"config": HOST | {"shard": "optimizer"}},
    "replicas": {"config": HOST, "replicas": True},
    "compiled": {"config": HOST | {"compile": {"backend": "eager"}}},
}
# A second run of their blocks needs other ranks
AIDED: dict[str, dict[str, Any]] = {
    "tiles": {"config": TILES},
    "tiles of replicas": {"config": TILES | {"device_memory": "1300KiB"}, "replicas": True},
    "another's weight": {"config": HOST, "effect": "anothers_weight"},
    "root's weight": {"config": HOST, "effect": "roots_weight"},
    "meets": {"config": HOST, "effect": "meets"},
}
CASES = [(shape, number) for shape in SHAPES for number in range(2)] + [
    ("parameters", 2),
    ("parameters", 3),
]
LOOPS: dict[str, dict[str, Any]] = {
    "lengths": {},
    "accumulates": {},
    "two_forwards": {},
    "evaluates": {},
    "evaluates_alone": {"replicas": True},
    "in_pieces": {},
    "in_the_backward": {},
    "modes": {},
    "raises": {},
    "raises in replicas": {"replicas": True},
}
OTHERS: dict[str, dict[str, Any]] = {
    "hooks": {"loop": "hooks"},
    "hooks in a pass": {"loop": "hooks_in_a_pass"},
    "counts on one rank": {"effect": "counts_on_one_rank"},
    "grows": {"loop": "lengths", "effect": "grows"},
    "counts long ones": {"loop": "lengths", "effect": "counts_long_ones"},
    "meets late": {"effect": "meets_late", "choice": CHOICES[0]},
    "meets late, but for products": {"effect": "meets_late", "choice": ["sent", "products_kept"]},
    "in parts": {"config": HOST | {"micro_batch": 80}, "choice": CHOICES[0]},
    "in parts, meets": {"config": HOST | {"micro_batch": 80}, "effect": "meets"},
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
    for shape, number in CASES:
        jobs[f"over_all:{shape}, {number}"] = SHAPES[shape] | {"choice": CHOICES[number]}
    for name, shape in AIDED.items():
        jobs[f"over_all:{name}"] = shape
    jobs["refused:tiles"] = AIDED["tiles"] | {"choice": CHOICES[0], "careless": True}
    for name, more in LOOPS.items():
        loop = name.partition(" ")[0]
        jobs[f"over_all:{name}"] = {"config": HOST, "loop": loop, "choice": CHOICES[0]} | more
        jobs[f"over_all:{name}, plain"] = {"config": HOST | NEVER, "loop": loop} | more
    jobs["over_all:as they are, plain"] = {"config": HOST | NEVER}
    for name, more in OTHERS.items():
        jobs[f"over_all:{name}"] = {"config": HOST} | more
        jobs[f"over_all:{name}, plain"] = job = {"config": HOST} | more
        job["config"] = job["config"] | NEVER
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


def assert_same_as(found: list[dict], plain: list[dict]) -> None:
    """Each rank has what it has if all keep all."""
    for rank, right in zip(found, plain):
        assert rank["losses"] == right["losses"]
        for name, value in right["weights"].items():
            assert value.equal(rank["weights"][name]), name


@pytest.mark.parametrize("shape, number", CASES)
def test_ranks_of_unlike_choices_have_the_bits_of_one_process(shape, number, two, swap):
    """Two passes measure, then each rank does what it chose: blocks run twice, or once."""
    found = two[f"over_all:{shape}, {number}"]
    assert_same_bits(found, expected(swap, **SHAPES[shape]))
    for choice, rank in zip(CHOICES[number], found):
        assert rank["choices"] == [choice] * BLOCKS and rank["blocks"][choice] == BLOCKS
        again = "recomputed" in choice or "products" in choice
        if shape != "compiled":  # whose graph counts nothing
            assert rank["runs"] == [BLOCKS] * 2 + [BLOCKS * (1 + again)] * (STEPS - 2)


@pytest.mark.parametrize("shape", AIDED)
def test_blocks_that_need_other_ranks_never_run_again(shape, two, swap):
    """Twins: blocks that need none, above."""
    found = two[f"over_all:{shape}"]
    assert_same_bits(found, expected(swap, **AIDED[shape]))
    for rank in found:
        assert rank["choices"] == ["sent"] * BLOCKS and rank["runs"] == [BLOCKS] * STEPS


def test_ranks_that_ran_such_blocks_again_would_part(two):
    """The failing twin: what one brings again, the other does not."""
    assert all(" is at " in said for said in two["refused:tiles"])


@pytest.mark.parametrize("name", ["meets late", "meets late, but for products"])
def test_a_block_runs_once_in_passes_in_which_it_communicates(name, two):
    """It does in two steps after blocks were chosen for. Twin: its other passes."""
    found = two[f"over_all:{name}"]
    assert_same_as(found, two[f"over_all:{name}, plain"])
    assert [rank["runs"] for rank in found] == [[3] * STEPS, [3, 3, 6, 6, 3, 3, 6]]


@pytest.mark.parametrize("name", LOOPS)
def test_unlike_choices_hold_whatever_is_done_around_the_passes(name, two):
    """All end with the bits of ranks that keep all; the second rank's blocks run again."""
    found = two[f"over_all:{name}"]
    is_struck = name.startswith("raises")
    plain = two["over_all:as they are, plain" if is_struck else f"over_all:{name}, plain"]
    assert_same_as(found, plain)
    for choice, rank, right in zip(CHOICES[0], found, plain):
        assert rank["choices"] == [choice] * BLOCKS and "recomputed" not in right["choices"]
        assert bool(rank["said"]) == is_struck


def test_each_rank_chooses_for_parts_of_its_batch(two):
    """The first rank keeps both parts, the second runs them again. Twin: blocks that communicate,
    whose parts all ranks run again, as without a choice."""
    found = two["over_all:in parts"]
    assert_same_as(found, two["over_all:in parts, plain"])
    assert [rank["choices"] for rank in found] == [[choice] * 2 * BLOCKS for choice in CHOICES[0]]
    meeting = two["over_all:in parts, meets"]
    assert_same_as(meeting, two["over_all:in parts, meets, plain"])
    assert all(rank["blocks"] == {} for rank in meeting)


def test_a_hook_that_comes_later_is_called_once(two, swap):
    """The second rank listens from the fifth step on, and runs that block once from then on. The
    first goes on as before."""
    found = two["over_all:hooks"]
    assert_same_bits(found, expected(swap, HOST))
    assert [rank["choices"] for rank in found] == [
        ["recomputed"] * BLOCKS,
        ["recomputed", "sent", "recomputed"],
    ]
    assert [rank["heard"] for rank in found] == [0, STEPS - 4]


def test_a_hook_that_comes_in_a_pass_is_called_once(two, swap):
    """Twin: before the pass, above."""
    found = two["over_all:hooks in a pass"]
    assert_same_bits(found, expected(swap, HOST))
    assert [rank["heard"] for rank in found] == [0, STEPS - 4] and not found[1]["said"]


def test_a_block_that_one_rank_cannot_run_again_runs_once_there(two, swap):
    """Twin: the other rank, without the side effect."""
    found = two["over_all:counts on one rank"]
    assert_same_bits(found, expected(swap, HOST))
    assert [rank["choices"][0] for rank in found] == ["recomputed", "sent"]
    assert found[1]["runs"] == [BLOCKS] * STEPS


@pytest.mark.parametrize("name", ["grows", "counts long ones"])
def test_a_block_that_a_longer_input_changes_runs_once(name, two):
    """Its state changes on the second rank alone, which has more from the fifth step on. Twin: the
    first rank."""
    found = two[f"over_all:{name}"]
    assert_same_as(found, two[f"over_all:{name}, plain"])
    assert found[0]["runs"] == [3, 3, 6, 6, 6, 6, 6]
    assert found[1]["runs"] == [3, 3, 6, 6, 3, 3, 3]
    assert found[1]["choices"] == ["sent"] * BLOCKS
