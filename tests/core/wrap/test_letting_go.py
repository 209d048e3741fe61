"""Leaks as a law: whichever way a job is let go, nothing of it stays, at any home.

Words used here: a **way** wraps, does something and lets go; it names what has to be gone by then.
A **round** is one of a way.
"""

from __future__ import annotations

import collections
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_cases import every_home, held
from inside import parts_of
from models import TIERS, Fail, at_home, in_child, seeded
from native_arrays import is_mapped
from torch import nn

import infinity
from infinity.core.run import build, hooks
from infinity.core.wrap import make_optimizer, wrap

SEED, WIDTH, ROUNDS = 2, 64, 50
Gone = list[weakref.ref]
WAYS: dict[str, Callable[[str, Path], Gone]] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise ValueError("stop")
        return x + self.other(torch.tanh(self.one(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.kept: Any = None  # what a user may keep on a model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def way(run: Callable[[str, Path], Gone]) -> Callable[[str, Path], Gone]:
    WAYS[run.__name__] = run
    return run


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(SEED, Model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def wrapped(home: str, folder: Path, *, tiles: bool = False, **more: Any) -> tuple[Any, Any, Gone]:
    """``tiles``: layers that run in tiles."""
    model, optimizer = plain()
    if tiles:
        model.blocks = seeded(
            SEED, lambda: nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH))
        )
        optimizer, more = torch.optim.AdamW(model.parameters()), {**more, "device_memory": "212KiB"}
    model, optimizer = infinity.wrap_model(model, optimizer, at_home(home, home, folder, **more))
    return model, optimizer, of(model, optimizer)


def of(model: nn.Module, *others: Any) -> Gone:
    """Refers to a wrapped model and all that it has."""
    engine = model.__dict__["_infinity"].engine
    flat_params = [flat for unit in parts_of(engine).units for flat in unit.flat_params]
    params = [param for flat in flat_params for param in flat.params]
    handles = [param._infinity.grad for param in params if param._infinity.grad is not None]
    parts = [
        parts_of(engine).store,
        engine.gradients,
        engine.backward,
        parts_of(engine).job.collectives,
        *(flat for unit in parts_of(engine).units for flat in unit.buffers.flats),
    ]
    return [
        weakref.ref(each)
        for each in (
            model,
            *others,
            engine,
            *parts_of(engine).units,
            *flat_params,
            *params,
            *handles,
            *parts,
        )
    ]


def batch() -> torch.Tensor:
    return torch.ones(8, WIDTH)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- the ways ---


@way
def del_after_the_wrap(home, folder):
    return wrapped(home, folder)[-1]


@way
def del_after_steps(home, folder):
    model, optimizer, gone = wrapped(home, folder)
    step(model, optimizer)
    step(model, optimizer)
    return gone


@way
def del_between_forward_and_backward(home, folder):
    model, _, gone = wrapped(home, folder)
    model.kept = model(batch())
    return gone


@way
def del_between_backward_and_step(home, folder):
    model, _, gone = wrapped(home, folder)
    model(batch()).mean().backward()
    model.kept = [param.grad for param in model.parameters()]
    return gone


@way
def rebinding(home, folder):
    gone = []
    for _ in range(2):
        model, optimizer, of_this = wrapped(home, folder)
        step(model, optimizer)
        gone += of_this
    return gone


@way
def an_exception_in_a_cell(home, folder):
    model, optimizer, gone = wrapped(home, folder)
    model.blocks[1].raises = True
    try:
        step(model, optimizer)
    except ValueError as error:
        sys.last_value = error  # as a notebook keeps it, until the next one
    sys.last_value = None
    return gone


@way
def an_exception_in_a_backward(home, folder):
    model, _, gone = wrapped(home, folder)
    try:
        Fail.apply(model(batch())).sum().backward()
    except ValueError:
        pass
    return gone


@way
def unwrap(home, folder):
    model, optimizer, gone = wrapped(home, folder)
    step(model, optimizer)
    step(*infinity.unwrap_model(model, optimizer))
    return gone


@way
def park(home, folder):
    model, optimizer, gone = wrapped(home, folder)
    step(model, optimizer)
    infinity.park(model, folder)
    return gone


def failed_wrap(home: str, folder: Path, where: Any, name: str, error: type[BaseException]) -> Gone:
    model, optimizer = plain()
    gone: Gone = [weakref.ref(model), weakref.ref(optimizer)]
    before = getattr(where, name)

    def fails(*args: Any, **named: Any) -> None:
        gone.extend(weakref.ref(arg) for arg in args if isinstance(arg, build.Job))
        raise error

    setattr(where, name, fails)
    try:
        infinity.wrap_model(model, optimizer, at_home(home, home, folder))
    except error:
        pass
    finally:
        setattr(where, name, before)
    torch.nn.functional.mse_loss(model(batch()), batch()).backward()  # it is a plain one
    return gone


@way
def a_wrap_that_fails_as_it_plans(home, folder):
    model, optimizer = plain()
    with pytest.raises(infinity.CapacityError):
        infinity.wrap_model(
            model,
            optimizer,
            at_home(home, home, folder, host_memory=1, device_memory=1, nvme_capacity=1),
        )
    return [weakref.ref(model), weakref.ref(optimizer)]


@way
def a_wrap_that_fails_as_it_allocates(home, folder):
    return failed_wrap(home, folder, build, "Resources", MemoryError)


@way
def a_wrap_that_fails_as_values_go_home(home, folder):
    return failed_wrap(home, folder, wrap, "OwnValues", KeyboardInterrupt)


@way
def a_wrap_that_fails_as_it_ends(home, folder):
    return failed_wrap(home, folder, make_optimizer, "InfinityOptimizer", KeyboardInterrupt)


@way
def full_params_left_by_an_exception(home, folder):
    model, _, gone = wrapped(home, folder)
    try:
        with infinity.full_params(model, writeback=True) as params:
            model.kept = params
            raise ValueError
    except ValueError:
        pass
    return gone


@way
def an_average(home, folder):
    model, optimizer, gone = wrapped(home, folder)
    model.kept = average = infinity.ema(model, 0.9)
    step(model, optimizer)
    average.update()
    with average.applied():
        model(batch())
    return [*gone, weakref.ref(average)]


@way
def accumulate_left_by_an_exception(home, folder):
    model, _, gone = wrapped(home, folder)
    try:
        with infinity.accumulate(model):
            model(batch()).mean().backward()
            raise ValueError
    except ValueError:
        pass
    return gone


@way
def checkpoints_and_state_dicts(home, folder):
    model, optimizer, gone = wrapped(home, folder)
    step(model, optimizer)
    path = folder.parent / "checkpoint"
    infinity.save_checkpoint(path, model, optimizer)
    infinity.load_checkpoint(path, model, optimizer)
    model.kept = model.state_dict(), optimizer.state_dict()
    return gone


@way
def a_model_on_its_own_parameters(home, folder):
    model, optimizer, gone = wrapped(home, folder)
    for param in model.parameters():
        param.owner = model
        param.register_hook(lambda grad, model=model, optimizer=optimizer: None)
    step(model, optimizer)
    return gone


@way
def blocks_that_run_again(home, folder):
    model, optimizer, gone = wrapped(home, folder, micro_batch=2)
    step(model, optimizer)
    model.kept = model(batch())
    return gone


@way
def tiles(home, folder):
    model, optimizer, gone = wrapped(home, folder, tiles=home != "device")
    step(model, optimizer)
    model.kept = model(batch())
    return gone


@way
def activations_at_home(home, folder):
    model, optimizer, gone = wrapped(home, folder, activations="nvme" if home == "nvme" else "host")
    step(model, optimizer)
    model.kept = model(torch.ones(512, WIDTH))
    return gone


@way
def a_group_that_was_added(home, folder):
    model = seeded(SEED, Model)
    optimizer = torch.optim.AdamW(model.blocks[0].parameters(), lr=1e-3)
    model.blocks[1].requires_grad_(False)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home(home, home, folder))
    gone = of(model, optimizer)
    optimizer.add_param_group({"params": list(model.blocks[1].requires_grad_(True).parameters())})
    step(model, optimizer)
    return gone


@way
def a_trainer(home, folder):
    transformers = pytest.importorskip("transformers")
    from infinity.integrations import InfinityTrainer

    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    args = transformers.TrainingArguments(
        str(folder.parent / "out"),
        max_steps=2,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    trainer = InfinityTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=args,
        train_dataset=[row] * 2,
        infinity=at_home(home, home, folder),
    )
    trainer.train()
    return [*of(trainer.model), weakref.ref(trainer)]


# --- what stays ---


def living() -> collections.Counter[str]:
    """Counts the objects that may be a job's: torch's, ours, and these modules."""
    kinds = (type(each) for each in gc.get_objects())
    return collections.Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if isinstance(kind.__module__, str)
    )


