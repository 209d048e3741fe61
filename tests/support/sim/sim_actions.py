"""What the users of simulated programs do. Each action is played on both sides, and gives what its
user sees.

**side**: plain torch, or the engine. An action makes at most one change of the training state, so
that a side that was disturbed has the state before it or the one after it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sim_device import scarcity
from sim_models import batch_of, blocks_of, loss_of
from sim_world import Side, wait_for_saves
from torch.optim import swa_utils

import infinity

Action = tuple[str, dict[str, Any]]
Seen = list[torch.Tensor] | dict[str, torch.Tensor]


class Kind(NamedTuple):
    """A kind of action. ``weight``: how often it is drawn; ``plain``: its plainest arguments."""

    weight: float
    draw: Callable[[random.Random], dict[str, Any]]
    play: Callable[..., Seen | None]
    plain: dict[str, Any]


ACTIONS: dict[str, Kind] = {}


def action(weight: float, **among: Any) -> Callable:
    """Adds an action whose arguments are drawn from ``among``: a number below one, or one of some,
    of which the first is the plainest."""

    def one(rng: random.Random, values: Any) -> Any:
        return rng.randrange(values) if isinstance(values, int) else rng.choice(values)

    def draw(rng: random.Random) -> dict[str, Any]:
        return {name: one(rng, values) for name, values in among.items()}

    def add(play: Callable) -> Callable:
        plain = {key: 0 if isinstance(values, int) else values[0] for key, values in among.items()}
        ACTIONS[play.__name__] = Kind(weight, draw, play, plain)
        return play

    return add


def forward(side: Side, data: int) -> torch.Tensor:
    torch.manual_seed(data)
    with torch.autocast("cpu", torch.bfloat16, enabled=side.dtype == "autocast"):
        return loss_of(side.model, batch_of(side.model, data))


def backward(side: Side, data: int, parts: int = 1) -> torch.Tensor:
    """Runs this rank's batch, and returns its loss. The plain side has the batches of all ranks."""
    found = []
    for rank in (side.rank,) if side.is_engine else range(side.ranks):
        loss = forward(side, data + 1000 * rank) / parts
        (loss if side.is_engine else loss / side.ranks).backward()
        found.append(loss.detach().clone())
    return found[0 if side.is_engine else side.rank]


def param_at(side: Side, at: int) -> tuple[str, torch.nn.Parameter]:
    named = list(side.model.named_parameters())
    return named[at % len(named)]


# --- passes and steps ---


@action(
    8,
    data=1000,
    micro=[1, 1, 1, 2, 3],
    together=[False, False, True],
    clip=[None, None, 0.05, 1e6],
    edit=["", "", "", "read", "halve", "assign", "drop"],
    at=50,
    keep=[False, False, False, True],
    how=["", "", "", "closure", "early"],
    late=["", "", "", "", "read", "clip"],
)
def step(side, data, micro, together, clip, edit, at, keep, how, late):
    """Accumulates, clips, edits gradients, and steps. ``late``: what is done with gradients
    afterwards."""
    seen: Seen = []
    optimizer = side.optimizer

    def backwards() -> torch.Tensor:
        joined = together and side.is_engine
        with infinity.accumulate(side.model) if joined else contextlib.nullcontext():
            for number in range(micro):
                seen.append(backward(side, data + number, micro))
        return seen[-1]

    def again() -> torch.Tensor:
        optimizer.zero_grad()
        return backwards()

    if how == "closure":
        optimizer.step(again)
    elif how == "early" and micro == 1:
        with optimizer.step_in_backward() if side.is_engine else contextlib.nullcontext():
            backwards()
        optimizer.step()
    else:
        backwards()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(side.model.parameters(), clip)
            seen.append(norm.clone())
        edit_gradient(param_at(side, at)[1], edit, seen)
        optimizer.step()
    if late == "clip":
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
    edit_gradient(param_at(side, at)[1], late if late == "read" else "", seen)
    optimizer.zero_grad(set_to_none=not keep)
    return seen


