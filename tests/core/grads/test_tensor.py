"""GradProxy: the stand-in that ``p.grad`` is does as torch's gradient would, at any home."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, Elsewhere, small_at_home
from torch import nn

from infinity.core.grads.record import GradRecord, GradState
from infinity.core.grads.tensor import GradProxy, GradView
from infinity.core.machine import accelerator
from infinity.core.run.operations import State
from infinity.errors import UsageError

ROWS = torch.stack([RAMP, RAMP])
ODD = torch.linspace(0.1, 0.8, 8).view(2, 4)  # whose sums and products are rounded


class Averager:
    """Counts how often it is asked to average."""

    averages = 0

    def average(self, *, are_gone: bool = False, of: object = None) -> None:
        self.averages += 1


@pytest.fixture(params=["host", "nvme", "elsewhere"])
def job(request, monkeypatch, tmp_path) -> AtHome:
    """With the ramp and twice the ramp as gradients."""
    if request.param == "elsewhere":
        monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    job = small_at_home("nvme" if request.param == "nvme" else "host", tmp_path)
    job.backward(RAMP, 2 * RAMP)
    return job


@pytest.fixture
def here() -> AtHome:
    """The same in memory that the device computes with."""
    job = small_at_home()
    job.backward(RAMP, 2 * RAMP)
    return job


def grads(job: AtHome) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (handle.param.grad for handle in job.handles[:2])
    assert type(first) is type(second) is GradProxy
    return first, second


def at_home(job: AtHome, index: int = 0) -> torch.Tensor:
    parts_of(job).gradients.homes.settle()
    return parts_of(job).gradients.values.value(job.handles[index], write=False).clone()


def consume(job: AtHome) -> None:
    for handle in job.handles[:2]:
        handle.grad.move(GradState.CONSUMED)


def of_several_ranks(job: AtHome) -> None:
    """Lets gradients take the ways that they take with others, though this rank has all bytes."""
    ranks = SimpleNamespace(alone=False, size=1, pp_group=None)
    parts_of(job).gradients.values.ranks = parts_of(job).gradients.assigned.ranks = ranks


def averaged_by(job: AtHome) -> Averager:
    averager = Averager()
    parts_of(job).gradients.reduce_with(None, averager.average)
    return averager


# name -> what is done with two gradients; it returns tensors, if any
OPERATIONS = {
    "a sum": lambda a, b: a + b,
    "a product with itself": lambda a, b: a * a,
    "mul_": lambda a, b: a.mul_(0.3),
    "mul_ by a tensor": lambda a, b: a.mul_(torch.tensor(0.3)),
    "mul_ by the other": lambda a, b: a.mul_(b),
    "mul_ by a whole": lambda a, b: a.mul_(torch.full((2, 4), 0.3)),
    "mul_ twice": lambda a, b: a.mul_(0.3).mul_(0.7),
    "div_": lambda a, b: a.div_(0.3),
    "div_ rounded": lambda a, b: a.div_(0.3, rounding_mode="floor"),
    "div_ by a tensor": lambda a, b: a.div_(torch.tensor(0.3)),
    "zero_": lambda a, b: a.zero_(),
    "clamp_": lambda a, b: a.clamp_(1.5, 2.5),
    "add_": lambda a, b: a.add_(b, alpha=0.3),
    "copy_": lambda a, b: a.copy_(b),
    "out=": lambda a, b: torch.add(b, 1, out=a),
    "into another": lambda a, b: torch.zeros(2, 4).add_(a),
    "foreach mul": lambda a, b: torch._foreach_mul_([a, b], 0.3),
    "foreach add": lambda a, b: torch._foreach_add_([a, b], [b, a], alpha=0.3),
    "foreach zero": lambda a, b: torch._foreach_zero_([a, b]),
    "foreach norm": lambda a, b: torch._foreach_norm([a, b], 1.0),
    "norms": lambda a, b: [torch.linalg.vector_norm(a, order) for order in (1.0, 2.0, math.inf)],
    "a norm without an order": lambda a, b: torch.linalg.vector_norm(b),
    "norms of rows": lambda a, b: torch.linalg.vector_norm(a, 1.0, dim=1),
    "a norm in fp64": lambda a, b: torch.linalg.vector_norm(a, dtype=torch.float64),
    "cat": lambda a, b: torch.cat([a, b]),
    "all views": lambda a, b: [a.t().clone(), a[0].clone(), b.view(-1)[2:5].clone()],
    "unbind": lambda a, b: [each.clone() for each in a.unbind(1)],
    "split": lambda a, b: [each + 1 for each in b.split(1)],
    "chunks of a view": lambda a, b: [each + 1 for each in a.t().chunk(2)],
    "as_strided": lambda a, b: a.as_strided((2, 2), (4, 1), 1) * 1,
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_an_operation_gives_torchs_bits_and_changes_what_torchs_would(job, what):
    """Method: the same on plain tensors. Twin: what is only read stays as it was."""
    plain = ROWS.clone(), 2 * ROWS
    with torch.no_grad():
        expected, found = OPERATIONS[what](*plain), OPERATIONS[what](*grads(job))
    for index in range(2):
        assert torch.equal(at_home(job, index), plain[index]), index
        assert job.handles[index].grad.state is GradState.LANDED
    pairs = zip(found, expected) if isinstance(expected, (list, tuple)) else [(found, expected)]
    for one, other in pairs if expected is not None else ():
        assert torch.equal(one + 0, other) and one.dtype == other.dtype
    if isinstance(expected, torch.Tensor) and expected is plain[0]:
        assert found is job.handles[0].param.grad  # in place: the gradient itself


def test_scaling_waits_for_the_step(here):
    """By a number or a tensor of one, in fp32. Twins: what is no number is multiplied at once."""
    first, _ = grads(here)
    record, half = here.handles[0].grad, torch.tensor(0.5)
    first.mul_(0.1).mul_(half)
    assert record.factors == [torch.tensor(0.1).item(), 0.5]
    first.mul_(torch.ones(1, 4))
    assert record.factors == []
    assert torch.equal(first.mul_(grads(here)[1]) + 0, ROWS * 0.1 * 0.5 * (2 * ROWS))


def test_its_values_are_averaged_before_they_are_read_and_not_for_zeros(here):
    averager, (first, second) = averaged_by(here), grads(here)
    for act in (torch.detach, torch.Tensor.zero_, lambda grad: torch._foreach_zero_([grad])):
        act(first)
        assert averager.averages == 0
    for count, act in enumerate((lambda: first + 1, lambda: first.mul_(2), lambda: first + second)):
        before = averager.averages
        act()
        assert averager.averages == before + (2 if count == 2 else 1)


def test_a_gradient_is_used_in_a_use_of_the_job(here):
    """Method: whether a scope is open while it is averaged; for a view, too."""
    first, seen = grads(here)[0], []
    note = lambda **_: seen.append(parts_of(here).scopes.running_here)
    running = SimpleNamespace(average=note)
    parts_of(here).gradients.reduce_with(None, running.average)
    first + 1
    first[0]
    first.numpy()
    assert seen == [True] * len(seen) and len(seen) == 3


@pytest.mark.parametrize("is_over", [True, False])
def test_a_consumed_gradient_is_changed_once_its_step_is_over(job, is_over):
    """It stays consumed. Twin: between the two halves of a step each change is refused."""
    (first, _), expected = grads(job), ROWS.clone()
    consume(job)
    parts_of(job).uses.define({State.STEPPED: lambda: not is_over})
    writes = (
        lambda grad: grad.mul_(3),
        lambda grad: grad.div_(2),
        lambda grad: grad.add_(1),
        lambda grad: torch._amp_foreach_non_finite_check_and_unscale_(
            [grad], torch.zeros(1), torch.tensor(0.3)
        ),
    )
    for write in writes:
        if is_over:
            write(first)
            write(expected)
        else:
            with pytest.raises(UsageError, match=r"layers\.0\.weight\.grad between step_in"):
                write(first)
    assert torch.equal(first + 0, expected) and torch.equal(at_home(job), expected)
    assert job.handles[0].grad.state is GradState.CONSUMED
    first.zero_()
    assert job.handles[0].grad.state is GradState.LANDED and at_home(job).count_nonzero() == 0


def test_a_torn_gradient_can_be_zeroed_only(here):
    first, second = grads(here)
    here.handles[0].grad = GradRecord(GradState.TORN, proxy=first, shown=first)
    reads = (
        lambda: first + 1,
        lambda: second.add_(first),
        lambda: torch.linalg.vector_norm(first),
        lambda: first.mul_(2),
        lambda: first[0],
    )
    for read in reads:
        with pytest.raises(UsageError, match=r"layers\.0\.weight is half done"):
            read()
    assert torch.equal(second + 0, 2 * ROWS)
    first.zero_()
    assert at_home(here).count_nonzero() == 0


def test_a_view_of_a_torn_gradient_cannot_be_read(here):
    """With several ranks. Twin: on one rank it has memory of its own."""
    first, second = grads(here)
    own = second[0]
    of_several_ranks(here)
    assert torch.equal(own + 0, 2 * RAMP)
    view = first[0]
    assert torch.equal(view + 0, RAMP)
    here.handles[0].grad = GradRecord(GradState.TORN, proxy=first, shown=first)
    with pytest.raises(UsageError, match="half done"):
        view + 0


def test_a_stand_in_from_before_is_refused(here):
    """Of a gradient that was cleared, or of a model that is gone; a view of it, too. Twin: the
    present one."""
    old = grads(here)[0]
    of_several_ranks(here)
    view = old[0]
    here.handles[0].param.grad = None
    here.backward(RAMP)
    for use in (lambda: old + 1, lambda: old.zero_(), lambda: old.mul_(2), lambda: view + 1):
        with pytest.raises(UsageError, match=r"from before zero_grad\(\) was used"):
            use()
    new, handle = here.handles[0].param.grad, here.handles[0]
    assert torch.equal(new + 0, ROWS)
    arrays, handle.flat_param.homes.arrays = handle.flat_param.homes.arrays, {}
    with pytest.raises(UsageError, match=r"layers\.0\.weight went with its model"):
        new + 1
    handle.flat_param.homes.arrays = arrays


def test_a_stand_in_whose_parameter_got_another_gradient_is_a_plain_tensor(job):
    """With its values and nobody's home. In place it is still itself, by keyword, too. Twin: beside
    a present one."""
    old, other = grads(job)
    job.handles[0].param.grad = ODD.clone()
    assert torch.equal(old.plain, ROWS) and torch.equal(old + other, ROWS + 2 * ROWS)
    assert old.add_(1) is old and torch.equal(old + 0, ROWS + 1)
    with torch.no_grad():
        assert torch.add(ROWS, 1, out=old) is old and torch.equal(old.plain, ROWS + 1)
    other.add_(old)
    assert torch.equal(at_home(job, 1), 2 * ROWS + (ROWS + 1))
    assert torch.equal(at_home(job), ODD)


# --- views ---


def test_a_view_has_memory_of_its_own_and_a_write_to_it_counts(job):
    """At every home, before and after a step. Twin: once it is let go the bytes are at home."""
    first, _ = grads(job)
    view = first.t()
    assert type(view) is torch.Tensor and view.shape == (4, 2) and view.stride() == (1, 4)
    assert torch.equal(view, ROWS.t())
    first.add_(1)
    assert torch.equal(view, ROWS.t() + 1)
    view.mul_(2)
    assert torch.equal(first + 0, 2 * (ROWS + 1))
    consume(job)
    view[0] = 0.5
    assert torch.equal(first.sum(), view.sum())
    del view
    expected = 2 * (ROWS + 1)
    expected[:, 0] = 0.5
    assert torch.equal(first + 0, expected) and torch.equal(at_home(job), expected)
    assert job.handles[0].grad.assigned is None


def test_arrays_are_of_memory_that_the_engine_does_not_use(job):
    """By every way to NumPy. Twins: with several ranks an array can be read only, and elements are
    not changed by a function."""
    first, _ = grads(job)
    arrays = [np.asarray(first), first.numpy(), first.detach().cpu().numpy(force=True)]
    arrays += [first.view(-1).numpy().reshape(2, 4), np.array(first, dtype=np.float32)]
    first.apply_(lambda value: value + 1)
    first.map_(torch.ones(2, 4), lambda value, other: value - other)
    job.handles[0].param.grad = None
    job.backward(ODD[0])
    assert all(array.tolist() == ROWS.tolist() for array in arrays)
    of_several_ranks(job)
    first, _ = grads(job)
    for array in (first.numpy(), first[0].numpy(), first.t().numpy()):
        assert not array.flags.writeable
    with pytest.raises(UsageError, match=r"apply_\(\)"):
        first.apply_(lambda value: value + 1)


def test_views_with_several_ranks_read_the_home_at_each_use(here):
    """And cannot be written to. Twin: on one rank they are plain tensors."""
    first, second = grads(here)
    assert type(second[0]) is torch.Tensor
    of_several_ranks(here)
    view = first.as_strided((2, 2), (2, 1), 3)
    assert type(view) is GradView and torch.equal(view + 0, torch.tensor([[4.0, 1.0], [2.0, 3.0]]))
    parts_of(here).gradients.homes.view(here.handles[0], write=True).copy_(ODD)
    assert torch.equal(view + 0, ODD.as_strided((2, 2), (2, 1), 3))
    assert torch.equal(view[1] + view[0], ODD.view(-1)[5:7] + ODD.view(-1)[3:5])
    assert view.detach() is view and torch.equal(torch.stack([view, view])[1], view + 0)
    nested = view.t().unbind(0)[1]
    assert type(nested) is GradView and nested.shape == (2,)
    assert torch.equal(nested + 0, ODD.view(-1)[[4, 6]])
    taken = view.clone()
    taken.zero_()
    assert torch.equal(view + 0, ODD.as_strided((2, 2), (2, 1), 3))
    for write in (lambda: view.add_(1), lambda: torch.add(view, 1, out=view)):
        with pytest.raises(UsageError, match=r"of a view of layers\.0\.weight\.grad"):
            write()


def test_several_views_are_each_their_own(here):
    """With factors that wait for the step, which a consumed gradient keeps."""
    here.handles[0].grad.factors.append(0.5)
    consume(here)
    of_several_ranks(here)
    first, _ = grads(here)
    for each, expected in zip(first.unbind(1), (ROWS * 0.5).unbind(1)):
        assert type(each) is GradView and torch.equal(each + 0, expected)
    assert here.handles[0].grad.factors == [0.5]


def test_a_view_is_averaged_before_it_is_read(here):
    of_several_ranks(here)
    view, averager = grads(here)[0][0], averaged_by(here)
    view + 1
    assert averager.averages == 1


def test_another_shape_in_place_is_refused(here):
    first, _ = grads(here)
    for reshape in ("t_", "squeeze_"):
        with pytest.raises(UsageError, match=r"layers\.0\.weight\.grad"):
            getattr(first, reshape)()
    assert first.detach_() is first and first.shape == (2, 4)


# --- scalers, norms and edits ---


@pytest.mark.parametrize("bad", [False, True])
def test_a_scaler_divides_plain_and_landed_gradients_and_finds_overflow(job, bad):
    """One after the other: in each of them. Twin: of finite ones it finds none."""
    first, second = grads(job)
    if bad:
        second.masked_fill_(torch.eye(2, 4, dtype=torch.bool), math.inf)
    before, plain, found = at_home(job, 1), ODD.clone(), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(
        [first, plain, second], found, torch.tensor(0.3)
    )
    assert found.item() == bad
    assert torch.equal(at_home(job), ROWS * torch.tensor(0.3))
    assert torch.equal(plain, ODD * torch.tensor(0.3))
    assert torch.equal(at_home(job, 1), before * torch.tensor(0.3))


class Edits:
    """Notes the users' changes of which other ranks are told."""

    def __init__(self, job: AtHome, monkeypatch):
        self.noted = []
        monkeypatch.setattr(
            parts_of(job).gradients.values,
            "note_edit",
            lambda handle, by: self.noted.append((handle.index, handle.name, by)),
        )


