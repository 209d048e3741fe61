"""States move along their tables only: gradients, flat params, units."""

from __future__ import annotations

import itertools

import pytest
import torch

from infinity import native
from infinity.core.grads.record import MOVES, GradRecord, GradState
from infinity.core.units import home_arrays
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec
from infinity.core.units.home_arrays import Activity, Shadow
from infinity.errors import InternalError


@pytest.mark.parametrize(
    "start, to", list(itertools.product(GradState, GradState)), ids=lambda state: state.name
)
def test_a_gradient_moves_along_its_table(start, to):
    """Method: every pair of states; what is not in the table raises, and changes nothing."""
    record = GradRecord(start)
    if to in MOVES[start]:
        record.move(to)
        assert record.state is to
    else:
        with pytest.raises(InternalError, match=start.name):
            record.move(to)
        assert record.state is start


class Over:
    """An update that is over."""

    done, ticket = True, None

    def wait(self) -> None:
        pass


def a_shard() -> FlatParam:
    spec = FlatParamSpec(
        torch.float32, torch.float32, native.Master.OWN, torch.float32, torch.float32, MOMENTS, True
    )
    return FlatParam(spec, [torch.nn.Parameter(torch.zeros(4))])


def in_state(activity: Activity) -> FlatParam:
    flat_param = a_shard()
    if activity is Activity.STEPPING:
        flat_param.homes.submit(Over())
    elif activity is Activity.SHADOWED:
        flat_param.homes.cast_shadow(Shadow(Over(), None))
    assert flat_param.homes.activity is activity
    return flat_param


VERBS = {
    "submit": (Activity.STEPPING, lambda flat_param: flat_param.homes.submit(Over())),
    "cast_shadow": (
        Activity.SHADOWED,
        lambda flat_param: flat_param.homes.cast_shadow(Shadow(Over(), None)),
    ),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("start", Activity, ids=lambda activity: activity.name)
def test_a_shard_moves_along_its_table(start, verb):
    """Method: every verb in every state; what is not in the table raises, and changes nothing."""
    flat_param, (to, act) = in_state(start), VERBS[verb]
    if to in home_arrays.MOVES[start]:
        act(flat_param)
        assert flat_param.homes.activity is to
    else:
        with pytest.raises(InternalError, match=start.name):
            act(flat_param)
        assert flat_param.homes.activity is start


def test_a_shard_that_is_waited_for_is_at_home():
    """From every state, and the same update may be submitted twice."""
    for activity in Activity:
        flat_param = in_state(activity)
        flat_param.homes.wait_idle()
        assert flat_param.homes.activity is Activity.AT_HOME
    flat_param, update = a_shard(), Over()
    flat_param.homes.submit(update)
    flat_param.homes.submit(update)
    assert flat_param.homes.activity is Activity.STEPPING
