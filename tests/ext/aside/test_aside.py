"""An engine that stands aside changes nothing but the time of a step.

Words used here: **there** means that the engine stands aside, **here** that it does not.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside import parts_of
from models import differing, in_child, loss_of, tokens, transformer
from striker import Striker
from torch import nn

import infinity
from infinity.ext.aside import aside

SEED = 61
HAS_COMPILED = aside._has_compiled
Pair = tuple[nn.Module, Any]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch) -> None:
    """Other tests of this process may have compiled something."""
    monkeypatch.setattr(aside, "_has_compiled", lambda: False)


@pytest.fixture
def soon(monkeypatch) -> None:
    """Has the engine stand aside after its first step, and again after each return."""
    for name, value in (("SKIPPED", 0), ("MEASURED", 1), ("SLOWER", float("inf"))):
        monkeypatch.setattr(aside, name, value)


def pair(make: Callable[..., Any] = torch.optim.AdamW, **config: Any) -> Pair:
    """A model whose embedding is a table that lands use by use, and is its head, too."""
    torch.manual_seed(SEED)
    model = transformer(SEED, width=64, blocks=2)
    table = nn.Embedding(4096, 64)
    model.tokens, model.head.weight = table, table.weight
    config = {"params": "device", "optimizer": "device", **config}
    return infinity.wrap_model(model, make(model.parameters(), lr=1e-2), config)


def is_there(model: nn.Module) -> bool:
    return parts_of(model).running.stands_aside


def backward(model: nn.Module, number: int) -> torch.Tensor:
    torch.manual_seed(number)
    loss = loss_of(model, tokens(SEED + number))
    loss.backward()
    return loss.detach()


def step(model: nn.Module, optimizer: Any, number: int, *, to_none: bool = True) -> torch.Tensor:
    loss = backward(model, number)
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
    return loss


def ends(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """All weights, and the optimizer's state."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": value.clone() for name, value in state.items()}
    return found


def both(
    monkeypatch, program: Callable[[Pair], Any], **config: Any
) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """What ``program`` gives, and all values at its end, there and here."""
    found = []
    for may in (True, False):
        if not may:
            monkeypatch.setattr(aside, "_may_stand_aside", lambda job: False)
        job = pair(**config)
        result = program(job)
        found.append((result, ends(*job)))
    return found


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


# --- when ---


def test_it_stands_aside_after_its_first_steps_and_says_so(caplog):
    """Twins: one step before, and a model whose optimizer's state is in host memory. Plain torch
    takes as long here as a clock says that it does."""
    caplog.set_level(logging.INFO, logger=aside.__name__)
    model, optimizer = pair()
    clock = parts_of(model).updates.clock
    first = aside.SKIPPED + aside.MEASURED
    for number in range(2 * first):
        assert is_there(model) is (number >= first)
        clock.ended -= 100.0 if number < first else 0.0  # of a slow engine
        step(model, optimizer, number)
    assert is_there(model) and "it stands aside until it is asked" in caplog.text
    assert "runs as plain torch" in infinity.stats(model).bottleneck and is_there(model)
    other, _ = infinity.wrap_model(nn.Linear(8, 8), None, {"params": "device"})
    assert "plain torch" not in infinity.stats(other).bottleneck


def test_it_comes_back_where_plain_torch_is_slower(caplog):
    caplog.set_level(logging.INFO, logger=aside.__name__)
    model, optimizer = pair()
    clock, seen = parts_of(model).updates.clock, []
    for number in range(4 * (aside.SKIPPED + aside.MEASURED)):
        clock.ended -= 100.0 if is_there(model) else 0.0
        step(model, optimizer, number)
        seen.append(is_there(model))
    first = aside.SKIPPED + aside.MEASURED
    assert any(seen) and not any(seen[2 * first - 1 :]) and ": it stays" in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": "host"},
        {"device_memory": "1GiB"},
        {"master": "fp32", "param_dtype": torch.bfloat16},
        {"audit": 1.0},
        {"micro_batch": 1},
        {"activations": "host"},
        {"fused_loss": True},
    ],
    ids=lambda config: next(iter(config)),
)
def test_it_stays_where_something_moves_or_needs_its_hooks(config, soon):
    model, optimizer = pair(**config)
    for number in range(3):
        step(model, optimizer, number)
        assert not is_there(model)


def test_it_stays_where_a_user_holds_state_or_an_average_is_kept(soon):
    model, optimizer = pair()
    held = model.state_dict()
    step(model, optimizer, 0)
    assert not is_there(model)
    del held
    step(model, optimizer, 1)
    assert is_there(model)
    average = infinity.ema(model, 0.9)
    step(model, optimizer, 2)
    average.update()
    assert not is_there(model)