def test_every_change_is_noted_once_for_the_other_ranks(job, monkeypatch):
    """With the factor or the new values. Twin: reads are not."""
    edits, (first, second) = Edits(job, monkeypatch), grads(job)
    name = "layers.0.weight"
    first + second, first.clone(), torch.linalg.vector_norm(first)
    assert edits.noted == []
    first.mul_(0.5)
    first.div_(4)
    first.zero_()
    assert edits.noted == [(0, name, 0.5), (0, name, 0.25), (0, name, 0.0)]
    first.add_(second)
    index, said, values = edits.noted.pop()
    assert (index, said) == (0, name) and torch.equal(values, 2 * ROWS)
    torch._foreach_zero_([first, second])
    assert [(said, by) for _, said, by in edits.noted[3:]] == [
        (name, 0.0),
        ("layers.1.weight", 0.0),
    ]


def test_the_clipping_of_torch_is_refused_on_a_stage_of_a_pipeline(here):
    """It would clip by this stage's norm. Twin: a norm alone may be taken."""
    values, (first, _) = parts_of(here).gradients.values, grads(here)
    expected = torch.linalg.vector_norm(ROWS)
    values.ranks = SimpleNamespace(pp_group=object(), size=1, alone=True)
    assert torch.linalg.vector_norm(first) == expected
    with pytest.raises(UsageError, match="stage of the pipeline only"):
        nn.utils.clip_grad_norm_([here.handles[0].param], 1.0)
    values.ranks = SimpleNamespace(pp_group=None, size=1, alone=True)
    assert nn.utils.clip_grad_norm_([here.handles[0].param], 1.0) == expected


class AllReduce:
    """Stands for an operation of torch's transport, which ends when it is waited for."""

    namespace, is_view, tags = "c10d", False, ()

    def __init__(self) -> None:
        self.waits = 0

    def __call__(self, tensors: list[torch.Tensor]) -> list:
        self.into = tensors[0]
        return [self, None]

    def wait(self) -> None:
        self.waits += 1
        self.into.fill_(5.0)


def test_a_collective_into_a_gradient_is_waited_for(job):
    """Twin: the other gradient stays."""
    collective, (first, _) = AllReduce(), grads(job)
    with torch.no_grad():
        GradProxy.__torch_dispatch__(collective, (), ([first],))
    assert collective.waits == 1
    assert at_home(job).tolist() == [[5.0] * 4] * 2 and torch.equal(at_home(job, 1), 2 * ROWS)
