"""The campaign over ranks (see `rank_campaign`), in samples: its longer form is a command.

Words used here: see `rank_campaign`.
"""

from __future__ import annotations

import json
import random

import prepared
import pytest
import rank_campaign

SEED = 5


def strikes(
    setup: str, operations: list[str], hows: tuple[str, ...], count: int
) -> list[tuple[str, str, int]]:
    chance = random.Random(f"{SEED} {setup}")
    return [
        (chance.choice(operations), chance.choice(hows), chance.randrange(1 << 30))
        for _ in range(count)
    ]


def check(setup: str, chosen: list[tuple[str, str, int]]) -> None:
    """Every strike ends with the same bits, or with a typed error on every rank."""
    found = rank_campaign.play(setup, chosen)
    bad = [each for each in found if each["outcome"] not in rank_campaign.FINE]
    assert not bad, bad
    assert len(found) == len(chosen) and any(each["places"] for each in found)


def test_the_longer_form_starts_as_a_command():
    """It finds the other files of the tests by itself."""
    started = prepared.run(rank_campaign.__file__, "--help")
    assert started.returncode == 0 and "--strikes" in started.stdout, started.stderr


def test_two_ranks_go_on_after_strikes():
    """Injected exceptions and real signals, on one rank or on both, in steps, edits and loads."""
    check("dp2", strikes("dp2", ["step", "clip", "write", "load"], rank_campaign.HOWS, 6))


def test_two_stages_go_on_after_strikes():
    """The same in steps of a pipeline, whose stages pass tensors over a group of their own."""
    check("pp2", strikes("pp2", ["step"], ("line", "all"), 4))


@pytest.mark.slow
@pytest.mark.parametrize("setup", rank_campaign.SETUPS)
def test_a_longer_campaign(setup):
    operations = [name for name in rank_campaign.OPERATIONS if rank_campaign.plays(setup, name)]
    check(setup, strikes(setup, operations, rank_campaign.HOWS, 60))


def test_the_campaign_tells_what_is_wrong(tmp_path, monkeypatch):
    """Twins: a state that no undisturbed run has; ranks of which some have the old values; a rank
    that crashed; ranks that hang."""
    told = {"outcome": "same", "place": "here", "said": [], "end": 0, "seconds": 1.0}

    class Ended:
        stderr, returncode = "", 0

    def judged(*ranks: dict | None, hang: str = "", status: int = 0) -> str:
        Ended.returncode = status
        for rank, line in enumerate(ranks):
            lines = ['{"begun": 0}'] + ([json.dumps({"number": 0, **line})] if line else [])
            (tmp_path / f"told.{rank}").write_text("\n".join(lines))
        (found,) = rank_campaign.judge(
            "dp2", [("step", "line", 1)], tmp_path, [Ended] * len(ranks), hang
        )
        return found["outcome"]

    assert judged(told, told) == "same"
    assert judged(told, told | {"end": 1}) == "silent" == judged(told, told | {"outcome": "silent"})
    assert (
        judged(told, told | {"outcome": "untyped"}) == "untyped"
        and judged(told, told | {"outcome": "typed"}) == "typed"
    )
    assert judged(told, None, status=1) == "crash" and judged(told, None, hang="stacks") == "hang"