def is_a_jobs(name: str) -> bool:
    return name.startswith(
        ("infinity.", "torch.Tensor", "torch.nn.", "torch.storage", "torch.optim", f"{__name__}.")
    )


def nbytes() -> int:
    """Counts the bytes of all tensors that live, each storage once."""
    tensors = [
        each
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, nn.Parameter)
    ]
    return sum(
        {
            each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors
        }.values()
    )


def resident() -> int:
    from infinity import native

    native.trim_heap()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def collect() -> None:
    """Collects until nothing is found: what only a graph holds, which the collector cannot look
    into, is found after the graph is gone."""
    for _ in range(4):
        if not gc.collect():
            return


def grown(names: Iterable[str], home: str, folder: Path, rounds: int) -> list[str]:
    """What has grown over so many rounds of each way, after one of each that is not looked at; and
    what had to be gone and is not."""
    complaints: list[str] = []

    def run(name: str) -> None:
        gone = WAYS[name](home, folder)
        collect()
        if left := collections.Counter(
            type(each).__name__ for ref in gone if (each := ref()) is not None
        ):
            complaints.append(f"{name}: {dict(left)}")

    for name in names:
        run(name)
    complaints.clear()
    nbytes()  # which makes the storages of other libraries' constants objects, for good
    after = living(), nbytes(), held(folder), resident()
    while True:
        before = after
        for _ in range(rounds):
            for name in names:
                run(name)
        collect()
        after = living(), nbytes(), held(folder), resident()
        if not after[2] < before[2]:
            break  # else a thread from before has ended late, and may have hidden one that stays
    more = {name: count for name, count in (after[0] - before[0]).items() if is_a_jobs(name)}
    complaints += [f"objects: {more}"] if more else []
    complaints += [f"bytes: {after[1] - before[1]}"] if after[1] > before[1] else []
    complaints += (
        [f"descriptors, threads, swap files: {before[2]} -> {after[2]}"]
        if after[2] != before[2]
        else []
    )
    complaints += [f"{os.listdir(folder)} in the folder"] if os.listdir(folder) else []
    if (
        rounds * len(names) >= ROUNDS and after[3] - before[3] > 16 * 2**20
    ):  # of a model's state 0.4 MiB a round
        complaints.append(f"resident: {(after[3] - before[3]) / 2**20:.1f} MiB")
    return complaints


