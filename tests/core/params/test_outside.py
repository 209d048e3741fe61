"""What is used outside a forward: parameters that one returns, parameters inside full_params,
gradients of another's loss."""

from __future__ import annotations

import pytest
import torch
from models import at_home, differing
from torch import nn

import infinity

HOMES = ["device", "host", "nvme"]


def train(model, optimizer, loss_of, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def both(build, loss_of, config) -> None:
    """Losses and weights of plain torch, and of the wrapped model. SGD, so that both are the same
    bits."""
    torch.manual_seed(0)
    plain = build()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loss_of)
    torch.manual_seed(0)
    model = build()
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config
    )
    assert list(map(torch.equal, train(model, optimizer, loss_of), expected)) == [True] * len(
        expected
    )
    assert differing(dict(model.state_dict()), dict(plain.state_dict())) == []


# --- a parameter that a forward returns ---


class Scaled(nn.Module):
    """Returns its output and its scale, as models of contrastive losses do."""

    def __init__(self, how: str):
        super().__init__()
        self.body, self.how = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), how
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        given = {
            "itself": self.scale,
            "another's": self.body[0].weight,
            "both": (self.scale, self.body[2].bias),
        }[self.how]
        return {"x": self.body(x), "given": given}


class Inside(nn.Module):
    """An inner module returns its parameter to the outer one."""

    def __init__(self):
        super().__init__()
        self.inner = Scaled("itself")

    def forward(self, x):
        out = self.inner(x)
        return {"x": out["x"] * out["given"], "given": self.inner.scale}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("how", ["itself", "another's", "both", "inside"])
def test_a_parameter_that_a_forward_returns_is_used_in_the_loss(how, home, tmp_path):
    def loss_of(model):
        out = model(torch.randn(4, 16))
        given = out["given"] if isinstance(out["given"], tuple) else (out["given"],)
        return (out["x"] * given[0].mean().exp()).square().mean() + sum(
            one.square().sum() for one in given
        )

    both(Inside if how == "inside" else lambda: Scaled(how), loss_of, at_home(home, home, tmp_path))


def test_a_parameter_that_is_returned_without_gradients_is_its_value(tmp_path):
    model, _ = infinity.wrap_model(
        Scaled("itself"), None, at_home("nvme", "nvme", tmp_path) | {"optimizer": "auto"}
    )
    with torch.no_grad():
        given = model(torch.zeros(1, 16))["given"]
    assert given.item() == 0.5 and not given.requires_grad


# --- gradients of another's loss ---


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.ConvTranspose2d(8, 16, 4),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4),
            nn.Sigmoid(),
        )


