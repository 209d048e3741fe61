"""Rules of classes that count steps in their groups, and have settings of their own.

Method: a small model takes the steps of the library's optimizer, plain and wrapped. A setting is
honoured with the library's numbers, or refused by name before anything has changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from deleted import needs
from lazily import Lazily
from ranks import run_ranks
from small_net import furthest, model, same, steps, wrapped
from torch import nn, optim

import infinity
from infinity import native
from infinity.errors import ConfigError, UsageError

pytorch_optimizer = Lazily("pytorch_optimizer")
pytestmark = [pytest.mark.filterwarnings("ignore"), needs("ext/class_step")]
SCRIPT = Path(__file__).parents[2] / "support" / "jobs" / "rule_ranks.py"
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def of_library(name: str, params: list, **settings) -> optim.Optimizer:
    return getattr(pytorch_optimizer, name)(params, **{"lr": 1e-3, "weight_decay": 0.1} | settings)


NAMES = {"AdEMAMix": native.Rule.ADEMAMIX, "Adan": native.Rule.ADAN}
MADE: dict[str, Make] = {name: partial(of_library, name) for name in NAMES}
each = pytest.mark.parametrize("case", MADE)


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def values_of(net: nn.Module, optimizer: optim.Optimizer) -> tuple[dict, dict]:
    return weights_of(net), optimizer.state_dict()["state"]


def counts(optimizer: optim.Optimizer) -> list[int | None]:
    return [group.get("step") for group in optimizer.param_groups]


def near(found: dict, theirs: dict) -> bool:
    """Whether weights are the library's, within a hundred-thousandth of what they moved by."""
    moved = furthest(theirs, weights_of(model()))
    return furthest(found, theirs) < 1e-5 * moved + 2e-7


def backward(net: nn.Module, turn: int) -> None:
    generator = torch.Generator().manual_seed(turn)
    target = torch.randint(0, 7, (16,), generator=generator)
    x = torch.randn(16, 64, generator=generator).to(net[3].bias.dtype)
    nn.functional.cross_entropy(net(x).float(), target).backward()


def of_two(make: Make, params: list, **second) -> optim.Optimizer:
    return make([{"params": params[:3]}, {"params": params[3:]} | second])


@each
def test_steps_are_counted_in_the_groups(case, tmp_path):
    """Claim: once a step, also for a parameter that gets its first gradient later, and in a group
    without any gradient: with the class's numbers. The twin: counts of single parameters differ."""

    def trained(home):
        net, optimizer = wrapped(partial(of_two, MADE[case]), home, tmp_path)
        for turn in range(6):
            backward(net, turn)
            for param in list(net.parameters())[4:6] if turn < 3 else ():
                param.grad = None
            optimizer.step()
            optimizer.zero_grad()
            found = counts(optimizer)
        optimizer.step()  # without a gradient
        return net, optimizer, found

    (plain, theirs, first), (net, ours, second) = trained(None), trained("host")
    assert first == second == [6, 6] and counts(theirs) == counts(ours) == [7, 7]
    assert near(weights_of(net), weights_of(plain))
    assert "step" not in ours.state[net[0][0].weight]
    late, early = net[2][0].weight, net[0][0].weight
    assert late._infinity.step == early._infinity.step - 3
    one, other = copy.deepcopy(ours.state_dict()), theirs.state_dict()
    assert [g["step"] for g in one["param_groups"]] == [g["step"] for g in other["param_groups"]]


@each
def test_a_state_dict_before_the_first_step_begins_anew(case, tmp_path):
    """Claim: the next step is the first one, as with the library. Twin: one after three goes on."""
    plain, ours = (wrapped(MADE[case], home, tmp_path) for home in (None, "nvme"))
    start = copy.deepcopy(plain[1].state_dict())
    for net, optimizer in (plain, ours):
        steps(net, optimizer, 3)
    later = copy.deepcopy(ours[1].state_dict())
    for net, optimizer in (plain, ours):
        optimizer.load_state_dict(copy.deepcopy(start))
        steps(net, optimizer, 2, seed=2)
    assert counts(ours[1]) == counts(plain[1]) == [2]
    assert near(weights_of(ours[0]), weights_of(plain[0]))
    ours[1].load_state_dict(later)
    assert counts(ours[1]) == [3]


@each
def test_a_group_that_is_added_counts_its_own_steps(case, tmp_path):
    def trained(home):
        net = model()
        for param in net[3].parameters():
            param.requires_grad_(False)
        optimizer = MADE[case]([p for p in net.parameters() if p.requires_grad])
        if home:
            given = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path)]}
            net, optimizer = infinity.wrap_model(net, optimizer, given)
        steps(net, optimizer, 3)
        for param in net[3].parameters():
            param.requires_grad_(True)
        optimizer.add_param_group({"params": list(net[3].parameters()), "lr": 1e-2})
        steps(net, optimizer, 2, seed=2)
        return net, optimizer

    (plain, theirs), (net, ours) = trained(None), trained("nvme")
    assert counts(theirs) == counts(ours) == [5, 2]
    assert near(weights_of(net), weights_of(plain))