@every_home
@pytest.mark.parametrize("name", WAYS)
def test_nothing_stays_whichever_way_a_job_is_let_go(name, home, swap):
    """Method: three rounds of a way in a child; model, optimizer, engine, units, flat params,
    parameters, gradients and buffers are gone once the garbage collector ran, and no live objects,
    tensors' bytes, descriptors, threads or swap files are added.
    """
    found = in_child(lambda: grown([name], home, swap, 3), seconds=120)
    assert found == []


@every_home
def test_fifty_rounds_leave_nothing(home, swap):
    """Method: the ways that are quick one after the other, fifty rounds in all; the same, and the
    process is no larger."""
    names = [name for name in WAYS if name not in ("a_trainer", "checkpoints_and_state_dicts")]
    assert in_child(lambda: grown(names, home, swap, -(-ROUNDS // len(names))), seconds=300) == []


@pytest.mark.slow
@every_home
@pytest.mark.parametrize("name", WAYS)
def test_fifty_rounds_of_one_way_leave_nothing(name, home, swap):
    """Method: fifty rounds of each way."""
    assert in_child(lambda: grown([name], home, swap, ROUNDS), seconds=600) == []


@pytest.mark.parametrize("home", TIERS)
def test_a_job_goes_without_the_garbage_collector(home, swap):
    """Method: with the collector off, delete model and optimizer after a step; everything is gone
    at once, and every descriptor closed."""

    def work() -> tuple[list[str], bool]:
        del_after_steps(home, swap)
        gc.collect()
        before = held(swap)
        gc.disable()
        gone = del_after_steps(home, swap)
        return [type(each).__name__ for ref in gone if (each := ref()) is not None], held(
            swap
        ) == before

    left, closed = in_child(work)
    assert [
        name for name in left if name != "GradRecord"
    ] == [] and closed  # a record and what stands for it refer to each other


def holds_its_parameter(monkeypatch) -> None:
    """A hook that is registered on a parameter, and leads back to it."""
    make = hooks.LandingHook.__init__

    def holding(self, param: torch.Tensor, landed) -> None:
        make(self, param, lambda given, mine=param: landed(given))

    monkeypatch.setattr(hooks.LandingHook, "__init__", holding)


def holds_the_shards(monkeypatch) -> None:
    """A table of the process with the flat params, and so with the parameters."""
    shut_down = build.shut_down

    class Held(list):
        pass

    def partial(function, scopes, store, contents, *rest):
        own = {id(each) for each in contents}
        flat_params = Held(each for each in gc.get_objects() if isinstance(each, build.ParamUnit))
        flat_params = Held(
            flat for unit in flat_params for flat in unit.flat_params if id(flat.homes) in own
        )
        return lambda: (flat_params.clear(), shut_down(scopes, store, contents, *rest))

    real = build.partial
    monkeypatch.setattr(
        build,
        "partial",
        lambda function, *args, **how: (partial if function is shut_down else real)(
            function, *args, **how
        ),
    )


@pytest.mark.parametrize(
    "fault, name",
    [(holds_its_parameter, "del_after_steps"), (holds_the_shards, "a_model_on_its_own_parameters")],
    ids=["hook", "table"],
)
def test_what_stays_is_found(fault, name, swap, monkeypatch):
    """Method: the failing twin: a hook that leads back to its parameter, as torch holds hooks out
    of the collector's sight, and a table of the process that has the parameters; both are found."""
    fault(monkeypatch)
    assert any(name in complaint for complaint in in_child(lambda: grown([name], "host", swap, 2)))


@pytest.mark.parametrize(
    "more",
    [{}, {"micro_batch": 2}, {"tiles": True}, {"device_memory": "256KiB"}],
    ids=["plain", "chunks", "tiles", "chosen activations"],
)
def test_a_backward_that_comes_too_late_says_so(more, swap):
    """Method: keep a loss, drop the model, run its backward: a UsageError that says what went, and
    the job and its homes have gone. With the model it works."""
    gc.collect()
    before = held(swap)[2]  # what other tests of this process keep
    model, optimizer, gone = wrapped("nvme", swap, **more)
    loss, job = model(batch()).mean(), weakref.ref(parts_of(model).job)
    del model, optimizer
    collect()
    assert held(swap)[2] == before and job() is None
    with pytest.raises(infinity.UsageError, match="went with the engine"):
        loss.backward()
    model, optimizer, _ = wrapped("nvme", swap, **more)
    model(batch()).mean().backward()


def test_an_optimizer_that_is_kept_after_an_unwrap_keeps_no_memory(swap):
    """Of the buffers that were registered with the I/O engine. Twin: before it they are there."""
    model, optimizer, _ = wrapped("nvme", swap)
    model(batch()).mean().backward()
    lease = parts_of(model).store.service.try_lease(4096)
    address = lease.address
    lease.release()
    assert is_mapped(address)
    infinity.unwrap_model(model, optimizer)
    gc.collect()
    assert not is_mapped(address)


def test_a_parameter_that_outlives_its_model_says_so(swap):
    """Method: keep a parameter and a gradient, drop the rest: both print, or name what is gone."""
    model, optimizer, _ = wrapped("host", swap)
    model(batch()).mean().backward()
    param = next(model.parameters())
    grad = param.grad
    del model, optimizer
    gc.collect()
    assert "home=gone" in repr(param)
    with pytest.raises(infinity.UsageError, match="engine is gone"):
        param + 1
    with pytest.raises(infinity.UsageError, match="engine is gone"):
        grad.norm()


class GivesBack(nn.Module):
    """Gives its own weight and its input back beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer(x), self.weight, x


class AroundIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = GivesBack(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, weight, same = self.inner(x)
        return self.last(y @ weight), same


def test_hooks_do_not_add_up_on_what_stays():
    """Method: a module returns its own weight, and its input, which is a leaf that the user keeps:
    neither has a hook of ours after three forwards, and all gradients are torch's."""
    ours, theirs = seeded(SEED, AroundIt), seeded(SEED, AroundIt)
    infinity.wrap_model(
        ours, torch.optim.SGD(ours.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )
    inputs = [torch.ones(2, 4, requires_grad=True) for _ in range(2)]
    for _ in range(3):
        for model, x in zip((ours, theirs), inputs):
            sum(out.sum() for out in model(x)).backward()
    assert not inputs[0]._backward_hooks and not any(
        param._backward_hooks for param in ours.parameters()
    )
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert all(
        torch.equal(one.grad.clone(), other.grad)
        for one, other in zip(ours.parameters(), theirs.parameters())
    )
