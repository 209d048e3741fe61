"""Layers that tensor parallelism has sharded run in tiles of each rank's part, with the results of
torch's own tensor parallelism and its sums over ranks.

**near**: within 1e-5 of the largest element; sums over tiles are added in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
import torch
from ranks import Jobs
from tile_jobs import config_of

from infinity.ext.tiles import sharded_layers

pytestmark = pytest.mark.timeout(300)
KINDS = ("columns and rows", "tied", "sequences", "llama", "gpt2")
DEVICE = "640KiB"


@pytest.fixture(scope="module")
def two(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    jobs: dict[str, dict] = {}
    for kind in KINDS:
        jobs[f"trained:{kind}-torch"] = {"kind": kind, "config": None}
        for home in ("host", "nvme"):
            config = config_of(home, folder, device_memory=DEVICE)
            jobs[f"trained:{kind}-{home}"] = {"kind": kind, "config": config}
    plain = {"kind": "columns and rows", "config": config_of("host", folder, device_memory=DEVICE)}
    for how in ("host", "nvme", "torch"):
        job = jobs[f"trained:llama-{how}"] | {"recomputes": True}
        jobs[f"trained:recomputed-{how}"] = job
    jobs["unsummed"] = {"config": plain["config"]}
    least = config_of("host", folder, device_memory="400KiB")
    jobs["trained:both batches"] = plain | {"config": least, "batches": [0, 1]}
    jobs["trained:one batch"] = plain | {"config": least}
    jobs["cast"] = {"config": plain["config"]}
    jobs["misused"] = {"config": config_of("host", folder, device_memory="400KiB")}
    jobs["replicated"] = {"config": config_of("host", folder, device_memory="1MiB")}
    jobs["returned"] = {"config": plain["config"]}
    return Jobs(standing_ranks(2), "sharded_tile_jobs", jobs)


@pytest.fixture(scope="module")
def four(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    folder = tmp_path_factory.mktemp("four")
    # More than without data ranks, for the same tiles: their gradients are averaged.
    jobs = {
        f"trained:{home}": {
            "kind": "columns and rows",
            "config": config_of(home, folder, device_memory="1MiB"),
        }
        for home in ("host", "nvme")
    }
    return Jobs(standing_ranks(4), "sharded_tile_jobs", jobs)


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names the tensors that are not near."""
    return [
        name
        for name, value in expected.items()
        if (found[name] - value).abs().max() > 1e-5 * value.abs().max()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_tiles_of_sharded_weights_train_as_torchs_own(two, kind):
    """First gradients and losses, without gradients too, and as many sums over ranks."""
    for found, expected in zip(two[f"trained:{kind}-host"], two[f"trained:{kind}-torch"]):
        assert len(found["tiled"]) >= 3 and found["within"]
        assert not differing(found["grads"], expected["grads"])
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert 0 < found["sums"] <= expected["sums"]


def test_partial_outputs_of_sharded_layers_are_summed_over_ranks(two):
    """Twin of the test above: each rank goes on with its own part, and the step is refused."""
    assert all("norm.weight, which ranks 0 and 1 have whole, differs" in s for s in two["unsummed"])


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_sharded_weights_have_one_result_at_every_home(two, kind):
    """Also after unwrapping."""
    for host, nvme in zip(two[f"trained:{kind}-host"], two[f"trained:{kind}-nvme"]):
        assert host["losses"] == nvme["losses"] and host["tiled"] == nvme["tiled"]
        for what in ("grads", "weights", "unwrapped"):
            assert not models.differing(host[what], nvme[what])
        assert not models.differing(host["weights"], host["unwrapped"])


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_data_ranks_of_sharded_layers_average_tile_by_tile(two, four, home):
    """Two data ranks of two ranks each, with the bits of two ranks that get both batches. Twin: two
    ranks with one of the batches."""
    expected, twin = (two[f"trained:{how}"][0] for how in ("both batches", "one batch"))
    for found in four[f"trained:{home}"]:
        assert found["tiled"] == expected["tiled"] and found["within"]
        assert not models.differing(found["grads"], expected["grads"])
        assert not models.differing(found["weights"], expected["weights"])
        assert models.differing(found["weights"], twin["weights"])


def test_sharded_layers_in_tiles_run_again_in_a_checkpoint(two):
    """One result at every home, and near torch's own checkpoint."""
    hows = ("host", "nvme", "torch")
    host, nvme, expected = (two[f"trained:recomputed-{how}"][0] for how in hows)
    assert not models.differing(host["weights"], nvme["weights"])
    assert not differing(host["grads"], expected["grads"])


def test_gradients_of_a_sharded_weight_in_tiles_are_dtensors_for_users(two):
    """What a hook sees, and what torch.autograd.grad returns."""
    for found in two["returned"]:
        assert not differing(found["ours"], found["torch"])


def test_a_plain_input_of_a_sharded_layer_in_tiles_is_refused_as_by_torch(two):
    assert all("got a plain tensor" in found["plain input"] for found in two["misused"])


def test_ranks_with_other_labels_are_refused_where_whole_weights_run_in_tiles(two):
    """Their gradients are compared as those of weights that are gathered whole. Twin: the tests
    above, with equal labels."""
    for found in two["misused"]:
        assert "differs between them" in found["other labels"]


def test_weights_that_every_rank_has_stay_whole(two):
    """A gradient of their rows would be partial, where inputs are parts."""
    assert all("device_memory" in said for said in two["replicated"])


def test_a_sharded_layer_in_tiles_has_torchs_dtype_in_autocast(two):
    for found in two["cast"]:
        assert found == ["torch.bfloat16"] * 2


def test_a_style_of_another_form_is_none_of_a_layer_in_tiles():
    """Transformers' style of norms has no steps before and after a forward."""
    layer = torch.nn.Linear(2, 2)
    original_forward = layer.forward
    exec(
        "def make(original_forward):\n"
        "    def forward(x):\n"
        "        return original_forward(x)\n"
        "    return forward",
        made := {"__name__": sharded_layers.STYLES},
    )
    layer.forward = made["make"](original_forward)
    assert sharded_layers.style_of(layer) is None