@each
def test_steps_in_the_backward_have_the_same_bits(case, tmp_path):
    """Claim: and are counted once."""
    net, optimizer = wrapped(MADE[case], "host", tmp_path)
    for turn in range(4):
        backward(net, turn)
        optimizer.step()
        optimizer.zero_grad()
    expected = values_of(net, optimizer)
    net, optimizer = wrapped(MADE[case], "nvme", tmp_path)
    for turn in range(4):
        with optimizer.step_in_backward():
            backward(net, turn)
        optimizer.step()
        optimizer.zero_grad()
    assert same(values_of(net, optimizer), expected) and counts(optimizer) == [4]


@each
def test_a_step_that_is_interrupted_is_counted_once(case, tmp_path, monkeypatch):
    """Claim: the repetition completes it. Method: an interrupt after the updates are submitted."""
    from infinity.core.step.stepper import Stepper

    net, optimizer = wrapped(MADE[case], "host", tmp_path)
    plain, theirs = wrapped(MADE[case], "host", tmp_path)
    for each_net in (net, plain):
        backward(each_net, 1)
    theirs.step()
    finish, made = Stepper.finish, []

    def interrupted(self):
        finish(self)
        made.append(True)
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Stepper, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    assert len(made) == 2 and counts(optimizer) == [1]
    assert same(values_of(net, optimizer), values_of(plain, theirs))


@each
def test_gradients_are_clipped_and_rates_scheduled_as_in_the_loop(case, tmp_path):
    """Claim: with two groups of other rates and betas."""
    betas = (0.8, 0.9, 0.95)

    def trained(home, **config):
        make = partial(of_two, MADE[case], lr=3e-3, betas=betas)
        net, optimizer = wrapped(make, home, tmp_path, **config)
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        for turn in range(8):
            backward(net, turn)
            if home is None:
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return weights_of(net)

    assert near(trained("nvme", max_grad_norm=0.05), trained(None))


ELSEWHERE = [
    {"optimizer": "nvme", "update_threads": 1},
    {"params": "nvme", "optimizer": "nvme", "host_memory": "1MiB", "update_threads": 3},
    {"params": "device", "optimizer": "host", "device_memory": "160KiB"},
    {"params": "device", "optimizer": "device", "update_threads": 2},
]


@each
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_homes_budgets_threads_and_units_change_no_bit(case, dtype, tmp_path, monkeypatch):
    """Claim: nor do they change one of bf16 weights with a split master. The twin: another rate
    does."""

    def trained(**config):
        lr = config.pop("lr", 1e-3)
        make = partial(MADE[case], lr=lr)
        net, optimizer = wrapped(make, "host", tmp_path, **{"param_dtype": dtype, **config})
        for turn in range(5):
            backward(net, turn)
            optimizer.step()
            optimizer.zero_grad()
        found = values_of(net, optimizer)
        infinity.unwrap_model(net, optimizer)
        return found

    expected = trained()
    for config in ELSEWHERE:
        assert same(trained(**config), expected), config
    for unit in native.simd_units():
        monkeypatch.setenv("INFINITY_SIMD", unit)
        assert same(trained(), expected), unit
    assert not same(trained(lr=1.01e-3), expected)


SWITCHES = {"AdEMAMix": ["cautious", "stable_adamw"], "Adan": ["use_gc", "adanorm"]}


@pytest.mark.parametrize(
    "case, key", [(case, key) for case, keys in SWITCHES.items() for key in keys]
)
def test_a_setting_that_the_rule_lacks_steps_by_the_class(case, key, tmp_path):
    """Claim: with its bits. When it is off again, a checkpoint goes on by the rule, with the
    class's numbers. The twin: set after the wrap, it is refused by name, with nothing changed."""
    make = partial(of_library, case, **{key: True})
    plain, ours = (wrapped(make, home, tmp_path) for home in (None, "nvme"))
    for net, optimizer in (plain, ours):
        steps(net, optimizer, 5)
    assert ours[1]._known.rule is None
    assert same(values_of(*ours), values_of(*plain))
    for _, optimizer in (plain, ours):
        optimizer.param_groups[0][key] = False
    infinity.save_checkpoint(tmp_path / "saved", *ours)
    net, optimizer = wrapped(MADE[case], "host", tmp_path)
    assert optimizer._known.rule == NAMES[case]
    infinity.load_checkpoint(tmp_path / "saved", net, optimizer)
    assert same(values_of(net, optimizer), values_of(*plain))
    for each_net, its_optimizer in (plain, (net, optimizer)):
        steps(each_net, its_optimizer, 3, seed=2)
    assert near(weights_of(net), weights_of(plain[0]))
    before = values_of(net, optimizer)
    optimizer.param_groups[0][key] = True
    backward(net, 1)
    with pytest.raises(UsageError, match=f"{key}=True, with which .* wrapped without {key}"):
        optimizer.step()
    assert same(values_of(net, optimizer), before) and counts(optimizer) == [8]
    optimizer.param_groups[0][key] = False
    optimizer.step()
    assert counts(optimizer) == [9]


