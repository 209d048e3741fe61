"""SavedWeight: autograd's graph holds where a weight is, and no bytes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.run import saved_weights
from infinity.core.run.saved_weights import SavedWeight, is_checkpoint, saving_hooks
from infinity.core.units.weight_storages import WeightStorages
from infinity.errors import UsageError
from infinity.torch_private import top_hooks


class Unit:
    """A unit whose buffer holds the numbers 1 to 16."""

    name, computes_at_home, older, buffers = "a unit", False, None, SimpleNamespace(all=())
    arrival = SimpleNamespace(rows=None)

    def __init__(self) -> None:
        self.version, self.in_use = 3, None
        self.flat = torch.arange(1.0, 17.0)
        self.storages, self.held = WeightStorages(), []
        self.storages.enter(self, self.flat)

    def hooks(self) -> tuple:
        hold = lambda unit, for_node: self.held.append(unit)
        return saving_hooks(top_hooks(True), self.storages, lambda: SimpleNamespace(hold=hold))


VIEWS = {
    "part": lambda flat: flat[4:8],
    "transposed": lambda flat: flat.view(4, 4).t(),
    "conjugate": lambda flat: torch.view_as_complex(flat.view(8, 2))[1:3].conj(),
    "negative": lambda flat: torch._neg_view(flat[2:5]),
    "as integers": lambda flat: flat[8:].view(torch.int32),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_weight_is_made_again_over_the_buffer(view):
    """Claim: with the values that the buffer has by then, and by way of a hold."""
    unit = Unit()
    pack, unpack = unit.hooks()
    weight = VIEWS[view](unit.flat)
    packed = pack(weight)
    assert isinstance(packed, SavedWeight) and unit.held == []
    unit.flat.add_(1)
    back = unpack(packed)
    assert unit.held == [unit] and back.untyped_storage().data_ptr() == unit.flat.data_ptr()
    assert (back.dtype, back.stride(), back.is_conj(), back.is_neg()) == (
        weight.dtype,
        weight.stride(),
        weight.is_conj(),
        weight.is_neg(),
    )
    assert torch.equal(back, VIEWS[view](torch.arange(2.0, 18.0)))


def test_other_tensors_are_saved_as_they_are():
    """Claim: with torch's check for changes, or by the hooks around."""
    unit, other = Unit(), torch.ones(3)
    pack, unpack = unit.hooks()
    packed = pack(other)
    assert unpack(packed).data_ptr() == other.data_ptr() and unit.held == []
    other.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unpack(packed)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: ("outer", each), lambda each: each):
        pack, unpack = unit.hooks()
    packed = pack(other)
    assert packed[0] == "outer" and unpack(packed) is packed
    assert isinstance(pack(unit.flat), SavedWeight)


def test_parts_of_a_tensor_are_not_among_what_a_function_gets(monkeypatch):
    """Method: a tensor of a weight and another one. Twin: the other one alone is."""
    unit, other = Unit(), torch.ones(16)
    pack, unpack = unit.hooks()
    both, alone = pack(TwoTensor(unit.flat, other)), pack(other)
    monkeypatch.setattr(saved_weights._unpacked, "params", [], raising=False)
    assert torch.equal(unpack(both).a, unit.flat) and unit.held == [unit]
    assert saved_weights._unpacked.params == []
    unpack(alone)
    assert len(saved_weights._unpacked.params) == 1


def test_hooks_within_hooks_are_the_same_ones():
    """Claim: those of an owner inside of another one. Twin: those of another model are others."""
    unit, other = Unit(), Unit()
    pair = unit.hooks()
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        assert unit.hooks() == pair and other.hooks() != pair


