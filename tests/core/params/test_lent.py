"""Lents: what users write to tensors of state dicts goes home at the next use or is refused."""

from __future__ import annotations

import re
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity.core.machine import storage_guard
from infinity.core.params import lent
from infinity.core.params.borrowed_state import STEP, StateSource
from infinity.core.params.lent import Lents, Source
from infinity.core.params.optimizer_state import MASTER, MASTERS
from infinity.core.run.operations import Operation, State
from infinity.errors import UsageError

OLD = "it is a snapshot"
VALUE = "value"
LARGE = 16384  # elements of a tensor of which only some bytes are compared


class Handle:
    """A parameter of ones at home."""

    def __init__(self, name: str, numel: int = 4):
        self.name, self.version, self.forward_edits, self.index = name, 0, 0, 0
        self.param, self.home = torch.ones(numel), torch.ones(numel)
        self.flat_param = self

    def changes(self, store: Any, index: int, value: torch.Tensor) -> list:
        """Lists the elements in which ``value`` differs from home."""
        return (value != self.home).nonzero().tolist()


class Values(Source):
    """Stands for the home of the weights."""

    is_weight = True

    def __init__(self, parts: Parts):
        self.parts = parts

    def stamp(self, handle: Handle) -> tuple:
        return handle.version, handle.forward_edits

    def write(self, written: list) -> None:
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        sent = [(handle.name, value.tolist()) for handle, value, _ in written]
        self.parts.asked.append(("values", sent))
        for handle, value, _ in written:
            handle.version += 1
            handle.home = value.clone()
        self.parts.end(lambda: [then() for *_, then in written])


