"""WeightAverage: what is averaged, at which homes, and that an interrupted change is completed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from inside import parts_of
from models import at_home, seeded
from torch import nn

import infinity
from infinity.core.machine.tiers import Tier
from infinity.core.units.handle import handle_of
from infinity.errors import UsageError
from infinity.ext.averages.weight_average import WeightAverage


def half(averages: list, values: list, count: torch.Tensor) -> None:
    for average, value in zip(averages, values):
        average.mul_(0.5).add_(value, alpha=0.5)


class Made:
    """A wrapped model of two layers, of which the first may be frozen, and its average."""

    def __init__(self, home, swap, *, blend: Callable = half, dtype=torch.float32, frozen=False):
        self.model = seeded(3, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).to(dtype)
        if frozen:
            self.model[0].requires_grad_(False)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.model, self.optimizer = infinity.wrap_model(
            self.model, torch.optim.SGD(trained, lr=0.5), at_home(home, home, swap)
        )
        self.engine = parts_of(self.model).engine
        self.average = parts_of(self).add(WeightAverage(parts_of(self).job, blend))

    def set(self, value: float) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(torch.full((4, 4) if param.dim() == 2 else (4,), value))

    def weights(self) -> set[float]:
        return {float(x) for value in self.model.state_dict().values() for x in value.flatten()}

    def averages(self) -> set[float]:
        handles = [handle_of(param) for param in self.model.parameters()]
        return {float(x) for each in handles for x in self.average.kept.read_whole(each)}


@pytest.mark.parametrize("home", ["device", "hostile"])
def test_updates_blend_and_the_first_copies(home, swap):
    made = Made(home, swap)
    for number, (value, expected) in enumerate(((1.0, 1.0), (3.0, 2.0), (4.0, 3.0))):
        made.set(value)
        assert made.average.count == number
        made.average.update()
        assert made.averages() == {expected} and made.weights() == {value}


def test_the_blend_is_told_how_many_updates_there_were(swap):
    told: list[int] = []
    made = Made("host", swap, blend=lambda averages, values, count: told.append(int(count)))
    for _ in range(3):
        made.average.update()
    assert sorted(set(told)) == [1, 2] and made.average.count == 3


def test_weights_and_averages_change_places_and_back(swap):
    made = Made("hostile", swap)
    made.set(1.0)
    made.average.update()
    made.set(5.0)
    made.average.is_wanted = True
    made.average.exchange()
    assert made.average.is_exchanged
    assert made.weights() == {1.0} and made.averages() == {5.0}
    made.average.bring_back()  # still wanted
    assert made.average.is_exchanged
    made.average.is_wanted = False
    made.average.bring_back()
    assert not made.average.is_exchanged
    assert made.weights() == {5.0} and made.averages() == {1.0}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_update_is_completed_by_the_next_use(at, swap):
    """Claim: no parameter is blended twice, which would give another number."""
    calls: list[int] = []

    def blend(averages: list, values: list, count: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        half(averages, values, count)

    made = Made("host", swap, blend=blend)
    made.set(1.0)
    made.average.update()
    made.set(3.0)
    with pytest.raises(KeyboardInterrupt), made.engine.uses.begin():
        made.average.update()
    assert made.weights() == {3.0}  # a use
    assert made.averages() == {2.0} and made.average.count == 2


def test_only_what_is_stepped_is_averaged(swap):
    made = Made("host", swap, frozen=True)
    has = [made.average.kept.has(handle_of(param)) for param in made.model.parameters()]
    assert has == [False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_are_fp32_of_the_masters(dtype, swap):
    """Method: the steps of a bf16 model are too small for its weights, and not for its masters."""
    made = Made("host", swap, dtype=dtype)
    made.set(1.0)
    for param in made.model.parameters():
        assert made.average.kept.dtype_of(handle_of(param).flat_param) is torch.float32
    for _ in range(2):
        (made.model(torch.zeros(1, 4).to(dtype)).float().sum() * 2**-10).backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
    made.average.update()
    bias = made.average.kept.read_whole(handle_of(made.model[1].bias))
    assert bias.tolist() == [1 - 2**-10] * 4


def test_a_part_is_read_and_written_alone(swap):
    """Twin: the others stay."""
    made = Made("host", swap)
    made.set(1.0)
    made.average.update()
    handle = handle_of(made.model[1].bias)
    made.average.kept.write_own(handle, torch.arange(4.0))
    assert {0.0, 1.0, 2.0, 3.0} == set(made.average.kept.array_of(handle.flat_param).flat.tolist())
    assert made.averages() == {0.0, 1.0, 2.0, 3.0}
    assert set(made.average.kept.read_whole(handle_of(made.model[1].weight)).tolist()) == {1.0}
    made.average.resume(7)
    assert made.average.count == 7


@pytest.mark.parametrize(("home", "in_memory"), [("host", True), ("nvme", False)])
def test_freed_averages_hold_no_memory(home, in_memory, swap):
    made = Made(home, swap)
    homes = [flat.homes for unit in parts_of(made).units for flat in unit.flat_params]
    held = [array for each in homes for array in each.kept.values()]
    assert {array.flat is not None for array in held} == {in_memory}
    account = parts_of(made).ledger.accounts[Tier.HOST]
    planned = account.planned_nbytes
    for _ in range(2):
        made.average.kept.free()
    assert (account.planned_nbytes < planned) == in_memory
    assert not any(each.kept for each in homes)
    assert not made.average.kept.has(handle_of(made.model[0].weight))


def test_an_average_outlives_no_model(swap):
    made = Made("host", swap)
    assert made.average.job is parts_of(made).job
    infinity.unwrap_model(made.model, made.optimizer)
    with pytest.raises(UsageError, match="went with its model"):
        _ = made.average.job