def test_weights_that_were_changed_since_are_told():
    """Twin: of the version in use. A change of another version does not matter."""
    unit = Unit()
    pack, unpack = unit.hooks()
    packed = pack(unit.flat)
    unit.version = 4
    with pytest.raises(UsageError, match="unit a unit as they were in its forward"):
        unpack(packed)
    assert unit.held == []
    unit.in_use = SimpleNamespace(version=3)
    assert unpack(packed).tolist() == unit.flat.tolist()


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_graph_of_a_backward_has_references_too(create_graph):
    """Method: the second backward asks for the unit again. Twin: without a graph there is none; in
    both no hooks are left behind."""
    unit, x = Unit(), torch.full((16,), 2.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(*unit.hooks()):
        loss = (x * unit.flat).square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=create_graph)
    assert torch.equal(grad, 4 * unit.flat**2) and unit.held == [unit]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert grad.requires_grad is create_graph
    if create_graph:
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert torch.equal(second, 2 * unit.flat**2) and len(unit.held) > 1


def test_a_checkpoint_counts_a_weight_that_is_saved_as_a_reference():
    """Method: inside a checkpoint, whose hooks are around ours. In the recomputation the weight is
    saved without ours, and the count is the same. Twin: other hooks are not asked for weights."""
    unit, x = Unit(), torch.full((16,), 2.0, requires_grad=True)
    runs = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(is_checkpoint(torch._C._autograd._top_saved_tensors_default_hooks(True)))
        if len(runs) == 1:
            with torch.autograd.graph.saved_tensors_hooks(*unit.hooks()):
                return (x * unit.flat).sin()
        return (x * unit.flat).sin()

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(runs) == 2 and runs[0]
    assert torch.allclose(x.grad, (2 * unit.flat).cos() * unit.flat)
    asked = []
    with torch.autograd.graph.saved_tensors_hooks(asked.append, lambda each: each):
        pack, _ = unit.hooks()
    pack(unit.flat)
    assert asked == []
    assert not is_checkpoint(None) and not is_checkpoint((asked.append and pack, None))


class Tagged(torch.autograd.Function):
    """A product whose backward reads and writes attributes of the weight, as fused layers do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        weight.seen = getattr(weight, "seen", 0) + 1
        main = getattr(weight, "main_grad", None)
        if main is not None:
            main.add_(dy.t() @ x)
        return dy @ weight * getattr(weight, "tag", 1.0), dy.t() @ x


class SetUp(Tagged):
    """The same, with a context that is set up apart."""

    @staticmethod
    def forward(x, weight):
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class TwoWeights(torch.autograd.Function):
    """Saves a weight, nothing, and the weight's own product."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight, None, x * 2)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        weight, nothing, twice = ctx.saved_tensors
        assert nothing is None
        weight.seen = getattr(weight, "seen", 0) + 1
        return dy @ weight * weight.tag, dy.t() @ twice / 2


class WithViews(torch.autograd.Function):
    """Saves a whole view of the weight, without its attributes, before and behind it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight.detach(), x, weight, weight.detach())
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        before, x, weight, behind = ctx.saved_tensors
        weight.seen = getattr(weight, "seen", 0) + 1
        for each in (before, weight, behind):
            dy = dy * getattr(each, "tag", 1.0)
        return dy @ weight, dy.t() @ x


class Accumulating(Tagged):
    """Adds the weight's gradient itself, as fused layers do."""

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        weight.grad = dy.t() @ x if weight.grad is None else weight.grad + dy.t() @ x
        return dy @ weight, None


class Subclass(torch.Tensor):
    """A tensor that the engine does not move."""


