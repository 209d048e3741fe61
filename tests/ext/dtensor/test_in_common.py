"""InCommon: ranks with other local parts of the same tensors must get and draw the same, and are
told where they part.

**peer**: the other rank, which has this rank's values unless a test gives it others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside import parts_of
from models import at_home
from small import RAMP, AtHome, Small, small_at_home
from torch import nn

import infinity
from infinity.core.machine.device import Device
from infinity.core.machine.traffic import Traffic
from infinity.core.seams import Events
from infinity.errors import UsageError
from infinity.ext.dtensor.in_common import (
    FIRST_STEPS,
    FORWARDS,
    LATER_STEPS,
    ChangedBuffers,
    InCommon,
)

ODD = torch.linspace(0.1, 0.8, 8).view(2, 4)


class Peer:
    """Stands for the collectives. ``apart``: places of values that differ on the peer; ``theirs``:
    what it says when it is asked what differs."""

    def __init__(self, channel: Any = "tp"):
        self.ranks = SimpleNamespace(tp_group=channel, world_rank=4)
        self.apart, self.theirs = set(), None
        self.met, self.failed, self.asked = [], [], []

    def spans(self, channel: Any, what: str, values: list[int]) -> list[tuple[int, int]]:
        assert channel == "tp"
        self.met.append((what, list(values)))
        return [(v, v + (place in self.apart)) for place, v in enumerate(values)]

    def collect(self, mine: Any, what: str, among: list) -> list[Any]:
        assert among == ["tp"]
        self.asked.append(what)
        return [mine, (7, mine[1] if self.theirs is None else self.theirs(mine[1]))]

    @contextmanager
    def heard_elsewhere(self, channel: Any) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            self.failed.append((channel, error))
            raise


class Far(Device):
    """Where reading values waits for the device."""

    is_host = False


class Made(InCommon):
    def __init__(self, peer: Peer | None = None, device: Device | None = None, job=None):
        self.peer, self.job = peer or Peer(), job or small_at_home()
        engine, self.root = self.job.engine, nn.Linear(4, 2)
        super().__init__(self.peer, device or engine.device)
        self.install(
            SimpleNamespace(**vars(parts_of(engine).job) | {"events": Events()}), nn.Linear(1, 1)
        )

    def forward(self, *args: Any, outputs: tuple = (), root=None, **kwargs: Any) -> None:
        root = root or self.root
        self.begin_forward(root, args, kwargs)
        self.end_forward(root, outputs)

    @property
    def last(self) -> list[int]:
        """What the last meeting compared."""
        return self.peer.met[-1][1]


@pytest.fixture
def common() -> Made:
    return Made()


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


# --- forwards ---


def test_a_rank_without_such_others_compares_nothing():
    """Twin: with them every forward and every batch is a meeting."""
    device = Device(torch.device("cpu"), Traffic())
    assert InCommon.begin(None, device, Peer(None), Events()) is None
    assert isinstance(InCommon.begin(None, device, Peer("tp"), Events()), InCommon)
    common = Made()
    common.forward(RAMP)
    common.compare_batch("a batch", (RAMP,), {})
    assert len(common.peer.met) == 2


def test_installed_it_listens_to_forwards_and_steps():
    """Twin: events of a job without it have no listener."""
    events, job = Events(), parts_of(small_at_home()).job
    common = InCommon(Peer(), job.device)
    common.install(SimpleNamespace(**vars(job) | {"events": events}), nn.Linear(1, 1))
    assert events.step_compared == [common.meet_for_step]
    assert len(events.pass_begun) == len(events.pass_ended) == 1
    assert not job.events.step_compared


CHANGES = {
    "a value": lambda given: given["x"].add_(1),
    "a dtype": lambda given: given.update(x=given["x"].double()),
    "a shape": lambda given: given.update(x=given["x"].view(2, 2)),
    "a number": lambda given: given.update(scale=3.0),
    "a word": lambda given: given.update(kind="b"),
    "a nested tensor": lambda given: given["more"][0].add_(1),
    "the mode": lambda given: given["root"].eval(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_all_that_a_forward_is_given_is_compared(common, what):
    """Twins: the same again is the same number; an object that is no plain value is left out."""
    given = {
        "root": common.root,
        "x": RAMP.clone(),
        "scale": 2.0,
        "kind": "a",
        "more": [ODD.clone()],
        "other": object(),
    }
    common.forward(**given)
    first = common.last
    given["other"] = object()
    common.forward(**given)
    assert common.last == first and first[0] != 0 == first[1]
    CHANGES[what](given)
    common.forward(**given)
    assert common.last != first


@pytest.mark.parametrize(
    "name, given",
    [("argument 0", lambda x: ((x,), {})), ("y", lambda x: ((), {"y": x}))],
)
def test_a_difference_is_named_on_all_of_these_ranks(common, name, given):
    """With both ranks and what each has; the others are told at their next meeting."""
    args, kwargs = given(RAMP)
    common.peer.apart = {0}
    common.peer.theirs = lambda mine: ({**mine[0], name: "other"}, mine[1])
    with pytest.raises(UsageError) as caught:
        common.begin_forward(common.root, args, kwargs)
    told = str(caught.value)
    assert told.startswith(f"a forward: {name} is float32 of (4,) with digest ")
    assert "on rank 4 and other on rank 7" in told and "Give all ranks" in told
    assert common.peer.failed == [("tp", caught.value)]
    assert common.peer.asked == ["what differs at a forward"]
    common.peer.theirs = lambda mine: ({}, mine[1])
    with pytest.raises(UsageError, match="and absent on rank 7"):
        common.begin_forward(common.root, args, kwargs)
    common.peer.theirs = lambda mine: ({**mine[0], "more": "there"}, mine[1])
    with pytest.raises(UsageError, match="more is absent on rank 4 and there on rank 7"):
        common.begin_forward(common.root, args, kwargs)
    common.peer.theirs = None
    with pytest.raises(UsageError, match="no difference can be named"):
        common.begin_forward(common.root, args, kwargs)


def test_what_forwards_drew_is_compared_at_the_next_meeting(common):
    """And forgotten then. Twins: a forward that draws nothing; what is drawn outside of one."""
    common.forward(RAMP)
    torch.rand(1)
    common.begin_forward(common.root, (RAMP,), {})
    assert common.last[1] == 0
    torch.rand(1)
    common.end_forward(common.root, [])
    torch.rand(1)
    common.peer.apart = {1}
    common.peer.theirs = lambda mine: (mine[0], {name: "other" for name in mine[1]})
    with pytest.raises(UsageError) as caught:
        common.begin_forward(common.root, (RAMP,), {})
    told = str(caught.value)
    assert told.startswith("a forward: the state of torch's generator before what was drawn is")
    assert "Seed these ranks alike" in told and "argument" not in told
    common.peer.apart = set()
    common.forward(RAMP)
    assert common.last[1] == 0
    common.begin_forward(common.root, (RAMP,), {})
    torch.rand(1)
    common.end_forward(common.root, [])
    common.compare("a batch", {})
    assert common.last[1] != 0
    common.compare("a batch", {})
    assert common.last == [0, 0]


def test_only_the_roots_own_end_ends_a_forward(common):
    """Twin: that of a module inside, or a second one, changes nothing."""
    common.begin_forward(common.root, (RAMP,), {})
    common.end_forward(nn.Linear(1, 1), [])
    torch.rand(1)
    common.end_forward(common.root, [])
    drawn = common.values()[0]
    assert drawn != 0
    torch.rand(1)
    common.end_forward(common.root, [])
    assert common.values()[0] == drawn


def test_forwards_of_a_batch_that_was_compared_are_not(common):
    """But what they draw is. Twin: after the block they are again."""
    common.compare_batch("a batch", (RAMP,), {"mask": ODD})
    first = common.last
    common.compare_batch("a batch", (RAMP,), {"mask": ODD + 1})
    assert common.last != first and common.peer.met[-1][0] == "a batch"
    output = torch.ones(2, requires_grad=True) * 1
    with pytest.raises(ValueError, match="stop"), common.without_comparisons():
        common.begin_forward(common.root, (RAMP,), {})
        torch.rand(1)
        common.end_forward(common.root, [output])
        raise ValueError("stop")
    assert len(common.peer.met) == 2
    output.sum().backward()
    drawn, *others = common.values()
    assert drawn != 0 and others == [0] * 6
    common.forward(RAMP)
    assert len(common.peer.met) == 3


def test_what_cannot_be_read_is_compared_by_its_form(common):
    """On meta, at home, sparse. Twins: a plain tensor has a digest; an empty one needs none."""
    assert common.summary(RAMP).startswith("float32 of (4,) with digest ")
    assert common.summary(nn.Parameter(RAMP)) == common.summary(RAMP)
    assert common.summary(RAMP, with_values=False) == "float32 of (4,)"
    param = common.job.handles[0].param
    for tensor in (RAMP.to("meta"), RAMP.to_sparse(), param, torch.empty(0), RAMP[None].as_subclass(
        type("Other", (torch.Tensor,), {})
    )):  # fmt: skip
        assert "digest" not in common.summary(tensor)
    conj = torch.view_as_complex(ODD.view(-1, 2)).conj()
    assert common.summary(conj) == common.summary(conj.resolve_conj())
    assert common.summary(ODD.t()) == common.summary(ODD.t().contiguous())
    found = []
    torch.vmap(lambda row: (found.append(common.summary(row)), row)[1])(ODD)
    assert "digest" not in found[0]


def test_parts_of_a_sequence_are_compared_by_form_and_draw_what_they_like(common, monkeypatch):
    """Twin: for a model that gets whole sequences both are compared."""
    monkeypatch.setattr(
        "infinity.ext.dtensor.in_common.takes_parts", lambda root: root.bias is None
    )
    for root, is_whole in ((nn.Linear(4, 2, bias=False), False), (nn.Linear(4, 2), True)):
        seen = []
        for value in (RAMP, RAMP + 1):
            common.begin_forward(root, (value,), {})
            seen.append(common.last[0])
            torch.rand(1)
            common.end_forward(root, [])
        assert (seen[0] != seen[1]) == is_whole
        assert (common.values()[0] != 0) == is_whole


def test_a_pass_that_an_exception_ended_is_not_compared(common):
    """Method: a forward draws, its output gets a gradient, and another forward draws and does not
    end. Twin: the same again is compared as ever."""
    common.forward(RAMP)
    nothing = common.values()

    def play(*, cut_short: bool) -> None:
        common.begin_forward(common.root, (RAMP,), {})
        torch.rand(1)
        output = ODD.clone().requires_grad_() * 1
        common.end_forward(common.root, [output])
        output.sum().backward()
        if cut_short:
            common.begin_forward(common.root, (RAMP,), {})
            torch.rand(1)
            common.drop(common.job)
            common.drop(common.job)

    play(cut_short=True)
    common.end_forward(common.root, [])  # torch calls it late, if at all
    assert common.values() == nothing
    common.forward(RAMP)
    assert common.last[1] == 0
    play(cut_short=False)
    drawn, *others = common.values()
    assert drawn != nothing[0] and any(others)


# --- buffers ---


def test_buffers_are_compared_once_they_change(common):
    """Twin: as they were at the wrap they may be a rank's own."""
    model = nn.Sequential(nn.BatchNorm1d(4))
    common.install(SimpleNamespace(**vars(parts_of(common.job).job) | {"events": Events()}), model)
    common.forward(RAMP)
    first = common.last
    common.forward(RAMP)
    assert common.last == first
    model[0].running_mean.add_(1)
    common.forward(RAMP)
    assert common.last != first
    common.forward(RAMP)
    assert common.last == first


