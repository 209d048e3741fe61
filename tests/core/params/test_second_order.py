"""Second order: gradients of gradients have plain torch's bits at every home, and their graphs hold
no weights.

Words used here: **recipe**: computes a loss and runs its backward, as a script does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from inside import parts_of
from models import at_home
from torch import nn
from torch.func import functional_call

import infinity

STEPS, WIDTH = 3, 4
both_homes = pytest.mark.parametrize("home", ("host", "nvme"))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Softplus())
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv1d(1, 4, 3, padding=1), nn.LayerNorm(4), Critic()
        self.fold = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.conv(x[:, None]).transpose(1, 2)))
        return self.last(self.fold(h.flatten(1)))


class ForceField(Critic):
    """Computes forces in its forward, as models of molecules do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        energy = super().forward(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, force


class Checkpointed(Critic):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = torch.utils.checkpoint.checkpoint
        return self.last(
            run(self.second, run(self.first, x, use_reentrant=False), use_reentrant=False)
        )


def gradient_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def laplacian(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A residual of Poisson's equation: third order, with the backward."""
    x.requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [
        torch.autograd.grad(slope[:, n].sum(), x, create_graph=True)[0][:, n] for n in range(WIDTH)
    ]
    return (sum(second) + u[:, 0]).square().mean()


def forces(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    energy, force = model(x)
    return energy + force.square().sum()


def gradient_norm(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(grad.square().sum() for grad in grads)


def hessian_product(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    params = list(model.parameters())
    grads = torch.autograd.grad(model(x).square().mean(), params, create_graph=True)
    products = torch.autograd.grad(sum(grad.sum() for grad in grads), params)
    return model(x).square().mean() + sum(product.sum() for product in products)


def maml(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    params = dict(model.named_parameters())
    loss = model(x).square().mean()
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    fast = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads)}
    return functional_call(model, fast, (2 * x,)).square().mean()


Recipe = Callable[[nn.Module, torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[type[nn.Module], Recipe]] = {
    "gradient penalty": (Critic, gradient_penalty),
    "gradient penalty of convolutions": (Convolved, gradient_penalty),
    "gradient penalty, checkpointed": (Checkpointed, gradient_penalty),
    "Laplacian": (Critic, laplacian),
    "forces": (ForceField, forces),
    "norm of the gradient": (Convolved, gradient_norm),
    "Hessian times a vector": (Critic, hessian_product),
    "MAML": (Critic, maml),
}


def made(kind: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained(model: nn.Module, optimizer, recipe: Recipe) -> list[torch.Tensor]:
    losses = []
    for step in range(STEPS):
        loss = recipe(model, torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH) * (step + 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values())]


@both_homes
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_gradients_have_plain_torchs_bits(case, home, tmp_path):
    """Twin: without the second gradient the results are others."""
    kind, recipe = CASES[case]
    right = trained(*made(kind), recipe)
    found = trained(*infinity.wrap_model(*made(kind), at_home(home, home, tmp_path)), recipe)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    if kind is not ForceField:
        first = trained(*made(kind), lambda model, x: model(x).square().mean())
        assert not torch.equal(first[0], right[0]) or not torch.equal(first[-1], right[-1])


@both_homes
def test_the_graph_of_a_backward_holds_no_weights(home, tmp_path):
    """Method: between the two backwards all units go home, and no memory of theirs is held. Twin:
    the graph is used after that."""
    model, _ = infinity.wrap_model(*made(Critic), at_home(home, home, tmp_path))
    prefetcher = parts_of(model).prefetcher
    x = torch.ones(2, WIDTH, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    units = parts_of(model).units
    assert not any(prefetcher.is_held(unit) for unit in units)
    prefetcher.release_all(units)
    assert not any(unit.buffers.is_held for unit in units if not unit.computes_at_home)
    slope.square().sum().backward()
    assert model.first[0].weight.grad.abs().sum() > 0


def test_weights_that_change_before_the_second_backward_are_refused(tmp_path):
    """Method: a step between the backwards, as torch refuses it. Twin: no step."""
    model, optimizer = infinity.wrap_model(*made(Critic), at_home("host", "host", tmp_path))
    x = torch.ones(2, WIDTH, requires_grad=True)
    for steps in (False, True):
        loss = model(x).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        if not steps:
            slope.square().sum().backward()
            continue
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(infinity.UsageError, match="they were changed since"):
            slope.square().sum().backward()


@both_homes
@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_of_gradients_that_a_backward_left_trains(home, count, tmp_path):
    """``p.grad`` has its graph after ``backward(create_graph=True)``, of several backwards too,
    also where one of them adds a constant. Twin: without it there is none."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        told = []
        for step in range(STEPS):
            x = torch.full((3, WIDTH), 0.1 * (step + 1))
            model(x).square().mean().backward(create_graph=True)
            for _ in range(count - 1):
                model(2 * x).sum().backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in model.parameters())
            penalty.backward()
            told += [penalty.detach(), *(p.grad.detach().clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return told + [value.clone() for value in model.state_dict().values()]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = Critic()
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    expected = run(*made())
    model, optimizer = infinity.wrap_model(*made(), at_home(home, home, tmp_path))
    assert all(map(torch.equal, run(model, optimizer), expected))
    model(torch.ones(1, WIDTH)).sum().backward()
    assert not any(param.grad.requires_grad for param in model.parameters())