class Parts:
    """Stands for the parts that take writes home, and notes what they are asked in its order."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.steps, self.ranks = SimpleNamespace(index=0), SimpleNamespace(alone=True)
        self.states, self.refuses = set(), None
        self.changes, self.late = Counter(), None  # late: ends of changes, called by the test

    # As the entry of the job.
    def is_in(self, state: State) -> bool:
        return state in self.states

    def check(self, operation: Operation) -> None:
        self.asked.append(("check", operation))
        if self.refuses is not None:
            raise self.refuses

    # As the optimizer's state.
    def stamp(self, handle: Handle, name: str) -> tuple:
        return self.steps.index, self.changes[handle, name]

    def write(self, handle: Handle, values: dict, then: Callable[[], None]) -> None:
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        self.written = values
        self.asked.append(("state", handle.name, {k: v.tolist() for k, v in values.items()}))
        self.changes.update((handle, name) for name in values)
        self.end(then)

    def end(self, then: Callable[[], None]) -> None:
        then() if self.late is None else self.late.append(then)

    def sent(self) -> list[tuple]:
        """Takes the writes that came home since the last call."""
        found = [each for each in self.asked if each[0] in ("values", "state")]
        self.asked = []
        return found


class Handed(Lents):
    """With its parts, and two parameters."""

    def __init__(self, numel: int = 4):
        self.parts = parts = Parts()
        super().__init__(parts.steps, parts.ranks, parts)
        self.values = Values(parts)
        self.a, self.b = Handle("a", numel), Handle("b", numel)

    def source(self, array: str) -> Source:
        state = StateSource(self.parts, array)
        return {VALUE: self.values, MASTER: MASTERS}.get(array, state)

    def of(self, handle: Handle, array: str = VALUE, *, follows: bool = False) -> torch.Tensor:
        """Gives a copy of an array at home."""
        tensor = torch.tensor(3.0) if array == STEP else handle.home.clone()
        (self.follow if follows else self.lend)(self.source(array), handle, tensor)
        return tensor

    @property
    def watched(self) -> int:
        return len(self._all(follow=False))


def values(**written: list) -> list[tuple]:
    return [("values", list(written.items()))]


@pytest.fixture
def handed() -> Handed:
    return Handed()


# --- what goes home ---


def test_writes_to_values_go_home_together_and_once(handed):
    """Of all parameters, in a block without autograd that takes no inference tensors. Twin: what
    nobody wrote to stays."""
    a, b, same = handed.of(handed.a), handed.of(handed.b), handed.of(Handle("c"))
    handed.settle()
    assert handed.parts.sent() == [] and same.tolist() == [1.0] * 4
    a.mul_(2), b.data.fill_(5)
    with torch.inference_mode():
        handed.settle()
    assert handed.parts.sent() == values(a=[2.0] * 4, b=[5.0] * 4)
    handed.settle()
    assert handed.parts.sent() == []


def test_other_state_dicts_of_the_value_follow_and_are_current(handed):
    """Twins: a snapshot and another array keep what they had."""
    old = handed.of(handed.a)
    handed.a.version = 1
    one, other, moment = handed.of(handed.a), handed.of(handed.a), handed.of(handed.a, "exp_avg")
    one.fill_(5), one.fill_(2)  # torch counts two changes, and one of the other
    handed.settle()
    assert other.tolist() == [2.0] * 4
    assert old.tolist() == moment.tolist() == [1.0] * 4 and handed.parts.sent()
    handed.settle()
    assert handed.parts.sent() == []
    other.fill_(3)
    handed.settle()
    assert handed.parts.sent() == values(a=[3.0] * 4) and one.tolist() == [3.0] * 4


@pytest.mark.parametrize("array", [VALUE, "exp_avg"])
def test_what_is_written_while_a_change_waits_for_its_end_goes_home_after_it(handed, array):
    tensor, handed.parts.late = handed.of(handed.a, array), []
    tensor.fill_(2)
    handed.settle()
    assert handed.parts.sent()
    tensor.fill_(3)
    handed.parts.late.pop()()
    handed.settle()
    state = [("state", "a", {"exp_avg": [3.0] * 4})]
    assert handed.parts.sent() == (values(a=[3.0] * 4) if array == VALUE else state)


@pytest.mark.parametrize(("array", "sent"), [("exp_avg", [7.0] * 4), (STEP, 7.0)])
def test_optimizer_state_goes_home_after_what_was_written_through_the_optimizer(
    handed, array, sent
):
    """As a copy, which a tensor that users borrowed follows. Twin: of a value nothing else is
    sent home first."""
    tensor, follower = handed.of(handed.a, array), handed.of(handed.a, array, follows=True)
    other = handed.of(handed.b, array, follows=True)
    tensor.fill_(7), other.fill_(9)
    handed.settle()
    assert handed.parts.asked == [
        ("check", Operation.WRITE_STATE_DICT),
        ("state", "b", {array: other.tolist()}),
        ("state", "a", {array: sent}),
    ]
    assert follower.tolist() == sent
    assert handed.parts.written[array].data_ptr() != tensor.data_ptr()
    handed.parts.asked = []
    handed.settle()
    assert handed.parts.asked == []
    value = handed.of(handed.b)
    value.fill_(2), other.fill_(8)
    handed.settle()
    assert handed.parts.sent() == values(b=[2.0] * 4)


def test_a_write_that_is_refused_now_goes_home_later(handed):
    """Twin: of an unwrapped model none does."""
    tensor = handed.of(handed.a)
    tensor.fill_(2)
    handed.parts.refuses = UsageError("later")
    for _ in range(2):
        with pytest.raises(UsageError, match="later"):
            handed.settle()
    assert handed.parts.sent() == []
    handed.parts.states = {State.UNWRAPPED}
    handed.settle()
    assert handed.parts.asked == []
    handed.parts.refuses, handed.parts.states = None, set()
    handed.settle()
    assert handed.parts.sent() == values(a=[2.0] * 4)


def test_each_way_into_a_use_sends_writes_home(handed):
    """One rank at its beginning, several where they meet. Twin: what loads all state does not."""
    tensor = handed.of(handed.a)
    ways = {
        "begin": lambda: handed.begin_use(repairing=False),
        "repair": lambda: handed.begin_use(repairing=True),
        "any": handed.settle,
        "all": handed.settle_all,
    }
    for alone, silent in ((True, ["repair"]), (False, ["begin", "repair"])):
        handed.parts.ranks.alone = alone
        for name, way in ways.items():
            tensor.add_(1)
            way()
            assert (handed.parts.sent() == []) == (name in silent), name
            handed.settle()
            handed.parts.sent()
    handed.of(handed.a, "exp_avg", follows=True).fill_(5)
    handed.settle()
    assert handed.parts.asked == []
    handed.settle_all()
    assert handed.parts.sent() == [("state", "a", {"exp_avg": [5.0] * 4})]


# --- what cannot go home ---


@pytest.mark.parametrize(
    ("change", "since"),
    [
        (lambda h: setattr(h.a, "version", 1), "a load or an edit that changed it meanwhile"),
        (lambda h: setattr(h.a, "forward_edits", 1), "a load or an edit that changed it meanwhile"),
        (
            lambda h: (setattr(h.a, "version", 1), setattr(h.parts.steps, "index", 5)),
            "3 further steps",
        ),
    ],
)
def test_a_write_to_a_snapshot_is_told_once_and_changes_nothing(handed, change, since):
    """Not even what else was written, which is a snapshot from then on. Twin: what was handed out
    since goes home."""
    handed.parts.steps.index = 2
    old, other = handed.of(handed.a), handed.of(handed.b)
    change(handed)
    new = handed.of(handed.a)
    old.fill_(2), other.fill_(2)
    with pytest.raises(UsageError, match=f"^a: .* after {since}: {OLD}"):
        handed.settle()
    handed.settle()
    assert handed.parts.sent() == [] and new.tolist() == [1.0] * 4
    new.fill_(4)
    handed.settle()
    assert handed.parts.sent() == values(a=[4.0] * 4) and old.tolist() == [2.0] * 4
    other.fill_(3)
    with pytest.raises(UsageError, match=f"^b: .*{OLD}"):
        handed.settle()


@pytest.mark.parametrize("array", ["exp_avg", STEP])
@pytest.mark.parametrize("how", ["a step", "a write", "what is settled first"])
def test_optimizer_state_is_a_snapshot_after_a_step_or_a_write(handed, array, how):
    """Twin: a new value of the parameter leaves it current."""
    tensor = handed.of(handed.a, array)
    handed.a.version = 5
    tensor.fill_(2)
    handed.settle()
    assert handed.parts.sent()

    def write() -> None:
        handed.parts.changes[handed.a, array] += 1

    if how == "a step":
        handed.parts.steps.index += 1
    elif how == "a write":
        write()
    else:
        handed.of(handed.a, array, follows=True).fill_(6)
    tensor.fill_(4)
    with pytest.raises(UsageError, match=f"^{array} of a: .*{OLD}"):
        handed.settle()
    value = [6.0] * 4 if array == "exp_avg" else 6.0
    first = [("state", "a", {array: value})] if how == "what is settled first" else []
    assert handed.parts.sent() == first


def test_a_snapshot_stays_one_when_the_old_version_returns(handed):
    old = handed.of(handed.a)
    handed.a.version = 1
    handed.settle()
    handed.a.version = 0
    old.fill_(2)
    with pytest.raises(UsageError, match=OLD):
        handed.settle()


def test_a_write_through_numpy_goes_home_where_one_rank_sees_all(handed):
    """Method: an element that is not probed. Twins: several ranks refuse it, once, and take what
    torch counts."""
    for alone in (True, False):
        handed = Handed(LARGE)
        handed.parts.ranks.alone = alone
        tensor = handed.of(handed.a)
        tensor.numpy()[1] = 2
        if alone:
            handed.settle()
            assert handed.parts.sent() == values(a=tensor.tolist())
            continue
        with pytest.raises(UsageError, match="^a: .* through NumPy, of which other"):
            handed.settle()
        handed.settle()
        assert handed.parts.sent() == []
        counted = handed.of(handed.b)
        counted.fill_(2)
        handed.settle()
        assert handed.parts.sent() == values(b=[2.0] * LARGE)


def test_masters_and_invalid_step_counts_are_refused(handed):
    """Nothing else goes home then. Twin: the master of a value that was changed is a snapshot."""
    master = handed.of(handed.a, MASTER)
    master.fill_(2)
    with pytest.raises(UsageError, match="^master of a in optimizer.state_dict.. was written to"):
        handed.settle()
    step = handed.of(handed.a, STEP)
    value = handed.of(handed.a)
    step.fill_(0.5), value.fill_(2)
    with pytest.raises(UsageError, match="step of a is 0.5"):
        handed.settle()
    handed.settle()
    assert handed.parts.sent() == []
    master = handed.of(handed.a, MASTER)
    handed.a.version = 1
    master.fill_(3)
    with pytest.raises(UsageError, match=f"^master of a: .*{OLD}"):
        handed.settle()
    assert handed.parts.sent() == []


def test_one_value_written_through_two_state_dicts_is_refused(handed):
    """Twin: two arrays of one parameter, and one array of two, go home."""
    one, other = handed.of(handed.a), handed.of(handed.a)
    one.fill_(2), other.fill_(2)
    with pytest.raises(UsageError, match="^a was written to through two state dicts"):
        handed.settle()
    assert handed.parts.sent() == []
    arrays = ((handed.a, VALUE), (handed.a, "exp_avg"), (handed.b, "exp_avg"))
    held = [handed.of(*each) for each in arrays]
    for tensor in held:
        tensor.fill_(3)
    handed.settle()
    assert len(handed.parts.sent()) == 3


def test_a_backward_refuses_values_that_were_written_since_its_forward(handed):
    """Twins: of another unit, of a moment, of a snapshot, and before any write."""
    of_a, of_b = SimpleNamespace(handles=[handed.a]), SimpleNamespace(handles=[handed.b])
    handed.refuse_in_backward(of_a)
    old = handed.of(handed.a)
    handed.a.version = 1
    value, moment = handed.of(handed.a), handed.of(handed.a, "exp_avg")
    old.fill_(2), moment.fill_(2)
    handed.refuse_in_backward(of_a)
    value.fill_(2)
    with pytest.raises(UsageError, match="this backward needs a as it was in its forward"):
        handed.refuse_in_backward(of_a)
    handed.refuse_in_backward(of_b)


# --- what other optimizers have ---


@pytest.mark.parametrize("kind", [dict, lambda entries: defaultdict(dict, entries)])
def test_state_that_another_optimizer_took_over_is_its_own(handed, kind):
    """It is watched no more. Twins: other written state and values go home."""
    taken, left = handed.of(handed.a, "exp_avg"), handed.of(handed.b, "exp_avg")
    value, param = handed.of(handed.b), torch.nn.Parameter(torch.ones(1))
    other = torch.optim.SGD([param], lr=1.0)
    other.state = kind({param: {"exp_avg": taken, "step": 1}, "else": 3, "value": {"v": value}})
    taken.fill_(2), left.fill_(2), value.fill_(2)
    handed.settle()
    sent = handed.parts.sent()
    assert sent == values(b=[2.0] * 4) + [("state", "b", {"exp_avg": [2.0] * 4})]
    assert handed.watched == 2
    taken.fill_(3)
    handed.settle()
    assert handed.parts.sent() == []


@pytest.mark.parametrize("is_kept", [True, False])
def test_optimizer_state_that_got_other_memory_is_told_once(handed, is_kept):
    """Claim: also when its last user is gone by then. Twin: a value's tensor is then its
    receiver's own, as in torch."""
    state, value = handed.of(handed.a, "exp_avg"), handed.of(handed.b)
    state.data = value.data = torch.zeros(4)
    if not is_kept:
        del state
    with pytest.raises(UsageError, match="exp_avg of a .* was given other memory"):
        handed.settle()
    handed.settle()
    assert handed.parts.sent() == []