@each
def test_a_switch_of_the_optimizer_itself_is_kept(case, tmp_path):
    """Claim: changed after the wrap, on either optimizer, it is refused, with nothing changed."""
    net, optimizer = wrapped(partial(MADE[case], maximize=True), "host", tmp_path)
    backward(net, 1)
    for changed in (optimizer, optimizer.wrapped):
        changed.maximize = False
        with pytest.raises(UsageError, match="maximize=False of the optimizer has changed"):
            optimizer.step()
        changed.maximize = True
    optimizer.step()
    assert counts(optimizer) == [1]


def test_a_clip_of_all_parameters_is_refused(tmp_path):
    """Claim: at the wrap, also when no group says so, and set after it, with nothing changed."""
    for groups in ([{}], [{"max_grad_norm": 0.0}]):
        with pytest.raises(ConfigError, match=r"max_grad_norm=0.5 .* use Config\(max_grad_norm"):
            wrapped(
                lambda params: MADE["Adan"]([{"params": params} | groups[0]], max_grad_norm=0.5),
                "host",
                tmp_path,
            )
    net, optimizer = wrapped(MADE["Adan"], "host", tmp_path)
    backward(net, 1)
    optimizer.wrapped.max_grad_norm = 0.5
    with pytest.raises(UsageError, match="max_grad_norm=0.5 of the optimizer has changed"):
        optimizer.step()
    optimizer.wrapped.max_grad_norm = 0.0
    optimizer.step()
    assert counts(optimizer) == [1]


def test_the_first_gradient_is_kept_as_the_class_does(tmp_path):
    """Claim: of a parameter that gets its first one in a later step of its group, and of one whose
    state was deleted. The twin: without a deletion its last gradient counts."""

    def trained(home, deletes=True):
        make = partial(MADE["Adan"], maximize=True, eps=1e-4)  # no noise of tiny gradients
        net, optimizer = wrapped(make, home, tmp_path)
        late, deleted = net[2][0].weight, net[0][0].weight
        for turn in range(5):
            backward(net, turn)
            if turn < 2:
                late.grad = None
            if turn == 3 and deletes:
                del optimizer.state[deleted]
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(net), optimizer.state[late]["previous_grad"].clone()

    theirs, found, twin = trained(None), trained("nvme"), trained("host", deletes=False)
    assert near(found[0], theirs[0]) and torch.allclose(found[1], theirs[1], rtol=1e-4, atol=1e-7)
    assert not near(twin[0], theirs[0])


def test_a_schedule_without_numbers_is_refused(tmp_path):
    """Claim: at the wrap, and at a step before anything has changed."""
    with pytest.raises(ConfigError, match="group 0 has t_alpha_beta3=0 with betas"):
        wrapped(partial(MADE["AdEMAMix"], t_alpha_beta3=0), "host", tmp_path)
    net, optimizer = wrapped(MADE["AdEMAMix"], "host", tmp_path)
    optimizer.param_groups[0]["t_alpha_beta3"] = 0
    backward(net, 1)
    with pytest.raises(UsageError, match="group 0 has t_alpha_beta3=0 with betas"):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    with pytest.raises(UsageError, match="give 3 numbers"):
        optimizer.step()
    assert not optimizer.state[net[3].bias]


@each
def test_parameters_outside_are_stepped_too(case, tmp_path):
    """Claim: by the class, with the same count: fp64 weights that the engine does not move."""

    def trained(home):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
        optimizer = MADE[case](list(net.parameters()))
        if home:
            net, optimizer = infinity.wrap_model(net, optimizer, {"params": home})
        for _ in range(5):
            net[1](net[0](torch.ones(1, 4)).double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(net), counts(optimizer)

    (theirs, first), (found, second) = trained(None), trained("host")
    assert first == second == [5] and furthest(found, theirs) < 1e-6


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "world, shard",
    [(2, "parameters"), pytest.param(4, "optimizer", marks=pytest.mark.slow)],
)
def test_ranks_have_the_bits_of_one_process(world, shard, tmp_path):
    """Claim: with the same batches, and from their checkpoint. The twin is in the job: another rate
    differs."""
    done = run_ranks(world, [str(SCRIPT), str(tmp_path), shard], seconds=240)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(world):
        told = json.loads((tmp_path / f"told.{rank}.json").read_text())
        assert set(told) == set(MADE)
        for case, found in told.items():
            assert found == {"same": True, "resumed": True, "counts": [6], "twin": False}, case
