"""Two versions of the weights in one process: what is under way goes on with those that it began
with."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from inside import parts_of
from lines import is_line
from models import at_home, differing
from torch import nn

import infinity
from infinity.core.run.engine import Engine
from infinity.core.units.home_arrays import HomeArrays
from infinity.core.units.unit import ParamUnit
from infinity.core.units.unit_buffers import UnitBuffers
from infinity.ext.versions_2bw.stale_weights import StaleWeights
from infinity.ext.versions_2bw.versions import UnitVersions

HOMES = ("device", "hostile")
SLOW_TWO, SLOW_AHEAD = (
    pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 0.0), (1, 1.0))
)


class Clamping(nn.Linear):
    """Changes its weight in every forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class Shrinking(nn.Linear):
    """Does so where torch does not count it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class Looking(nn.Linear):
    """Looks at its weight where it could change it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight.data.abs().max()


def model_of(kind: type = nn.Linear) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Sequential(kind(32, 32), nn.ReLU()), nn.Linear(32, 8)
    )


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(number))


def wrap(home: str, folder: Any, kind: type = nn.Linear, kept: int = 1) -> tuple:
    model = model_of(kind)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home(home, home, folder))
    engine = parts_of(model).engine
    with engine.uses.begin():
        parts_of(engine).add(StaleWeights(parts_of(engine).job)).keep(kept)
    return model, optimizer, engine


def stale_of(engine: Engine) -> StaleWeights:
    return parts_of(engine).find(StaleWeights)


def gradients_of(model: nn.Module, number: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(batch(number)).square().mean().backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def run_batch(model: Any, optimizer: Any, engine: Any, number: int) -> None:
    """One batch of a run, and the update that it makes."""
    with engine.accumulation.opened():
        stale_of(engine).compute_with(max(number - 1, 0))
        model(batch(number)).square().mean().backward()
    stale_of(engine).update(optimizer.step)
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("home", HOMES)
def test_a_graph_goes_on_with_the_weights_that_it_began_with(home, tmp_path):
    """Two forwards, the first one's backward, an update, the other's backward and a forward of the
    third: gradients of the first weights. The failing twins: after the update the newest weights
    give others, and an ordinary step refuses the second backward.
    """
    model, optimizer, engine = wrap(home, tmp_path)
    plain = model_of()
    with stale_of(engine).running():
        with engine.accumulation.opened():
            losses = [model(batch(number)).square().mean() for number in range(2)]
            losses[0].backward()
        stale_of(engine).update(optimizer.step)
        optimizer.zero_grad()
        with engine.accumulation.opened():
            stale_of(engine).compute_with(0)
            losses[1].backward()
            late = model(batch(1)).square().mean()
            assert torch.equal(late, losses[1])
            stale_of(engine).compute_with(1)
            assert not torch.equal(model(batch(1)).square().mean(), losses[1])
        found = {name: param.grad.clone() for name, param in model.named_parameters()}
    optimizer.zero_grad()
    assert not differing(found, gradients_of(plain, 1))
    plain.load_state_dict(values(model))
    assert len(differing(found, gradients_of(plain, 1))) == len(found)
    loss = model(batch(2)).square().mean()
    model(batch(3)).square().mean().backward()
    optimizer.step()
    with pytest.raises(infinity.UsageError, match="as they were in its forward"):
        loss.backward()
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_an_update_that_fails_leaves_one_version(home, kept, tmp_path):
    """Before it has begun: the weights of before, and the same gradient is applied by a step.
    Between two of its flat params: it is carried to its end, by which the weights are those of an
    undisturbed one."""
    expected: dict[str, torch.Tensor] = {}
    for fails in ("never", "before", "between"):
        model, optimizer, engine = wrap(home, tmp_path, kept=kept)
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(KeyboardInterrupt),
            stale_of(engine).running(kept),
        ):
            with engine.accumulation.opened():
                model(batch(0)).square().mean().backward()
            calls: list[int] = []
            commit = HomeArrays.commit

            def interrupted(*arguments: Any, calls: list = calls, commit: Any = commit) -> None:
                calls.append(1)
                if len(calls) == 2:
                    raise KeyboardInterrupt
                commit(*arguments)

            def raises() -> None:
                raise KeyboardInterrupt

            if fails == "between":
                patch.setattr(HomeArrays, "commit", interrupted)
            stale_of(engine).update(raises if fails == "before" else optimizer.step)
            assert fails == "never"
            raise KeyboardInterrupt
        if fails == "before":
            assert not differing(values(model), values(model_of()))
            optimizer.step()
        optimizer.zero_grad()
        for number in (1, 2):  # and so do what follows, in place
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = copy.deepcopy(values(model))
        expected = expected or found
        assert not differing(found, expected), fails
        infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("home", ["host", "device"])