def test_it_stays_where_torch_has_compiled_anything(soon, monkeypatch):
    model, optimizer = pair()
    frames = {"total": 1}
    with monkeypatch.context() as patch:
        utils = SimpleNamespace(counters={"frames": frames})
        patch.setitem(sys.modules, "torch._dynamo.utils", utils)
        assert HAS_COMPILED()
        frames.clear()
        assert not HAS_COMPILED()
    monkeypatch.setattr(aside, "_has_compiled", lambda: True)
    step(model, optimizer, 0)
    assert not is_there(model)


def test_it_stays_without_memory_for_the_gradients_that_autograd_makes(soon, monkeypatch):
    model, optimizer = pair()
    monkeypatch.setattr(aside, "memory_left", lambda: 1024)
    step(model, optimizer, 0)
    assert not is_there(model)
    monkeypatch.setattr(aside, "memory_left", lambda: 1 << 40)
    step(model, optimizer, 1)
    assert is_there(model)


# --- the same bits ---


OPTIMIZERS = {
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr),
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "clipped": lambda params, lr: torch.optim.AdamW(params, lr=lr, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_weights_and_state_are_the_same(name, soon, monkeypatch):
    """With accumulation, a clip, a rate that changes and a step without zero_grad. Of SGD, those of
    plain torch, too."""

    def program(job: Pair) -> list[torch.Tensor]:
        model, optimizer = job
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        losses = []
        for number in range(4):
            losses += [backward(model, 2 * number), backward(model, 2 * number + 1)]
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).clone())
            optimizer.step()
            schedule.step()
            if number != 2:
                optimizer.zero_grad(set_to_none=number != 1)
        losses.append(model.eval()(tokens(SEED)).detach())
        return losses

    config = {"max_grad_norm": 0.05} if name == "clipped" else {}
    there, here = both(monkeypatch, program, make=OPTIMIZERS[name], **config)
    assert alike(there[0], here[0]) and differing(there[1], here[1]) == []
    if name == "sgd":
        torch.manual_seed(SEED)
        model = transformer(SEED, width=64, blocks=2)
        table = nn.Embedding(4096, 64)
        model.tokens, model.head.weight = table, table.weight
        assert alike(program((model, OPTIMIZERS[name](model.parameters(), 1e-2))), there[0])


def test_users_hooks_are_called_once_with_the_gradient(soon, monkeypatch):
    """Those of before the wrap, of here and of there, and handles remove them."""

    def program(job: Pair) -> list[Any]:
        model, optimizer = job
        seen: list[Any] = []
        weight = model.blocks[0].attention.out.weight

        def note(param: torch.Tensor) -> None:
            seen.append(param.grad.clone())

        first = weight.register_post_accumulate_grad_hook(note)
        weight.register_hook(lambda grad: seen.append(grad.clone()))
        step(model, optimizer, 0)
        second = weight.register_post_accumulate_grad_hook(note)
        step(model, optimizer, 1)
        first.remove()
        step(model, optimizer, 2)
        model.state_dict()
        step(model, optimizer, 3)
        second.remove()
        return [*seen, step(model, optimizer, 4), len(seen)]

    there, here = both(monkeypatch, program)
    assert alike(there[0], here[0]) and there[0][-1] == 2 + 3 + 2 + 2 + 1


def test_a_users_changes_of_weights_and_gradients_count(soon, monkeypatch):
    """By ``.data``, in place, by assignment, by a load, and a frozen block."""

    def program(job: Pair) -> list[torch.Tensor]:
        model, optimizer = job
        step(model, optimizer, 0)
        weight = model.blocks[0].attention.out.weight
        weight.data = torch.full_like(weight.data, 0.01)
        losses = [step(model, optimizer, 1)]
        with torch.no_grad():
            weight.mul_(1.5)
            weight[0] = 0.25
        losses.append(step(model, optimizer, 2))
        losses.append(backward(model, 3))
        weight.grad = weight.grad * 2
        model.positions.grad.data.mul_(3)
        model.positions.grad.add_(0.5)
        losses.append(weight.grad.clone())
        optimizer.step()
        losses.append(weight.grad.clone())
        optimizer.zero_grad()
        for param in model.blocks[1].parameters():
            param.requires_grad_(False)
        losses.append(step(model, optimizer, 4))
        model.load_state_dict({k: v.clone() * 0.5 for k, v in model.state_dict().items()})
        losses += [step(model, optimizer, 5), step(model, optimizer, 6)]
        return losses

    there, here = both(monkeypatch, program)
    assert alike(there[0], here[0]) and differing(there[1], here[1]) == []


