"""Many ranks: the same bits as one process, equal shards, the papers' bytes, and no rank that fails
alone.

Words used here: see `ranks` (job, launch) and `rank_jobs`.

**one process**: wrapped without others, given every rank's batch in turn, each loss divided by
their number. In fp32 and with a power of two of ranks that is the same sum in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import models
import pytest
import rank_jobs
import torch
from fake_cufile import build_cufile, skip_beside_real
from gpu_stand_in import build_stand_in
from inside import parts_of
from passed import passed
from rank_jobs import moments
from ranks import Jobs

import infinity

pytestmark = pytest.mark.timeout(700)  # the launches that the tests share take minutes
MODES = ["parameters", "gradients", "optimizer"]
HOMES = ["device", "host", "nvme"]
STEPS = 3


ELSEWHERE = [(mode, "split") for mode in MODES] + [
    ("parameters", "nvme"),
    ("parameters", "past"),
    ("parameters", "clip"),
    ("optimizer", "micro"),
    ("gradients", "host"),
    ("optimizer", "there"),
    ("parameters", "device"),
]


def jobs_elsewhere(mode: str, folder: Path, kernels: str, cufile: str) -> dict[str, dict]:
    """What is run on devices of the ranks' own, of those in ELSEWHERE."""
    host = {"params": "host", "optimizer": "host", "shard": mode}
    jobs = {
        "host": {"config": host},
        "nvme": {"config": models.at_home("nvme", "nvme", folder / "swap") | {"shard": mode}},
        "past": {
            "config": models.at_home("nvme", "nvme", folder / "swap") | {"shard": mode},
            "kernels": kernels,
            "cufile": cufile,
        },
        "clip": {"config": host, "clip": 0.5},
        "micro": {"config": host, "micro": 3},
        "split": {"config": host, "kernels": kernels, "share": 0.5},
        "there": {"config": host | {"optimizer": "device"}, "kernels": kernels},
        "device": {
            "config": host | {"params": "device", "optimizer": "device"},
            "kernels": kernels,
        },
    }
    return {
        f"elsewhere:{what}-{mode}": job for what, job in jobs.items() if (mode, what) in ELSEWHERE
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    """Everything that two ranks can do one after the other."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "swap").mkdir()
    jobs: dict[str, dict] = {}
    for mode in MODES:
        for home in HOMES:
            jobs[f"parity:{mode}-{home}"] = {
                "config": models.at_home(home, home, folder / "swap") | {"shard": mode}
            }
        jobs[f"gradients:{mode}"] = {"shard": mode, "home": "host", "folder": str(folder / "swap")}
        jobs |= jobs_elsewhere(
            mode, folder, build_stand_in().__file__, str(build_cufile(tmp_path_factory))
        )
        jobs[f"parity:clip-{mode}"] = {
            "config": {"params": "host", "optimizer": "host", "shard": mode},
            "clip": 0.5,
        }
        jobs[f"unused:{mode}"] = {"shard": mode}
        jobs[f"stepped_in_backward:{mode}"] = {"shard": mode}
        jobs[f"parity:micro-{mode}"] = {
            "config": {"params": "host", "optimizer": "host", "shard": mode},
            "micro": 3,
        }
        jobs[f"uneven:{mode}"] = {"shard": mode, "home": "host", "folder": str(folder / "swap")}
        jobs[f"retried:{mode}"] = {"shard": mode}
        jobs |= {f"left_out:{mode}-{at}": {"shard": mode, "at": at} for at in (0, 2)}
        jobs[f"restless:{mode}"] = {
            "config": {"params": "host", "optimizer": "host", "shard": mode},
            "path": str(folder / f"restless-{mode}"),
        }
    jobs["uneven:on-disk"] = {"shard": "parameters", "home": "nvme", "folder": str(folder / "swap")}
    replicas = {"shape": (2, 1), "names": ("dp_replicate", "dp_shard")}
    jobs |= {
        f"uneven:replicas-{home}": {
            "shard": "parameters",
            "home": home,
            "folder": str(folder / "swap"),
            **replicas,
        }
        for home in HOMES
    }
    jobs["too_large_a_layer:replicas"] = replicas
    jobs["too_large_a_layer:whole"] = {"shard": "gradients"}
    jobs["too_large_a_layer:rows"] = {}
    jobs["odd_buffers_and_empty_parameters"] = {"path": str(folder / "empty")}
    jobs["gradients:on-disk"] = {
        "shard": "parameters",
        "home": "nvme",
        "folder": str(folder / "swap"),
    }
    split = models.at_home("nvme", "nvme", folder / "swap")
    jobs["parity:reversed"] = {
        "config": {"params": "host", "optimizer": "host"},
        "shape": [1, 0],
        "names": ("dp",),
    }
    jobs["parity:bf16"] = {"config": split, "dtype": torch.bfloat16}
    jobs["parity:tight"] = {"config": split | {"host_memory": "4.5MiB", "device_memory": "1.75MiB"}}
    jobs["parity:compressed"] = {
        "config": {"params": "host", "optimizer": "host", "compress_gathers": True}
    }
    jobs["parity:int8"] = {"config": {"params": "host", "optimizer": "host", "moments": "int8"}}
    jobs |= {f"other_values:{same}": {"same": same} for same in (True, False)}
    jobs["overflow"] = {}
    jobs["diverging"] = {}
    jobs["generate"] = {}
    for what in (
        "config",
        "model",
        "budget",
        "budget everywhere",
        "folder",
        "bad model",
        "mesh",
        "axis",
    ):
        jobs[f"refused:{what}"] = {"what": what}
    return Jobs(standing_ranks(2), "rank_jobs", jobs)


@pytest.fixture(scope="module")
def four(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    """Four ranks: what differs from two."""
    folder = tmp_path_factory.mktemp("four")
    (folder / "swap").mkdir()
    host = {"params": "host", "optimizer": "host"}
    jobs = {f"parity:{mode}": {"config": host | {"shard": mode}} for mode in MODES}
    jobs["parity:hybrid"] = {"config": host, "shape": (2, 2), "names": ("dp_replicate", "dp_shard")}
    jobs["elsewhere:hybrid"] = jobs["parity:hybrid"]
    jobs["elsewhere:nodes"] = {"config": host | {"shard_in_node": True}, "nodes": True}
    jobs["parity:hybrid2"] = {
        "config": host | {"shard": "gradients"},
        "shape": (2, 2),
        "names": ("dp_shard", "dp_replicate"),
    }
    jobs["parity:replicas"] = {
        "config": host,
        "shape": (4, 1),
        "names": ("dp_replicate", "dp_shard"),
    }
    for home in ("host", "nvme"):
        config = models.at_home(home, home, folder / "swap") | {"shard_in_node": True}
        jobs[f"restless_in_nodes:{home}"] = {
            "config": config,
            "path": str(folder / f"restless-{home}"),
        }
        jobs[f"in_nodes:{home}"] = {
            "config": models.at_home(home, home, folder / "swap") | {"shard_in_node": True}
        }
    return Jobs(standing_ranks(4), "rank_jobs", jobs)


def same_run(a: list[dict], b: list[dict]) -> bool:
    """Whether every rank's losses, norms and weights, and the optimizer's state, have the same bits
    in both."""
    return all(
        x["losses"] == y["losses"]
        and x["norms"] == y["norms"]
        and not models.differing(x["weights"], y["weights"])
        and not models.differing(moments(x["optimizer"]), moments(y["optimizer"]))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        pytest.param(
            *case,
            marks=(
                pytest.mark.slow if case in (("gradients", "split"), ("optimizer", "split")) else ()
            ),
        )
        for case in ELSEWHERE
    ],
)
def test_ranks_on_devices_of_their_own_have_the_same_bits(two, mode, what):
    """Claim: with several ranks, too, a device whose memory the processor does not use changes
    nothing. Method: the same job where it does."""
    same = (
        f"{what}-{mode}"
        if what in ("clip", "micro")
        else f"{mode}-{'nvme' if what in ('nvme', 'past') else 'host'}"
    )
    if what == "past":
        skip_beside_real()
    assert same_run(two[f"elsewhere:{what}-{mode}"], two[f"parity:{same}"])
    for of_rank in two[f"elsewhere:{what}-{mode}"]:
        assert (of_rank["stats"]["edges"].get("nvme->device", {"nbytes": 0})["nbytes"] > 0) == (
            what == "past"
        )


@pytest.mark.slow
def test_replicas_and_nodes_on_devices_of_their_own_have_the_same_bits(four):
    assert same_run(four["elsewhere:hybrid"], four["parity:hybrid"])
    assert same_run(four["elsewhere:nodes"], four["in_nodes:host"])


def one_process(
    world: int, *, dtype: torch.dtype = torch.float32, clip: float | None = None, **config
) -> tuple[dict, dict, list]:
    """Weights, the optimizer's state dict and norms of one process that is given every rank's
    batch."""
    model = rank_jobs.build(3, dtype)
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "device", "optimizer": "device"} | config
    )
    norms = rank_jobs.in_turn(model, optimizer, world, steps=STEPS, clip=clip)
    found = rank_jobs.cloned(model.state_dict()), optimizer.state_dict(), norms
    infinity.unwrap_model(model, optimizer)
    return found


# --- the numbers ---


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_have_the_bits_of_one_process(two, mode, home):
    """Weights and moments after three steps, on every rank, whatever is sharded and wherever it
    lives."""
    weights, optimizer, _ = one_process(2)
    for found in two[f"parity:{mode}-{home}"]:
        assert not models.differing(found["weights"], weights)
        assert not models.differing(found["unwrapped"], weights)
        assert not models.differing(moments(found["optimizer"]), moments(optimizer))


def test_a_mesh_may_name_its_ranks_in_any_order(two):
    """torch numbers the ranks of a group its own way: shards must go by that."""
    assert not models.differing(
        two["parity:reversed"][0]["weights"], two["parity:parameters-host"][0]["weights"]
    )


def test_other_batches_would_show(two):
    """The twin: one process that is given only the first rank's batches ends elsewhere."""
    weights, _, _ = one_process(1)
    assert models.differing(two["parity:parameters-host"][0]["weights"], weights)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*MODES])
