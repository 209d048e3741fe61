"""Three stages without flush, which keep up to three versions of the weights: three ranks over
gloo. For the words see test_weight_versions.

**live**: of a version, from its update until no later action computes with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
import torch
from ouroboros import ouroboros
from parallel_jobs import off
from ranks import Jobs
from version_jobs import VERSIONS

from infinity.ext.versions_2bw.version_rules import VersionRule, order_of

STAGES = 3
HOST = {"params": "host", "optimizer": "host"}
# Micro-batches of an update -> versions beside the newest, on each stage.
KEPT = {
    ("stash", 1): (2, 1, 0),
    ("stash", 2): (1, 1, 0),
    ("vertical", 1): (2, 2, 2),
    ("vertical", 2): (1, 1, 1),
    ("two", 4): (1, 1, 1),
}
QUICK = ("stash", 1), ("vertical", 1)
CASES = [
    pytest.param(
        *case, id="-".join(map(str, case)), marks=() if case in QUICK else pytest.mark.slow
    )
    for case in KEPT
]


@pytest.fixture(scope="module")
def three(standing_ranks) -> Mapping[str, Any]:
    """Everything that three ranks do."""
    jobs: dict[str, dict] = {}
    for kind, micro in KEPT:
        given = {"rule": "momentum", "micro": micro, "runs": [(kind, range(7 // micro + 1))]}
        jobs[f"oracle:{kind}-{micro}"] = given
        jobs[f"trained:{kind}-{micro}"] = given | {"config": HOST}
        jobs[f"executed:{kind}-{micro}"] = {"versions": kind, "micro": micro, "batches": 6}
    for late in (True, False):
        given = {"rule": "SGD", "numbers": range(7), "late": late}
        jobs[f"by_ouroboros:{'late' if late else 'at once'}"] = given
    given = {"rule": "SGD", "micro": 1, "runs": [("stash", range(7))]}
    jobs["trained:SGD"] = given | {"config": HOST}
    return Jobs(standing_ranks(STAGES), "version_jobs", jobs)


def merged(ranks: list[dict]) -> dict[str, torch.Tensor]:
    return {name: value for rank in ranks for name, value in rank["weights"].items()}


@pytest.mark.parametrize("kind, micro", CASES)
def test_three_stages_have_the_bits_of_the_oracle(three, kind, micro):
    expected, ranks = three[f"oracle:{kind}-{micro}"][0], three[f"trained:{kind}-{micro}"]
    assert not models.differing(merged(ranks), expected["weights"])
    assert ranks[-1]["losses"] == expected["losses"]


@pytest.mark.parametrize("kind, micro", CASES)
def test_the_ledger_has_exactly_the_versions_of_each_stage(three, kind, micro):
    """Of n stages, with one micro-batch for each update: n - s by stashing, n by vertical sync, and
    with at least n of them two by PipeDream-2BW. The last stage of stashing takes no second
    copy."""
    for rank, kept in zip(three[f"trained:{kind}-{micro}"], KEPT[kind, micro]):
        assert rank["taken"] == rank["planned"]
        assert kept * rank["shards"] <= rank["taken"] <= kept * (rank["shards"] + 4096 * 100)


@pytest.mark.parametrize("kind, micro", CASES)
def test_each_forward_computes_with_the_version_of_its_rule(three, kind, micro):
    """Seen in the values of a parameter. The failing twin: on the first of three stages the newest
    version is another one."""
    for stage, rank in enumerate(three[f"executed:{kind}-{micro}"]):
        expected = [VERSIONS[kind](k, stage, STAGES, micro) for k in range(6 * micro)]
        assert rank["used"] == expected
        newest = [number // micro for number in range(6 * micro)]
        assert (rank["used"] == newest) == (kind == "stash" and stage == STAGES - 1)


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("micro", range(1, 6))
def test_no_stage_lacks_a_version_or_keeps_one_that_nothing_computes_with(stages, micro):
    """By 1F1B's order alone, for 24 micro-batches: a version is made before it is used, and the
    most that live at once are those that the rule keeps, and the newest."""
    for kind in ("two", "stash", "vertical"):
        for stage in range(stages if micro >= stages or kind != "two" else 0):
            rule = VersionRule.of(kind, stage, stages, micro)
            order, made, most = list(order_of(stage, stages, 24)), 0, 1
            for at, action in enumerate(order):
                version = rule.version(action.number)
                assert version == VERSIONS[kind](action.number, stage, stages, micro) <= made
                if action.is_forward or (action.number + 1) % micro:
                    continue
                made += 1
                wanted = [rule.version(later.number) for later in order[at + 1 :]]
                most = max(most, made - min([*wanted, made]) + 1)
            assert most == rule.stale + 1
            exactly = {"two": 2, "stash": stages - stage, "vertical": stages}
            assert micro > 1 or most == exactly[kind]


def test_versions_are_those_of_the_papers_examples():
    """PipeDream-2BW with four micro-batches in a batch; and what four stages hold with one in an
    update, the newest included."""
    two = VersionRule.of("two", 0, 4, 4)
    assert [two.version(k) for k in range(13)] == [0] * 8 + [1] * 4 + [2]
    held = {"stash": [4, 3, 2, 1], "vertical": [4, 4, 4, 4]}
    for kind, counts in held.items():
        assert [VersionRule.of(kind, s, 4, 1).stale + 1 for s in range(4)] == counts
    assert [VersionRule.of("two", s, 4, 4).stale + 1 for s in range(4)] == [2, 2, 2, 2]


def test_ouroboros(three):
    """Stashing with one micro-batch for each update is Ouroboros with a module for each stage: the
    same bits. The failing twin: modules that update at once have others."""
    found = merged(three["trained:SGD"])
    assert not models.differing(found, three["by_ouroboros:late"][0]["weights"])
    assert off(found, three["by_ouroboros:at once"][0]["weights"]) > 1e-4


@pytest.mark.parametrize("modules", [1, 2, 3, 5])
@pytest.mark.parametrize("is_tied", [False, True])
def test_ouroboros_is_its_papers_update(modules, is_tied):
    """Method: its formula over all weights that there were, in double precision: the same bits.
    Twin: without the delay only one module has them."""
    seed = torch.Generator().manual_seed(modules)
    start = torch.randn(modules, 4, dtype=torch.float64, generator=seed)
    ends = modules > 1 and is_tied
    names = [[str(module)] for module in range(modules)]

    def gradient(weights: torch.Tensor, sample: int) -> torch.Tensor:
        """Of all modules' weights, so that a wrong version of any is seen in each."""
        whole = weights[0] + weights[:-1].sum(0) if ends else weights.sum(0)
        return torch.sin(whole * (sample + 1)) + torch.arange(1, modules + 1)[:, None] / 7

    def by_formula(late: bool) -> torch.Tensor:
        seen, now = [], start.clone()
        for t in range(6 + modules - 1):
            seen.append(gradient(now, t))
            step = torch.zeros_like(now)
            for k in range(modules):
                sample = t - (modules - 1 - k) * late
                if 0 <= sample < 6:
                    place = 0 if ends and k == modules - 1 else k
                    step[place] = step[place] + seen[sample][k]
            now = now - 0.1 * step
        return now

    now = start.clone()

    def update(found: dict[str, torch.Tensor]) -> None:
        nonlocal now
        step = torch.zeros_like(now)
        for name, value in found.items():
            step[int(name)] = value
        now = now - 0.1 * step

    def gradients(sample: int) -> dict[str, torch.Tensor]:
        return {str(k): value for k, value in enumerate(gradient(now, sample))}

    ties = {str(modules - 1): "0"} if ends else None
    ouroboros(names, gradients, update, range(6), ties=ties)
    assert torch.equal(now, by_formula(late=True))
    assert torch.equal(now, by_formula(late=False)) == (modules == 1)
