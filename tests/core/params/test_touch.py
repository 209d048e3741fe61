"""Touch: one operation on parameters at rest has the results that it has on plain ones, and leaves
nothing resident."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from small import AtHome, small_at_home
from torch import nn

import infinity
from infinity.core.params.parameter import StoredAlias, StoredParameter
from infinity.core.params.touches import Touches
from infinity.errors import UsageError

VALUES = torch.arange(8.0).view(2, 4)


@pytest.fixture
def job() -> AtHome:
    """Six weights, each in a unit of its own, with 0, 1, 2, ..."""
    job = small_at_home()
    with torch.no_grad():
        for layer in job.model.layers:
            layer.weight.copy_(VALUES)
    return job


def weights(job: AtHome) -> list[nn.Parameter]:
    return list(job.model.parameters())


def home(job: AtHome, number: int = 0) -> list:
    return job.model.state_dict()[f"layers.{number}.weight"].tolist()


def is_at_rest(job: AtHome) -> bool:
    held = any(parts_of(job).prefetcher.is_held(handle.unit) for handle in job.handles)
    return not held and all(type(weight) is StoredParameter for weight in weights(job))


# --- results ---


def test_a_read_gives_a_plain_tensor(job):
    weight = weights(job)[0]
    found = weight.detach() * 2 + weight.data
    assert type(found) is torch.Tensor and torch.equal(found, VALUES * 3) and is_at_rest(job)


def test_a_result_in_a_parameters_memory_is_at_rest_itself(job):
    """Method: what the views give follows the values. Twin: a result with memory of its own does
    not."""
    weight = weights(job)[0]
    views = [weight.detach().t(), weight.data[1], weight.view(-1)[2:4], *weight.split(2, dim=1)]
    copy = weight.detach().clone()
    assert all(type(view) is StoredAlias for view in views)
    with torch.no_grad():
        weight.mul_(2)
    plain = VALUES * 2
    for view, expected in zip(
        views, [plain.t(), plain[1], plain.view(-1)[2:4], *plain.split(2, 1)]
    ):
        assert view.shape == expected.shape and view.stride() == expected.stride()
        assert torch.equal(view + 0, expected)
    assert torch.equal(copy, VALUES) and is_at_rest(job)


def test_what_an_operation_returns_of_its_arguments_is_the_argument(job):
    weight = weights(job)[0]
    alias, view = weight.detach(), weight.detach()[0]
    with torch.no_grad():
        assert weight.add_(1) is weight and alias.mul_(2) is alias and view.zero_() is view
    assert home(job)[0] == [0] * 4 and home(job)[1] == [10, 12, 14, 16]


def test_views_of_several_parameters_in_one_memory_are_told_apart():
    """Method: two parameters of one unit, in one call."""
    model = nn.Linear(4, 4)
    model, _ = infinity.wrap_model(model, None, {"params": "host"})
    values = {name: value.clone() for name, value in model.state_dict().items()}
    weight, bias = torch.broadcast_tensors(model.weight.detach(), model.bias.detach())
    assert torch.equal(weight + 0, values["weight"])
    assert torch.equal(bias + 0, values["bias"].expand(4, 4))


# --- writes ---


def test_a_write_goes_home_with_every_way_to_write(job):
    """Twin: the others keep their values."""
    with torch.no_grad():
        weights(job)[0].clamp_(2, 5)
        weights(job)[1].data[0, 1:3] = 9
        torch.add(VALUES, 1, out=weights(job)[2].data)
        weights(job)[3].data += 3
        nn.init.constant_(weights(job)[4], 4)
    assert home(job, 0) == VALUES.clamp(2, 5).tolist()
    assert home(job, 1) == [[0, 9, 9, 3], [4, 5, 6, 7]]
    assert home(job, 2) == (VALUES + 1).tolist() and home(job, 3) == (VALUES + 3).tolist()
    assert home(job, 4) == [[4] * 4] * 2 and home(job, 5) == VALUES.tolist()
    assert is_at_rest(job)


def test_torchs_own_refusal_is_raised_and_changes_nothing(job):
    """Method: a leaf that requires a gradient, and shapes that do not fit. Twin: work goes on."""
    weight = weights(job)[0]
    for wrong in (lambda: weight.mul_(2), lambda: weight @ weight, lambda: weight[0].add_(1)):
        with pytest.raises(RuntimeError) as refused:
            wrong()
        assert not isinstance(refused.value, infinity.InfinityError)
        assert is_at_rest(job) and not parts_of(job).uses.scopes.interrupted
    assert home(job) == VALUES.tolist() and weight.sum().item() == 28


@pytest.mark.parametrize(
    "refused",
    ["numpy", "data_ptr", "share_memory_", "t_", "resize_", "__array__", "storage"],
)
def test_what_gives_memory_away_or_changes_its_form_is_refused(refused, job):
    """Twin: of a copy it is not."""
    alias = weights(job)[0].detach()
    arguments = (2,) if refused == "resize_" else ()
    changes_form = refused in ("t_", "resize_")
    said = "would change the form of" if changes_form else "on"
    with pytest.raises(UsageError, match=f"{refused} {said} parameter layers.0.weight, "):
        getattr(alias, refused)(*arguments)
    getattr(alias.clone(), refused)(*arguments)


# --- gradients ---


def test_what_is_computed_with_gradients_trains(job):
    """Method: a norm, a view and a product, whose saved weights are references. Twin: a detached
    one gives none."""
    a, b, *_ = weights(job)
    ((a * b).sum() + a[0].sum() + b.detach().sum()).backward()
    assert (a.grad + 0).tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert torch.equal(b.grad + 0, VALUES)
    assert is_at_rest(job)


def test_a_gradient_and_its_parameter_are_used_together(job):
    weight = weights(job)[0]
    weight.pow(2).sum().backward()
    for product in (weight * weight.grad, weight.grad * weight, weight.grad * weight.data):
        assert torch.equal(product.detach() + 0, 2 * VALUES * VALUES)


def test_a_backward_that_needs_values_from_before_a_write_is_refused(job):
    """Twin: of another parameter they may be written."""
    a, b, *_ = weights(job)
    loss = (a * a).sum()
    with torch.no_grad():
        b.zero_()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        a.zero_()
    with pytest.raises(UsageError, match="they were changed since"):
        loss.backward()


# --- several parameters ---


def test_a_function_of_lists_needs_one_unit_at_a_time(job, monkeypatch):
    """Method: six units, and a list of plain tensors and numbers beside them. Twin: the results are
    those of plain tensors."""
    held = []
    holding = Touches.holding
    monkeypatch.setattr(
        Touches,
        "holding",
        lambda self, handles, *args, **named: (
            held.append({handle.unit for handle in handles})
            or holding(self, handles, *args, **named)
        ),
    )
    found = torch._foreach_add(weights(job), [VALUES] * 6, alpha=2)
    assert [torch.equal(each, VALUES * 3) for each in found] == [True] * 6
    assert len(held) == 6 and all(len(units) == 1 for units in held)
    with torch.no_grad():
        torch._foreach_mul_(weights(job), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert [home(job, n) == ((n + 1) * VALUES).tolist() for n in range(6)] == [True] * 6
    norms = torch._foreach_norm(weights(job)[:2])
    assert [norm.item() for norm in norms] == [VALUES.norm().item(), (2 * VALUES).norm().item()]
    mixed = torch._foreach_neg([torch.ones(2), *weights(job)[:1]])
    assert mixed[0].tolist() == [-1, -1] and torch.equal(mixed[1], -VALUES)


def test_two_wrapped_models_are_used_in_one_operation(job):
    other = small_at_home()
    with torch.no_grad():
        weights(other)[0].lerp_(weights(job)[0], 0.5)
        weights(other)[1].copy_(weights(job)[0])
    assert home(other) == ((1 + VALUES) / 2).tolist() and home(other, 1) == VALUES.tolist()
    assert is_at_rest(job) and is_at_rest(other)


def seen_by_autograd(weight: torch.Tensor) -> list:
    """What autograd does with views of a leaf that are kept in variables."""
    view, found = weight[1], []
    view.register_hook(lambda grad: found.append(grad.clone()))
    view.retain_grad()
    (view * view).sum().backward()
    leaf = weight.detach().requires_grad_()
    (leaf * leaf).sum().backward()
    leaf.sum().backward()
    flat = weight.view(-1)
    (slope,) = torch.autograd.grad(flat.pow(3).sum(), flat, create_graph=True)
    slope.square().sum().backward()
    found += [view.grad, leaf.grad, slope.detach(), torch.autograd.grad(weight[0, 1], weight)[0]]
    weight.requires_grad_(False)
    return [*found, weight.grad + 0, view.is_leaf, view.grad_fn is None, (view * 2).requires_grad]


def test_autograd_knows_a_view_as_one_tensor(job):
    """Method: hooks, gradients of views and of leaves made of them, second order, and a parameter
    that is frozen behind its view; as with a plain parameter."""
    right, found = seen_by_autograd(nn.Parameter(VALUES.clone())), seen_by_autograd(weights(job)[0])
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_a_function_of_the_users_takes_what_is_at_rest(job):
    """Method: the parameter and a view, whose gradients land; and a detached one that is written
    to before the backward, as torch refuses it. Twin: one that is not written to."""
    weight = weights(job)[0]
    (Squared.apply(weight).sum() + Squared.apply(weight.view(-1)).sum()).backward()
    assert torch.equal(weight.grad + 0, 4 * VALUES)
    for writes in (False, True):
        leaf = weight.detach().requires_grad_()
        loss = Squared.apply(leaf).sum()
        if not writes:
            loss.backward()
            assert torch.equal(leaf.grad, 2 * VALUES)
            continue
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_tensors_like_a_view_have_its_form(job):
    weight = weights(job)[0]
    assert torch.zeros_like(weight[0]).shape == (4,)
    assert weight.data.view(torch.int32).new_zeros(2).dtype is torch.int32


def test_inside_full_params_a_view_is_one_of_the_copy(job):
    """Twin: after the block it is one of what was written back."""
    view = weights(job)[0].detach().view(-1)
    with torch.no_grad(), infinity.full_params(job.model, writeback=True) as params:
        params["layers.0.weight"].mul_(2)
        assert torch.equal(view + 0, 2 * VALUES.view(-1))
        view[0] = 9
    assert view[0].item() == 9 and home(job)[0][0] == 9


def test_a_leaf_is_not_copied_into_where_autograd_records(job):
    """As in torch. Twins: under no_grad, and by ``data``, it is."""
    weight = weights(job)[0]
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        weight.copy_(torch.ones(2, 4))
    assert home(job) == VALUES.tolist()
    weight.data.copy_(torch.ones(2, 4))
    assert home(job) == [[1] * 4] * 2


def test_what_was_replaced_is_told_to_every_use(job):
    """Twin: what is taken anew is right."""
    weight = weights(job)[0]
    old = weight.data
    weight.data = torch.full((2, 4), 7.0)
    for use in (lambda: torch.equal(old, weight), lambda: old.copy_(VALUES), lambda: old + 0):
        with pytest.raises(UsageError, match="shows the values before layers.0.weight.data was"):
            use()
    with pytest.raises(UsageError, match="assigning layers.0.weight.data would not reach"):
        weight.detach().data = VALUES
    assert torch.equal(weight.data, torch.full((2, 4), 7.0)) and home(job) == [[7] * 4] * 2


def test_views_are_compared_by_their_own_values(job):
    """Twins: two of the same elements, and the parameter with itself."""
    weight = weights(job)[0]
    assert not torch.equal(weight[0], weight[1]) and not weight[0].equal(VALUES[1])
    assert torch.equal(weight[0], weight.detach()[0]) and torch.equal(weight, weight.detach())


def test_one_element_is_formatted_as_a_number(job):
    """Twin: a parameter of several elements is written as torch does."""
    weight = weights(job)[0]
    assert f"{weight[0, 1]:.2f}" == "1.00"
    assert f"{weight}" == str(torch.nn.Parameter(weight.detach().clone()))


def test_lists_with_gradients_are_written_home(job):
    """torch does not count the writes of such a call."""
    weight = weights(job)[0]
    weight.sum().backward()
    with torch.no_grad():
        torch._foreach_add_([weight], [weight.grad], alpha=-0.5)
    assert home(job) == (VALUES - 0.5).tolist()
