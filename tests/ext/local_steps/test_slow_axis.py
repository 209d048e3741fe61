"""Groups that train apart over a slow axis, and are averaged: the numbers of one process that does
the same, on two and four ranks.

Words used here:

**oracle**: one process that trains all groups, one after the other, and averages them with torch's
own optimizer. **turn**: the step after which a unit is averaged.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import local_jobs
import models
import pytest
import rank_jobs
import torch
from inside import parts_of
from local_jobs import HOST
from ranks import Jobs, fall, launch_without

import infinity

pytestmark = pytest.mark.timeout(700)  # what the tests share takes minutes on a busy machine
PLAIN = {"lr": 1, "momentum": 0}
DILOCO = {"steps": 14, "every": 7, "stream": False, "kind": "adamw"}
STREAMED = {"steps": 16, "every": 7, "kind": "adamw", "delay": 2, "alpha": 0.25}


@pytest.fixture(scope="module")
def two(standing_ranks, tmp_path_factory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("groups")
    (folder / "swap").mkdir()
    on_disk = {"config": models.at_home("nvme", "nvme", folder / "swap")}
    half = {"dtype": torch.bfloat16, "kind": "adamw", "every": 3, "steps": 7}
    jobs: dict[str, dict[str, Any]] = {
        "data_parallel:sgd": {"steps": 4},
        "data_parallel:adamw": {"steps": 4, "kind": "adamw"},
        "trains:every step": {"steps": 4, "every": 1, **PLAIN},
        "trains:every step adamw": {"steps": 4, "every": 1, "kind": "adamw", **PLAIN},
        "trains:weights every step": {"steps": 4, "every": 1, "alpha": 1e-9, **PLAIN},
        "trains:diloco": DILOCO,
        "trains:plain": DILOCO | PLAIN,
        "trains:streamed": STREAMED,
        "trains:on disk": STREAMED | on_disk,
        "trains:on the device": STREAMED | {"config": {"params": "device", "optimizer": "device"}},
        "trains:half": half,
        "trains:half on disk": half | on_disk,
        "trains:codes": DILOCO | {"codes": True},
        "trains:quadratic": {"steps": 10, "every": "quadratic", "least": 2, "coefficient": 0.2},
        "resumes:whole": DILOCO | {"saved_at": 10},
        "resumes:forgetful": DILOCO | {"saved_at": 10, "forgets": True},
        "resumes:streamed": STREAMED | {"saved_at": 9},
        "resumes:beside": STREAMED | {"saved_at": 9, "wait": False},
        "resumes:on disk": STREAMED | {"saved_at": 9, "wait": False} | on_disk,
        "skewed": {"steps": 90, "skewed_from": 20, "skewed_to": 60},
    }
    for name, together in (("apart", False), ("together", True)):
        micro_batches = {"steps": 2, "micro": 3, "together": together}
        jobs[f"data_parallel:{name}"] = micro_batches
        jobs[f"trains:{name}"] = micro_batches | {"every": 1, **PLAIN}
    jobs["goes"] = {"made": 3}
    jobs |= {f"is_struck:{at}": STREAMED | {"at": at} for at in (70, 95)}
    jobs |= {f"fails:{what}": {"what": what} for what in ("settings", "probe")}
    jobs["fails:load"] = {"what": "load", "folder": str(folder / "other")}
    for name in jobs:
        if name.startswith("resumes"):
            jobs[name]["folder"] = str(folder / name.replace(" ", "-"))
    return Jobs(standing_ranks(2), "local_jobs", jobs)


@pytest.fixture(scope="module")
def four(standing_ranks, tmp_path_factory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("groups-of-two")
    shape = {"shape": (2, 2)}
    jobs = {
        "data_parallel:sgd": {"steps": 4, **shape},
        "trains:every step": {"steps": 4, "every": 1, **PLAIN, **shape},
        "trains:diloco": DILOCO | shape,
        "trains:streamed": STREAMED | shape,
        "trains:four groups": {"steps": 10, "every": 3, "delay": 1, "shape": (4, 1)},
        "resumes": STREAMED | shape | {"saved_at": 9, "folder": str(folder)},
    }
    for shard in ("gradients", "optimizer"):
        jobs[f"trains:streamed {shard}"] = STREAMED | shape | {"config": HOST | {"shard": shard}}
    return Jobs(standing_ranks(4), "local_jobs", jobs)


class Oracle:
    """Groups of ``size`` ranks, trained by one process."""

    def __init__(self, size: int, groups: int, kind: str, *, lr: float, momentum: float):
        self.size, self.pairs = size, []
        for _ in range(groups):
            model = rank_jobs.build(3)
            self.pairs.append(
                infinity.wrap_model(model, local_jobs.optimizer_of(kind, model), HOST)
            )
        units = parts_of(self.pairs[0][0]).units
        self.units = [[handle.name for handle in unit.handles] for unit in units]
        self.anchors = {
            name: torch.nn.Parameter(value.clone())
            for name, value in self.pairs[0][0].state_dict().items()
            if any(name in names for names in self.units)  # a tied one once
        }
        self.outer = {
            name: torch.optim.SGD([anchor], lr=lr, momentum=momentum, nesterov=momentum > 0)
            for name, anchor in self.anchors.items()
        }

    def step(self, number: int) -> None:
        for group, (model, optimizer) in enumerate(self.pairs):
            for rank in range(self.size):
                ids = rank_jobs.batch(number, 0, group * self.size + rank)
                (models.loss_of(model, ids) / self.size).backward()
            optimizer.step()
            optimizer.zero_grad()

    def moved(self, names: list[str]) -> dict[str, torch.Tensor]:
        """The mean of what the groups have moved, in their order."""
        states = [model.state_dict() for model, _ in self.pairs]
        found = {}
        for name in names:
            total = self.anchors[name].detach() - states[0][name]
            for state in states[1:]:
                total = total + (self.anchors[name].detach() - state[name])
            found[name] = total / len(states)
        return found

    def apply(self, means: dict[str, torch.Tensor], alpha: float) -> None:
        for name, mean in means.items():
            self.anchors[name].grad = mean
            self.outer[name].step()
        for model, _ in self.pairs:
            state = model.state_dict()
            new = {
                name: torch.lerp(self.anchors[name].detach(), state[name], alpha) for name in means
            }
            model.load_state_dict(new, strict=False)

    def run(
        self, *, steps: int, every: int, stream: bool = True, delay: int = 0, alpha: float = 0.0
    ) -> list[dict[str, torch.Tensor]]:
        """The weights of each group."""
        count, pending = len(self.units), {}
        turns = [-(-(place + 1) * every // count) if stream else every for place in range(count)]
        for number in range(steps):
            self.step(number)
            for due in [due for due in pending if due == number]:
                self.apply(pending.pop(due), alpha)
            for names, turn in zip(self.units, turns):
                if turn == number % every + 1:
                    pending.setdefault(number + delay, {}).update(self.moved(names))
            if not delay and number in pending:
                self.apply(pending.pop(number), alpha)
        return [rank_jobs.cloned(model.state_dict()) for model, _ in self.pairs]


# --- a period of one ---


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_an_average_after_every_step_has_the_bits_of_data_parallelism(two, kind):
    """Claim: also with Adam, since gradients are averaged before it."""
    name = "every step" if kind == "sgd" else f"every step {kind}"
    for found, expected in zip(two[f"trains:{name}"], two[f"data_parallel:{kind}"]):
        assert not models.differing(found["weights"], expected)
        assert found["ended"] == [True] * 4 and not found["outer"]


def test_micro_batches_that_are_reduced_once_have_the_bits_of_data_parallelism(two):
    """In `infinity.accumulate`. The twin: data parallelism averages each micro-batch over all
    ranks, the groups only their sum."""
    for name, is_same in (("together", True), ("apart", False)):
        for found, expected in zip(two[f"trains:{name}"], two[f"data_parallel:{name}"]):
            assert (not models.differing(found["weights"], expected)) is is_same
            for key, value in found["weights"].items():
                torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-5)


def test_averaged_weights_are_near_them_and_differ(two):
    """The twin: a mean of weights that are rounded already."""
    expected = two["data_parallel:sgd"][0]
    found = two["trains:weights every step"][0]["weights"]
    assert models.differing(found, expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_two_groups_of_two_have_the_bits_of_data_parallelism(four):
    expected = four["data_parallel:sgd"][0]
    for found in four["trains:every step"]:
        assert not models.differing(found["weights"], expected)


# --- against one process ---


def test_diloco_has_the_bits_of_one_process_that_trains_both_groups(two):
    """Method: AdamW inside, torch's SGD with Nesterov momentum outside (Douillard et al. 2023).
    Twin: a plain mean ends elsewhere."""
    oracle = Oracle(1, 2, "adamw", lr=0.7, momentum=0.9)
    expected = oracle.run(steps=14, every=7, stream=False)
    assert not models.differing(*expected)
    for found in two["trains:diloco"]:
        assert not models.differing(found["weights"], expected[found["group"]])
        assert [at for at, ended in enumerate(found["ended"]) if ended] == [6, 13]
    assert models.differing(two["trains:plain"][0]["weights"], expected[0])


def test_a_plain_mean_is_the_mean_and_keeps_nothing(two):
    oracle = Oracle(1, 2, "adamw", lr=1, momentum=0)
    expected = oracle.run(steps=14, every=7, stream=False)
    for found in two["trains:plain"]:
        assert not found["outer"]
        for name, value in found["weights"].items():
            # Two rounds of Adam after fp32 rounding of another order.
            torch.testing.assert_close(value, expected[0][name], atol=2e-3, rtol=0)
    assert not models.differing(*(found["weights"] for found in two["trains:plain"]))


def test_streaming_diloco_has_the_bits_of_one_process(two):
    """Twin: the groups differ meanwhile, while their anchors are the same."""
    oracle = Oracle(1, 2, "adamw", lr=0.7, momentum=0.9)
    expected = oracle.run(steps=16, every=7, delay=2, alpha=0.25)
    found = two["trains:streamed"]
    for of_rank in found:
        assert not models.differing(of_rank["weights"], expected[of_rank["group"]])
        assert not any(of_rank["ended"])
    assert models.differing(found[0]["weights"], found[1]["weights"])
    assert found[0]["outer"] and not models.differing(found[0]["outer"], found[1]["outer"])


@pytest.mark.slow
def test_two_groups_of_two_have_the_bits_of_one_process(four):
    oracle = Oracle(2, 2, "adamw", lr=0.7, momentum=0.9)
    expected = oracle.run(steps=14, every=7, stream=False)
    for found in four["trains:diloco"]:
        assert not models.differing(found["weights"], expected[found["group"]])


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["gradients", "optimizer"])
def test_what_a_group_shards_changes_no_bit(four, shard):
    for found, expected in zip(four[f"trains:streamed {shard}"], four["trains:streamed"]):
        assert not models.differing(found["weights"], expected["weights"])


@pytest.mark.slow
def test_a_checkpoint_of_groups_of_two_goes_on_with_the_same_bits(four):
    for found in four["resumes"]:
        (_, saved, outer), (_, loaded, outer_loaded) = found["ends"]
        assert not models.differing(saved, loaded)
        assert not models.differing(outer, outer_loaded)


@pytest.mark.slow
def test_four_groups_have_the_same_anchors_and_bytes_from_three(four):
    found = four["trains:four groups"]
    for of_rank in found:
        assert not models.differing(of_rank["outer"], found[0]["outer"])
        sent = sum(4 * shard + 16 for shard in of_rank["shards"])
        assert of_rank["received"] == 3 * 3 * sent


# --- homes, bytes, codes ---


@pytest.mark.parametrize("home", ["on disk", "on the device"])
def test_homes_change_no_bit(two, home):
    for found, expected in zip(two[f"trains:{home}"], two["trains:streamed"]):
        assert not models.differing(found["weights"], expected["weights"])
        assert not models.differing(found["outer"], expected["outer"])
        assert bool(found["swap"]) == (home == "on disk")


def test_masters_of_half_precision_are_averaged(two):
    """Method: on disk and in memory; twin: a step of one group leaves the other one's masters."""
    for found, expected in zip(two["trains:half on disk"], two["trains:half"]):
        assert not models.differing(found["weights"], expected["weights"])
        assert not models.differing(found["outer"], expected["outer"])
    assert models.differing(*(found["weights"] for found in two["trains:half"]))