def gan(config: dict | None, wrapped: str = "both") -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop of torch's DCGAN tutorial: the discriminator twice, then the generator through it.
    Adam, as there."""
    torch.manual_seed(0)
    nets = {"generator": Generator(), "discriminator": Discriminator()}
    optimizers = {
        name: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5) for name, net in nets.items()
    }
    for name in nets if config is not None else ():
        if wrapped in ("both", name):
            nets[name], optimizers[name] = infinity.wrap_model(nets[name], optimizers[name], config)
    generator, discriminator = nets.values()
    criterion, losses = nn.BCELoss(), []
    for _ in range(4):
        real = torch.randn(4, 3, 8, 8)
        discriminator.zero_grad()
        of_real = criterion(discriminator(real).view(-1), torch.ones(4))
        of_real.backward()
        fake = generator(torch.randn(4, 8, 1, 1))
        of_fake = criterion(discriminator(fake.detach()).view(-1), torch.zeros(4))
        of_fake.backward()
        optimizers["discriminator"].step()
        generator.zero_grad()
        loss = criterion(discriminator(fake).view(-1), torch.ones(4))
        loss.backward()
        optimizers["generator"].step()
        losses += [of_real.item(), of_fake.item(), loss.item()]
    return losses, {
        f"{name}.{key}": value.clone()
        for name, net in nets.items()
        for key, value in net.state_dict().items()
    }


@pytest.mark.parametrize("wrapped", ["both", "generator", "discriminator"])
@pytest.mark.parametrize("home", HOMES)
def test_torchs_gan_tutorial_trains_with_its_bits(home, wrapped, tmp_path):
    expected = gan(None)
    losses, state = gan(at_home(home, home, tmp_path), wrapped)
    assert losses == expected[0] and differing(state, expected[1]) == []


@pytest.mark.parametrize("home", HOMES)
def test_what_another_loss_added_to_a_consumed_gradient_is_stepped_as_torch_steps_it(
    home, tmp_path
):
    """Method: step without zero_grad, then a loss through the model whose input has a graph, and a
    step: torch adds to the old gradient, which is at home still."""

    def run(config: dict | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        before, model = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if config:
            model, optimizer = infinity.wrap_model(model, optimizer, config)
        for at in range(3):
            torch.manual_seed(at)
            model(before(torch.randn(2, 8))).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    assert differing(run(at_home(home, home, tmp_path)), run(None)) == []


# --- full_params ---


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def forward(self, x):
        return self.body(x)


WAYS = {
    "its dictionary": lambda model, params: sum(value.square().sum() for value in params.values()),
    "the module's own": lambda model, params: sum(
        value.square().sum() for value in model.body.parameters()
    ),
    "both": lambda model, params: (
        (model.body[0].weight * params["body.2.weight"]).sum() + model.body[1].bias.norm()
    ),
    "functions of torch": lambda model, params: (
        torch.stack([model.body[0].bias, params["body.1.bias"]]).sum().exp()
    ),
    "a norm of all": (
        lambda model, params: torch.stack([value.norm() for value in model.parameters()]).norm()
    ),
    "its data, which is a constant": (
        lambda model, params: (model.body[0].weight.detach() * model.body[0].weight).sum()
    ),
}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["inside", "afterwards", "alone"])
def test_what_is_computed_inside_full_params_trains(when, way, home, tmp_path):
    """Method: a penalty of the weights in the loss, or as the loss; the backward inside the block,
    or after it."""

    def step(model, optimizer, params, leave) -> torch.Tensor:
        penalty = 0.01 * WAYS[way](model, params)
        loss = penalty if when == "alone" else model(torch.randn(4, 16)).square().mean() + penalty
        leave()
        loss.backward()
        return loss

    def run(config: dict | None) -> tuple[list[float], dict]:
        torch.manual_seed(0)
        model = Penalised()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if config:
            model, optimizer = infinity.wrap_model(model, optimizer, config)
        losses = []
        for at in range(3):
            torch.manual_seed(at)
            if config is None:
                loss = step(model, optimizer, dict(model.named_parameters()), lambda: None)
            else:
                block = infinity.full_params(model)
                ended = []

                def leave(block=block, ended=ended):
                    if when == "afterwards" and not ended:
                        block.__exit__(None, None, None)
                        ended.append(True)

                loss = step(model, optimizer, block.__enter__(), leave)
                if not ended:
                    block.__exit__(None, None, None)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    losses, state = run(at_home(home, home, tmp_path))
    expected = run(None)
    assert losses == expected[0] and differing(state, expected[1]) == []


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("through", ["dictionary", "module"])
def test_edits_through_either_land_with_writeback_and_are_refused_without(through, home, tmp_path):
    model, _ = infinity.wrap_model(
        Penalised(), None, at_home(home, home, tmp_path) | {"optimizer": "auto"}
    )
    name, param = "body.1.weight", model.body[1].weight
    before = model.state_dict()[name].clone()

    def edit(params) -> None:
        with torch.no_grad():
            target = params[name] if through == "dictionary" else param
            assert target.mul_(2) is target
            target[0, 0] = 7.0
            target.data[0, 1] = 8.0

    with pytest.raises(infinity.UsageError, match="without writeback"):
        with infinity.full_params(model, ["body.1"]) as params:
            edit(params)
            assert torch.equal(params[name].detach(), param.detach())
    assert torch.equal(model.state_dict()[name], before)
    with infinity.full_params(model, ["body.1"], writeback=True) as params:
        edit(params)
    expected = before * 2
    expected[0, 0], expected[0, 1] = 7.0, 8.0
    assert torch.equal(model.state_dict()[name], expected)
    with pytest.raises(infinity.UsageError, match="full_params"):
        param.data_ptr()  # at rest again


@pytest.mark.parametrize("exception", [KeyboardInterrupt, ValueError])
def test_after_a_block_that_raised_the_parameter_is_at_rest(exception, tmp_path):
    model, _ = infinity.wrap_model(Penalised(), None, at_home("host", "host", tmp_path))
    with pytest.raises(exception):
        with infinity.full_params(model):
            model.body[0].weight.sum()
            raise exception
    with pytest.raises(infinity.UsageError, match="full_params"):
        model.body[0].weight.data_ptr()


def test_blocks_inside_each_other(tmp_path):
    model, _ = infinity.wrap_model(Penalised(), None, at_home("host", "host", tmp_path))
    with infinity.full_params(model, "body.0") as outer:
        with infinity.full_params(model) as inner, torch.no_grad():
            assert model.body[0].weight.data_ptr() == inner["body.0.weight"].data_ptr()
        assert model.body[0].weight.data_ptr() == outer["body.0.weight"].data_ptr()
        with pytest.raises(infinity.UsageError, match="full_params"):
            model.body[1].weight.data_ptr()


def test_a_backward_of_values_that_a_step_has_changed_raises(tmp_path):
    model = Penalised()
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), at_home("host", "host", tmp_path)
    )
    with infinity.full_params(model) as params:
        penalty = sum(value.square().sum() for value in params.values())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(infinity.UsageError, match="before that"):
        penalty.backward()


def test_after_a_step_inside_the_block_the_parameter_is_at_rest(tmp_path):
    """Method: a step changes the home; what the block has is of before, and the parameter does not
    stand for it any more."""
    model = Penalised()
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), at_home("host", "host", tmp_path)
    )
    with infinity.full_params(model):
        model.body[0].weight.sum()
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        assert torch.equal(model.body[0].weight + 0, model.state_dict()["body.0.weight"])
        with pytest.raises(infinity.UsageError, match="full_params"):
            model.body[0].weight.data_ptr()


# --- backwards for some parameters, and layers by themselves ---


def blocks(config) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (model, optimizer) if config is None else infinity.wrap_model(model, optimizer, config)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("through", ["the tensor's", "autograd's"])
def test_a_backward_for_some_parameters_has_torchs_bits(through, home, tmp_path):
    """Twin: the others get no gradient."""
    x, values = torch.ones(2, 16), []
    for config in (None, at_home(home, home, tmp_path)):
        model, optimizer = blocks(config)
        params, loss = list(model[0].parameters()), model(x).sum()
        backward = (
            loss.backward
            if through == "the tensor's"
            else lambda inputs, loss=loss: torch.autograd.backward(loss, inputs=inputs)
        )
        backward(inputs=params)
        assert all(param.grad is None for param in model[1].parameters())
        optimizer.step()
        values.append({name: value.clone() for name, value in model.state_dict().items()})
    assert differing(*values) == []


@pytest.mark.parametrize("home", HOMES)
def test_a_layer_that_is_called_by_itself_trains(home, tmp_path):
    """Method: a layer inside a part that is gathered together, by itself and by a function of the
    user's; the same as a part of its own."""
    x, values = torch.ones(2, 16), []
    of_blocks = at_home(home, home, tmp_path)
    for config in (None, of_blocks, of_blocks | {"units": ["Linear"]}):
        model, optimizer = blocks(config)
        layer = model[0][0]
        (layer(x).sum() + nn.functional.linear(x, layer.weight).square().sum()).backward()
        optimizer.step()
        values.append({name: value.clone() for name, value in model.state_dict().items()})
    assert differing(values[0], values[1]) == differing(values[0], values[2]) == []