@pytest.mark.parametrize("kept, ahead", [(1, 0.0), SLOW_TWO, SLOW_AHEAD])
def test_an_interruption_at_any_line_between_versions_leaves_one(home, kept, ahead, tmp_path):
    """In the exchange of a unit's versions, in the choice of one and at the end, also with error
    feedback: afterwards a forward computes with the newest weights."""
    model, optimizer, engine = wrap(home, tmp_path, kept=kept + bool(ahead))
    watched = {
        function.__code__
        for function in (
            UnitVersions.begin_update,
            UnitVersions.compute_with,
            UnitVersions.extrapolate,
            UnitVersions._swap,
            UnitVersions._show,
            ParamUnit.change_places,
            UnitBuffers.swap,
            StaleWeights.running.__wrapped__,
        )
    }
    plain, struck = model_of(), 0

    while True:
        lines = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code not in watched:
                return None
            if is_line(frame, event):
                lines += 1
                if lines == struck + 1:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with stale_of(engine).running(kept, ahead):
                for number in range(1 + kept):
                    run_batch(model, optimizer, engine, number)
                stale_of(engine).compute_with(1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if lines <= struck:
            break
        struck += 1
        optimizer.zero_grad()
        plain.load_state_dict(values(model))
        assert torch.equal(model(batch(5)), plain(batch(5))), struck
        assert torch._C._is_torch_function_enabled(), struck
    assert struck > 50
    infinity.unwrap_model(model, optimizer)


def test_casts_by_autocast_are_of_the_weights_that_are_computed_with(tmp_path):
    """Autocast keeps its casts by parameter. The failing twin: plain torch goes on with those of
    before a step."""
    outputs = {}
    model, optimizer, engine = wrap("host", tmp_path)
    with torch.autocast("cpu", dtype=torch.bfloat16), stale_of(engine).running():
        with engine.accumulation.opened():
            outputs["before"] = model(batch(0))
            outputs["before"].square().mean().backward()
        stale_of(engine).update(optimizer.step)
        optimizer.zero_grad()
        with engine.accumulation.opened():
            outputs["newest"] = model(batch(0))
            stale_of(engine).compute_with(0)
            outputs["older"] = model(batch(0))
    plain = model_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(outputs["before"], plain(batch(0))) and torch.equal(
            outputs["older"], outputs["before"]
        )
        plain.load_state_dict(values(model))
        assert torch.equal(plain(batch(0)), outputs["before"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain(batch(0)), outputs["newest"]) and not torch.equal(
            outputs["newest"], outputs["before"]
        )
    optimizer.zero_grad()
    infinity.unwrap_model(model, optimizer)


def test_a_group_that_has_no_older_weights_is_refused(tmp_path):
    model = model_of()
    model[0].weight.requires_grad_(False)
    optimizer: Any = torch.optim.SGD(
        [param for param in model.parameters() if param.requires_grad], lr=0.1
    )
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", tmp_path))
    engine = parts_of(model).engine
    with engine.uses.begin():
        parts_of(engine).add(StaleWeights(parts_of(engine).job))
    with pytest.raises(infinity.UsageError, match="after without_flush"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 1
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("home", ["host", "device"])
@pytest.mark.parametrize("kind", [Clamping, Shrinking])
def test_a_forward_that_changes_its_weights_is_refused_with_older_ones(home, kind, tmp_path):
    model, optimizer, engine = wrap(home, tmp_path, kind)
    with (
        pytest.raises(infinity.UsageError, match="changed parameters of unit .* in place"),
        stale_of(engine).running(),
    ):
        with engine.accumulation.opened():
            model(batch(0)).square().mean().backward()
        stale_of(engine).update(optimizer.step)
        optimizer.zero_grad()
        with engine.accumulation.opened():
            stale_of(engine).compute_with(0)
            model(batch(1))
    model(batch(1)).square().mean().backward()  # which it may do again
    optimizer.step()
    optimizer.zero_grad()
    infinity.unwrap_model(model, optimizer)


def test_a_forward_that_looks_at_its_weights_goes_on_with_older_ones(tmp_path):
    """Through ``.data``, by which it could change them."""
    model, optimizer, engine = wrap("host", tmp_path, Looking)
    with stale_of(engine).running():
        for number in range(3):
            run_batch(model, optimizer, engine, number)
    assert engine.steps.index == 3
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("home", HOMES)
def test_each_of_several_versions_is_computed_with_until_it_is_replaced(home, tmp_path):
    """Against copies of the weights after each update. The failing twin: an older version than
    those that are kept is refused, and so is one that is not made yet."""
    model, optimizer, engine = wrap(home, tmp_path, kept=3)
    plain, versions = model_of(), [values(model)]
    with stale_of(engine).running(3):
        for number in range(7):
            with engine.accumulation.opened():
                for version in range(max(0, number - 3), number + 1):
                    stale_of(engine).compute_with(version)
                    plain.load_state_dict(versions[version])
                    assert torch.equal(model(batch(9)), plain(batch(9))), (number, version)
                for version in (number - 4, number + 1):
                    with pytest.raises(infinity.errors.InternalError, match="3 are kept"):
                        stale_of(engine).compute_with(version)
                stale_of(engine).compute_with(number)
                model(batch(number)).square().mean().backward()
            stale_of(engine).update(optimizer.step)
            optimizer.zero_grad()
            homes = [flat for unit in parts_of(engine).units for flat in unit.flat_params]
            for flat in homes:
                flat.homes.wait()
            versions.append(newest_of(engine))
    assert not differing(values(model), versions[-1])
    infinity.unwrap_model(model, optimizer)


def newest_of(engine: Any) -> dict[str, torch.Tensor]:
    """The newest weights at home, inside a run."""
    with engine.uses.begin():
        return {
            handle.name: handle.flat_param.read_value(parts_of(engine).store, handle.index).clone()
            for unit in parts_of(engine).units
            for handle in unit.handles
        }
