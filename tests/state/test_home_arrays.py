"""HomeArrays: the activities of a flat param's arrays, what may follow which, and what is
swapped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity import native
from infinity.errors import InternalError
from infinity.machine.device import PAST
from infinity.state.flat_layout import FlatLayout
from infinity.state.flat_param_spec import FlatParamSpec
from infinity.state.home_arrays import Activity, HomeArrays, Shadow

AT_HOME, STEPPING, SHADOWED = Activity
F32 = torch.float32


class Update:
    """Counts its waits, the first ``interrupts`` of which raise; ``done`` before any if so told."""

    def __init__(self, interrupts: int = 0, *, done: bool = False):
        self.waits, self.interrupts, self.done = 0, interrupts, done

    def wait(self) -> None:
        self.waits += 1
        if self.waits <= self.interrupts:
            raise KeyboardInterrupt
        self.done = True


def shadow(ticket: Update | None) -> Shadow:
    return Shadow(SimpleNamespace(ticket=ticket), inputs=None)


@pytest.fixture
def home() -> HomeArrays:
    """With room for a shadow; the arrays are names, which are only moved."""
    spec = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, 1, stepped=True)
    made = HomeArrays(spec, FlatLayout.of([torch.ones(1)]), ["a.weight"])
    made.arrays = {"weight": "W", "exp_avg": "M", "grad": "G"}
    made.beside = {"weight": "w", "exp_avg": "m"}
    return made


def brought_to(home: HomeArrays, activity: Activity) -> HomeArrays:
    if activity is STEPPING:
        home.submit(Update())
    elif activity is SHADOWED:
        home.cast_shadow(shadow(Update()))
    assert home.activity is activity
    return home


@pytest.mark.parametrize("start", Activity, ids=lambda activity: activity.name)
def test_an_update_follows_what_it_may_and_nothing_else(start, home):
    """By hand: a step follows all but a step, and a shadow is cast at home only."""
    brought_to(home, start)
    moves = [
        (lambda: home.submit(Update()), {AT_HOME, SHADOWED}, STEPPING),
        (lambda: home.cast_shadow(shadow(None)), {AT_HOME}, SHADOWED),
    ]
    for move, allowed, end in moves:
        if start in allowed:
            move()
            assert home.activity is end
            home.settle()
            brought_to(home, start)
        else:
            refusal = f"the flat param of a.weight is {start.name} and cannot go to {end.name}"
            with pytest.raises(InternalError, match=refusal):
                move()
            assert home.activity is start


def test_the_same_update_may_be_submitted_again_and_another_may_not(home):
    update = Update()
    for _ in range(2):
        home.submit(update)
    with pytest.raises(InternalError):
        home.submit(Update())
    home.wait()
    home.wait()
    assert update.waits == 1 and home.activity is AT_HOME


def test_a_kept_shadow_becomes_the_state_and_a_dropped_one_does_not(home):
    ticket = Update()
    home.cast_shadow(shadow(ticket))
    home.keep_shadow()
    assert home.arrays == {"weight": "w", "exp_avg": "m", "grad": "G"}
    assert home.beside == {"weight": "W", "exp_avg": "M"}
    assert home.update is ticket and home.activity is STEPPING and ticket.waits == 0
    home.wait()
    dropped = Update()
    home.cast_shadow(shadow(dropped))
    home.inputs_change()
    assert dropped.waits == 1 and home.activity is AT_HOME and home.weight == "w"


@pytest.mark.parametrize("done", [True, False])
def test_a_shadow_whose_wait_is_interrupted_is_kept_while_it_runs(home, done):
    home.cast_shadow(shadow(Update(interrupts=1, done=done)))
    with pytest.raises(KeyboardInterrupt):
        home.drop_shadow()
    assert home.activity is (AT_HOME if done else SHADOWED)
    home.drop_shadow()
    assert home.activity is AT_HOME


def test_a_shadow_that_was_not_submitted_is_dropped_at_once(home):
    home.cast_shadow(shadow(None))
    home.drop_shadow()
    assert home.activity is AT_HOME


def test_an_update_to_a_new_weight_makes_the_old_one_older_once(home):
    """Twin: before it, the current weight is the older one too."""
    home.beside = {}
    assert home.stale == home.weight == "W"
    update = Update()
    for _ in range(2):
        home.advance(update, "new")
        assert (home.weight, home.stale, home.arrays["grad"]) == ("new", "W", "G")
    with pytest.raises(InternalError):
        home.advance(Update(), "newer")


def test_idle_arrays_have_waited_for_the_update_and_the_last_read(home):
    """Twin: wait() is for the update alone."""
    for idle in (False, True):
        update, read = Update(), Update()
        home.submit(update)
        home.lend(read)
        (home.wait_idle if idle else home.wait)()
        assert (update.waits, read.waits) == (1, int(idle))
        assert home.last_read is (PAST if idle else read)