def edit_gradient(param: torch.nn.Parameter, edit: str, seen: Seen) -> None:
    if param.grad is None or not edit:
        return
    if edit == "read":
        seen.append(param.grad.clone())
    elif edit == "halve":
        param.grad.mul_(0.5)
    elif edit == "assign":
        param.grad = param.grad.clone() * 0.25
    else:
        param.grad = None


@action(1, data=1000)
def forward_only(side, data):
    """Computes a loss, and drops it."""
    return [forward(side, data).detach().clone()]


@action(1, data=1000)
def backward_only(side, data):
    """Computes gradients, and clears them."""
    loss = backward(side, data)
    side.optimizer.zero_grad()
    return [loss]


@action(2, data=1000, how=["no_grad", "inference", "thread"])
def evaluate(side, data, how):
    """Evaluates a batch, in this thread or in another one."""
    seen: Seen = []

    def work() -> None:
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            seen.append(side.model(batch_of(side.model, data)).clone())

    side.model.eval()
    if how == "thread":
        in_thread(work)
    else:
        work()
    side.model.train()
    return seen


def in_thread(work: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the user's thread
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@action(1, data=1000)
def generate(side, data):
    """Appends the likeliest token, three times."""
    batch = batch_of(side.model, data)
    if batch.is_floating_point():
        return None
    side.model.eval()
    ids = batch[:, :4]
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, side.model(ids)[:, -1:].argmax(-1)], 1)
    side.model.train()
    return [ids]


# --- edits ---


@action(2, at=50, how=["data", "full_params", "state_dict", "load", "data of it", "numpy"])
def edit_weight(side, at, how):
    """Halves one weight: by itself, or by what a state dict lends."""
    name, param = param_at(side, at)
    if how == "full_params" and side.is_engine:
        with infinity.full_params(side.model, [name], writeback=True) as params:
            params[name].mul_(0.5)
    elif how in ("data", "full_params"):
        param.data.mul_(0.5)
    elif how == "state_dict":
        side.model.state_dict()[name].mul_(0.5)
    elif how == "data of it":
        side.model.state_dict()[name].data.view(-1)[:3].mul_(0.5)
    elif how == "numpy" and (param.device.type, param.dtype) == ("cpu", torch.float32):
        values = side.model.state_dict()[name].numpy()
        values *= 0.5
    else:
        value = side.model.state_dict()[name].clone() * 0.5
        side.model.load_state_dict({name: value}, strict=False)


@action(1, at=50)
def edit_state(side, at):
    """Halves what the optimizer keeps for one parameter."""
    entry = side.optimizer.state.get(param_at(side, at)[1], {})
    for name, value in entry.items():
        if name != "step" and isinstance(value, torch.Tensor):
            value.mul_(0.5)


@action(1, factor=[0.5, 2.0])
def set_rate(side, factor):
    """Changes the learning rate of every group."""
    for group in side.optimizer.param_groups:
        group["lr"] *= factor


@action(1, at=50)
def freeze(side, at):
    """Freezes a parameter, or has it train again."""
    param = param_at(side, at)[1]
    if any(param is each for group in side.optimizer.param_groups for each in group["params"]):
        param.requires_grad_(not param.requires_grad)


@action(1)
def add_group(side):
    """Gives the optimizer a parameter that it did not have."""
    if side.held_out and side.average is None:  # which would lack it
        param = dict(side.model.named_parameters())[side.held_out[-1]]
        param.requires_grad_(True)
        param.grad = None
        try:
            side.optimizer.add_param_group({"params": [param], "lr": 0.0078125})
        except BaseException:
            param.requires_grad_(False)
            raise
        side.held_out.pop()


@action(0.5)
def new_optimizer(side):
    """Goes on with another optimizer of the same parameters, which no save before knows."""
    if side.average is not None:  # which the new one would lack
        return
    side.saves.clear()
    if side.is_engine:  # else one of the same class would load
        wait_for_saves()
        shutil.rmtree(side.saved, ignore_errors=True)
    old = side.optimizer
    params = [each for group in old.param_groups for each in group["params"]]
    old.zero_grad()
    if side.dtype == "bf16":  # which is stepped as by torch in Adam alone
        new: Any = torch.optim.Adam(params, lr=0.01, fused=True)
    else:
        new = torch.optim.SGD(params, lr=0.0625, momentum=0.5, foreach=False)
    side.optimizer = infinity.wrap_model(side.model, new)[1] if side.is_engine else new


