"""A tensor that is assigned to ``p.grad`` is the gradient from then on, at any home, as it is in
torch.

Words used here: a **case** trains a model, plain or wrapped, and returns what has to have the same
bits on both. **flat** is one tensor whose views are the gradients of all parameters.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threaded_device
import torch
from contract_cases import every_home
from models import Fail, at_home
from torch import nn

import infinity
from infinity.core.machine import accelerator
from infinity.core.params import lent
from infinity.core.params.assigned_grads import AssignedGrads
from infinity.core.step.clipping import clip_grad_norm_

SEED, WIDTH = 50, 16
CASES: dict[str, Callable[[nn.Module, Any], list]] = {}


def case(run: Callable[[nn.Module, Any], list]) -> Callable[[nn.Module, Any], list]:
    CASES[run.__name__] = run
    return run


def plain() -> tuple[nn.Module, Any]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrapped(home: str, folder: Path, **more: Any) -> tuple[Any, Any]:
    return infinity.wrap_model(*plain(), at_home(home, home, folder, **more))


def loss_of(model: nn.Module, at: int = 0) -> torch.Tensor:
    return model(torch.ones(2, WIDTH) * (at + 1)).square().sum()


def assign_flat(model: nn.Module, flat: torch.Tensor) -> torch.Tensor:
    """Makes views of ``flat`` all gradients."""
    params = list(model.parameters())
    for param, view in zip(params, flat.split([param.numel() for param in params])):
        param.grad = view.view(param.shape)
    return flat


def zeros_for(model: nn.Module) -> torch.Tensor:
    return torch.zeros(sum(param.numel() for param in model.parameters()))


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters()]


# --- the cases ---


@case
def one_tensor_for_two_parameters(model, optimizer):
    """What is written to one, by its name, by a name from before, or by a backward, is written to
    both."""
    first, second, seen = model[0].weight, model[2].weight, []
    for at in range(2):
        loss_of(model, at).backward()
        before = first.grad
        second.grad = before
        assert second.grad is first.grad
        second.grad.mul_(2)
        seen += grads_of(model)
        before.add_(1)
        seen += [*grads_of(model), before.clone()]
        loss_of(model, at).backward()
        seen += grads_of(model)
        optimizer.step()
        first.grad.zero_()
        seen += grads_of(model)
        optimizer.zero_grad()
        seen += [before.clone()]
    return seen


@case
def one_tensor_for_two_after_a_step(model, optimizer):
    """A gradient that a step has applied becomes another parameter's: the next step applies
    both."""
    loss_of(model).backward()
    optimizer.step()
    for param in model.parameters():
        if param is not model[0].weight:
            param.grad = None
    model[2].weight.grad = model[0].weight.grad
    model[0].weight.grad.mul_(2)
    optimizer.step()
    return [model[2].weight.grad.clone()]


@case
def one_tensor_for_two_that_nobody_else_holds(model, optimizer):
    """What is written through one's name is written to both, also when the script has dropped the
    tensor."""
    first, second = model[0].weight, model[2].weight
    first.grad = second.grad = torch.ones(WIDTH, WIDTH)
    second.grad.mul_(2)
    seen = [first.grad.clone()]
    loss_of(model).backward()
    seen += grads_of(model)
    optimizer.step()
    second.grad = None
    first.grad.zero_()
    return [*seen, first.grad.clone()]


@case
def gradients_that_change_places(model, optimizer):
    """Each has the other's values, and a name from before is the tensor that it was."""
    first, second, seen = model[0].weight, model[2].weight, []
    loss_of(model).backward()
    mine, other = first.grad, second.grad
    first.grad, second.grad = second.grad, first.grad
    mine.mul_(3)
    seen += grads_of(model)
    first.grad = torch.ones(WIDTH, WIDTH)
    seen += [mine.clone(), other.clone(), mine + other, *grads_of(model)]
    optimizer.step()
    return seen


@case
def a_name_from_before_an_assignment(model, optimizer):
    """It is the tensor that it was, which is nobody's gradient any more."""
    weight = model[0].weight
    loss_of(model).backward()
    before = weight.grad
    weight.grad = before * 2
    before.zero_()
    seen = [before.clone(), *grads_of(model)]
    optimizer.step()
    optimizer.zero_grad()
    weight.grad = before
    optimizer.step()
    return seen