def test_four_ranks_have_the_bits_of_one_process(four, case):
    weights, optimizer, _ = one_process(4)
    for found in four[f"parity:{case}"]:
        assert not models.differing(found["weights"], weights)
        assert not models.differing(moments(found["optimizer"]), moments(optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hybrid", "hybrid2", "replicas"])
def test_replicas_end_with_the_same_weights(four, case):
    """Sums are taken in rows, then over replicas, which is another order than one process has:
    within fp32 rounding."""
    weights, _, _ = one_process(4)
    first, *others = (found["weights"] for found in four[f"parity:{case}"])
    for other in others:
        assert not models.differing(first, other)
    for name, value in first.items():
        torch.testing.assert_close(
            value, weights[name], atol=2e-3, rtol=0
        )  # Adam: lr where a gradient is noise


def test_bf16_from_disk_has_the_bits_of_one_process(two):
    """Two bf16 gradients add up in fp32 and are rounded once, as bf16 accumulation does with
    two."""
    weights, _, _ = one_process(2, dtype=torch.bfloat16)
    for found in two["parity:bf16"]:
        assert not models.differing(found["weights"], weights)
        assert found["swap"]  # it was on disk indeed


def test_tight_budgets_change_no_bit(two):
    for found in two["parity:tight"]:
        assert not models.differing(found["weights"], two["parity:parameters-host"][0]["weights"])
        for tier in found["stats"]["tiers"].values():
            assert tier["peak_nbytes"] <= tier["planned_nbytes"]


def test_int8_moments_are_the_same_on_all_ranks(two):
    first, second = two["parity:int8"]
    assert not models.differing(first["weights"], second["weights"])


def test_clipping_is_by_the_norm_of_all_ranks(two):
    """The norm is put together from shards: equal on all ranks and modes, and to one process within
    rounding."""
    weights, _, norms = one_process(2, clip=0.5)
    reference = two["parity:clip-parameters"][0]
    assert max(norms) > 0.5, "nothing was clipped"
    assert reference["norms"] == pytest.approx(norms, rel=1e-5)
    for mode in MODES:
        for found in two[f"parity:clip-{mode}"]:
            assert found["norms"] == reference["norms"]
            assert not models.differing(found["weights"], reference["weights"])


@pytest.mark.parametrize("case", [*MODES, "on-disk"])
def test_gradients_are_averages_that_torch_can_read_and_change(two, case):
    """Values, norms, clipping by value, in-place arithmetic, assignment and zeroing of ``p.grad``,
    against torch alone."""
    model = rank_jobs.build()
    for rank in range(2):
        (models.loss_of(model, rank_jobs.batch(0, 0, rank)) / 2).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    norms = [
        torch.nn.utils.get_total_norm(list(grads.values()), order).item()
        for order in (2.0, 1.0, float("inf"))
    ]
    for found in two[f"gradients:{case}"]:
        assert not models.differing(found["values"], grads)
        assert found["norm"] == pytest.approx(norms, rel=1e-5)
        clipped = {name: grad.clamp(-1e-3, 1e-3) for name, grad in grads.items()}
        assert not models.differing(found["clipped"], clipped)
        name = "blocks.0.norm1.weight"
        assert torch.equal(found["changed"], clipped[name] * 2 + 1)
        assert (found["set"] == 7).all()
        assert found["zeros"] == 0 and found["none"] == [None] * len(grads)
        assert not models.differing({"view": found["view"]}, {"view": grads["positions"].view(-1)})


def test_overflow_on_one_rank_skips_the_step_on_all(two):
    assert two["overflow"] == [[True, True], [True, True]]


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_used_on_one_rank_gets_the_average_and_one_used_nowhere_none(two, mode):
    first, second = two[f"unused:{mode}"]
    assert not models.differing(first["weights"], second["weights"])
    for one, other in zip(first["grads"], second["grads"]):
        assert torch.equal(one["scale"], other["scale"]) and one["scale"].any()
        assert one["unused"] is None and other["unused"] is None


@pytest.mark.parametrize("case", [*MODES, "on-disk", *(f"replicas-{home}" for home in HOMES)])
def test_ranks_that_skip_other_parts_end_with_the_same_right_weights(two, case):
    """Every step another rank skips another part; in the least device memory, which is not
    exceeded. Against plain torch that is given both batches: skipping changes which gradients add
    up, so Adam may differ where they are noise.
    """
    first, second = two[f"uneven:{case}"]
    assert not models.differing(first["weights"], second["weights"])
    assert first["off"] < 1e-4 and first["within"] and second["within"]


@pytest.mark.parametrize("ranks", ["whole", "replicas"])
def test_no_layer_runs_in_tiles_that_other_ranks_have_too(two, ranks):
    """Method: a layer that is larger than the budget, which one process runs in tiles, on ranks
    that keep whole weights or the same shard. Refused. Twin: ranks with a shard each take it."""
    assert all("the least that works here is" in said for said in two[f"too_large_a_layer:{ranks}"])
    assert not any("the least" in said for said in two["too_large_a_layer:rows"])


@pytest.mark.parametrize("case", MODES)
def test_edits_in_a_forward_steps_in_a_backward_and_loads_between_are_right(two, case):
    """Against plain torch with every rank's batches; Adam may differ by a rounding of the sums'
    order."""
    first, second = two[f"restless:{case}"]
    assert not models.differing(first["weights"], second["weights"])
    assert first["off"] < 1e-4 and first["counts"] == {4.0}


@pytest.mark.slow
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_second_slices_are_never_stale(four, home):
    """The same with weights gathered inside two machines of two ranks."""
    for found in four[f"restless_in_nodes:{home}"]:
        assert not models.differing(
            found["weights"], four[f"restless_in_nodes:{home}"][0]["weights"]
        )
        assert found["off"] < 1e-4 and found["counts"] == {4.0}


@pytest.mark.parametrize("mode", MODES)
def test_backwards_that_fail_on_all_ranks_leave_nothing_behind(two, mode):
    for found in two[f"retried:{mode}"]:
        assert found["different"] == []
        undisturbed, disturbed = found["charges"]
        assert disturbed == undisturbed


def test_odd_buffers_and_empty_parameters_are_no_obstacle(two):
    assert two["odd_buffers_and_empty_parameters"] == [[], []]


@pytest.mark.parametrize("mode", MODES)
def test_stepping_in_the_backward_changes_no_bit(two, mode):
    assert two[f"stepped_in_backward:{mode}"] == [{"different": []}] * 2


def test_micro_batches_accumulate(two):
    """Three micro-batches: ranks agree, and modes but for the order of sums."""
    for mode in MODES:
        first, second = two[f"parity:micro-{mode}"]
        assert not models.differing(first["weights"], second["weights"])
    assert not models.differing(
        two["parity:micro-parameters"][0]["weights"], two["parity:micro-gradients"][0]["weights"]
    )


# --- bytes ---


@functools.cache
def elements_of_units(world: int = 2) -> list[int]:
    """Of the weights as the engine lays them out: padded, for ``world`` ranks."""
    model = rank_jobs.build()
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "host", "optimizer": "host"}
    )
    units = parts_of(model).units
    padding = 4096 * world
    of_units = [
        sum(-(-flat.layout.numel // padding) * padding for flat in unit.flat_params)
        for unit in units
    ]
    infinity.unwrap_model(model, optimizer)
    return of_units


@pytest.mark.parametrize(
    ("mode", "gathers", "reduces", "micro"),
    [
        ("parameters", 2, 1, 1),
        ("gradients", 1, 1, 1),
        ("optimizer", 1, 1, 1),
        ("parameters", 6, 3, 3),
        ("gradients", 1, 3, 3),
        ("optimizer", 1, 1, 3),
    ],
)
def test_zero_passes_the_papers_volume_between_ranks(two, mode, gathers, reduces, micro):
    """ZeRO: 2, 2 and 3 times the parameters per step, of which each of two ranks receives half. The
    units that end the forward are there already when the backward begins, and state_dict() gathers
    nothing through these edges.
    """
    name = f"parity:micro-{mode}" if micro > 1 else f"parity:{mode}-host"
    of_units = elements_of_units()
    psi = (
        4 * sum(of_units) // 2
    )  # bytes of fp32 weights that one rank receives when all are gathered
    there = 4 * (2 * max(of_units) + min(of_units)) // 2  # two blocks and the head
    for found in two[name]:
        moved = passed(found["stats"]["collectives"])
        assert moved["reduce-scatter"] == STEPS * reduces * psi
        assert (
            STEPS * (gathers * psi - micro * there) <= moved["all-gather"] <= STEPS * gathers * psi
        )


@pytest.mark.parametrize(
    ("mode", "nbytes"), [("parameters", 8), ("gradients", 8), ("optimizer", 10)]
)
def test_zero_infinity_has_an_equal_slice_at_home_on_every_rank(two, mode, nbytes):
    """fp32 state is 16 bytes per parameter: half of it on each of two ranks, and with ZeRO-1 the
    whole gradient."""
    for found in two[f"parity:{mode}-host"]:
        assert found["home"] == sum(elements_of_units()) * nbytes


@pytest.mark.slow
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_second_slices_change_no_bit_and_keep_the_backwards_gather_in_the_machine(four, home):
    """Two machines of two ranks, or so they are told: half of the gathers pass between two ranks
    instead of four."""
    for found, plain in zip(four[f"in_nodes:{home}"], four["parity:parameters"]):
        assert not models.differing(found["weights"], plain["weights"])
        far, near = (
            passed(found["stats"]["collectives"])[edge]
            for edge in ("all-gather", "all-gather in node")
        )
        alone = passed(plain["stats"]["collectives"])["all-gather"]
        psi = STEPS * 4 * sum(elements_of_units(4)) * 3 // 4
        assert far == psi, "forward: each unit once from everywhere"
        assert near == (alone - psi) * 2 // 3, (
            "backward: half of each from the neighbour instead of three quarters"
        )
        device = found["stats"]["tiers"]["device"]
        assert device["peak_nbytes"] <= device["planned_nbytes"]


def test_compressed_gathers_pass_a_quarter_of_the_bytes_within_the_stated_error(two):
    """fp32 as 8-bit codes with a scale per 256; both ranks compute with the same weights, near the
    exact ones."""
    from infinity.ext.shared_homes.quantize import decode_blocks, encode_blocks

    first, second = two["parity:compressed"]
    exact = two["parity:parameters-host"][0]
    assert not models.differing(first["weights"], second["weights"])
    assert models.differing(first["weights"], exact["weights"]), "nothing was compressed"
    for ours, theirs in zip(first["losses"], exact["losses"]):
        assert ours == pytest.approx(theirs, rel=0.02)
    moved, whole = (passed(found["stats"]["collectives"])["all-gather"] for found in (first, exact))
    assert moved == whole * (256 + 4) // 1024
    values = torch.randn(4 * 256, generator=torch.Generator().manual_seed(5)) * torch.logspace(
        -20, 20, 4
    ).repeat_interleave(256)
    values[256:512] = 0
    out = torch.empty_like(values)
    decode_blocks(encode_blocks(values), out.view(1, -1))
    largest = values.view(-1, 256).abs().amax(1, keepdim=True)
    assert ((out - values).view(-1, 256).abs() <= largest / 253).all()


# --- bad input, and ranks that fall ---


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("config", "ConfigError", r"Config\(moments\) is 'fp32' on rank 0 and 'bf16' on rank 1"),
        ("model", "ConfigError", r"parameter blocks\.3.* is \(.* on rank 0 and absent on rank 1"),
        ("budget", "ConfigError", r"Config\(host_memory\) is None on rank 0 and 1000 on rank 1"),
        ("budget everywhere", "CapacityError", "host_memory is 500 B"),
        ("bad model", "", "none is one of the model's"),
        ("folder", "", "no folder /nowhere"),
        ("axis", "ConfigError", "axes must be named dp_replicate, dp, dp_shard"),
    ],
)
def test_what_one_rank_gets_wrong_is_an_error_on_all_and_the_next_wrap_works(two, what, kind, said):
    import re

    for found in two[f"refused:{what}"]:
        assert found["said"].startswith(kind) and re.search(said, found["said"]), found["said"]
        assert found["untouched"]
        assert found["losses"]


