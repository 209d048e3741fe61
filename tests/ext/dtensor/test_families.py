"""Models of transformers, adapters of peft and torchtitan's model, cut over two ranks and trained
from their homes.

**twin**: the same training by one process, or by the library itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import models
import pytest
from ranks import Jobs, near, run_all

FAMILIES = ("llama", "qwen3", "t5", "bert", "gpt2")
RECOMPUTED = ("llama", "qwen3", "gpt2")
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module")
def two(launch_folder, standing_ranks) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    swap = launch_folder / "swap"
    configs = [models.at_home(home, home, swap) for home in ("host", "nvme")]
    jobs: dict[str, dict] = {
        f"families:{name}": {"name": name, "configs": configs} for name in FAMILIES
    }
    jobs |= {
        f"families:{name}-again": {"name": name, "configs": configs, "recomputes": True}
        for name in RECOMPUTED
    }
    jobs |= {
        f"generates:{name}": {"name": name, "config": configs[0], "folder": str(launch_folder)}
        for name in ("llama", "gpt2")
    }
    jobs |= {f"experts:{name}": {"name": name, "configs": configs} for name in MIXTURES}
    jobs["experts_refused"] = {}
    jobs["adapters"] = {"config": configs[1], "folder": str(launch_folder)}
    jobs["axes"] = {"names": ["dp", "cp", "sp", "fsdp"]}
    return Jobs(standing_ranks(2), "parallel_families", jobs)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_transformers_train_under_their_own_or_a_found_plan(two, name):
    """Gradients of one process, the same bits from every home, and no more bytes than the plan
    says."""
    for rank in two[f"families:{name}"]:
        first, *others = rank["homes"]
        assert near(first["losses"][:1], rank["one process"][:1]) and near(
            first["losses"], rank["one process"], 1e-4
        )
        assert first["grads off"] < 1e-6 and first["q_norm off"] < 1e-6
        assert rank["names"]
        assert rank["cut"] < 0.7 * rank["whole"]
        for other in others:
            assert other["losses"] == first["losses"]
            assert not models.differing(other["weights"], first["weights"])


@pytest.mark.parametrize("name", RECOMPUTED)
def test_layers_that_run_again_in_the_backward_change_no_bit(two, name):
    """Checkpoints each layer by transformers: a checkpoint compares what is saved with what the
    layer saves when it runs again. Twin: the same model without."""
    for rank, twin in zip(two[f"families:{name}-again"], two[f"families:{name}"]):
        for found, expected in zip(rank["homes"], twin["homes"]):
            assert found["losses"] == expected["losses"]
            assert not models.differing(found["weights"], expected["weights"])


@pytest.mark.parametrize("rest", ["whole", "cut"])
@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_with_whole_experts_of_a_mixture_train_as_one_process(two, name, rest):
    """Half of the experts' bytes on each of two ranks; the same bits from every home."""
    for rank in two[f"experts:{name}"]:
        first, *others = rank[rest]["homes"]
        assert near(first["losses"][:1], rank["one process"][:1]) and near(
            first["losses"], rank["one process"], 1e-4
        )
        assert rank[rest]["grads off"] < 1e-6 and rank[rest]["share"] == 0.5
        for other in others:
            assert other["losses"] == first["losses"]
            assert not models.differing(other["weights"], first["weights"])


def test_what_is_no_mixture_or_does_not_divide_is_refused(two):
    for rank in two["experts_refused"]:
        assert "LlamaForCausalLM has no plan for its experts" in rank["no mixture"]
        assert "3 experts cannot be shared out equally to 2 ranks (ep=2)" in rank["experts"]
        assert "of one dimension" in rank["mesh"] and "already sharded" in rank["cut"]
        assert rank["one axis of size 1"] == "was taken" and rank["untouched"] == "True"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_and_a_saved_folder_are_those_of_one_process(two, name):
    assert two[f"generates:{name}"] == [{"same": True, "saved": True}] * 2


def test_adapters_around_cut_layers_are_those_of_one_process(two):
    """peft cuts one of each two adapters; both are saved whole."""
    first, second = two["adapters"]
    for rank in (first, second):
        assert near(rank["ours"]["losses"], rank["one process"]["losses"], 1e-5)
        assert rank["grads off"] < 1e-6 and rank["weights off"] < 1e-4
        assert rank["saved"] is True
        assert "cut the base model first" in rank["adapted before"]
        assert (
            "adapters of peft that are whole, around a layer that is cut" in rank["whole adapters"]
        )
    assert not models.differing(first["ours"]["weights"], second["ours"]["weights"])


def test_ranks_with_other_parts_of_the_sequences_are_data_ranks(two):
    for rank in two["axes"]:
        for name in ("cp", "sp", "fsdp"):
            assert rank[name]["losses"] == rank["dp"]["losses"]
            assert not models.differing(rank[name]["weights"], rank["dp"]["weights"])


@pytest.mark.slow
def test_torchtitans_own_function_cuts_a_model_that_trains_from_its_homes(tmp_path):
    """Run where torchtitan is installed (0.2.0 was tried; later ones need a nightly torch).
    INFINITY_TORCHTITAN: a folder with it."""
    if "INFINITY_TORCHTITAN" not in os.environ:
        pytest.importorskip("torchtitan")
    path = os.pathsep.join(
        filter(None, (os.environ.get("INFINITY_TORCHTITAN"), os.environ.get("PYTHONPATH")))
    )
    jobs = {
        f"titan:{home}-{parts}": {
            "config": models.at_home(home, home, tmp_path),
            "loss_parallel": parts,
        }
        for home in ("host", "nvme")
        for parts in (True, False)
    }
    found = run_all(
        tmp_path / "jobs", 2, jobs, script="parallel_families.py", environment={"PYTHONPATH": path}
    )
    for name, ranks in found.items():
        for rank in ranks:
            assert near(rank["ours"]["losses"], rank["torchtitan"]["losses"]), name
            assert near(rank["ours"]["norms"], rank["torchtitan"]["norms"], 1e-5), name
            assert rank["off"] < 1e-5, name
