"""Hooks: a wrapped model cannot be copied, its gradients are told of, and all hooks go away."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from inside import parts_of
from models import TIERS, at_home
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import infinity
from infinity.core.grads.backward import Backward
from infinity.core.run.hooks import LandingHook, RefusedCopy
from infinity.core.units.handle import raw_hooks
from infinity.errors import CapacityError, UsageError

HOST = {"params": "host", "optimizer": "host"}


@pytest.mark.parametrize("take", [copy.deepcopy, copy.copy, pickle.dumps, torch.jit.script])
def test_a_copy_is_refused_until_that_is_removed(take):
    """Claim: a removal may be repeated. Twin: a module beside it is copied."""
    module, beside = nn.Linear(2, 2), nn.Linear(2, 2)
    refused = RefusedCopy(module)
    with pytest.raises(UsageError, match="this Linear is wrapped"):
        take(module)
    assert take(beside) is not None
    for _ in range(2):
        refused.remove()
    assert take(module) is not None
    gone = RefusedCopy(nn.Linear(1, 1))
    gc.collect()
    gone.remove()


def test_a_landed_gradient_is_told_with_its_parameter():
    """Twins: another parameter's is not, nor one after the removal."""
    param, other, told = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), []
    hook = LandingHook(param, lambda each: told.append((each, each.grad.tolist())))
    (3 * param + other).sum().backward()
    assert len(told) == 1 and told[0][0] is param and told[0][1] == [3.0, 3.0]
    hook.remove()
    hook.remove()
    param.sum().backward()
    assert len(told) == 1


@pytest.mark.parametrize("requires", [True, False])
def test_a_hook_leaves_the_parameter_trained_or_frozen(requires):
    """Claim: a frozen one is told of once it is unfrozen."""
    param, told = nn.Parameter(torch.ones(2), requires_grad=requires), []
    LandingHook(param, told.append)
    assert param.requires_grad == requires
    param.requires_grad_(True).sum().backward()
    assert len(told) == 1


def test_a_hook_comes_last_when_it_is_asked_to():
    """Twin: before it is asked it comes in its turn; asked twice it is called once."""
    param, told = nn.Parameter(torch.ones(2)), []
    hook = LandingHook(param, lambda _: told.append("ours"))
    param.register_post_accumulate_grad_hook(lambda _: told.append("theirs"))
    param.sum().backward()
    assert told == ["ours", "theirs"]
    for _ in range(2):
        told.clear()
        hook.come_last()
        param.sum().backward()
        assert told == ["theirs", "ours"]
    hook.remove()
    param.sum().backward()
    assert told == ["theirs", "ours", "theirs"]


def test_a_hook_keeps_no_parameter():
    param = nn.Parameter(torch.ones(2))
    hook, gone = LandingHook(param, lambda _: None), weakref.ref(param)
    del param
    gc.collect()
    assert gone() is None
    hook.come_last()


def hooks_of(model: nn.Module) -> list[int]:
    return [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ]


def test_an_unwrapped_model_has_the_hooks_that_it_had():
    """Method: the user's own hook is there before, and comes after ours as the weights are there.
    Twin: while it is wrapped there are more."""
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.sum().item()))
    before, expected = hooks_of(model), model[0].weight.sum().item()
    names = [set(vars(module)) for module in model.modules()]
    ours, optimizer = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)
    assert all(now > then for now, then in zip(hooks_of(ours), before))
    ours(torch.ones(1, 2))
    assert seen == [expected]
    plain, _ = infinity.unwrap_model(ours, optimizer)
    assert hooks_of(plain) == before and [set(vars(each)) for each in plain.modules()] == names
    assert copy.deepcopy(plain) is not None


@pytest.mark.parametrize("frozen", [True, False])
def test_only_what_is_stepped_is_hooked(frozen):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if frozen:
        model[0].requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    model, _ = infinity.wrap_model(model, torch.optim.SGD(params, lr=0.1), HOST)
    hooked = [bool(raw_hooks(param)) for param in model.parameters()]
    assert hooked == [not frozen] * 2 + [True] * 2


def test_ours_come_before_the_hooks_that_a_module_had():
    """So that those find the weights. Twin: a hook that is registered later runs in its turn."""
    model, order = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: order.append("before"))
    model, _ = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: order.append("after"))
        ours, *others = module._forward_pre_hooks.values()
        assert getattr(ours, "is_infinity", False)
        assert not any(getattr(each, "is_infinity", False) for each in others)
    model(torch.ones(1, 2))
    assert order == ["before", "after"] * 3


