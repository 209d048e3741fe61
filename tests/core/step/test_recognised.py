"""Several optimizers over one model: each steps its own parameters, as in torch.

Words used here:

**halves**: an encoder and a decoder, which share a block of a third optimizer-less kind: its weight
is the first optimizer's, its bias the second's.
"""

from __future__ import annotations

import copy

import pytest
import torch
from deleted import needs
from torch import nn

import infinity
from infinity.core.step.recognised import Optimizers, as_given
from infinity.errors import ConfigError, UsageError

HOMES = ["host", "nvme"]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
        self.decoder = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
        self.shared = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.decoder(self.encoder(x).relu()))


def job(**first) -> tuple[Halves, list[torch.optim.Optimizer]]:
    """One with momentum, and one without but with two groups."""
    torch.manual_seed(0)
    model = Halves()
    groups = [
        {"params": list(model.decoder.parameters()), "lr": 0.05},
        {"params": [model.shared.bias]},
    ]
    return model, [
        torch.optim.SGD(
            [*model.encoder.parameters(), model.shared.weight], lr=0.1, **{"momentum": 0.9, **first}
        ),
        torch.optim.SGD(groups, lr=0.2),
    ]


def config(home: str, folder) -> dict:
    return {"params": home, "optimizer": home} | (
        {"nvme_paths": [str(folder)]} if home == "nvme" else {}
    )


def train(model, optimizers, *, steps: int = 6, seed: int = 1) -> list[float]:
    """The second one steps every other time, on the gradients of two backwards."""
    generator, losses = torch.Generator().manual_seed(seed), []
    for number in range(steps):
        loss = model(torch.randn(4, 16, generator=generator)).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers[: 1 + number % 2]:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def same_values(model, plain) -> bool:
    theirs = plain.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def same_state(ours: dict, theirs: dict) -> bool:
    return (
        ours["param_groups"] == theirs["param_groups"]
        and ours["state"].keys() == theirs["state"].keys()
        and all(
            torch.equal(ours["state"][index]["momentum_buffer"], state["momentum_buffer"])
            for index, state in theirs["state"].items()
            if state.get("momentum_buffer") is not None
        )
    )


@pytest.mark.parametrize("home", HOMES)
def test_each_optimizer_steps_its_own_parameters_with_torchs_bits(home, tmp_path):
    """Losses, weights and both state dicts; and what is unwrapped goes on alike."""
    plain, theirs = job()
    expected = train(plain, theirs)
    model, optimizers = infinity.wrap_model(*job(), config(home, tmp_path))
    assert type(optimizers) is list and len(optimizers) == 2
    assert train(model, optimizers) == expected and same_values(model, plain)
    for ours, other in zip(optimizers, theirs):
        assert same_state(ours.state_dict(), other.state_dict())
    model, given = infinity.unwrap_model(model, optimizers)
    assert [type(each) for each in given] == [torch.optim.SGD] * 2
    assert train(model, given, seed=2) == train(plain, theirs, seed=2)


@pytest.mark.parametrize("home", HOMES)
def test_a_checkpoint_has_all_of_them(home, tmp_path):
    """Also at another home. Twin: one of two is refused, to save and to load."""
    model, optimizers = infinity.wrap_model(*job(), config(home, tmp_path))
    train(model, optimizers)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizers)
    expected = train(model, optimizers, seed=2)
    again, others = infinity.wrap_model(*job(), config("host", tmp_path))
    infinity.load_checkpoint(tmp_path / "saved", again, others[::-1])  # the order does not matter
    assert train(again, others, seed=2) == expected
    for call in (infinity.save_checkpoint, infinity.load_checkpoint):
        with pytest.raises(UsageError, match="give the whole list"):
            call(tmp_path / "saved", again, others[0])
    alone, optimizer = job()[0], None
    alone, optimizer = infinity.wrap_model(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="2 optimizers"):
        infinity.load_checkpoint(tmp_path / "saved", alone, optimizer)


