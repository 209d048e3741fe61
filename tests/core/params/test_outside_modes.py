"""Apart: the engine's own work runs outside of modes and transforms, and what has no bytes is
refused.

Words used here: **counting**: a mode that lets every operation be, and counts it. **bare**: a
thread in no mode, transform or trace.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deleted import needs
from lone import lone_group
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functionalize, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.core.params.outside_modes import (
    has_bytes,
    is_compiling,
    outside_modes,
    refuse_without_bytes,
)
from infinity.errors import UsageError

X = torch.arange(6.0).view(2, 3)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@outside_modes
def ones(size: int = 2, *, fill: float = 1.0) -> torch.Tensor:
    """Makes what only real operations can."""
    return torch.full((size,), fill).mul_(1)


# --- work of the engine ---


def test_work_apart_is_not_seen_by_a_mode():
    """Twins: the mode sees what comes before it and after it."""
    with Counting() as mode:
        X.add(1)
        assert mode.count == 1
        made = ones(3, fill=2.0)
        assert mode.count == 1
        X.add(1)
    assert mode.count == 2 and made.tolist() == [2, 2, 2]
    assert ones(fill=3.0).tolist() == [3, 3] and ones.__name__ == "ones" and "real" in ones.__doc__


def test_work_apart_has_bytes_under_a_mode_of_fakes():
    """Twin: what is made there otherwise has none."""
    with FakeTensorMode():
        made = ones()
        assert not has_bytes(torch.ones(2))
    assert type(made) is torch.Tensor and made.tolist() == [1, 1]


@pytest.mark.parametrize("transform", ["vmap", "grad", "both"])
def test_work_apart_is_outside_of_all_transforms(transform):
    """Twin: the transform goes on after it."""
    depths = []

    @outside_modes
    def work() -> None:
        depths.append(torch._C._functorch.maybe_current_level())

    def of(x: torch.Tensor) -> torch.Tensor:
        work()
        depths.append(torch._C._functorch.maybe_current_level() is not None)
        return (x * x).sum()

    run = {"vmap": vmap(of), "grad": grad(of), "both": vmap(grad(of))}[transform]
    out = run(X)
    assert depths == [None, True]
    expected = (X * X).sum(1) if transform == "vmap" else 2 * X
    assert torch.equal(out, expected)


def test_work_apart_is_outside_of_a_mode_inside_a_transform():
    seen = []

    def of(x: torch.Tensor) -> torch.Tensor:
        with Counting() as mode:
            ones()
            seen.append(mode.count)
        return x

    vmap(of)(X)
    assert seen == [0]


def test_an_error_of_work_apart_is_raised_and_the_mode_goes_on():
    @outside_modes
    def failing() -> None:
        raise ValueError("of the work")

    with Counting() as mode:
        with pytest.raises(ValueError, match="of the work"):
            failing()
        X.add(1)
    assert mode.count == 1
    with pytest.raises(ValueError, match="of the work"):
        failing()


def test_torch_is_compiling_while_it_traces():
    assert not is_compiling()
    with tracing(TracingContext(None)):
        assert is_compiling()
    assert not is_compiling()


# --- bytes ---


def test_a_tensor_has_bytes_unless_it_is_on_meta_fake_or_of_a_transform():
    found = []

    def of(x: torch.Tensor) -> torch.Tensor:
        found.append(has_bytes(x))
        return x

    assert has_bytes(X) and has_bytes(X[0]) and has_bytes(torch.nn.Parameter(X))
    assert not has_bytes(torch.ones(2, device="meta"))
    assert not has_bytes(FakeTensorMode().from_tensor(X))
    vmap(of)(X)
    assert found == [False]


@needs("ext/dtensor")
def test_a_distributed_tensor_has_bytes_if_its_local_part_has():
    with lone_group():
        tensor = distribute_tensor(X.clone(), dist.init_device_mesh("cpu", (1,)), [Shard(0)])
        assert has_bytes(tensor)
        tensor._local_tensor = FakeTensorMode().from_tensor(X)
        assert not has_bytes(tensor)


# --- refusals ---


def refused(**kw) -> str | None:
    """What the refusal of a forward says it is under; None without one."""
    try:
        refuse_without_bytes("a forward", **kw)
    except UsageError as error:
        text = str(error)
        assert text.startswith("a forward of a wrapped model under ")
        assert "its weights come from home, which is not done there. " in text
        return text.removeprefix("a forward of a wrapped model under ").partition(":")[0]
    return None


def told(run, **kw) -> str | None:
    """The refusal inside ``run``, which is given a function."""
    found = []

    def of(x: torch.Tensor) -> torch.Tensor:
        found.append(refused(**kw))
        return x * 1

    run(of)
    return found[0]


def test_a_bare_thread_and_one_that_counts_are_not_refused():
    assert refused() is None
    with Counting():
        assert refused() is None


def test_a_mode_of_fakes_is_refused_with_what_to_do_instead():
    with FakeTensorMode():
        assert refused() == "FakeTensorMode"
        with pytest.raises(
            UsageError, match=r"before wrap_model, or with another one on torch.dev"
        ):
            refuse_without_bytes("a forward")
        with Counting():
            assert refused() == "FakeTensorMode"
    assert refused() is None


def test_tracers_are_refused():
    assert told(lambda of: make_fx(of)(X)) == "a tracer (make_fx, export)"
    assert told(lambda of: torch.jit.trace(of, X, check_trace=False)) == "torch.jit.trace"
    assert refused() is None


@pytest.mark.parametrize("run", [vmap, grad, lambda of: vmap(grad(of))])
def test_a_transform_that_saves_for_a_backward_is_refused(run):
    """Twins: one without gradients; a use that allows transforms."""

    def ran(of) -> None:
        run(lambda x: of(x).sum())(X)

    assert told(ran) == "a transform of torch.func"
    assert told(ran, transforms=False) is None


def test_a_transform_without_gradients_saves_nothing():
    """Method: torch.no_grad around and inside it."""
    with torch.no_grad():
        assert told(lambda of: vmap(of)(X)) is None


def test_functionalization_that_saves_nothing_is_not_a_transform_that_does():
    """Twin: another transform around it is one."""
    assert told(lambda of: functionalize(of)(X)) is None
    assert told(lambda of: vmap(functionalize(of))(X)) == "a transform of torch.func"