def test_every_module_of_the_engine_is_left_and_refuses_to_be_copied():
    """Left even if its forward raises. Method: the hook that torch calls in any case. Twin: a
    module without weights of its own has none."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model, _ = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)
    for module, is_ours in ((model, True), (model[0], True), (model[1], False)):
        ours = [
            number
            for number, hook in module._forward_hooks.items()
            if getattr(hook, "is_infinity", False)
        ]
        assert len(ours) == is_ours and list(module._forward_hooks_always_called) == ours
        if is_ours:
            with pytest.raises(UsageError, match="is wrapped"):
                copy.deepcopy(module)
        else:
            copy.deepcopy(module)


def replaced(param: torch.Tensor) -> None:
    param.grad = param.grad * 0.5 if param.dim() > 1 else None


def stepped_by_hand(param: torch.Tensor) -> None:
    with torch.no_grad():
        param.add_(param.grad, alpha=-0.05)
    param.grad = None


HOOKS: dict[str, Callable[[torch.Tensor], object]] = {
    "clipped": lambda param: torch.nn.utils.clip_grad_norm_([param], 0.05),
    "scaled": lambda param: param.grad.mul_(0.5),
    "clamped through its data": lambda param: param.grad.data.clamp_(-0.02, 0.02),
    "replaced or cleared": replaced,
    "stepped": lambda param: torch.optim.SGD([param], lr=0.05).step(),
    "stepped by hand": stepped_by_hand,
}


class Hooked:
    """A loop over one of two equal models, plain or wrapped, whose hooks note what they see."""

    def __init__(self, change: Callable[[torch.Tensor], object], home: str | None, folder) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.seen: list[torch.Tensor] = []
        self._home, self._folder, self._change = home, folder, change

    def note_and_change(self, param: torch.Tensor) -> None:
        self.seen.append(param.grad.detach().clone())
        self._change(param)

    def hook(self) -> list:
        params = self.model.parameters()
        return [each.register_post_accumulate_grad_hook(self.note_and_change) for each in params]

    def wrap(self) -> None:
        if self._home is not None:
            config = at_home(self._home, self._home, self._folder)
            self.model, self.optimizer = infinity.wrap_model(self.model, self.optimizer, config)

    def unwrap(self) -> None:
        if self._home is not None:
            self.model, self.optimizer = infinity.unwrap_model(self.model, self.optimizer)

    def steps(self, *backwards: int) -> None:
        for count in backwards:
            for seed in range(count):
                inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
                self.model(inputs).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bits(self) -> list[bytes]:
        values = [*self.seen, *(param.detach() for param in self.model.parameters())]
        return [value.numpy().tobytes() for value in values]


def hooked_before(loop: Hooked) -> None:
    first, *_ = loop.hook()
    loop.wrap()
    loop.steps(2, 2)
    first.remove()
    loop.steps(2)
    loop.unwrap()
    loop.steps(1)


def hooked_while_wrapped(loop: Hooked) -> None:
    loop.wrap()
    loop.steps(1)
    first, *_ = loop.hook()
    loop.steps(2)
    loop.unwrap()
    loop.steps(1)
    first.remove()
    loop.steps(1)


def same_hooked(script, change, home, folder) -> bool:
    loops = [Hooked(change, None, folder), Hooked(change, home, folder)]
    for loop in loops:
        script(loop)
    one, other = loops
    return one.bits() == other.bits()


@pytest.mark.parametrize("script", [hooked_before, hooked_while_wrapped])
@pytest.mark.parametrize(
    ("change", "home"),
    [(change, TIERS[place % 3]) for place, change in enumerate(HOOKS)],
)
def test_a_hook_on_a_gradient_has_the_sum_that_torchs_has(script, change, home, tmp_path):
    """Method: twins, plain and wrapped, with several backwards in a step; hooks are registered
    before the wrap or after it, removed in between and kept over the unwrap; the bits that they saw
    and the weights are compared."""
    assert same_hooked(script, HOOKS[change], home, tmp_path)


def test_a_hook_that_is_called_before_the_gradient_is_added_sees_another(tmp_path, monkeypatch):
    """Method: the failing twin: the engine lands what the hook had, and not the sum."""

    def after(self, param, hooks):
        for hook in tuple(hooks.values()):
            hook(param)
        self.landed(param)

    assert same_hooked(hooked_before, HOOKS["scaled"], "host", tmp_path)
    monkeypatch.setattr(Backward, "accumulated", after)
    assert not same_hooked(hooked_before, HOOKS["scaled"], "host", tmp_path)


def test_hooks_of_both_kinds_run_in_the_order_that_they_have_in_torch():
    """Method: tensor hooks and others from before and after the wrap, one of which is added by a
    hook. Twin: one that returns a value raises what torch raises."""
    found = []
    for home in (None, "host"):
        loop, told = Hooked(lambda param: None, home, None), []
        for round_ in range(2):
            for place, param in enumerate(loop.model.parameters()):
                param.register_hook(lambda _, at=(round_, place): told.append(("before", at)))
                param.register_post_accumulate_grad_hook(
                    lambda _, at=(round_, place): told.append(("after", at))
                )
            if not round_:
                loop.wrap()
        loop.steps(2)
        found.append(list(told))
        loop.model[0].bias.register_post_accumulate_grad_hook(lambda param: param.grad)
        with pytest.raises(RuntimeError, match="should return None"):
            loop.steps(1)
    assert found[0] == found[1] and len(found[0]) == 2 * 2 * 2 * 4


def test_a_unit_is_stepped_in_the_backward_after_the_hooks_of_its_gradients():
    """Twin: the same hooks, stepped after the backward."""
    weights = []
    for inside in (True, False):
        loop = Hooked(HOOKS["scaled"], "host", None)
        loop.hook()
        loop.wrap()
        if inside:
            with loop.optimizer.step_in_backward():
                loop.model(torch.ones(2, 6)).square().sum().backward()
        else:
            loop.model(torch.ones(2, 6)).square().sum().backward()
        loop.optimizer.step()
        loop.unwrap()
        weights.append(loop.bits())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_a_hook_between_the_backwards_of_one_pass_has_the_sum(home, tmp_path):
    """Method: twins, of which the wrapped one has its three backwards in one pass. Twin: a hook
    that is removed after the first of them changes the weights."""
    found = []
    for each, is_removed in ((None, False), (home, False), (home, True)):
        loop = Hooked(HOOKS["clipped"], each, tmp_path)
        hooks = loop.hook()
        loop.wrap()
        one_pass = parts_of(loop.model).accumulation.opened if each else torch.enable_grad
        with one_pass():
            for seed in (1, 2, 3):
                loop.model(torch.full((2, 6), 0.1 * seed)).square().sum().backward()
                if is_removed:
                    hooks[0].remove()
        loop.optimizer.step()
        loop.unwrap()
        found.append(loop.bits())
    assert found[0] == found[1] != found[2]


def over_several(loop: Hooked) -> None:
    params = list(loop.model.parameters())
    hook = register_multi_grad_hook(params, lambda grads: loop.seen.extend(map(torch.clone, grads)))
    register_multi_grad_hook(params[1:], lambda grad: loop.seen.append(grad.clone()), mode="any")
    register_multi_grad_hook([params[0].view(-1), params[2]], lambda grads: None)
    loop.steps(2)
    hook.remove()
    loop.steps(1)


def at_edges(loop: Hooked) -> None:
    edges = [get_gradient_edge(param) for param in loop.model.parameters()]
    loss = loop.model(torch.ones(2, 6)).square().sum()
    loop.seen.extend(torch.autograd.grad(loss, edges, retain_graph=True))
    loss.backward(inputs=edges[:1])
    loop.seen.append(loop.model[0].weight.grad.clone())


def at_nodes(loop: Hooked) -> None:
    weight = loop.model[0].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    assert node is get_gradient_edge(weight).node and node.variable is weight
    node.register_prehook(lambda grads: loop.seen.append(grads[0].clone()))
    node.register_hook(lambda *_: loop.seen.append(weight.grad.clone()))
    loop.steps(2)


@pytest.mark.parametrize("script", [over_several, at_edges, at_nodes])
@pytest.mark.parametrize("home", [*TIERS])
def test_places_in_the_graph_are_found_without_weights(script, home, tmp_path):
    """Method: twins: multi-gradient hooks, gradients of edges and hooks of nodes have torch's bits.
    To find a place reads nothing. Twin: torch's own error for a frozen parameter."""
    found = []
    for each in (None, home):
        loop = Hooked(lambda param: None, each, tmp_path)
        loop.wrap()
        moved = []
        for _ in range(2 if each else 0):
            moved.append({k: e.nbytes for k, e in infinity.stats(loop.model).edges.items()})
            list(map(get_gradient_edge, loop.model.parameters()))
        assert moved[:1] == moved[1:]
        script(loop)
        loop.model[0].bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require gradients"):
            get_gradient_edge(loop.model[0].bias)
        loop.model[0].bias.requires_grad_(True)
        loop.unwrap()
        found.append(loop.bits())
    assert found[0] == found[1]


def test_a_failed_wrap_leaves_hooks_that_their_handles_remove():
    """Twin: before they are removed they run."""
    loop = Hooked(lambda param: None, "host", None)
    first, *_ = loop.hook()
    with pytest.raises(CapacityError):
        infinity.wrap_model(loop.model, loop.optimizer, HOST | {"host_memory": 1})
    loop.steps(1)
    assert len(loop.seen) == 4
    first.remove()
    loop.steps(1)
    assert len(loop.seen) == 7
