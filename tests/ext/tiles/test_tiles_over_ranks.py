"""Layers run in tiles on several ranks, too: with the bits of one process that runs the same tiles,
in no more device memory than that and two buckets.

**one process**: given every rank's batch in turn, each loss divided by their number. In fp32 and
with a power of two of ranks that is the same sum in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
from marks import few
from ranks import Jobs
from tile_jobs import MIB, STEPS, WIDTH, WORDS, config_of, train

pytestmark = pytest.mark.timeout(300)
HOMES = ["host", "nvme"]
WHOLE = config_of("host", None, device_memory="64MiB")  # no layer runs in tiles


@pytest.fixture(scope="module")
def two(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    jobs: dict[str, dict] = {
        f"over_all:{home}": {"config": config_of(home, folder)} for home in HOMES
    }
    jobs["over_all:in parts"] = {"config": config_of("host", folder), "piece": 3000}
    jobs["over_all:tied"] = {"config": config_of("host", folder), "tied": True}
    jobs["over_all:micro"] = {"config": config_of("host", folder), "micro": 2}
    jobs["over_all:fused"] = {"config": WHOLE | {"fused_loss": True}}
    jobs["in_replicas:host"] = {"config": config_of("host", folder), "shards": 1}
    jobs["elsewhere:late"] = {"config": config_of("host", folder)}
    jobs["unaveraged:host"] = {"config": config_of("host", folder)}
    jobs["hooked:host"] = {"config": config_of("host", folder)}
    jobs |= {
        f"struck:{at}": {"config": config_of("host", folder), "at": at}
        for at in ("forward", "backward")
    }
    jobs |= {"least_device:bf16": {}, "least_device:bf16, tp": {"tp": 2}}
    return Jobs(standing_ranks(2), "tile_jobs", jobs)


@pytest.fixture(scope="module")
def four(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    folder = tmp_path_factory.mktemp("four")
    jobs: dict[str, dict] = {
        "over_all:host": {"config": config_of("host", folder, device_memory="1MiB")},
        "over_all:infinity": {
            "config": config_of("nvme", folder, device_memory="1MiB", activations="host")
        },
        "in_replicas:nvme": {
            "config": config_of("nvme", folder, device_memory="1MiB"),
            "shards": 2,
        },
        "least_device:bf16": {},
        "least_device:bf16, tp": {"tp": 2},
    }
    return Jobs(standing_ranks(4), "tile_jobs", jobs)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict[str, Any]:
    # Less, for the same tiles: nothing is averaged.
    config = config_of("host", tmp_path_factory.mktemp("one"), device_memory="400KiB")
    return {
        "2": train(config, range(2)),
        "4": train(config, range(4)),
        "2, larger tiles": train(config | {"device_memory": "640KiB"}, range(2)),
    }


@pytest.mark.parametrize("how", [*HOMES, "in parts"])
def test_tiles_over_two_ranks_have_the_bits_of_one_process(two, one, how):
    """Weights and first gradients, on each rank, whose budget and tiles are those of the one
    process. Twin: ranks that land their own gradients end with other weights."""
    expected = one["2"]
    assert len(expected["tiled"]) == 4
    for found in two[f"over_all:{how}"]:
        assert found["tiled"] == expected["tiled"] and found["within"] and expected["within"]
        assert not models.differing(found["grads"], expected["grads"])
        assert not models.differing(found["weights"], expected["weights"])
        assert found["norms"] == pytest.approx(expected["norms"], rel=2e-5)
    assert models.differing(two["unaveraged:host"][0]["weights"], expected["weights"])


def test_a_fused_loss_over_two_ranks_has_the_bits_of_one_process(two):
    """The loop computes it, when the weight is back at home. Twin: whole logits, summed in another
    order."""
    expected, whole = train(WHOLE | {"fused_loss": True}, range(2)), train(WHOLE, range(2))
    for found in two["over_all:fused"]:
        assert not found["tiled"] and found["within"]
        assert not models.differing(found["grads"], expected["grads"])
        assert not models.differing(found["weights"], expected["weights"])
        assert models.differing(found["grads"], whole["grads"])


@pytest.mark.parametrize("how", ["host", "infinity"])
def test_tiles_over_four_ranks_have_the_bits_of_one_process(four, one, how):
    """The same on four ranks, most of whose tiles lie on one of them: also as ZeRO-Infinity has it,
    with all state on NVMe and what forwards save on the host."""
    for found in four[f"over_all:{how}"]:
        assert found["tiled"] == one["4"]["tiled"] and found["within"]
        assert not models.differing(found["grads"], one["4"]["grads"])
        assert not models.differing(found["weights"], one["4"]["weights"])


def test_tiles_of_replicas_have_the_bits_of_one_process(two, four, one):
    """Two replicas with a batch each, and two of two ranks whose replicas have the same batches: of
    these the sum is exactly twice that of two ranks. The twin is that of the test above: without
    an average other weights come out."""
    for found in (*two["in_replicas:host"], *four["in_replicas:nvme"]):
        assert found["tiled"] and found["within"]
        assert found["tiled"] == one["2"]["tiled"]
        assert not models.differing(found["grads"], one["2"]["grads"])
        assert not models.differing(found["weights"], one["2"]["weights"])


def test_tiles_over_ranks_have_the_same_bits_on_devices_of_their_own(two, one):
    """Copies to and from the device are late; averages are made in host memory."""
    for found in two["elsewhere:late"]:
        expected = one["2, larger tiles"]
        assert found["tiled"] == expected["tiled"] and found["within"]
        assert not models.differing(found["weights"], expected["weights"])


@pytest.mark.parametrize("how", ["tied", "micro"])
def test_what_adds_up_over_several_gradients_is_the_same_on_all_ranks(two, how):
    """A table and a head of one weight, and two backwards before a step: each use's average is
    added at home. On all ranks alike, and near one process, which adds in another order."""
    config = config_of("host", None, device_memory="400KiB")
    expected = train(config, range(2), tied=how == "tied", micro=2 if how == "micro" else 1)
    first, second = two[f"over_all:{how}"]
    assert first["tiled"] and first["within"]
    assert not models.differing(first["weights"], second["weights"])
    for name, value in expected["grads"].items():
        scale = value.abs().max()
        assert (first["grads"][name] - value).abs().max() <= 1e-5 * scale, name


def test_tiles_send_each_byte_of_weights_and_gradients_as_whole_units_do(two):
    """A weight comes in the forward and again in the backward, and its gradient goes home once: of
    each byte a rank of two lacks a half."""
    tiled = [WORDS * WIDTH, WORDS * WIDTH, 1500 * WIDTH, 1500 * WIDTH]
    forwards = STEPS * sum(tiled) * 4
    # A lookup needs no rows in its backward, and a head's loss computes its logits again.
    backwards = STEPS * sum(tiled[1:]) * 4
    received = {
        kind: sum(found["collectives"][kind]["nbytes"] for found in two["over_all:host"])
        for kind in ("all-gather", "reduce-scatter")
    }
    assert received["all-gather"] == pytest.approx(forwards + backwards, rel=0.05)
    assert received["reduce-scatter"] == pytest.approx(forwards, rel=0.05)


@pytest.mark.parametrize("how", ["bf16", "bf16, tp"])
@pytest.mark.parametrize("ranks", few(["two", "four"], 1))
def test_zero_r_ranks_need_no_more_device_memory_than_one_process_and_two_buckets(
    ranks, how, request
):
    """Four blocks of two Linears of 8 MiB, all state on the host, tensor parallel or not. One
    process needs 128 KiB; whole units need 112 MiB."""
    most = 128 * 1024 + 2 * 8 * MIB
    assert 0 < max(request.getfixturevalue(ranks)[f"least_device:{how}"]) <= most


def test_a_hook_on_a_weight_in_tiles_is_refused_over_ranks(two):
    assert all("larger device_memory" in said for said in two["hooked:host"])


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_rank_that_fails_between_two_tiles_is_told_and_all_go_on(two, one, at):
    """The other rank waits with its next tile, until the first tries again: both are told where
    they are. Tried once more, both end with the weights of a run without an error."""
    first, second = two[f"struck:{at}"]
    assert [said.partition(":")[0] for said in first["said"]] == ["ZeroDivisionError", "UsageError"]
    (said,) = second["said"]
    assert "a forward" in first["said"][1] and "a forward" in said
    assert not models.differing(first["weights"], one["2"]["weights"])
    assert not models.differing(second["weights"], one["2"]["weights"])