def test_a_buffer_is_changed_if_it_was_written_or_replaced():
    """Twins: one that is None or of inference mode is left out; a read takes it as it is."""
    model, changed = nn.Sequential(nn.BatchNorm1d(4)), ChangedBuffers()
    model.register_buffer("own", torch.ones(2))
    model.register_buffer("none", None)
    changed.note(model)
    assert changed.read() == {}
    model[0].running_mean.add_(1)
    model.own = torch.ones(2)
    found = changed.read()
    assert list(found) == ["buffer own", "buffer 0.running_mean"]
    assert found["buffer own"] is model.own and changed.read() == {}
    with torch.inference_mode():
        model.own = torch.ones(2)
    assert changed.read() == {}


# --- steps ---


def landed(common: Made, sample: torch.Tensor | None, index: int = 0) -> None:
    common.job.handles[index].grad.sample = sample


def spans_of(values: list[int], *, other: list[int]) -> list[tuple[int, int]]:
    return [(min(pair), max(pair)) for pair in zip(values, other)]


def test_gradients_may_differ_between_ranks_by_rounding_alone(common):
    """Method: a thousandth of the norm for fp32. Twins: without gradients, and equal ones."""
    assert common.agrees(spans_of(common.values(), other=common.values()))
    found = {}
    for off in (0.0, 1e-4, 1e-1):
        landed(common, ODD.view(-1) * torch.tensor([1.0 + off] + [1.0] * 7))
        found[off] = common.values()
    assert common.agrees(spans_of(found[0.0], other=found[0.0]))
    assert common.agrees(spans_of(found[0.0], other=found[1e-4]))
    spans = spans_of(found[0.0], other=found[1e-1])
    assert not common.agrees(spans)
    landed(common, ODD.view(-1))
    common.peer.theirs = lambda mine: {name: each * 1.5 for name, each in mine.items()}
    with pytest.raises(UsageError) as caught:
        common.check(spans)
    told = str(caught.value)
    assert "the gradient of layers.0.weight, which ranks 4 and 7 have whole" in told
    assert "by 0.5 of its norm" in told