@pytest.mark.parametrize("to_none", [True, False])
def test_a_loop_that_saves_by_itself_stands_aside_between_its_saves(
    to_none, soon, monkeypatch, tmp_path
):
    """The saves of `infinity.Checkpoints` bring it back, and it goes again. Twin: a loop that never
    stands aside saves the same."""

    def program(job: Pair) -> Any:
        folder, seen = tmp_path / str(len(list(tmp_path.iterdir()))), []
        saver = infinity.Checkpoints(folder, *job, overhead=0.9)
        saver.resume()
        losses = []
        for number in range(12):
            losses.append(step(*job, number, to_none=to_none))
            saver.after_step()
            seen.append(is_there(job[0]))
        saver.close()
        assert any(seen) == (aside._may_stand_aside is may) and saver.steps == 12
        again = pair()
        assert infinity.Checkpoints(folder, *again).resume().steps == 12
        assert differing(ends(*again), ends(*job)) == []
        return losses

    may = aside._may_stand_aside
    there, here = both(monkeypatch, program)
    assert alike(there[0], here[0]) and differing(there[1], here[1]) == []


def use_accumulate(model: nn.Module, optimizer: Any, folder: Path) -> Any:
    with infinity.accumulate(model):
        return [backward(model, 50), backward(model, 51)]


USES = {
    "state_dict": lambda model, optimizer, folder: list(model.state_dict().values())[0].clone(),
    "optimizer's state": lambda model, optimizer, folder: [
        each["exp_avg"].clone() for each in optimizer.state_dict()["state"].values()
    ],
    "state of one": lambda model, optimizer, folder: optimizer.state[model.positions][
        "exp_avg_sq"
    ].clone(),
    "save": lambda model, optimizer, folder: tried(
        lambda: infinity.save_checkpoint(folder / "saved", model, optimizer)
    ),
    "full_params": lambda model, optimizer, folder: full(model),
    "park": lambda model, optimizer, folder: tried(lambda: infinity.park(model, folder)),
    "accumulate": use_accumulate,
    "clip": lambda model, optimizer, folder: infinity.clip_grad_norm_(optimizer, 0.1),
    "convert": lambda model, optimizer, folder: bool(refused(model.half)),
    "copy": lambda model, optimizer, folder: refused(lambda: __import__("copy").deepcopy(model)),
    "early": lambda model, optimizer, folder: early(model, optimizer),
}


def tried(work: Callable[[], Any]) -> str:
    """What ``work`` says where gradients wait for a step."""
    try:
        work()
    except infinity.UsageError as error:
        return str(error)
    return ""


def full(model: nn.Module) -> torch.Tensor:
    with infinity.full_params(model, writeback=True):
        model.positions.data.mul_(1.25)
        return model.positions.detach().clone()


def early(model: nn.Module, optimizer: Any) -> torch.Tensor:
    optimizer.zero_grad()
    with optimizer.step_in_backward():
        loss = backward(model, 60)
    optimizer.step()
    return loss


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(infinity.UsageError) as error:
        work()
    return str(error.value)


PLACES = ["between steps", "before a backward", "before a step", "after"]


@pytest.mark.parametrize(
    ("use", "when"),
    # A pass of several micro-batches cannot begin between a forward and its backward.
    [(use, when) for use in USES for when in PLACES if (use, when) != ("accumulate", PLACES[1])],
)
def test_any_other_use_finds_all_as_if_it_had_never_stood_aside(
    use, when, soon, monkeypatch, tmp_path
):
    """At each place of a step that has two backwards. ``after``: before zero_grad."""

    def program(job: Pair) -> list[Any]:
        model, optimizer = job
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        found: list[Any] = []

        def asks(at: str) -> None:
            if at == when:
                found.append(USES[use](model, optimizer, tmp_path))

        asks("between steps")
        found.append(backward(model, 2))
        torch.manual_seed(3)
        loss = loss_of(model, tokens(SEED + 3))
        asks("before a backward")
        if when != "before a backward" or use not in ("full_params", "early"):
            loss.backward()  # else torch refuses it: the weights are others
        asks("before a step")
        found.append([p.grad is None or p.grad.clone() for p in model.parameters()])
        optimizer.step()
        asks("after")
        optimizer.zero_grad()
        return [*found, step(model, optimizer, 4), step(model, optimizer, 5)]

    there, here = both(monkeypatch, program)
    assert alike(there[0], here[0]) and differing(there[1], here[1]) == []


# --- exceptions ---