@case
def a_flat_buffer_before_the_backward(model, optimizer):
    """What autograd adds shows in it, and zeroing it stands for zero_grad()."""
    flat, seen = assign_flat(model, zeros_for(model)), []
    for at in range(3):
        flat.zero_()
        for _ in range(2):
            loss_of(model, at).backward()
        seen += [flat.clone(), flat.norm()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        seen += [flat.clone(), *grads_of(model)]
    return seen


@case
def a_flat_buffer_of_which_a_part_gets_no_gradient(model, optimizer):
    flat, seen = assign_flat(model, zeros_for(model)), []
    for at in range(3):
        flat.zero_()
        model[0](torch.ones(2, WIDTH) * (at + 1)).square().sum().backward()
        optimizer.step()
        seen += [flat.clone()]
    return seen


@case
def a_flat_buffer_after_the_backward(model, optimizer):
    seen = []
    for at in range(3):
        loss_of(model, at).backward()
        flat = assign_flat(
            model, torch.cat([param.grad.reshape(-1) for param in model.parameters()])
        )
        flat.clamp_(-0.1, 0.1)
        seen += grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return seen


@case
def memory_of_numpy(model, optimizer):
    loss_of(model).backward()
    array = np.ones((WIDTH, WIDTH), np.float32)
    model[0].weight.grad = torch.from_numpy(array)
    array[:] = 0.25
    loss_of(model, 1).backward()
    seen = [torch.tensor(array)]
    array *= 0.5
    optimizer.step()
    array *= 0
    seen.append(model[0].weight.grad.clone())
    model[0].bias.grad = model[2].weight.grad = model[2].bias.grad = None
    loss_of(model, 2).backward()
    optimizer.step()
    return [*seen, torch.tensor(array)]


@case
def one_tensor_of_several_weights(model, optimizer):
    loss_of(model).backward()
    tensor = torch.ones(WIDTH)
    model[0].bias.grad = model[2].bias.grad = tensor
    loss_of(model, 1).backward()
    tensor.mul_(3)
    seen = [tensor.clone()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return [*seen, tensor]


@case
def other_memory_by_data(model, optimizer):
    loss_of(model).backward()
    tensor, other = torch.ones(WIDTH), torch.full((WIDTH,), 5.0)
    model[0].bias.grad = model[2].bias.grad = tensor
    tensor.data.mul_(2)
    seen = grads_of(model)
    model[0].bias.grad.data = other
    other.mul_(2)
    loss_of(model, 1).backward()
    optimizer.step()
    return [*seen, tensor, other, *grads_of(model)]


@case
def every_other_gradient_assigned(model, optimizer):
    """Beside others that are not: clipped, scaled and zeroed together."""
    kept, seen = [], []
    for at in range(3):
        loss_of(model, at).backward()
        if at == 0:
            for layer in (model[0], model[2]):
                kept.append(layer.weight.grad.detach().clone())
                layer.weight.grad = kept[-1]
        model[0].weight.grad += 1
        kept[1].sub_(0.5)
        torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)
        seen += [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5), *grads_of(model)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seen += [each.clone() for each in kept]
    return seen


@case
def a_scaler(model, optimizer):
    flat = assign_flat(model, zeros_for(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model)).backward()
    flat.mul_(2)
    scaler.unscale_(optimizer)
    seen = [flat.clone()]
    scaler.step(optimizer)
    scaler.update()
    flat.fill_(float("inf"))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return [*seen, flat]


@case
def a_step_that_is_made_twice(model, optimizer):
    """A second step with what was changed, and with what was assigned once more."""
    loss_of(model).backward()
    flat = assign_flat(model, torch.cat([param.grad.reshape(-1) for param in model.parameters()]))
    optimizer.step()
    flat.mul_(0.5)
    optimizer.step()
    for param in model.parameters():
        param.grad = param.grad
    optimizer.step()
    return [flat]


@case
def what_nobody_holds(model, optimizer):
    for at in range(3):
        for param in model.parameters():
            tensor = torch.ones(param.shape)
            param.grad = tensor
            tensor.data.mul_(at + 1)
            del tensor
        loss_of(model, at).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


@case
def a_view_of_another_gradient(model, optimizer):
    """What is written to one is written to both."""
    loss_of(model).backward()
    model[2].weight.grad = model[0].weight.grad.t()
    model[2].weight.grad[0].mul_(2)
    loss_of(model, 1).backward()
    seen = grads_of(model)
    optimizer.step()
    return seen


@case
def arrays_and_views_that_are_kept(model, optimizer):
    """For logs: of each step, before and after it. What is added later shows in them, and nothing
    after zero_grad(): the memory is theirs."""
    kept: list = []
    for at in range(3):
        for more in (0, 1):
            loss_of(model, at + more).backward()
            for param in model.parameters():
                kept += [param.grad.cpu().numpy(), param.grad.detach().flatten().numpy()]
                kept += [np.asarray(param.grad), param.grad.view(-1), *param.grad.unbind()]
        optimizer.step()
        kept += [param.grad.reshape(4, -1).t().numpy() for param in model.parameters()]
        optimizer.zero_grad(set_to_none=at < 2)
    del param
    gc.collect()
    return kept


@case
def what_is_written_to_arrays_and_views(model, optimizer):
    """Counts, before a step and after it, and so does what is written to the gradient itself."""
    seen: list = []
    for at in range(3):
        loss_of(model, at).backward()
        array = model[0].weight.grad.numpy()
        array *= 0.5
        model[2].weight.grad.view(-1)[3] = 7.0
        model[0].bias.grad.apply_(lambda value: value * 2)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen += [array.copy(), *grads_of(model)]
        optimizer.step()
        array[0] = 1.0
        model[2].bias.grad[1:].zero_()
        model[2].weight.grad.mul_(0.5)
        seen += [array.copy(), *grads_of(model)]
        if at:
            optimizer.zero_grad()
    return seen


@case
def gradients_that_are_changed_after_the_step(model, optimizer):
    """Then stepped again, added to, or zeroed."""
    params, seen = list(model.parameters()), []
    changes = (
        lambda: torch.nn.utils.clip_grad_norm_(params, 0.1),
        lambda: [param.grad.mul_(0.5) for param in params],
        lambda: [param.grad.add_(1.0).div_(3.0) for param in params],
        lambda: torch._foreach_mul_([param.grad for param in params], 0.25),
        lambda: torch._foreach_copy_([p.grad for p in params], [p.grad + 1 for p in params]),
        lambda: [param.grad.masked_fill_(param.grad > 0, 0.5) for param in params],
    )
    for at, change in enumerate(changes):
        loss_of(model, at).backward()
        for _ in range(2):
            optimizer.step()
            change()
            seen += grads_of(model)
        if at % 3:
            optimizer.zero_grad(set_to_none=at % 3 == 1)
    return seen


# --- the tests ---


def differing(home: str, folder: Path, name: str, **more: Any) -> str:
    """Where the wrapped model parts from the plain one; empty where it does not."""
    found, expected = (
        [*CASES[name](*pair), pair[0].state_dict()]
        for pair in (wrapped(home, folder, **more), plain())
    )
    try:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES)
