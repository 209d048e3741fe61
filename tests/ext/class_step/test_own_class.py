"""Own classes: an optimizer that a script defines steps by its own code, or the error has the lines
that use it.

Method: a small model takes some steps beside the plain optimizer, from every home, and has its
bits. Twins: classes whose step is another one when it sees one parameter at a time are refused with
the reason; the two lines of the message, run as they are, give the plain bits.
"""

from __future__ import annotations

import textwrap
from typing import ClassVar

import pytest
import torch
from models import at_home
from own_optimizers import Momentum, MuonWithAdam, Trusting
from small_net import furthest, model, same, steps
from torch import nn
from twins import twin

import infinity
from infinity.errors import ConfigError

HOMES = ["device", "hostile"]


OWN = [Momentum, Trusting, MuonWithAdam]


def trained(kind: type, home: str | None, folder, count: int = 6):
    net = model()
    optimizer = kind(net.parameters())
    if home is not None:
        given = at_home(home, home, folder)
        net, optimizer = infinity.wrap_model(net, optimizer, given)
    steps(net, optimizer, count)
    weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    state = optimizer.state_dict()["state"]
    return weights, {i: {k: torch.as_tensor(v) for k, v in of.items()} for i, of in state.items()}


def plain_run(kind: type, count: int = 6):
    return twin(lambda: trained(kind, None, None, count), kind, count)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", OWN)
def test_an_own_class_has_its_own_bits(kind, home, tmp_path):
    expected, found = plain_run(kind), trained(kind, home, tmp_path)
    assert same(expected, found)
    assert {i: set(of) for i, of in expected[1].items()} == {
        i: set(of) for i, of in found[1].items()
    }
    assert not same(expected, trained(kind, home, tmp_path, count=5))


@pytest.mark.parametrize("kind", OWN)
def test_an_own_class_resumes_and_is_given_back(kind, tmp_path):
    expected, _ = plain_run(kind, 4)
    net = model()
    net, optimizer = infinity.wrap_model(net, kind(net.parameters()), {"params": "host"})
    steps(net, optimizer, 4)
    infinity.save_checkpoint(tmp_path / "saved", net, optimizer)
    other = model()
    other, theirs = infinity.wrap_model(other, kind(other.parameters()), {"params": "host"})
    infinity.load_checkpoint(tmp_path / "saved", other, theirs)
    plain, own = infinity.unwrap_model(net, optimizer)
    assert furthest(dict(plain.state_dict()), expected) == 0
    for each in ((plain, own), (other, theirs)):
        steps(*each, 2, seed=2)
    assert furthest(dict(plain.state_dict()), dict(other.state_dict())) == 0


class ByOneNorm(Momentum):
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([grad for grad in grads if grad is not None])
        with torch.no_grad():
            for grad in grads:
                if grad is not None:
                    grad.div_(norm + 1)
        super().step()