class Stop(Exception):
    """The user's own."""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_a_pass_loses_no_gradient_of_before(where, soon, monkeypatch):
    """Of two micro-batches the second fails. In its forward: a step applies the first alone. In its
    backward: no step is made of half a sum before it is cleared, as at every home."""

    def program(job: Pair) -> list[Any]:
        model, optimizer = job
        step(model, optimizer, 0)
        found = [backward(model, 1)]

        def fail(*_: Any) -> None:
            raise Stop

        inner = model.blocks[0]
        handle = (
            inner.register_forward_hook(fail)
            if where == "forward"
            else inner.attention.out.weight.register_hook(fail)
        )
        with pytest.raises(Stop):
            backward(model, 2)
        handle.remove()
        if where == "backward":
            assert "is half done" in refused(optimizer.step)
        else:
            optimizer.step()
        optimizer.zero_grad()
        return [*found, step(model, optimizer, 3), step(model, optimizer, 4)]

    there, here = both(monkeypatch, program)
    assert alike(there[0], here[0]) and differing(there[1], here[1]) == []


@pytest.mark.parametrize("of", ["return", "step", "stand aside"])
def test_an_interrupt_at_any_point_loses_nothing(of, soon, monkeypatch):
    """Method: Ctrl-C at points of what brings the engine back, most of them where it lets go; of a
    step there; and of the step after which it stands aside. A step that was cut short is completed,
    or asked for again; so all ends as without the interrupt."""
    calm = pair()
    for number in range(5):
        step(*calm, number)
    expected, point, struck = ends(*calm), 1, 0
    while True:
        model, optimizer = pair()
        parts = parts_of(model)
        for number in range(1 if of == "stand aside" else 2):
            backward(model, number)
            if of != "stand aside" or number != 0:
                optimizer.step()
                optimizer.zero_grad()
        if of != "stand aside":
            backward(model, 2)
        striker, before = Striker(KeyboardInterrupt, "line"), parts.steps.index
        work = (lambda: model.state_dict() and None) if of == "return" else optimizer.step
        error, _ = striker.run(point, work)
        assert error is None or isinstance(error, KeyboardInterrupt), error
        struck += error is not None
        done = before + (of != "return")
        with torch.no_grad():
            model(tokens(SEED))  # recovers
        if parts.steps.index < done or of == "return":
            optimizer.step()
        optimizer.zero_grad()
        for number in range(1 if of == "stand aside" else 3, 5):
            step(model, optimizer, number)
        assert differing(ends(model, optimizer), expected) == [], striker.place
        if error is None:
            break
        point += 13 if of == "return" and 100 < point < 1000 else 601
    assert struck > 3


def test_a_backward_of_a_part_alone_that_fails_leaves_a_gradient_that_no_step_takes(soon):
    """Twin: the same after zero_grad."""
    model, optimizer = pair()
    step(model, optimizer, 0)
    assert is_there(model)
    block = model.blocks[0]

    def fail(_grad: torch.Tensor) -> None:
        raise Stop

    handle = block.norm1.weight.register_hook(fail)
    with pytest.raises(Stop):
        block(torch.randn(2, 4, 64)).sum().backward()
    handle.remove()
    assert "is half done" in refused(optimizer.step)
    optimizer.zero_grad()
    optimizer.step()


def test_a_gradient_that_a_user_holds_stays_the_gradient(soon, monkeypatch):
    """Method: it is halved after a state dict has brought the engine back, and zeroed after the
    step."""

    def program(job: Pair) -> list[Any]:
        model, optimizer = job
        step(model, optimizer, 0)
        backward(model, 1)
        held = model.positions.grad
        model.state_dict()
        held.mul_(0.5)
        found = [model.positions.grad.clone()]
        optimizer.step()
        held.zero_()
        found.append(model.positions.grad.clone())
        optimizer.zero_grad()
        return [*found, step(model, optimizer, 2)]

    there, here = both(monkeypatch, program)
    assert alike(there[0], here[0]) and differing(there[1], here[1]) == []


def test_a_forked_child_is_refused_and_not_ended_by_the_system(soon):
    """Its weights' memory stays with the parent. Twin: the parent goes on there."""
    model, optimizer = pair()
    step(model, optimizer, 0)
    assert is_there(model)

    def touch() -> str:
        return refused(lambda: model.blocks[0](torch.randn(2, 4, 64)))

    assert "cannot be used" in in_child(touch)
    assert is_there(model)
    step(model, optimizer, 1)


def test_nothing_is_kept_alive_by_an_engine_that_stands_aside(soon):
    """Without the garbage collector. Twin: with the model alone the engine stays."""
    gc.collect()
    gc.disable()
    try:
        model, optimizer = pair()
        step(model, optimizer, 0)
        assert is_there(model)
        engine = weakref.ref(parts_of(model).engine)
        weight = model.positions
        del optimizer
        assert engine() is not None
        del model
        assert engine() is None and weight.detach().isfinite().all()
    finally:
        gc.enable()
