"""Config(tied=...): parameters that are one though the model has two."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

import infinity

PAIRS = [("embedding.weight", "head.weight")]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = (
            nn.Embedding(32, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 32, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(x)).tanh())


def build(*, tied: bool = False, seed: int = 2) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        model.head.weight.copy_(model.embedding.weight)
    if tied:
        model.head.weight = model.embedding.weight
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        x = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("home", ["device", "hostile"])
def test_two_become_one_and_train_as_one(home, swap):
    """The twin: two that start alike and are not named part."""
    plain, apart = build(tied=True), build()
    expected = train(*plain)
    model, optimizer = infinity.wrap_model(
        *build(), models.at_home(home, home, swap) | {"tied": PAIRS}
    )
    assert model.head.weight is model.embedding.weight
    assert train(model, optimizer) == expected != train(*apart)
    assert not models.differing(model.state_dict(), plain[0].state_dict())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(plain[0].parameters())
    )


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([("embedding.weight", "heads.weight")], "Model has no parameter heads.weight"),
        (
            [("hidden.weight", "head.weight")],
            r"hidden.weight is \(16, 16\) torch.float32 and head.weight is \(32, 16\)",
        ),
        ([("hidden.bias", "other")], "Model has no parameter other"),
    ],
)
def test_what_cannot_be_one_is_refused(pairs, said):
    model, optimizer = build()
    before = dict(model.named_parameters())
    with pytest.raises(infinity.ConfigError, match=said):
        infinity.wrap_model(model, optimizer, {"params": "host", "tied": pairs})
    assert all(param is before[name] for name, param in model.named_parameters())


def test_other_values_are_refused():
    model, optimizer = build()
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(
        infinity.ConfigError, match="embedding.weight and head.weight have other values"
    ):
        infinity.wrap_model(model, optimizer, {"params": "host", "tied": PAIRS})


def test_a_wrap_that_fails_later_leaves_two():
    model, optimizer = build()
    before, given = (
        dict(model.named_parameters()),
        [list(group["params"]) for group in optimizer.param_groups],
    )
    with pytest.raises(infinity.CapacityError):
        infinity.wrap_model(
            model, optimizer, {"params": "host", "host_memory": 1000, "tied": PAIRS}
        )
    assert all(
        param is before[name] for name, param in model.named_parameters(remove_duplicate=False)
    )
    assert all(
        a is b
        for group, params in zip(optimizer.param_groups, given)
        for a, b in zip(group["params"], params, strict=True)
    )
    assert train(
        *infinity.wrap_model(model, optimizer, {"params": "host", "tied": PAIRS})
    ) == train(*build(tied=True))


@pytest.mark.parametrize("value", ["embedding.weight", [("a",)], [("a", 1)], [["a", "b", "c"]]])
def test_anything_but_pairs_of_names_is_refused(value):
    with pytest.raises(infinity.ConfigError, match="must be a list of pairs of parameter names"):
        infinity.Config(tied=value)
