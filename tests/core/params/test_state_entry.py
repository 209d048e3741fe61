"""StateEntry: the optimizer state of one parameter as a dict, of which a part is at home."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, small_at_home

from infinity import UsageError
from infinity.core.params.state_entry import GONE, StateAtHome, StateEntry

NAMES = ["step", "exp_avg", "exp_avg_sq"]


def adam(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, betas=(0.5, 0.75))


def entry_of(job: AtHome, index: int = 0) -> StateEntry:
    return job.optimizer.state[job.handles[index].param]


def stepped() -> AtHome:
    """The first parameter's moments are a half and a quarter of the ramp and of its square."""
    job = small_at_home(make=adam)
    job.backward(RAMP)
    job.optimizer.step()
    return job


def values(entry: dict) -> dict:
    return {key: each.tolist() if torch.is_tensor(each) else each for key, each in entry.items()}


def expected() -> dict:
    moments = ([(each / of).tolist()] * 2 for each, of in ((RAMP, 2), (RAMP.square(), 4)))
    return dict(zip(NAMES, (1.0, *moments)))


def test_a_value_in_another_form_is_read_back_as_it_was_assigned():
    """As a number, or of another dtype, after a read. The tensor that was read is the user's own.
    Twin: one in torch's form is the state itself."""
    job = stepped()
    entry = entry_of(job)
    before = entry["exp_avg"], entry["step"]
    entry["step"] = 4
    entry["exp_avg"] = torch.full_like(before[0], 9.0, dtype=torch.float64)
    before[0].zero_()
    assert entry["step"] == 4 and (entry["exp_avg"] == 9.0).all()
    kept = torch.full_like(before[0], 7.0)
    entry["exp_avg"] = kept
    kept += 1
    assert entry["exp_avg"] is kept


def test_a_users_own_value_is_no_step():
    """Saved and loaded before the first step. Twin: a parameter that was stepped."""
    for job, steps in ((small_at_home(make=adam), 0), (stepped(), 1)):
        entry_of(job)["mine"] = 5
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        assert job.handles[0].step == steps and entry_of(job)["mine"] == 5


def test_without_a_home_it_is_a_plain_dict():
    entry = StateEntry({"a": 1})
    entry["exp_avg"] = 2
    assert entry == {"a": 1, "exp_avg": 2} == entry.own and entry.missing == []
    del entry["a"]
    assert list(entry) == ["exp_avg"] and len(entry) == 1
    entry.clear()
    assert entry == {}


def test_state_at_home_is_shown_under_torchs_keys():
    """Twin: a parameter without a step has none."""
    job = stepped()
    entry = entry_of(job)
    assert list(entry) == NAMES and len(entry) == 3 and "exp_avg" in entry
    assert values(entry) == expected() and entry.own == {} and entry.missing == []
    assert len(entry_of(job, 1)) == 0 and entry_of(job, 1).missing == NAMES


TAKES = [dict, copy.copy, copy.deepcopy, StateEntry.copy, lambda entry: entry | {}]
TAKES += [lambda entry: pickle.loads(pickle.dumps(entry)), lambda entry: {} | entry]


@pytest.mark.parametrize("take", TAKES)
def test_a_copy_is_a_plain_dict_with_the_values_from_home(take):
    job = stepped()
    entry_of(job)["mine"] = 5
    taken = take(entry_of(job))
    assert type(taken) is dict and values(taken) == expected() | {"mine": 5}


def test_it_is_compared_merged_and_described_with_its_keys_at_home():
    job = stepped()
    entry = entry_of(job)
    entry["mine"] = 5
    assert list(reversed(entry)) == ["mine", *reversed(NAMES)]
    assert repr(entry) == "StateEntry('step', 'exp_avg', 'exp_avg_sq', 'mine')"
    assert entry != {"mine": 5} and not entry != entry.copy()
    assert entry | {"mine": 6} != entry and ({"mine": 6} | entry)["mine"] == 5


def test_a_value_that_is_set_is_at_home():
    """Twins: the other values stay, and None clears all of them, as SGD's does."""
    job = stepped()
    entry, handle = entry_of(job), job.handles[0]
    entry["exp_avg"] = torch.full((2, 4), 9.0, dtype=torch.float64)
    entry["step"] = 7
    assert handle.step == 7 and entry.own == {}
    assert values(entry) == expected() | {"step": 7.0, "exp_avg": [[9.0] * 4] * 2}
    entry["exp_avg"] = None
    assert not handle.has_state and not entry


def test_what_is_merged_into_it_goes_where_its_key_is_kept_and_is_cleared_there():
    job = stepped()
    entry = before = entry_of(job)
    entry |= {"step": 4, "mine": 7}
    assert entry is before and job.handles[0].step == 4 and entry.own == {"mine": 7}
    entry.clear()
    assert not entry and not job.handles[0].has_state


