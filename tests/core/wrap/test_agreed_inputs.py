"""Agreement: ranks exchange digests of what they were given, and what differs only then.

Method: a stand-in for the collectives, which has what another rank would send.
"""

from __future__ import annotations

import contextlib
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.core.wrap.agreement import agree
from infinity.errors import ConfigError

Tables = dict[str, dict[str, Any]]
MINE: Tables = {
    "inputs": {"the model": "Net", "Config(units)": "auto"},
    "settings": {"Config(units)": "auto"},
    "built": {"the memory order of w": "row-major"},
    "values": {"w": b"1", "v": b"2"},
    "common": {"w": b"1"},
    "names": {"w": None},
}


class Meetings:
    """Two data ranks, of which this is the first. The other one has ``theirs``."""

    def __init__(self, theirs: Tables, *, tp: int = 1):
        self.theirs, self.told = theirs, list[str]()
        self.ranks = SimpleNamespace(
            alone=False, is_first=True, world_rank=0, local_size=2, pp_rank=0, pp_group=None,
            data_size=2 // tp, data_rank=0, tp_size=tp, tp_rank=0, data_channels=[],
            unit_channels=[],
        )  # fmt: skip

    def together(self, what: str) -> Any:
        return contextlib.nullcontext()

    def collect(self, mine: Any, what: str, among: Any = None) -> list[Any]:
        self.told.append(what)
        if what == "samples":
            return [mine, self.theirs["values" if "v" in mine else "common"]]
        if what == "wrap_model" and not hasattr(mine, "digests"):
            name = next(name for name, table in MINE.items() if table == mine[1])
            return [mine, (1, self.theirs[name])]
        digests = {
            name: mine.digests[name] if table == MINE[name] else "another"
            for name, table in self.theirs.items()
        }
        return [mine, mine._replace(rank=1, digests=digests)]


def changed(**tables: dict[str, Any]) -> Tables:
    return {**MINE, **tables}


def test_equal_ranks_meet_once(caplog):
    """Twin: the tables of all cases below."""
    met = Meetings(changed())
    assert agree(MINE, 1, met) == (2, Fraction(1, 2), "")
    assert met.told == ["wrap_model"] and not caplog.text


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (
            changed(inputs={"the model": "Other"}),
            "wrap_model: the model is .* on rank 0 and Other on rank 1",
        ),
        (changed(built={"the memory order of w": "by dims 1"}), "wrap_model: the memory order"),
        (changed(settings={"Config(units)": "Block"}), "wrap_model: Config"),
    ],
)
def test_only_the_table_that_differs_is_compared(theirs, told):
    met = Meetings(theirs)
    with pytest.raises(ConfigError, match=told):
        agree(MINE, 1, met)
    assert len(met.told) == 2


def test_other_values_of_data_ranks_are_told(caplog):
    """By hand: one of two, named. Twin: a value that only this rank has is no other one."""
    met = Meetings(changed(values={"w": b"9", "v": b"2"}))
    agree(MINE, 1, met)
    assert "in 1 of 2 parameters (w, ...)" in caplog.text and met.told == ["wrap_model", "samples"]
    caplog.clear()
    agree(MINE, 1, Meetings(changed(values={"v": b"2"})))
    assert not caplog.text


def test_other_values_of_what_tp_ranks_have_in_common_are_refused():
    """Twin: of data ranks, which have other parts of it."""
    theirs = changed(common={"w": b"9"})
    with pytest.raises(ConfigError, match=r"1 of 1 parameters that are whole on every rank"):
        agree(MINE, 1, Meetings(theirs, tp=2))
    assert agree(MINE, 1, Meetings(theirs))[0] == 2