@every_home
def test_an_assigned_tensor_is_the_gradient(home, name, tmp_path):
    """Method: each case on both models; the same bits."""
    assert differing(home, tmp_path, name) == ""


class Elsewhere(threaded_device.ThreadedDevice):
    """One whose memory is not the host's."""

    is_host = False


@pytest.mark.parametrize("name", CASES)
def test_it_is_so_from_a_device_elsewhere(name, tmp_path, monkeypatch):
    """Method: the same with homes that the device cannot compute with."""
    monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    for home in ("host", "nvme"):
        assert differing(home, tmp_path, name) == ""


def test_without_the_watch_what_is_written_later_is_lost(tmp_path, monkeypatch):
    """Method: the failing twin: assigned tensors are copied and forgotten."""
    monkeypatch.setattr(AssignedGrads, "watch", lambda self, handle, tensor, part, **_: None)
    for name in ("a_flat_buffer_after_the_backward", "one_tensor_of_several_weights"):
        assert differing("host", tmp_path, name), name


def test_a_graph_of_the_backward_leaves_the_tensor_as_it_is(tmp_path):
    """Method: create_graph=True; the tensor keeps its values, as in torch, and the gradient is
    another one."""
    found = []
    for model, _ in (plain(), wrapped("device", tmp_path)):
        tensor = torch.ones(WIDTH)
        model[0].bias.grad = tensor
        loss_of(model).backward(create_graph=True)
        found.append((tensor, model[0].bias.grad.detach().clone()))
        model.zero_grad()
    torch.testing.assert_close(*found, rtol=0, atol=0)