def test_a_tensor_in_torchs_form_is_the_state_from_then_on():
    """What is written to it later counts. Twin: of one of another dtype the values were taken."""
    job = stepped()
    entry, at_home = entry_of(job), job.optimizer.state.at_home
    own, other = torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float64)
    entry["exp_avg"], entry["exp_avg_sq"] = own, other
    own.fill_(3.0)
    other.fill_(3.0)
    at_home.settle()
    flat_param, store = job.handles[0].flat_param, parts_of(job).store
    assert entry["exp_avg"] is own
    assert flat_param.read_moment(store, "exp_avg", 0).tolist() == [[3.0] * 4] * 2
    assert flat_param.read_moment(store, "exp_avg_sq", 0).tolist() == [[0.0] * 4] * 2


def test_keys_wait_until_all_of_torchs_are_there():
    """Nothing of them is at home before, and a step is refused. Twin: None is no value."""
    job = small_at_home(make=adam)
    entry, handle, at_home = entry_of(job), job.handles[0], job.optimizer.state.at_home
    entry["step"] = None
    assert len(entry) == 0 and not entry.is_partial
    entry["exp_avg"], entry["step"] = torch.ones(2, 4), 3
    assert entry.missing == ["exp_avg_sq"] and entry.is_partial and not handle.has_state
    assert list(entry.own) == ["exp_avg", "step"]
    for _ in range(2):
        with pytest.raises(
            UsageError, match=r"layers\.0\.weight lacks exp_avg_sq: set all of step,"
        ):
            at_home.settle()
    entry["exp_avg_sq"] = torch.full((2, 4), 2.0)
    at_home.settle()
    assert not entry.is_partial and handle.step == 3 and entry.own == {}
    assert values(entry) == dict(zip(NAMES, (3.0, [[1.0] * 4] * 2, [[2.0] * 4] * 2)))


def test_a_deleted_key_takes_the_state_from_home_and_can_come_back():
    job = stepped()
    entry, handle, at_home = entry_of(job), job.handles[0], job.optimizer.state.at_home
    del entry["exp_avg"]
    assert entry.missing == ["exp_avg"] and not handle.has_state
    assert values(entry) == {key: expected()[key] for key in ("step", "exp_avg_sq")}
    with pytest.raises(UsageError, match="lacks exp_avg"):
        at_home.settle()
    entry["exp_avg"] = torch.zeros(2, 4)
    assert handle.step == 1 and not entry.is_partial
    del entry["step"], entry["exp_avg"], entry["exp_avg_sq"]
    at_home.settle()  # without any of them the parameter begins anew
    assert len(entry) == 0 and not handle.has_state


def test_an_entry_that_has_parted_keeps_its_values_and_reaches_home_no_more():
    entry = entry_of(job := stepped())
    entry.part()
    assert values(entry) == expected()
    entry["step"] = 8
    assert job.handles[0].step == 1


WRONG = [("step", 1.5), ("step", -1), ("exp_avg", 3), ("exp_avg", torch.ones(4, 2))]
WRONG += [("exp_avg_sq", torch.ones(2, 4, device="meta"))]


@pytest.mark.parametrize("key, value", WRONG)
def test_what_cannot_be_the_state_is_refused_and_changes_nothing(key, value):
    """With all keys at home, and with some of them missing."""
    job = stepped()
    for index in range(2):
        entry = entry_of(job, index)
        before = values(entry)
        with pytest.raises(UsageError, match=rf"{key} of layers\.{index}\.weight"):
            entry[key] = value
        assert values(entry) == before


def test_a_rule_without_a_count_has_made_its_first_step_when_its_buffer_is_set():
    job = small_at_home(make=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5))
    entry_of(job)["momentum_buffer"] = torch.full((2, 4), 4.0)
    assert job.handles[0].step == 1 and list(entry_of(job)) == ["momentum_buffer"]
    job.backward(RAMP)
    job.optimizer.step()
    assert entry_of(job)["momentum_buffer"].tolist() == [(2 + RAMP).tolist()] * 2
    entry_of(job)["momentum_buffer"] = torch.ones(2, 4)
    assert job.handles[0].step == 2  # twin: it has made steps


def test_an_entry_whose_optimizer_is_gone_says_so():
    at_home = StateAtHome(lambda: None, {"momentum_buffer": "exp_avg"}, counts_steps=False)
    assert at_home.names == ("momentum_buffer",)
    assert at_home.keys == {"momentum_buffer", "exp_avg", "step", "master"}
    at_home = StateAtHome(lambda: None, {}, counts_steps=True)
    entry = StateEntry(state=at_home, handle=small_at_home().handles[0])
    assert len(entry) == 0 == len(at_home.names)
    del at_home
    with pytest.raises(UsageError, match=GONE):
        len(entry)