class Around(nn.Module):
    """Uses a parameter that is not its own, inside of its own forward."""

    def __init__(self, other: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.others = nn.Parameter(torch.ones(4, 4)), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Accumulating.apply(x @ self.weight, self.others[0])


@pytest.mark.parametrize(
    "home, make",
    [
        ("host", lambda: nn.Parameter(torch.ones(4, 4))),
        ("nvme", lambda: nn.Parameter(torch.ones(4, 4).as_subclass(Subclass))),
        ("device", lambda: nn.Linear(4, 4, bias=False).weight),
    ],
)
def test_a_users_function_finds_a_parameter_that_is_not_the_models(home, make, tmp_path):
    """Its gradient is set on the parameter itself, over two backwards, as in plain torch. Twin: a
    tensor that is saved detached gets none."""
    torch.manual_seed(0)
    other, grads = make(), []
    for wraps in (False, True):
        other.grad, model = None, Around(other)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wraps:
            homes = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path)]}
            model, optimizer = infinity.wrap_model(model, optimizer, homes)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        grads.append(other.grad.clone())
    assert torch.equal(*grads)
    model.others[0], other.grad = other.detach(), None
    model(torch.ones(2, 4)).sum().backward()
    assert other.grad is None


class Layer(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(8, 8)), function
        self.weight.tag = 0.5
        if function is SetUp:
            self.weight.main_grad = torch.zeros(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x, self.weight)


@pytest.mark.parametrize(
    "function, home",
    [(Tagged, "nvme"), (SetUp, "host"), (TwoWeights, "device"), (WithViews, "host")],
)
def test_a_users_function_finds_the_attributes_of_the_weight_it_saved(function, home, tmp_path):
    """Trains beside plain torch: same losses, and the same attributes afterwards. Twin: without the
    weight's tag the losses are others."""

    def trained(*, wraps: bool, tag: float = 0.5) -> list:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(function) for _ in range(3)), nn.LayerNorm(8))
        for layer in model[:3]:
            layer.weight.tag = tag
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wraps:
            homes = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path)]}
            model, optimizer = infinity.wrap_model(model, optimizer, homes)
        losses = []
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(x) ** 3).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        main = getattr(model[0].weight, "main_grad", torch.zeros(1))
        return [*losses, model[0].weight.seen, main.sum().item()]

    assert trained(wraps=True) == trained(wraps=False)
    assert trained(wraps=True, tag=1.0) != trained(wraps=False)


class Typed(TwoWeights):
    """Takes another branch for parameters, and for attributes that come after the forward."""

    @staticmethod
    def backward(ctx, dy):
        weight, _, twice = ctx.saved_tensors
        dy = dy * (2.0 if isinstance(weight, nn.Parameter) else 3.0)
        return dy @ weight * getattr(weight, "late", 1.0), dy.t() @ twice / 2


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_a_users_function_gets_a_parameter_without_attributes_itself(home, tmp_path):
    """Asks for the class of the weight, and for an attribute set behind the forward. Twin: without
    that attribute."""

    def gradient(*, wraps: bool, late: float = 5.0) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(Layer(Typed), Layer(Typed))
        for layer in model:
            del layer.weight.tag
        if wraps:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            homes = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path)]}
            model, _ = infinity.wrap_model(model, optimizer, homes)
        loss = model(torch.ones(4, 8)).sum()
        model[1].weight.late = late
        loss.backward()
        return model[0].weight.grad.clone()

    right = gradient(wraps=False)
    assert torch.equal(gradient(wraps=True), right)
    assert not torch.equal(gradient(wraps=True, late=1.0), right)


def kept_on_cpu(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


def in_a_checkpoint(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def run_twice(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


@pytest.mark.parametrize("call", [kept_on_cpu, in_a_checkpoint, run_twice])
def test_attributes_are_found_inside_others_hooks_where_torch_finds_them(call):
    """Has other hooks around what is saved, which give back new tensors, or a second forward
    without them. Twin: a weight without its tag."""

    def gradient(*, wraps: bool, tag: float = 0.5) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(Layer(Tagged), Layer(Tagged))
        model[1].weight.tag = tag
        if wraps:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, _ = infinity.wrap_model(model, optimizer, {"params": "host"})
        call(model, torch.ones(4, 8, requires_grad=True)).sum().backward()
        return model[0].weight.grad.clone()

    assert torch.equal(gradient(wraps=True), gradient(wraps=False))
    is_found = call is run_twice
    assert torch.equal(gradient(wraps=True, tag=1.0), gradient(wraps=True)) != is_found