# --- what is watched, and how long ---


def test_a_tensor_that_is_only_read_is_dropped_with_its_last_user(handed):
    """Twins: one that was written to goes home after its end, and one with views or in NumPy waits
    for the next use."""
    tensor = handed.of(handed.a)
    assert handed.watched == 1
    del tensor
    assert handed.watched == 0
    handed.of(handed.a).fill_(2)
    assert handed.watched == 1
    handed.settle()
    assert handed.parts.sent() == values(a=[2.0] * 4) and handed.watched == 0
    for hold in (lambda t: torch.empty(0).set_(t.untyped_storage()), lambda t: t.numpy()):
        held = hold(handed.of(handed.a))
        assert handed.watched == 1
        handed.settle()
        del held
        handed.settle()
        assert handed.watched == 0 and handed.parts.sent() == []


def test_a_tensor_that_dies_written_through_numpy_goes_home():
    """Method: an element that is not probed; the array dies before the tensor."""
    handed = Handed(LARGE)
    tensor = handed.of(handed.a)
    tensor.numpy()[1] = 2
    del tensor
    handed.settle()
    assert handed.parts.sent() == values(a=[1.0, 2.0, *[1.0] * (LARGE - 2)])
    assert handed.watched == 0


def test_the_end_of_a_tensor_ends_no_other_at_its_place(handed):
    """Twin: the end of the one that is there does; of one that is gone nothing is left to do."""
    tensor, other = handed.of(handed.a), torch.ones(1)
    key = storage_guard.identity(tensor)
    handed.died(handed.a, key, weakref.ref(other))
    handed.died(handed.a, key + 1, weakref.ref(tensor))
    handed.died(handed.b, key, weakref.ref(tensor))
    assert handed.watched == 1
    other = handed.of(handed.a)
    tensor.fill_(2)
    handed.settle()
    del tensor
    assert handed.watched == 1 and handed.parts.sent() and other.tolist() == [2.0] * 4


