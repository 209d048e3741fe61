"""Token-wise: modules whose result for a token depends on other tokens are found; no ranks."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from infinity.ext.sequence.token_wise import computes_positions, depends_on_others, is_like

COUNT = 6
PLACES, OTHERS = torch.arange(COUNT, 2 * COUNT), torch.arange(COUNT)


@contextmanager
def seeing():
    yield []


class Conv(nn.Module):
    """Sees the token before."""

    def forward(self, x):
        return x + torch.cat([x[:, :1], x[:, :-1]], 1)


class Normed(nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)


class Counted(nn.Module):
    def forward(self, x):
        return x * len(x[0])


class Bool(nn.Module):
    """A mask that has the token dim in its second place from the end."""

    def forward(self, x, position_ids):
        return position_ids[:, :, None] > position_ids.amin(1)[:, None, None]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        return {"hidden": (self.drop(self.layer(x)).relu(), x.shape[-1])}


class Flat(nn.Module):
    """Takes its tokens in another form, of which nothing is known."""

    def forward(self, x):
        assert x.shape == (2, COUNT, 4)
        return x.sum(1)


def given(module: nn.Module) -> tuple:
    torch.manual_seed(0)
    more = {"position_ids": PLACES[None]} if isinstance(module, Bool) else {}
    return (torch.randn(2, COUNT, 4),), more


@pytest.mark.parametrize(
    ("module", "depends"),
    [(Conv, True), (Normed, True), (Counted, True), (Bool, True), (Gated, False), (Flat, False)],
)
def test_a_module_that_sees_other_tokens_is_found(module, depends):
    """Method: it computes the same tokens once more, behind others. Dropout draws nothing, and the
    mode and the random numbers stay."""
    made = module().train()
    random = torch.get_rng_state()
    assert depends_on_others(made, given(made), PLACES, OTHERS, seeing) is depends
    assert all(each.training for each in made.modules())
    arguments = given(made)
    torch.set_rng_state(random)
    depends_on_others(made, arguments, PLACES, OTHERS, seeing)
    assert torch.equal(torch.get_rng_state(), random)


def test_what_a_layer_gives_its_attention_is_compared():
    """Queries of batch x heads x tokens x width, and a scale."""

    class Layer(nn.Module):
        def forward(self, x):
            seen.append((x.view(2, x.shape[1], 2, 2).transpose(1, 2), scale(x)))
            return x

    seen: list = []

    @contextmanager
    def noting():
        seen.clear()
        yield seen

    def scale(x):
        return 1.0

    assert not depends_on_others(Layer(), given(Layer()), PLACES, OTHERS, noting)

    def scale(x):
        return x.shape[1] ** 0.5

    assert depends_on_others(Layer(), given(Layer()), PLACES, OTHERS, noting)


def test_modules_of_positions_are_known_by_their_arguments():
    assert computes_positions(Bool()) and not computes_positions(Gated())
    assert is_like(PLACES[None].expand(3, -1), PLACES)
    assert not is_like(PLACES.float(), PLACES) and not is_like(PLACES + 1, PLACES)