def test_state_of_torchs_state_dicts_is_taken():
    """Both are loaded with what a plain run saved, in mid-run."""
    plain, theirs = job()
    train(plain, theirs)
    model, optimizers = infinity.wrap_model(*job(), config("host", None))
    model.load_state_dict(plain.state_dict())
    for ours, other in zip(optimizers, theirs):
        ours.load_state_dict(copy.deepcopy(other.state_dict()))
    assert train(model, optimizers, seed=3) == train(plain, theirs, seed=3)


def test_books_show_their_own_parameters_alone():
    model, (first, second) = infinity.wrap_model(*job(), config("host", None))
    train(model, [first, second])
    assert set(first.state) == {*model.encoder.parameters(), model.shared.weight}
    assert model.decoder[0].weight not in first.state and not set(second.state)


@needs("ext/class_step")
def test_a_frozen_parameter_joins_one_of_them():
    """Twin: its neighbour, stored beside it, cannot join the other."""
    model, optimizers = job()
    for group in optimizers[0].param_groups:
        group["params"] = [p for p in group["params"] if p not in set(model.shared.parameters())]
    optimizers[1].param_groups[1]["params"] = []
    plain, theirs = copy.deepcopy((model, optimizers))
    model, (first, second) = infinity.wrap_model(model, optimizers, config("host", None))
    for of_model, of_first in ((model, first), (plain, theirs[0])):
        of_first.add_param_group({"params": [of_model.shared.weight], "lr": 0.3})
    assert train(model, [first, second]) == train(plain, theirs) and same_values(model, plain)
    with pytest.raises(UsageError, match="of another optimizer"):
        second.add_param_group({"params": [model.shared.bias]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model, both: both[1].add_param_group({"params": [model.shared.weight]}), "both"),
        (lambda model, both: both.append(object()), "object, not a torch.optim.Optimizer"),
    ],
    ids=["a parameter in two", "no optimizer"],
)
def test_what_cannot_be_a_list_is_refused_before_anything_changes(change, said):
    model, both = job()
    change(model, both)
    said = "in the optimizers 0 and 1" if said == "both" else said
    with pytest.raises(ConfigError, match=said):
        infinity.wrap_model(model, both, config("host", None))
    assert type(model.shared.weight) is nn.Parameter


def test_a_clip_for_a_step_of_all_parameters_is_refused():
    """Twin: with one optimizer it is not."""
    option = {"max_grad_norm": 1.0}
    with pytest.raises(ConfigError, match="with 2 optimizers"):
        infinity.wrap_model(*job(), config("host", None) | option)
    model, both = job()
    infinity.wrap_model(model, both[:1], config("host", None) | option)


def test_a_backward_does_not_step_for_one_of_several():
    model, (first, _) = infinity.wrap_model(*job(), config("host", None))
    with pytest.raises(UsageError, match="one of several optimizers"), first.step_in_backward():
        pass
    assert len(train(model, [first])) == 6


def test_a_parameter_that_moved_to_the_other_is_refused_before_a_step():
    model, (first, second) = infinity.wrap_model(*job(), config("host", None))
    train(model, [first, second])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    second.param_groups[0]["params"].append(model.shared.weight)
    model(torch.ones(1, 16)).sum().backward()
    with pytest.raises(UsageError, match="another optimizer's"):
        second.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_list_of_one_and_a_tuple_give_lists():
    """Twins: a single one gives itself, None gives None."""
    model, both = job()
    assert type(infinity.wrap_model(model, tuple(both), config("host", None))[1]) is list
    assert as_given(None) == [] and as_given(both[0]) == both[:1] and as_given(tuple(both)) == both
    model, both = job()
    model, (one,) = infinity.wrap_model(model, both[:1], config("host", None))
    assert isinstance(one, torch.optim.Optimizer)
    assert infinity.wrap_model(job()[0], None, config("host", None))[1] is None


