"""Between: stages of a pipeline pass nothing over a group that holds what another pass has left.

Method: without ranks, with groups that are made up. What ranks do with it is in the campaign (see
`rank_campaign`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import infinity
from infinity.ext.pipeline import between, schedules
from infinity.ext.pipeline.between import Between


class Owner:
    """What has schedules over the group."""

    def __init__(self) -> None:
        self.forgot = 0

    def forget(self) -> None:
        self.forgot += 1


def make(owner: Owner, monkeypatch: Any, *, is_host: bool = True) -> tuple[Between, list[str]]:
    made: list[str] = []

    def gloo_group(members: list[int], what: str) -> Any:
        made.append(what)
        return SimpleNamespace(name=what)

    monkeypatch.setattr(between, "gloo_group", gloo_group)
    monkeypatch.setattr(between.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(between.dist, "destroy_process_group", lambda group: None)
    engine = SimpleNamespace(
        ranks=SimpleNamespace(wrap=0, process_groups=[]), device=SimpleNamespace(is_host=is_host)
    )
    return Between(engine, SimpleNamespace(get_group=lambda: "the mesh's"), owner.forget), made


def strike(group: Between) -> None:
    with pytest.raises(KeyboardInterrupt), group.passing():
        raise KeyboardInterrupt


def test_the_group_is_made_anew_where_a_pass_was_cut_short_on_any_rank(monkeypatch):
    """Also where ranks have made it another number of times. Twin: passes that were whole leave it
    as it is."""
    owner = Owner()
    group, made = make(owner, monkeypatch)
    with group.passing():
        pass
    group.settle([group.said, (False, 0)])
    assert (
        group.said == (False, 0)
        and len(made) == 1
        and group.group.name == made[0]
        and not owner.forgot
    )
    strike(group)
    assert group.said == (True, 0) and group.group is None and owner.forgot == 1
    group.settle([group.said, (False, 0)])
    assert group.said == (False, 1) and len(made) == 2
    group.settle([group.said, (True, 3)])
    assert group.said == (False, 4) and len({*made}) == 3


def test_a_group_of_a_device_is_refused_after_a_cut(monkeypatch):
    """Twin: before it, it is used."""
    owner = Owner()
    group, _ = make(owner, monkeypatch, is_host=False)
    group.settle([group.said, (False, 0)])
    assert group.group == "the mesh's" != group.host_group
    strike(group)
    with pytest.raises(infinity.UsageError, match="make the pipeline anew"):
        group.settle([group.said, (False, 0)])


def test_what_a_broken_transport_says_is_typed(monkeypatch):
    """Twin: another error stays."""
    monkeypatch.setattr(between, "ranks_lost", lambda what, error: infinity.errors.PeerError(what))
    for text, kind in (
        ("Connection closed by peer", infinity.errors.PeerError),
        ("shapes differ", RuntimeError),
    ):
        group, _ = make(Owner(), monkeypatch)
        with pytest.raises(RuntimeError) as told, group.passing():
            raise RuntimeError(text)
        assert type(told.value) is kind


def test_a_schedule_is_refused_after_an_exception_between_its_messages(monkeypatch):
    """Twins: one before them, and a job of one rank."""

    def _step_microbatches() -> None:
        raise KeyboardInterrupt

    def complains() -> None:
        raise ValueError("arguments")

    engine = SimpleNamespace(collectives=SimpleNamespace(fail=lambda error, for_now: None))
    for work, ranks, is_refused in (
        (_step_microbatches, 2, True),
        (complains, 2, False),
        (_step_microbatches, 1, False),
    ):
        monkeypatch.setattr(schedules.dist, "get_world_size", lambda group, ranks=ranks: ranks)
        schedule = SimpleNamespace()
        with (
            pytest.raises((KeyboardInterrupt, ValueError)),
            schedules._noting_cuts(schedule, [SimpleNamespace(group=None)]),
        ):
            work()
        if not is_refused:
            schedules._refuse_cut_short(schedule, engine)
            continue
        with pytest.raises(infinity.UsageError, match="new process group"):
            schedules._refuse_cut_short(schedule, engine)