@every_home
def test_the_very_tensor_is_shown_until_it_is_let_go(home, tmp_path):
    """Method: identity while it is held; None after zero_grad(), and a stand-in once nobody holds
    it."""
    model, optimizer = wrapped(home, tmp_path)
    tensor = torch.ones(WIDTH)
    model[0].bias.grad = tensor
    assert model[0].bias.grad is tensor
    optimizer.step()
    assert model[0].bias.grad is tensor
    optimizer.zero_grad()
    assert model[0].bias.grad is None
    tensor.mul_(2)
    model[0].bias.grad = tensor + 1
    assert type(model[0].bias.grad) is not torch.Tensor
    assert torch.equal(model[0].bias.grad.clone(), torch.full((WIDTH,), 3.0))


@pytest.mark.parametrize("how", ["zero_grad", "None", "another", "model gone"])
@every_home
def test_nothing_of_it_is_kept(home, how, tmp_path):
    """Method: memory of NumPy, which may be written to unheard, is watched until the gradient is
    another one; then it is gone. Twin: before that it is there."""
    model, optimizer = wrapped(home, tmp_path)
    array = np.ones(WIDTH, np.float32)
    model[0].bias.grad = torch.from_numpy(array)
    gone = weakref.ref(array)
    del array
    assert gone() is not None
    if how == "zero_grad":
        optimizer.zero_grad()
    elif how == "None":
        model[0].bias.grad = None
    elif how == "another":
        model[0].bias.grad = torch.ones(WIDTH)
    else:
        del model, optimizer
    gc.collect()
    assert gone() is None


@every_home
def test_what_nobody_holds_takes_no_memory(home, tmp_path):
    """Method: temporary tensors are assigned; by the next forward nothing of them is watched any
    more."""
    model, _ = wrapped(home, tmp_path)
    held = torch.ones(WIDTH)
    for param in model.parameters():
        param.grad = torch.ones(param.shape)
    model[2].bias.grad = held
    loss_of(model)
    watched = [param._infinity.grad.assigned for param in model.parameters()]
    assert [each is not None for each in watched] == [False, False, False, True]


@every_home
def test_an_assigned_gradient_that_is_kept_adds_up_as_in_torch(home, tmp_path):
    """Method: a step, a backward and a step without zero_grad, on one flat tensor."""
    found = []
    for model, optimizer in (plain(), wrapped(home, tmp_path)):
        flat = assign_flat(model, zeros_for(model))
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
        found.append((flat.clone(), *(value.clone() for value in model.state_dict().values())))
        optimizer.zero_grad()
    assert all(map(torch.equal, *found))