def test_nothing_is_dropped_at_the_end_of_the_process_or_of_the_engine(handed):
    """Method: what torch calls as it frees a tensor. Twin: before that it is."""
    died = []
    handed.died = lambda handle, key, reference: died.append(key)
    me = weakref.ref(handed)
    lent._died(me, handed.a, 1, None, is_over=lambda: True)
    lent._died(lambda: None, handed.a, 1, None, is_over=lambda: False)
    assert died == []
    lent._died(me, handed.a, 1, None)
    assert died == [1]


def test_tensors_without_bytes_of_their_own_are_not_watched(handed):
    """Twin: with one element it is."""
    with torch.inference_mode():
        inference = torch.ones(2)
    kept = [torch.ones(0), inference, torch.ones(1)]
    for count, tensor in zip((0, 0, 1), kept, strict=True):
        handed.lend(handed.values, handed.a, tensor)
        assert handed.watched == count


# --- loads ---


def test_a_tensor_that_is_loaded_is_current_afterwards(handed):
    """What was written to it before goes home first. Twins: loaded into another parameter it is a
    snapshot of its own, and so is a moment."""
    tensor, moment = handed.of(handed.a), handed.of(handed.a, "exp_avg")
    tensor.fill_(2)
    with handed.loading(handed.values, {handed.a: tensor}):
        assert handed.parts.sent() == values(a=[2.0] * 4)
        handed.a.version += 1
    tensor.fill_(3)
    handed.settle()
    assert handed.parts.sent() == values(a=[3.0] * 4)
    handed.parts.changes[handed.a, "exp_avg"] += 1
    for handle, given in ((handed.b, tensor), (handed.a, moment)):
        with handed.loading(handed.values, {handle: given}):
            handed.a.version += 1
        given.fill_(4)
        with pytest.raises(UsageError, match=OLD):
            handed.settle()