def test_the_bytes_are_those_of_the_values_once_in_a_period(two):
    """4 bytes a parameter, and 16 for each unit, in each of two periods; 8-bit codes are 65 bytes
    for 64 values. Twin: data parallelism moves them in every step."""
    for name, per_256 in (("diloco", 1024), ("plain", 1024), ("codes", 260)):
        for found in two[f"trains:{name}"]:
            values = sum(shard // 256 * per_256 for shard in found["shards"])
            assert found["received"] == 2 * (values + 16 * len(found["shards"]))
    every_step = two["trains:every step"][0]["received"] / 4
    assert every_step > 6 * two["trains:diloco"][0]["received"] / 14


def test_codes_are_near_and_the_same_in_all_groups(two):
    exact, found = two["trains:diloco"][0]["weights"], two["trains:codes"]
    assert not models.differing(*(of_rank["weights"] for of_rank in found))
    assert models.differing(found[0]["weights"], exact)
    for name, value in found[0]["weights"].items():
        assert float((value - exact[name]).abs().max()) < 2e-2, name


# --- in the middle of a period ---


@pytest.mark.parametrize("case", ["whole", "streamed", "beside", "on disk"])
def test_a_checkpoint_in_the_middle_of_a_period_goes_on_with_the_same_bits(two, case):
    """Method: also while exchanges are on their way, and beside the training."""
    for found in two[f"resumes:{case}"]:
        (began, saved, outer), (resumed, loaded, outer_loaded) = found["ends"]
        assert (began, resumed) == (0, 10 if case == "whole" else 9)
        assert not models.differing(saved, loaded)
        assert not models.differing(outer, outer_loaded)
    expected = two["trains:diloco" if case == "whole" else "trains:streamed"]
    for found, straight in zip(two[f"resumes:{case}"], expected):
        assert not models.differing(found["ends"][0][1], straight["weights"])


@pytest.mark.slow
def test_groups_that_are_killed_go_on_with_the_same_bits(two, tmp_path):
    """Method: SIGKILL of all processes in the middle of a period, with exchanges on their way; then
    new processes."""
    jobs = {"is_killed": STREAMED | {"saved_at": 9, "folder": str(tmp_path / "saved")}}
    _, ends = launch_without(tmp_path / "first", 2, jobs, script="local_jobs.py")
    assert all(code == -signal.SIGKILL for code, _ in ends), ends
    found, ends = launch_without(tmp_path / "second", 2, jobs, script="local_jobs.py")
    for of_rank, expected in zip(found["is_killed"], two["trains:streamed"]):
        assert not models.differing(of_rank["weights"], expected["weights"]), ends


def test_a_group_that_forgets_its_anchors_would_show(two):
    """The twin."""
    for found in two["resumes:forgetful"]:
        assert models.differing(found["ends"][0][1], found["ends"][1][1])


@pytest.mark.parametrize("at", [70, 95])
def test_an_average_that_is_interrupted_on_one_rank_is_completed(two, at):
    """Method: Ctrl-C at a write of rank 1; its next use completes the average, while rank 0 knows
    nothing of it."""
    found = two[f"is_struck:{at}"]
    assert [of_rank["strikes"] for of_rank in found] == [0, 1]
    for of_rank, expected in zip(found, two["trains:streamed"]):
        assert not models.differing(of_rank["weights"], expected["weights"])
        assert of_rank["steps"] == 16


# --- the period ---


def test_qsr_follows_the_learning_rate(two):
    """(0.2 / 0.1) squared, at least 2 (Gu et al. 2024)."""
    for found in two["trains:quadratic"]:
        assert found["period"] == 4
        assert models.differing(found["weights"], two["trains:every step"][0]["weights"])


def test_skewscout_shortens_the_period_while_data_differ(two):
    """Claim: it climbs while the groups' data are alike, goes down when they differ, and up again
    (Hsieh et al. 2020), by the same steps on all ranks."""
    first, second = (found["periods"] for found in two["skewed"])
    assert first == second
    assert max(first[:20]) == 16 and min(first[40:60]) == 1 and max(first[60:]) >= 8


# --- what does not fit, and what goes ---


@pytest.mark.slow
def test_a_group_that_is_lost_ends_the_other_with_its_reason(tmp_path):
    said = fall(tmp_path, "out of coffee", script="local_jobs.py")
    assert "PeerError" in said and "out of coffee" in said


def test_a_dropped_model_leaves_no_process_group(two):
    for counts in two["goes"]:
        assert len(set(counts)) == 1


def test_other_settings_are_refused_on_all_ranks(two):
    for found in two["fails:settings"]:
        assert "ConfigError" in found["said"][0] and "the period" in found["said"][0]


def test_a_probe_that_raises_costs_no_average(two):
    """Its error is raised where it came from, and told to the others. The next probe finds NaN,
    which counts as a gap: the period stays the shortest."""
    first, second = two["fails:probe"]
    assert [each.partition(":")[0] for each in first["said"]] == ["ValueError"]
    assert [each.partition(":")[0] for each in second["said"]] == ["PeerError"]
    assert "no data here" in second["said"][0]
    assert first["periods"] == second["periods"] == [1, 1]
    assert first["steps"] == second["steps"] == 2


def test_a_group_from_another_checkpoint_is_told(two):
    for found in two["fails:load"]:
        assert "UsageError" in found["said"][0] and "same number of steps" in found["said"][0]