def test_the_gradient_that_differs_most_is_named(common):
    """Of those that both ranks have. Twin: of zeros any difference counts as it is."""
    for index in range(3):
        landed(common, ODD.view(-1), index)
    spans = spans_of([0] * 7, other=[0, 10**18, 0, 0, 0, 0, 0])
    spans[2] = (common.values()[2],) * 2
    factors = {"layers.0.weight": 1.1, "layers.1.weight": 3.0}
    common.peer.theirs = lambda mine: {name: mine[name] * by for name, by in factors.items()}
    with pytest.raises(UsageError, match=r"layers\.1\.weight.* by 2 of its norm"):
        common.check([(0, 0), (-(10**18) * 5, 10**18 * 5), spans[2], *spans[3:]])
    landed(common, torch.zeros(8))
    landed(common, None, 1)
    common.peer.theirs = lambda mine: {"layers.0.weight": torch.ones(8).double()}
    with pytest.raises(UsageError, match=r"layers\.0\.weight.* by 2\.83 of its norm"):
        common.check([(0, 0), (-(10**18) * 5, 10**18 * 5), spans[2], *spans[3:]])


def halved() -> AtHome:
    model = Small().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", None))
    return AtHome(model, optimizer, parts_of(model).engine)


def test_gradients_in_sixteen_bits_may_differ_by_more():
    """Three hundredths of the norm. Twins: in fp32 they may not, nor by more."""
    for job, off, is_rounding in (
        (small_at_home(), 1e-2, False),
        (halved(), 1e-2, True),
        (halved(), 0.5, False),
    ):
        common, found = Made(job=job), []
        for first in (1.0, 1.0 + off):
            landed(common, torch.tensor([first] + [1.0] * 7))
            found.append(common.values())
        assert common.agrees(spans_of(found[0], other=found[1])) == is_rounding


