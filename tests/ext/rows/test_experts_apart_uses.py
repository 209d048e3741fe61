"""Experts apart: users' own reads and changes in mid-step have the bits of whole experts.

Method: as in test_experts_apart, but compared byte for byte: NaN, too. Each way of use comes in
every second step. **late**: a device whose copies home come late.
Twins: a use of all experts that gets those on the device alone shows in the bits.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable

import pytest
import threaded_device
import torch
from marks import few
from test_experts_apart import Loop, adamw, make, whole

import infinity
from infinity.core.grads import landing
from infinity.core.machine import accelerator
from infinity.core.units.arrival import Arrival
from infinity.core.units.home_arrays import HomeArrays
from infinity.ext.rows import expert_rows
from infinity.ext.rows.chosen_experts import ChosenExperts
from infinity.ext.rows.expert_rows import ExpertRows

STEPS = 6
HOMES = ["host", "nvme"]


def bits_of(value) -> bytes:
    tensor = torch.as_tensor(value).detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def differing(one: tuple, other: tuple) -> list:
    """Lists what differs between two runs, in any bit."""
    found = [] if repr(one[0]) == repr(other[0]) else ["losses"]
    found += [name for name in one[1] if bits_of(one[1][name]) != bits_of(other[1][name])]
    return found + [
        (index, key)
        for index, state in one[2].items()
        for key, value in state.items()
        if bits_of(value) != bits_of(other[2][index][key])
    ]


def both(run: Callable[[], tuple], monkeypatch) -> list:
    """Lists what differs between a run with experts apart and the same with whole ones."""
    apart = run()
    with monkeypatch.context() as patched:
        whole(patched)
        return differing(apart, run())


def running(way: Callable[[Loop], None], folder, home: str, **config) -> Callable[[], tuple]:
    def run() -> tuple:
        model = make()
        loop = Loop(model, adamw(model.parameters()), folder, home, **config)
        for number in range(STEPS):
            way(loop) if number % 2 else loop.step()
        return loop.found()

    return run


def mixture(loop: Loop):
    return loop.model.model.layers[0].mlp


def of_experts(loop: Loop) -> list[torch.nn.Parameter]:
    return [param for name, param in loop.model.named_parameters() if "experts" in name]


def with_hook(loop: Loop, handle) -> None:
    loop.step()
    handle.remove()


# --- reads of all experts while some are on the device ---


def read_by_a_hook_before_them(loop: Loop) -> None:
    def read(module, args):
        loop.losses.append(module.down_proj.detach().abs().sum().item())

    with_hook(loop, mixture(loop).experts.register_forward_pre_hook(read))


def read_by_a_hook_behind_them(loop: Loop) -> None:
    def add(module, args, output):
        return output + 1e-3 * module.down_proj.square().mean()

    with_hook(loop, mixture(loop).experts.register_forward_hook(add))


def read_by_a_hook_of_their_backward(loop: Loop) -> None:
    def read(module, *grads):
        loop.losses.append(module.down_proj.detach().abs().sum().item())

    experts = mixture(loop).experts
    before = experts.register_full_backward_pre_hook(read)
    with_hook(loop, experts.register_full_backward_hook(read))
    before.remove()


def read_by_a_hook_of_their_output(loop: Loop) -> None:
    def watch(module, args, output):
        def read(grad):
            loop.losses.append(module.down_proj.detach().abs().sum().item())

        output.register_hook(read)

    with_hook(loop, mixture(loop).experts.register_forward_hook(watch))


def decayed_by_a_hook_of_a_gradient(loop: Loop) -> None:
    param = mixture(loop).experts.down_proj
    with_hook(loop, param.register_hook(lambda grad: grad + 1e-3 * param.detach()))


def decayed_as_a_gradient_lands(loop: Loop) -> None:
    def decay(param):
        param.grad.add_(param.detach(), alpha=1e-3)

    param = mixture(loop).experts.down_proj
    with_hook(loop, param.register_post_accumulate_grad_hook(decay))


def read_by_a_forward_of_its_own(loop: Loop) -> None:
    experts = mixture(loop).experts
    forward = experts.forward

    def replaced(self, hidden_states, top_k_index, top_k_weights):
        more = 1e-3 * self.down_proj.square().mean()
        return forward(hidden_states, top_k_index, top_k_weights) + more

    experts.forward = types.MethodType(replaced, experts)
    loop.step()
    del experts.forward


def routed_by_a_hook(loop: Loop) -> None:
    def turn(module, args, kwargs):
        args = list(args)
        if len(args) > 1:
            args[1] = (args[1] + 1) % 12
        else:
            kwargs["top_k_index"] = (kwargs["top_k_index"] + 1) % 12
        return tuple(args), kwargs

    with_hook(loop, mixture(loop).experts.register_forward_pre_hook(turn, with_kwargs=True))


def rows_that_fail_to_come(loop: Loop) -> None:
    """Of a choice that a hook changes; the step is repeated."""
    add, copy, before = Arrival.add, Arrival._copy_own, loop.generator.get_state()

    def fail(self, *_):
        Arrival._copy_own = copy
        raise infinity.StorageError("a disk failed")

    def add_none(self, *given):
        Arrival.add, Arrival._copy_own = add, fail
        add(self, *given)

    Arrival.add = add_none
    try:
        routed_by_a_hook(loop)
    except infinity.StorageError:
        mixture(loop).experts._forward_pre_hooks.popitem()
        loop.generator.set_state(before)
        loop.optimizer.zero_grad()
        routed_by_a_hook(loop)
    finally:
        Arrival.add = add


def read_in_the_block_around_them(loop: Loop) -> None:
    def add(module, args, output):
        return output + 1e-3 * module.experts.gate_up_proj.std()

    with_hook(loop, mixture(loop).register_forward_hook(add))


def used_twice_in_a_forward(loop: Loop) -> None:
    def again(module, args, output):
        index = torch.tensor([[7, 9]] * 3)
        more = module.experts(output.view(-1, 64), index, torch.full((3, 2), 0.5))
        return output + more.view(output.shape)

    with_hook(loop, mixture(loop).register_forward_hook(again))


def called_without_hooks(loop: Loop) -> None:
    def forward(self, states):
        flat = states.view(-1, states.shape[-1])
        _, weights, index = self.gate(flat)
        return self.experts.forward(flat, index, weights).reshape(states.shape)

    block = mixture(loop)
    block.forward = types.MethodType(forward, block)
    loop.step()
    del block.forward


READS = [
    read_by_a_hook_before_them,
    read_by_a_hook_behind_them,
    read_by_a_hook_of_their_backward,
    read_by_a_hook_of_their_output,
    decayed_by_a_hook_of_a_gradient,
    decayed_as_a_gradient_lands,
    read_by_a_forward_of_its_own,
    routed_by_a_hook,
    read_in_the_block_around_them,
    rows_that_fail_to_come,
    used_twice_in_a_forward,
    called_without_hooks,
]


@pytest.mark.parametrize("way", READS)
def test_whoever_reads_the_experts_finds_all(way, tmp_path, monkeypatch):
    assert both(running(way, tmp_path, "hostile"), monkeypatch) == []


# --- changes of gradients ---


def after_a_backward(change: Callable[[Loop], None]) -> Callable[[Loop], None]:
    def way(loop: Loop) -> None:
        loss = loop.loss()
        loss.backward()
        change(loop)
        loop.update(loss)

    way.__name__ = change.__name__
    return way


def a_row_is_changed(loop: Loop) -> None:
    for param in of_experts(loop):
        param.grad[5].add_(0.01)


def rows_are_set(loop: Loop) -> None:
    for param in of_experts(loop):
        param.grad[2:9] = 0.01


def a_flat_view_is_changed(loop: Loop) -> None:
    for param in of_experts(loop):
        param.grad.view(-1).add_(0.01)


def all_is_changed(loop: Loop) -> None:
    torch._foreach_add_([param.grad for param in of_experts(loop)], 0.01)


def a_detached_one_is_changed(loop: Loop) -> None:
    for param in of_experts(loop):
        param.grad.detach().add_(0.01)


def values_are_clipped(loop: Loop) -> None:
    torch.nn.utils.clip_grad_value_(loop.model.parameters(), 1e-3)


def a_norm_is_not_a_number(loop: Loop) -> None:
    loop.model.model.norm.weight.grad[0] = float("nan")
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)


def a_factor_is_infinite(loop: Loop) -> None:
    for param in of_experts(loop):
        param.grad.mul_(float("inf"))


def signs_are_turned(loop: Loop) -> None:
    for param in of_experts(loop):
        param.grad.mul_(-1.0)


def some_are_dropped(loop: Loop) -> None:
    mixture(loop).experts.down_proj.grad = None


CHANGES = [
    a_row_is_changed,
    rows_are_set,
    a_flat_view_is_changed,
    all_is_changed,
    a_detached_one_is_changed,
    values_are_clipped,
    a_norm_is_not_a_number,
    a_factor_is_infinite,
    signs_are_turned,
    some_are_dropped,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_gradient_is_the_next_steps(change, tmp_path, monkeypatch):
    assert both(running(after_a_backward(change), tmp_path, "hostile"), monkeypatch) == []


# --- sums of several backwards ---


def scaled_between(loop: Loop) -> None:
    loop.loss().backward()
    for param in of_experts(loop):
        param.grad.mul_(0.5)
        param.grad.mul_(0.25)


def read_between(loop: Loop) -> None:
    loop.loss().backward()
    loop.losses += [param.grad.sum().item() for param in of_experts(loop)]


def turned_between(loop: Loop) -> None:
    loop.loss().backward()
    for param in of_experts(loop):
        param.grad.mul_(-0.5)


def viewed_between(loop: Loop) -> None:
    loop.loss().backward()
    for param in of_experts(loop):
        param.grad[7].add_(0.01)


def dropped_between(loop: Loop) -> None:
    loop.loss().backward()
    mixture(loop).experts.down_proj.grad = None


def zeroed_between(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.zero_grad(set_to_none=False)


def stepped_between(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()


BETWEEN_BACKWARDS = [
    scaled_between,
    read_between,
    turned_between,
    viewed_between,
    dropped_between,
    zeroed_between,
    stepped_between,
]


@pytest.mark.parametrize("clip", few([0.1, None], 1))
@pytest.mark.parametrize("between", BETWEEN_BACKWARDS)
def test_a_sum_is_that_of_whole_gradients(between, clip, tmp_path, monkeypatch):
    def way(loop: Loop) -> None:
        between(loop)
        loop.loss().backward()
        (loss := loop.loss()).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), clip)
        loop.losses += [param.grad.abs().sum().item() for param in of_experts(loop)]
        loop.update(loss)

    assert both(running(way, tmp_path, "hostile"), monkeypatch) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_negative_zeros(dtype, tmp_path, monkeypatch):
    """Claim: a row is summed as in a whole gradient, where a sum of zeros is never negative."""

    def run() -> tuple:
        model = make(dtype=dtype)
        loop = Loop(model, adamw(model.parameters()), tmp_path)
        param = mixture(loop).experts.down_proj
        seen = []
        for sign in (-1, 1, -1):
            hook = param.register_hook(lambda grad, sign=sign: grad * 0 * sign)
            (loss := loop.loss()).backward()
            hook.remove()
            seen.append(bits_of(param.grad.clone()))
        loop.update(loss)
        return [seen], *loop.found()[1:]

    assert both(run, monkeypatch) == []


# --- changes of state and of weights ---


def the_count_goes_back(loop: Loop) -> None:
    loop.step()
    for param in loop.model.parameters():
        count = float(loop.optimizer.state[param]["step"])
        loop.optimizer.state[param]["step"] = torch.tensor(count - 1)


def moments_are_halved(loop: Loop) -> None:
    loop.step()
    for param in loop.model.parameters():
        loop.optimizer.state[param]["exp_avg"].mul_(0.5)


def all_hyperparameters_change(loop: Loop) -> None:
    group = loop.optimizer.param_groups[0]
    group.update(betas=(0.5, 0.9), weight_decay=0.3, eps=2 * group["eps"], maximize=True)
    loop.step()


def weights_are_changed(loop: Loop) -> None:
    loop.step()
    with torch.no_grad():
        for param in of_experts(loop):
            param[3].mul_(0.9)
            param.data[4] += 1
    with infinity.full_params(loop.model, writeback=True):
        for param in of_experts(loop):
            param.data[2].mul_(0.5)


def steps_without_a_backward(loop: Loop) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.optimizer.step()
    loop.step()


def stepped_again(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.step()
    loop.update(loss)


def parked(loop: Loop) -> None:
    loop.step()
    infinity.park(loop.model)
    infinity.resume(loop.model)


def frozen_for_a_step(loop: Loop) -> None:
    mixture(loop).experts.requires_grad_(False)
    loop.step()
    mixture(loop).experts.requires_grad_(True)


def an_average_is_kept(loop: Loop) -> None:
    if not hasattr(loop, "average"):
        loop.average = infinity.ema(loop.model, 0.9)
    loop.step()


def all_names_are_read(loop: Loop) -> None:
    loop.step()
    loop.losses += [value.sum().item() for _, value in infinity.named_weights(loop.model)]


BETWEEN = [
    the_count_goes_back,
    moments_are_halved,
    all_hyperparameters_change,
    weights_are_changed,
    steps_without_a_backward,
    stepped_again,
    parked,
    frozen_for_a_step,
    an_average_is_kept,
    all_names_are_read,
]


@pytest.mark.parametrize("way", BETWEEN)
def test_whatever_is_done_between_two_steps(way, tmp_path, monkeypatch):
    assert both(running(way, tmp_path, "hostile"), monkeypatch) == []


def test_a_model_that_is_unwrapped_has_all_steps(tmp_path, monkeypatch):
    def run() -> tuple:
        model = make()
        loop = Loop(model, adamw(model.parameters()), tmp_path, "hostile")
        for _ in range(STEPS):
            loop.step()
        loop.model, loop.optimizer = infinity.unwrap_model(loop.model, loop.optimizer)
        loop.schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda n: 1 / (1 + n))
        loop.step()
        return loop.found()

    assert both(run, monkeypatch) == []


@pytest.mark.parametrize("most", [1, 3])
def test_rows_that_are_far_behind_have_the_same_bits(most, tmp_path, monkeypatch):
    """Claim: bringing a row up to date though nobody uses it changes nothing."""
    monkeypatch.setattr(expert_rows, "MOST_BEHIND", most)
    assert both(running(Loop.step, tmp_path, "host"), monkeypatch) == []


# --- interrupts ---


class StoppedUpdater:
    """An updater; as its first submission of a replay is over, the thread is interrupted."""

    def __init__(self, updater, seen: list):
        self._updater, self._seen = updater, seen

    def submit_all(self, updates) -> None:
        self._updater.submit_all(updates)
        self._seen.append(updates)
        if len(self._seen) == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("home", HOMES)
def test_a_replay_that_is_interrupted_is_made_once(home, tmp_path, monkeypatch):
    """Claim: after an interrupt in a forward the job goes on with the bits of none."""

    def run(*, stopped: bool) -> tuple:
        model = make()
        loop = Loop(model, adamw(model.parameters()), tmp_path, home)
        loop.step()
        if stopped:
            with pytest.raises(KeyboardInterrupt):
                loop.step()
        else:
            torch.randint(0, 128, (1, 3), generator=loop.generator)  # as the failed forward
        for _ in range(STEPS):
            loop.step()
        return loop.found()

    expected, real, seen = run(stopped=False), HomeArrays.replay, []

    def replay(self, updater, rule, version):
        return real(self, StoppedUpdater(updater, seen), rule, version)

    monkeypatch.setattr(HomeArrays, "replay", replay)
    assert differing(run(stopped=True), expected) == [] and seen


# --- late copies ---


class Held(threaded_device.ThreadedDevice):
    """A device whose copies home wait as long as the test holds them, but for a second at most."""

    gate = threading.Event()

    def put(self, queue, work, **more):
        def late() -> None:
            if queue == "out":
                self.gate.wait(1.0)
            work()

        return super().put(queue, late, **more)


@pytest.mark.parametrize("home", ["host"])
def test_dropped_gradients_that_land_late_are_not_added(home, tmp_path, monkeypatch):
    """Claim: gradients that are dropped in mid-accumulation are in no later sum, however late their
    copies are. Method: a queue that holds those back until the next ones are landing."""
    real = landing.LandingQueue.__init__
    monkeypatch.setattr(
        landing.LandingQueue,
        "__init__",
        lambda self, device, traffic, nbytes: real(self, device, traffic, 2**30),
    )
    monkeypatch.setitem(accelerator.KINDS, "cpu", Held)

    def run() -> tuple:
        Held.gate.set()
        model = make()
        loop = Loop(model, adamw(model.parameters()), tmp_path, home)
        loop.step()
        Held.gate.clear()
        for _ in range(2):
            loop.loss().backward()
        loop.optimizer.zero_grad()
        for _ in range(2):
            (loss := loop.loss()).backward()
        Held.gate.set()
        loop.update(loss)
        return loop.found()

    assert both(run, monkeypatch) == []


# --- bytes ---


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("home", HOMES)
def test_bytes_of_trained_experts(home, backwards, tmp_path, monkeypatch):
    """Claim: no gradient of an expert that was not hit goes home, and none of its weights to the
    device. Method: what whole ones move in addition, of which some stay for the backward."""
    hits: list[int] = []

    def moved() -> dict[str, int]:
        hits.clear()
        model = make()
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(
                lambda module, args: hits.append(len(torch.unique(args[1])))
            )
        loop = Loop(model, adamw(model.parameters()), tmp_path, home)
        before = {edge: one.nbytes for edge, one in infinity.stats(loop.model).edges.items()}
        for _ in range(STEPS):
            for _ in range(backwards - 1):
                loop.loss().backward()
            loop.step()
        edges = infinity.stats(loop.model).edges
        return {edge: edges[edge].nbytes - before[edge] for edge in edges}

    apart = moved()
    with monkeypatch.context() as patched:
        whole(patched)
        all_of_them = moved()
    each = sum(param[0].nbytes for param in make().model.layers[0].mlp.experts.parameters())
    idle = 2 * STEPS * 12 * backwards - sum(hits)
    assert idle > STEPS * 12 * backwards, "fewer than half are hit"
    # Of a sum all rows with a gradient are counted.
    share = 1 if backwards == 1 else 0.5
    assert all_of_them["device->host"] - apart["device->host"] >= share * idle * each
    assert all_of_them["host->device"] - apart["host->device"] >= idle * each


# --- twins ---


def test_experts_that_are_not_brought_show(tmp_path, monkeypatch):
    """The twin of all reads: without what is missing, they find other values."""
    way = running(read_in_the_block_around_them, tmp_path, "host")
    expected = way()
    monkeypatch.setattr(ChosenExperts, "take_missing", lambda self: frozenset())
    assert differing(way(), expected)


def test_steps_that_are_forgotten_show(tmp_path, monkeypatch):
    """The twin of all changes in between."""
    way = running(moments_are_halved, tmp_path, "host")
    expected = way()
    monkeypatch.setattr(ExpertRows, "catch_up", lambda self, rows: self.wait_running())
    assert differing(way(), expected)