class Counting(Momentum):
    """Decays its rate by a count of its own, every fourth step."""

    def __init__(self, params):
        super().__init__(params)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["now"] = group["lr"] * 0.5 ** (self.count // 4)
        super().step()

    def update(self, group, param, state):
        param.sub_(param.grad * group["now"])


class CountingInside(Counting):
    """Keeps its count in an object, and halves its rate long after a trial."""

    class Count:
        value = 0

    def __init__(self, params):
        super().__init__(params)
        self.inside = [self.Count()]

    def step(self, closure=None):
        self.inside[0].value += 1
        self.count = 1000 * (self.inside[0].value > 100) - 1
        super().step()


class CountingForAll(Counting):
    """Keeps its count in the class, for all its optimizers."""

    counts: ClassVar[dict[str, int]] = {"steps": 0}

    def step(self, closure=None):
        self.counts["steps"] += 1
        self.count = 1000 * (self.counts["steps"] > 100) - 1
        super().step()


class CountingInState(Counting):
    """Keeps its count in its state, by a name."""

    def step(self, closure=None):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        self.count = 1000 * (self.state["all"]["steps"] > 100) - 1
        super().step()


class CountingAtOnce(CountingInState):
    """Makes the count in its state before its first step."""

    def __init__(self, params):
        super().__init__(params)
        self.state["all"] = 1

    def step(self, closure=None):
        self.state["all"] += 1
        self.count = 1000 * (self.state["all"] > 100) - 1
        Momentum.step(self)


class Summing(Momentum):
    """Keeps a sum over all gradients in its groups, as D-Adaptation does. It raises the rate long
    after a trial."""

    def __init__(self, params):
        super().__init__(params)
        for group in self.param_groups:
            group["seen"], group["now"] = 0.0, group["lr"]

    def step(self, closure=None):
        for group in self.param_groups:
            grads = [param.grad for param in group["params"] if param.grad is not None]
            group["seen"] += sum(grad.square().sum().item() for grad in grads)
            group["now"] = group["lr"] * (1 + (group["seen"] > 1e6))
        super().step()

    def update(self, group, param, state):
        param.sub_(param.grad * group["now"])


class SummingInATensor(Momentum):
    """Keeps a sum over all gradients in an attribute."""

    def __init__(self, params):
        super().__init__(params)
        self.seen = torch.zeros(())

    def update(self, group, param, state):
        self.seen += param.grad.square().sum()
        param.sub_(param.grad * (group["lr"] * (1 + int(self.seen > 1e30))))


class Filling(Momentum):
    """Fills a tensor of its own with its rate, as those do that compile their step."""

    def __init__(self, params):
        super().__init__(params)
        self.rate = torch.zeros(())

    def update(self, group, param, state):
        state["step"] = state.get("step", 0) + 1
        self.rate.fill_(group["lr"] / state["step"])
        param.sub_(param.grad * self.rate)


class Telling(Momentum):
    """Tells in its group of the last rate that it used."""

    def update(self, group, param, state):
        group["last"] = group["lr"] / (1 + param.grad.norm().item())
        param.sub_(param.grad * group["last"])


class ById(Momentum):
    """Has a rate for each parameter, by its id."""

    def __init__(self, params):
        super().__init__(params)
        own = self.param_groups[0]["params"]
        self.rates = {id(param): 0.1 * at for at, param in enumerate(own)}

    def update(self, group, param, state):
        param.sub_(param.grad * self.rates.get(id(param), 0.1))


class ByParameter(Momentum):
    def __init__(self, params):
        super().__init__(params)
        self.fast = {self.param_groups[0]["params"][1]}

    def update(self, group, param, state):
        param.sub_(param.grad * (0.2 if param in self.fast else 0.1))


class Stepping(Summing):
    """Keeps a count in its groups, which no gradient changes."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] += 1
            group["now"] = group["lr"] / group["seen"]
        Momentum.step(self)


class OnParameters(Momentum):
    """Keeps sums as attributes of parameters."""

    def update(self, group, param, state):
        param.before = getattr(param, "before", 0) * group["decay"] + param.grad
        param.sub_(param.before, alpha=group["lr"])


class ByName(Momentum):
    """Steps biases at another rate, by the names of parameters."""

    def __init__(self, params):
        super().__init__(params)
        for group in self.param_groups:
            group["names"] = [f"{at}.weight" for at, _ in enumerate(group["params"])]
            group["names"][-1] = "bias"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, param in zip(group["names"], group["params"]):
                if param.grad is not None:
                    rate = group["lr"] * (0.1 if "bias" in name else 1)
                    param.sub_(param.grad, alpha=rate)


class Noisy(Momentum):
    def update(self, group, param, state):
        param.sub_((param.grad + torch.randn_like(param)) * group["lr"])


class Stacked(Momentum):
    """Steps all matrices of a shape in one product, as nanochat's does, with their state at the
    first of them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            shapes = {param.shape for param in group["params"] if param.grad is not None}
            for shape in sorted(shapes):
                params = [param for param in group["params"] if param.shape == shape]
                grads = torch.stack([param.grad for param in params])
                state = self.state[params[0]]
                state.setdefault("sum", torch.zeros_like(grads)).mul_(0.9).add_(grads)
                for param, by in zip(params, state["sum"].unbind(0)):
                    param.add_(by, alpha=-group["lr"])


class OfLargeOnes(Momentum):
    """Keeps sums of rows of large matrices, and asserts that these have no other sum."""

    def update(self, group, param, state):
        if param.ndim < 2 or param.numel() < 4096:
            super().update(group, param, state)
            return
        assert "sum" not in state
        state.setdefault("rows", torch.zeros_like(param[:, 0])).add_(param.grad.sum(1))
        param.sub_(state["rows"][:, None], alpha=group["lr"])


class Saving(Momentum):
    def state_dict(self):
        return super().state_dict() | {"mine": 1}


class Releasing(Momentum):
    def __del__(self):
        self.closed = True


class Lookout(Momentum):
    def update(self, group, param, state):
        param.sub_(param.grad.to_sparse().to_dense() * self.defaults["missing"])


class Careless(Momentum):
    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad * group["lr"])