def test_numbers_that_are_not_finite_are_no_difference(common):
    """A loss may overflow on all ranks: the scaler skips the step."""
    landed(common, torch.full((8,), float("inf")))
    first = common.values()
    landed(common, torch.full((8,), float("nan")))
    assert common.agrees(spans_of(first, other=common.values()))
    landed(common, torch.ones(8))
    assert common.agrees(spans_of(first, other=common.values()))


def test_a_loss_that_differs_is_told_from_outputs_that_do(common):
    """Method: sketches of the gradients that reach equal outputs. Twin: of other outputs other
    gradients are right."""

    def run(value: float, factor: float) -> list[int]:
        output = (ODD * value).requires_grad_() * 1
        common.forward(RAMP, outputs=(output,))
        (output * RAMP).sum().mul(factor).backward()
        return common.values()

    same, other_loss, other_outputs = run(1.0, 1.0), run(1.0, 2.0), run(3.0, 2.0)
    assert any(same[3:])
    assert common.agrees(spans_of(same, other=run(1.0, 1.0)))
    assert common.agrees(spans_of(same, other=other_outputs))
    assert not common.agrees(spans_of(same, other=other_loss))
    with pytest.raises(UsageError, match="a step: the gradient of what the model gives differs"):
        common.check(spans_of(same, other=other_loss))