def test_places_and_orders_follow_the_list():
    model, both = job()
    optimizers = Optimizers(both)
    assert optimizers.optimizer_index_of(model.shared.bias) == 1
    assert optimizers.order_of(model.shared.bias) == (1, 1)
    assert optimizers.of(model.encoder[0].weight).optimizer is both[0]
    assert optimizers.of(nn.Parameter(torch.zeros(1))) is None and len(Optimizers([])) == 0


def wrapped_twice(home: str, folder):
    model, (first, second) = job()
    model, first = infinity.wrap_model(model, first, config(home, folder))
    model, second = infinity.wrap_model(model, second, config(home, folder))
    return model, [first, second]


@needs("ext/class_step")
@pytest.mark.parametrize("home", HOMES)
def test_a_model_is_wrapped_again_with_another_optimizer(home, tmp_path):
    """With torch's bits; and a checkpoint has both."""
    plain, theirs = job()
    expected = train(plain, theirs)
    model, optimizers = wrapped_twice(home, tmp_path)
    assert train(model, optimizers) == expected and same_values(model, plain)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizers)
    more = train(model, optimizers, seed=2)
    again, others = infinity.wrap_model(*job(), config("host", tmp_path))
    infinity.load_checkpoint(tmp_path / "saved", again, others)
    assert train(again, others, seed=2) == more == train(plain, theirs, seed=2)
    model, given = infinity.unwrap_model(model, optimizers)
    assert train(model, given, seed=3) == train(plain, theirs, seed=3)


@needs("ext/class_step")
def test_an_optimizer_with_state_joins():
    """What a plain run left in it goes home."""
    plain, theirs = job()
    train(plain, theirs)
    model, (first, second) = copy.deepcopy((plain, theirs))
    model, second = infinity.wrap_model(model, second, config("host", None))
    model, first = infinity.wrap_model(model, first)
    assert train(model, [first, second], seed=2) == train(plain, theirs, seed=2)


@needs("ext/class_step")
def test_what_cannot_join_is_refused_and_changes_nothing():
    """Parameters of another model, another configuration, and what is wrapped already."""
    model, (first, second) = job()
    model, first = infinity.wrap_model(model, first, config("host", None))
    other, (strange, _) = job()
    infinity.wrap_model(other, strange, config("host", None))
    with pytest.raises(ConfigError, match="of another wrapped model"):
        infinity.wrap_model(model, torch.optim.SGD([other.shared.bias], lr=0.1))
    with pytest.raises(ConfigError, match="master='fp32'"):
        infinity.wrap_model(model, second, {"master": "fp32"})
    with pytest.raises(UsageError, match="this optimizer is wrapped already|not supported"):
        infinity.wrap_model(model, first)
    model, second = infinity.wrap_model(model, second)
    plain, theirs = job()
    assert train(model, [first, second]) == train(plain, theirs)


def test_modules_that_share_a_trunk_are_wrapped_as_one():
    """Each is called by itself. Twin: one after the other is refused, and says how."""

    def pair():
        torch.manual_seed(0)
        trunk = nn.Linear(16, 16)
        both = nn.Sequential(trunk, nn.Linear(16, 4)), nn.Sequential(trunk, nn.Linear(16, 2))
        return both, [
            torch.optim.SGD(both[0].parameters(), lr=0.1),
            torch.optim.SGD(both[1][1].parameters(), lr=0.2),
        ]

    def run(both, optimizers):
        losses = []
        for _ in range(3):
            for module, optimizer in zip(both, optimizers):
                loss = module(torch.ones(2, 16)).pow(2).mean()
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                for each in optimizers:
                    each.zero_grad()
        return losses

    both, optimizers = pair()
    _, optimizers = infinity.wrap_model(nn.ModuleList(both), optimizers, config("host", None))
    assert run(both, optimizers) == run(*pair())
    both, optimizers = pair()
    infinity.wrap_model(both[0], optimizers[0], config("host", None))
    with pytest.raises(UsageError, match="share parameters as one"):
        infinity.wrap_model(both[1], optimizers[1], config("host", None))