def test_what_is_too_long_to_be_said_still_differs():
    """The twin: texts that are cut to the same beginning would pass for equal."""
    from infinity.ranks.channel import SAID_NBYTES, _cut

    one, other = "x" * SAID_NBYTES + "a", "x" * SAID_NBYTES + "b"
    assert (
        _cut(one) != _cut(other)
        and max(len(_cut(text).encode()) for text in (one, "\u00e9" * 999)) <= SAID_NBYTES
    )
    assert _cut("short") == "short"


def test_ranks_that_take_other_branches_are_told_both(two):
    for rank, said in enumerate(two["diverging"]):
        assert said.startswith("UsageError") and "blocks.1" in said and "blocks.2" in said, said
        assert f"rank {rank} is at" in said


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_module_left_out_on_one_rank_is_refused_in_that_step_or_never(two, mode, at):
    """Promise: where ranks part in one step, that step is the one of plain torch or is refused, and
    the next ones run."""
    for rank, found in enumerate(two[f"left_out:{mode}-{at}"]):
        assert [step for step, _ in found["said"]] in ([], [at]), found["said"]
        assert all(f"rank {rank} is at" in said and "blocks.1" in said for _, said in found["said"])
        assert found["off"] < 1e-6


def test_generation_with_weights_in_slices(two):
    for found in two["generate"]:
        assert found["same"]
        assert 0.5 <= found["share"] < 0.75


def test_other_values_on_other_ranks_are_said(two):
    """Stages of a pipeline that look alike would all become the first one: that it was given other
    values is said, once."""
    assert two["other_values:True"] == [[], []]
    (said,), others = two["other_values:False"]
    assert "not replicas" in said and others == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", MODES)
def test_ranks_plan_and_charge_the_whole_gradients_of_a_table(shard, tied, standing_ranks):
    """Counts whole gradients that are alive in a backward of two ranks, where autograd adds them
    up. Twin: a tied table with ZeRO-1 needs the term of its own."""
    jobs = {f"whole_gradients:{shard} {tied}": {"shard": shard, "tied": tied}}
    for found in Jobs(standing_ranks(2), "table_jobs", jobs)[f"whole_gradients:{shard} {tied}"]:
        held = found["most"] * found["whole"] + found["weights"]
        assert held <= found["planned"] and found["charged"] <= found["planned"]
        of_autograd = 3 if tied else 1
        assert found["most"] >= of_autograd
        assert found["charged"] >= (1 + of_autograd) * found["whole"]  # with the weight
        if tied and shard == "optimizer":
            assert held > found["planned"] - found["autograd"]