@every_home
def test_a_backward_that_fails_leaves_the_gradient_torn(home, tmp_path):
    """Method: it fails half-way; the step is refused until zero_grad(), and then the bits are those
    of a run without it."""
    model, optimizer = wrapped(home, tmp_path)
    flat = assign_flat(model, zeros_for(model))
    with pytest.raises(ValueError, match="stop"):
        model[2](Fail.apply(model[1](model[0](torch.ones(2, WIDTH))))).sum().backward()
    with pytest.raises(infinity.UsageError, match="zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    other, other_optimizer = plain()
    for each, one in ((model, optimizer), (other, other_optimizer)):
        flat = assign_flat(each, zeros_for(each))
        loss_of(each).backward()
        flat.mul_(2)
        one.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@every_home
def test_accumulated_steps_in_backward_and_clipping_of_our_own(home, tmp_path):
    """Method: infinity.accumulate, step_in_backward and infinity.clip_grad_norm_ over a flat
    buffer, beside a plain loop."""
    model, optimizer = wrapped(home, tmp_path)
    other, other_optimizer = plain()
    flat, expected = assign_flat(model, zeros_for(model)), assign_flat(other, zeros_for(other))
    with infinity.accumulate(model):
        for at in range(2):
            loss_of(model, at).backward()
    for at in range(2):
        loss_of(other, at).backward()
    clip_grad_norm_(optimizer, 0.5)
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    assert torch.equal(flat, expected)
    optimizer.step()
    other_optimizer.step()
    for at in range(2):
        flat.zero_()
        expected.zero_()
        with optimizer.step_in_backward():
            loss_of(model, at).backward()
        optimizer.step()
        loss_of(other, at).backward()
        other_optimizer.step()
        assert torch.equal(flat, expected)
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@every_home
def test_it_is_the_gradient_before_the_wrap_and_after_the_unwrap(home, tmp_path):
    """Method: assigned to the plain model, then wrapped, changed, stepped, and unwrapped: the same
    tensor, and torch's bits."""
    pairs = plain(), plain()
    flats = [assign_flat(model, zeros_for(model)) for model, _ in pairs]
    model, optimizer = infinity.wrap_model(*pairs[0], at_home(home, home, tmp_path))
    other, other_optimizer = pairs[1]
    for each, one, flat in ((model, optimizer, flats[0]), (other, other_optimizer, flats[1])):
        flat.fill_(0.5)
        loss_of(each).backward()
        one.step()
    model, optimizer = infinity.unwrap_model(model, optimizer)
    for each, one, flat in ((model, optimizer, flats[0]), (other, other_optimizer, flats[1])):
        flat.mul_(2)
        one.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@every_home
def test_a_view_that_is_assigned_is_the_gradient(home, tmp_path):
    """Method: p.grad = a view of its own values; after the unwrap it is that view, as in torch."""
    model, optimizer = wrapped(home, tmp_path)
    loss_of(model).backward()
    grad = model[0].weight.grad
    view, expected = grad.view(-1).view(grad.shape), grad.clone()
    assert type(view) is torch.Tensor
    model[0].weight.grad = view
    assert torch.equal(model[0].weight.grad.clone(), expected)
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert torch.equal(model[0].weight.grad, expected)
    assert model[0].weight.grad.data_ptr() == view.data_ptr()


def test_temporary_tensors_are_let_go_after_some(tmp_path, monkeypatch):
    """Method: with room for two, four are assigned that nobody holds. Twin: those that are held
    stay."""
    monkeypatch.setattr(lent, "TRIMMED_AT_COUNT", 2)
    for holds in (False, True):
        model, _ = wrapped("host", tmp_path)
        held = []
        for param in model.parameters():
            value = torch.ones(param.shape)
            held += [value] if holds else []
            param.grad = value
        watched = sum(param._infinity.grad.assigned is not None for param in model.parameters())
        assert watched == 4 if holds else watched <= 3


@every_home
def test_another_shape_is_refused(home, tmp_path):
    """Method: an assigned tensor is reshaped in place; the step says so."""
    model, optimizer = wrapped(home, tmp_path)
    tensor = torch.ones(WIDTH)
    model[0].bias.grad = tensor
    tensor.unsqueeze_(0)
    with pytest.raises(infinity.UsageError, match="another shape"):
        optimizer.step()


@every_home
def test_a_gradient_of_another_kind_is_refused_and_changes_neither(home, tmp_path):
    """Method: one parameter's gradient becomes that of another of another shape; both are as
    before. Twin: of the same shape it is taken."""
    model, _ = wrapped(home, tmp_path)
    loss_of(model).backward()
    expected, before = grads_of(model), model[0].weight.grad
    with pytest.raises(infinity.UsageError, match="for another shape"):
        model[0].bias.grad = before
    assert model[0].weight.grad is before
    assert all(map(torch.equal, grads_of(model), expected))
    model[2].weight.grad = before
    assert torch.equal(model[2].weight.grad, expected[0])