def test_only_outputs_that_get_gradients_are_watched(common):
    """Twins: a constant, an empty one."""
    common.forward(RAMP, outputs=(torch.ones(2), torch.ones(0, requires_grad=True) * 1))
    assert common.values()[3:] == [0] * 4


def test_draws_that_differ_at_a_step_are_told_until_they_agree(common):
    """Twin: once ranks agree, the next step compares from there."""
    common.begin_forward(common.root, (RAMP,), {})
    torch.rand(1)
    common.end_forward(common.root, [])
    values = common.values()
    spans = [(values[0], values[0] + 1), *((0, 0),) * 6]
    assert not common.agrees(spans) and common.values()[0] == values[0]
    common.peer.theirs = lambda mine: (mine[0], {})
    with pytest.raises(UsageError, match=r"^a step: the state of torch's generator"):
        common.check(spans)
    common.begin_forward(common.root, (RAMP,), {})
    torch.rand(1)
    common.end_forward(common.root, [])
    assert common.agrees(spans_of(common.values(), other=common.values()))
    assert common.values()[0] == 0


# --- readings ---


@pytest.mark.parametrize("is_far", [False, True])
def test_on_an_accelerator_values_are_read_in_some_steps_only(is_far):
    """The first ones, some later ones, and of each the first forwards. Twin: a processor's are
    read in all. Method: whether samples of gradients are taken."""
    common = Made(device=Far(torch.device("cpu"), Traffic()) if is_far else None)
    steps = common.job.engine.steps

    def taken(step: int) -> list[bool]:
        steps.index, found = step, []
        for _ in range(FORWARDS + 1):
            common.forward(RAMP)
            found.append(common.job.engine.gradients.takes_samples)
        return found

    first, none = [True] * FORWARDS + [not is_far], [not is_far] * (FORWARDS + 1)
    assert taken(0) == first and taken(FIRST_STEPS - 1) == first
    assert taken(FIRST_STEPS) == none and taken(LATER_STEPS + 1) == none
    assert taken(2 * LATER_STEPS) == first and taken(0) == first


def test_outputs_are_sketched_only_where_values_are_read():
    common = Made(device=Far(torch.device("cpu"), Traffic()))
    for step, is_read in ((0, True), (FIRST_STEPS, False)):
        common.job.engine.steps.index = step
        output = torch.ones(2, 2, requires_grad=True) * 1
        common.forward(RAMP, outputs=(output,))
        output.sum().backward()
        assert any(common.values()[3:]) == is_read