@pytest.mark.parametrize(
    "value", [torch.ones(4, device="meta"), torch.ones(4).to_sparse(), torch.ones(4)]
)
def test_any_value_may_be_loaded(handed, value):
    """Twin: the tensor that is watched is a snapshot then."""
    tensor = handed.of(handed.a)
    with handed.loading(handed.values, {handed.a: value}):
        handed.a.version += 1
    tensor.fill_(2)
    with pytest.raises(UsageError, match=OLD):
        handed.settle()


# --- a state dict that is filled ---


def test_what_is_in_a_state_dict_is_not_compared_while_it_is_filled_further(handed):
    """Twins: from its first module to its second it is, for only the same dict is passed over; so
    it is for another dict, after an error, and in a plain dict, which cannot be recognised."""

    class Failed(Exception):
        pass

    tensor, state = handed.of(handed.a), OrderedDict()

    def is_sent(into: dict, *, fails: bool = False) -> bool:
        tensor.add_(1)
        try:
            with handed.filling(into):
                handed.settle()
                if fails:
                    raise Failed
        except Failed:
            pass
        sent = bool(handed.parts.sent())
        handed.settle()
        handed.parts.sent()
        return sent

    assert is_sent(state)
    assert not is_sent(state)
    assert not is_sent(state, fails=True)
    tensor.add_(1)
    handed.settle()
    assert handed.parts.sent()
    other = OrderedDict()
    assert is_sent(other) and is_sent(state) and not is_sent(state)
    plain: dict = {}
    assert is_sent(plain) and is_sent(plain)


def test_an_array_that_outlives_a_view_is_watched(handed):
    """What was lent is a view of another tensor, which ends with it, and NumPy has it since. Twin:
    once the array has gone, nothing is watched."""
    value = torch.ones(8).as_strided((4,), (1,))
    handed.lend(handed.values, handed.a, value)
    array = value.numpy()
    del value
    handed.settle()
    array[2] = 5
    handed.settle()
    assert handed.parts.sent() == values(a=[1.0, 1.0, 5.0, 1.0])
    del array
    handed.settle()
    assert handed.watched == 0


def test_few_classes_keep_weak_references_to_users_tensors():
    """Reads the core. Besides the lent ones: views that follow a weight, saved weights of a graph,
    and what a gradient's stand-in is. Twin: another file would be found."""
    made = re.compile(r"weakref\.ref\(\s*(?:tensor|value|view|proxy)\b")
    assert made.search("self._it = weakref.ref(value)")
    core = Path(infinity.__file__).parent / "core"
    found = {path.name for path in core.rglob("*.py") if made.search(path.read_text())}
    others = {"aliases.py", "saved_weights.py", "assigned_grads.py", "at_home.py"}
    assert found == {"lent.py", *others}