class Idle(Momentum):
    def update(self, group, param, state):
        pass


REFUSED = {
    ByOneNorm: "steps all parameters at once, as a clip by their common norm does",
    Counting: "counts in count, beside its state",
    CountingInside: "counts in inside[0].value, beside its state",
    CountingForAll: "counts in counts['steps'], beside its state",
    CountingInState: "state has 'all', which is not a parameter",
    CountingAtOnce: "on a small tensor on the CPU raised TypeError",
    Summing: "as a sum over gradients in a group",
    SummingInATensor: "counts in seen, beside its state",
    ById: "looks parameters up in rates",
    ByParameter: "looks parameters up in fast",
    OnParameters: "keeps state outside of optimizer.state",
    ByName: "reads names of a group, which has one for each parameter",
    Noisy: "draws random numbers",
    Stacked: "keeps sum, which are as large as a parameter and have another shape",
    OfLargeOnes: "on small tensors on the CPU raised AssertionError",
    Saving: "has a state_dict() of its own",
    Releasing: "has a __del__() of its own",
    Lookout: "raised KeyError('missing')",
    Careless: "should leave out a parameter whose grad is None",
    Idle: "Its step changes nothing",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_one_parameter_at_a_time_would_lose_is_refused(kind):
    """Claim: by the reason, before anything changed."""
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = kind(net.parameters())
    with pytest.raises(ConfigError) as error:
        infinity.wrap_model(net, optimizer)
    assert f"{kind.__name__} is not supported" in str(error.value)
    assert REFUSED[kind] in str(error.value), str(error.value)
    assert type(net[3].weight) is nn.Parameter
    assert not any(isinstance(key, torch.Tensor) for key in optimizer.state)
    assert furthest(dict(net.state_dict()), before) == 0


def test_names_of_parameters_that_a_class_does_not_read_are_kept():
    """Twin: one that reads them is refused above."""
    net = model()
    optimizer = Momentum([{"params": list(net.parameters()), "names": ["a"] * 8}])
    net, optimizer = infinity.wrap_model(net, optimizer, {"params": "host"})
    steps(net, optimizer, 2)
    other = model()
    steps(other, Momentum(other.parameters()), 2)
    assert furthest(dict(net.state_dict()), dict(other.state_dict())) == 0
    assert optimizer.param_groups[0]["names"] == ["a"] * 8


def test_a_class_that_meets_other_ranks_is_refused(tmp_path):
    """Claim: one rank alone may step a parameter, so that a collective would wait forever."""

    class Gathering(Momentum):
        def update(self, group, param, state):
            torch.distributed.all_reduce(param.grad)
            super().update(group, param, state)

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        net = model()
        with pytest.raises(ConfigError, match="Its step meets the other ranks"):
            infinity.wrap_model(net, Gathering(net.parameters()))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", [ByOneNorm, Counting, Stacked])
def test_the_lines_of_the_message_use_such_a_class(kind, home, tmp_path):
    """Method: the message's two lines are run as they are."""
    net = model()
    with pytest.raises(ConfigError) as error:
        infinity.wrap_model(net, kind(net.parameters()))
    lines = [line for line in str(error.value).splitlines() if line.startswith("    ")]
    given = at_home(home, home, tmp_path)
    names = {"model": net, "torch": torch, "infinity": infinity, "config": given}
    code = textwrap.dedent("\n".join(lines)).replace("(...)", "(model.parameters())")
    exec(code, names | {kind.__name__: kind}, names)
    steps(names["model"], names["optimizer"], 5)
    expected, _ = plain_run(kind, 5)
    assert furthest(dict(names["model"].state_dict()), expected) == 0


@pytest.mark.parametrize("kind", [Stepping, Filling, Telling])
def test_what_is_no_sum_over_parameters_steps_as_alone(kind):
    """By its own code: a count of steps in a group, a tensor that each step fills, and a number of
    a group that tells of the last parameter. Twins: sums over gradients there are refused above."""
    net, other = model(), model()
    net, optimizer = infinity.wrap_model(net, kind(net.parameters()), {"params": "host"})
    steps(net, optimizer, 4)
    theirs = kind(other.parameters())
    steps(other, theirs, 4)
    assert furthest(dict(net.state_dict()), dict(other.state_dict())) == 0
    assert [g.get("seen") for g in optimizer.param_groups] == [
        g.get("seen") for g in theirs.param_groups
    ]