@action(1)
def load_states(side):
    """Loads the state dicts of plain torch."""
    if side.is_engine:
        model, optimizer = side.plain.states
        side.model.load_state_dict(model)
        side.optimizer.load_state_dict(optimizer)


# --- averages ---


@action(1.5, read=[False, False, True])
def average(side, read):
    """Makes a moving average, or updates and reads it."""
    if side.is_engine:
        made = side.average or infinity.ema(side.model, 0.75)
        try:
            made.update()
        except BaseException:
            if side.average is None:
                with contextlib.suppress(infinity.InfinityError):
                    made.remove()
            raise
    else:
        blend = swa_utils.get_ema_multi_avg_fn(0.75)
        made = side.average or swa_utils.AveragedModel(side.model, multi_avg_fn=blend)
        made.update_parameters(side.model)
    side.average = made
    return [value.clone() for value in side.averages().values()] if read else None


# --- what the engine alone does ---


@action(1, resume=[False, True])
def park(side, resume):
    """Parks the model, and has it come back at its next use, or at once."""
    side.optimizer.zero_grad()
    if side.is_engine:
        infinity.park(side.model, side.scratch)
        if resume:
            infinity.resume(side.model)


@action(1, params=["device", "host", "nvme"], optimizer=["device", "host", "nvme"])
def rewrap(side, params, optimizer):
    """Unwraps the model, and wraps it with other homes."""
    side.average = None
    if side.is_engine:
        side.unwrap()
        side.wrap({"params": params, "optimizer": optimizer})


@action(3, wait=[True, False])
def save(side, wait):
    """Saves a checkpoint."""
    side.save(wait)


@action(3)
def load(side):
    """Loads the last checkpoint."""
    side.load()


@action(0.5)
def fork(side):
    """Forks a child that ends, as a loader's worker."""
    if side.is_engine:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)


# --- what goes wrong ---


class UsersError(Exception):
    """An exception of the user's own code."""


@contextlib.contextmanager
def failing(module: torch.nn.Module, in_backward: bool) -> Iterator[None]:
    """Has the user's code in ``module`` raise."""

    def fail(*_: Any) -> None:
        raise UsersError

    def fail_later(module: Any, given: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(fail)

    hook = module.register_forward_hook(fail_later if in_backward else fail)
    try:
        yield
    finally:
        hook.remove()


@action(1.5, data=1000, at=50, in_backward=[False, True])
def users_error(side, data, at, in_backward):
    """Meets an exception of the user's own code, and goes on."""
    blocks = blocks_of(side.model)
    with failing(blocks[at % len(blocks)], in_backward), contextlib.suppress(UsersError):
        forward(side, data).backward()
    side.optimizer.zero_grad()


def struck(side, work, points):
    """Another action, which an exception ends at one point inside of the engine."""
    name, given = work
    return ACTIONS[name].play(side, **given)


STRUCK = ("step", "forward_only", "evaluate", "edit_weight", "save", "load", "park", "average")


def draw_struck(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(STRUCK)
    return {"work": [name, ACTIONS[name].draw(rng)], "points": rng.randrange(1, 4000)}


ACTIONS["struck"] = Kind(2, draw_struck, struck, {})


@action(2, on=[True, True, False])
def faults(side, on):
    """The disk begins to fail, or ends that."""
    if side.is_engine:
        side.disk.turn(on)


@action(1, data=1000, kib=[64, 16, 256])
def scarce(side, data, kib):
    """Computes gradients while the device has little memory left, and clears them."""
    is_late = side.is_engine and next(side.model.parameters()).device.type != "cpu"
    with scarcity(kib) if is_late else contextlib.nullcontext():
        loss = backward(side, data)
    side.optimizer.zero_grad()
    return [loss]


@action(1)
def look(side):
    """Compares all that both sides have."""
    return side.tensors()
