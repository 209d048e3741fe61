"""Known: every rule and every class steps as its library does, from every home.

Method: a small model takes 20 steps of its own gradients beside the library's optimizer. Homes,
budgets and units of vectors have the same bits (`tests/native/test_kernel.py` has the units).
Twins: another learning rate differs; a class that is changed is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import flashoptim_here
import pytest
import torch
from lazily import Lazily
from marks import few
from small_net import furthest, model, same, steps, wrapped
from torch import nn, optim

import infinity
from infinity import native
from infinity.errors import ConfigError, UsageError
from infinity.ext.class_step.known_elsewhere import ALIASES, BY_RULE

bitsandbytes, torchao = Lazily("bitsandbytes"), Lazily("torchao.optim")
pytorch_optimizer = Lazily("pytorch_optimizer")
pytestmark = pytest.mark.filterwarnings("ignore")
HOMES = ["device", "host", "nvme"]
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def of_flashoptim(name: str, params: list[nn.Parameter], **settings) -> optim.Optimizer:
    kind = getattr(flashoptim_here.imported(), name)
    return kind(params, quantize=False, master_weight_bits=None, fused=False, **settings)


TORCHS: dict[str, Make] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "Adam": lambda params: optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adadelta": lambda params: optim.Adadelta(params, lr=1.0, rho=0.8, weight_decay=0.01),
    "Adagrad": lambda params: optim.Adagrad(params, lr=1e-2, lr_decay=0.01, weight_decay=0.01),
    "Adamax": lambda params: optim.Adamax(params, lr=2e-3, weight_decay=0.1, maximize=True),
    "AdamW, amsgrad": lambda params: optim.AdamW(params, lr=1e-2, amsgrad=True),
    "Adam, amsgrad": lambda params: optim.Adam(
        params, lr=1e-2, weight_decay=0.1, amsgrad=True, maximize=True
    ),
    "ASGD": lambda params: optim.ASGD(params, lr=1e-2, lambd=1e-2, t0=8, weight_decay=0.1),
    "NAdam": lambda params: optim.NAdam(params, lr=1e-2, weight_decay=0.1),
    "NAdam, decoupled": lambda params: optim.NAdam(
        params, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RAdam": lambda params: optim.RAdam(params, lr=1e-2, weight_decay=0.1),
    "RAdam, decoupled": lambda params: optim.RAdam(
        params, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RMSprop": lambda params: optim.RMSprop(params, lr=1e-3, weight_decay=0.01),
    "RMSprop, momentum": lambda params: optim.RMSprop(params, lr=1e-3, momentum=0.9),
    "RMSprop, centred": lambda params: optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.9),
    "Rprop": lambda params: optim.Rprop(params, lr=1e-3),
}
OF_PATHS: dict[str, Make] = {
    "AdEMAMix": lambda p: pytorch_optimizer.AdEMAMix(p, lr=1e-3, weight_decay=0.1),
    "AdEMAMix, decoupled": lambda p: pytorch_optimizer.AdEMAMix(
        p, lr=1e-3, weight_decay=0.1, weight_decouple=True, maximize=True
    ),
    "AdEMAMix, schedules": lambda p: pytorch_optimizer.AdEMAMix(
        p,
        lr=1e-3,
        betas=(0.4, 0.9, 0.99),
        weight_decay=0.01,
        weight_decouple=True,
        fixed_decay=True,
        alpha=3.0,
        t_alpha_beta3=12,
    ),
}
OF_PATHS |= {
    "Adan": lambda p: pytorch_optimizer.Adan(p, lr=1e-3, weight_decay=0.1),
    "Adan, decoupled": lambda p: pytorch_optimizer.Adan(
        p,
        lr=3e-3,
        betas=(0.9, 0.4, 0.95),
        weight_decay=0.1,
        weight_decouple=True,
        maximize=True,
    ),
}
OTHERS: dict[str, Make] = {
    "bitsandbytes AdamW": lambda p: bitsandbytes.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "bitsandbytes Adam": lambda p: bitsandbytes.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "bitsandbytes PagedAdamW32bit": lambda p: bitsandbytes.optim.PagedAdamW32bit(p, lr=1e-2),
    "bitsandbytes Lion": lambda p: bitsandbytes.optim.Lion(p, lr=1e-3, weight_decay=0.1),
}
OTHERS |= {
    f"flashoptim {name}": partial(of_flashoptim, name, **settings)
    for name, settings in {
        "FlashAdamW": {"lr": 1e-2, "weight_decay": 0.1},
        "FlashAdam": {"lr": 1e-2, "weight_decay": 0.1},
        "FlashLion": {"lr": 1e-3, "weight_decay": 0.1},
        "FlashSGD": {"lr": 0.1, "momentum": 0.9},
    }.items()
}
KERNELS = TORCHS | OF_PATHS  # each rule, with its branches
MADE = KERNELS | OTHERS
REFUSED_MOMENTS = {
    **{name: ["int8", "bf16"][: 1 + name.startswith("AdEMAMix")] for name in OF_PATHS},
    "AdamW, amsgrad": ["int8"],
    "Adam, amsgrad": ["int8"],
    "ASGD": ["int8", "bf16"],
    "RMSprop, centred": ["int8", "bf16"],
    "Rprop": ["int8"],
}


def run(make: Make, home: str | None, folder, **config) -> tuple[dict, dict]:
    net, optimizer = wrapped(make, home, folder, **config)
    steps(net, optimizer, 20)
    state = ALIASES["bitsandbytes.optim.adamw.AdamW"].flat(optimizer.state_dict())["state"]
    return (
        {name: value.detach().clone() for name, value in net.state_dict().items()},
        {i: {k: torch.as_tensor(v).clone() for k, v in of.items()} for i, of in state.items()},
    )


@pytest.mark.parametrize("case", MADE)
def test_twenty_steps_are_the_librarys_from_every_home(case, tmp_path):
    """Claim: the library's weights within a hundred-thousandth of what they moved by, its keys, and
    the same bits from every home. flashoptim corrects biases in fp32, which costs it a digit."""
    theirs, state = run(MADE[case], None, tmp_path)
    found = [run(MADE[case], home, tmp_path) for home in HOMES]
    moved = furthest(theirs, dict(model().state_dict()))
    near = 1e-4 if case.startswith("flashoptim") else 1e-5
    assert furthest(found[0][0], theirs) < near * moved + 2e-7
    assert {i: set(of) for i, of in found[0][1].items()} == {i: set(of) for i, of in state.items()}
    for i, of in state.items():
        for key, value in of.items():
            assert torch.allclose(found[0][1][i][key].float(), value.float(), rtol=1e-3, atol=1e-5)
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize("case", few(MADE, 6))
def test_another_rate_shows(case, tmp_path):
    """The twin."""

    def faster(params):
        optimizer = MADE[case](params)
        for group in optimizer.param_groups:
            group["lr"] *= 1.01
        return optimizer

    theirs, _ = run(MADE[case], None, tmp_path)
    found, _ = run(faster, "host", tmp_path)
    moved = furthest(theirs, dict(model().state_dict()))
    assert furthest(found, theirs) > 1e-5 * moved + 2e-7


@pytest.mark.parametrize("case", MADE)
def test_states_load_both_ways(case, tmp_path):
    """Claim: a job goes on from the library's state with the library's numbers, and the library
    from the job's."""
    plain = wrapped(MADE[case], None, tmp_path)
    steps(*plain, 5)
    ours = wrapped(MADE[case], "host", tmp_path)
    ours[0].load_state_dict(plain[0].state_dict())
    ours[1].load_state_dict(plain[1].state_dict())
    back = infinity.unwrap_model(*ours)
    again = wrapped(MADE[case], "nvme", tmp_path)
    again[0].load_state_dict(plain[0].state_dict())
    again[1].load_state_dict(plain[1].state_dict())
    for net, optimizer in (plain, back, again):
        steps(net, optimizer, 5, seed=2)
    for net, _ in (back, again):
        assert furthest(dict(net.state_dict()), dict(plain[0].state_dict())) < 2e-5


@pytest.mark.parametrize("moments", few(["int8", "bf16"], 1))
@pytest.mark.parametrize("case", KERNELS)
def test_smaller_moments_have_the_same_bits_from_every_home(case, moments, tmp_path):
    """Claim: and they are near those in fp32, or refused for the rule."""
    make = KERNELS[case]
    if moments in REFUSED_MOMENTS.get(case, ()):
        with pytest.raises(ConfigError, match=f"moments='{moments}' is not for .*: choose fp32"):
            wrapped(make, "host", tmp_path, moments=moments)
        return
    found = [run(make, home, tmp_path, moments=moments) for home in HOMES]
    assert same(found[0], found[1]) and same(found[0], found[2])
    whole, _ = run(make, "host", tmp_path)
    moved = furthest(whole, dict(model().state_dict()))
    assert 0 < furthest(found[0][0], whole) < 0.5 * moved


@pytest.mark.parametrize("case", MADE)
def test_a_job_resumes_to_the_bit(case, tmp_path):
    whole = wrapped(MADE[case], "host", tmp_path)
    steps(*whole, 4)
    infinity.save_checkpoint(tmp_path / "saved", *whole)
    resumed = wrapped(MADE[case], "nvme", tmp_path)
    infinity.load_checkpoint(tmp_path / "saved", *resumed)
    for net, optimizer in (whole, resumed):
        steps(net, optimizer, 4, seed=2)
    for name, value in whole[0].state_dict().items():
        assert torch.equal(value, resumed[0].state_dict()[name])


def test_every_rule_has_a_class_and_a_test():
    assert set(BY_RULE) == set(native.Rule.__members__.values())
    tested = {name.partition(",")[0] for name in KERNELS}
    kinds = [known.kind for known in BY_RULE.values() if known.kind is not None]
    names = {kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__ for kind in kinds}
    assert names == tested


# Settings of two groups, of which one needs another moment
UNLIKE = {
    "amsgrad": (optim.AdamW, {"amsgrad": True}, {"amsgrad": False}, "max_exp_avg_sq"),
    "momentum": (optim.SGD, {"momentum": 0.0}, {"momentum": 0.9}, "momentum_buffer"),
    "centered": (optim.RMSprop, {"centered": True}, {"momentum": 0.5}, "grad_avg"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_a_group_has_the_moments_that_it_needs(case, tmp_path):
    """Claim: the state has torch's keys in each group, and torch's numbers; state dicts and
    checkpoints are loaded. A group gets no setting later for which it has no array."""
    kind, *settings, moment = UNLIKE[case]

    def of_groups(*settings):
        def make(params):
            groups = [{"params": params[:3]} | settings[0], {"params": params[3:]} | settings[1]]
            return kind(groups, lr=1e-3)

        return make

    make = of_groups(*settings)
    theirs, state = run(make, None, tmp_path)
    keys = {i: {key for key, value in of.items() if value is not None} for i, of in state.items()}
    for home in HOMES:
        net, optimizer = wrapped(make, home, tmp_path)
        steps(net, optimizer, 20)
        assert furthest(dict(net.state_dict()), theirs) < 1e-4
        found = optimizer.state_dict()
        assert {i: set(of) for i, of in found["state"].items()} == {
            i: k for i, k in keys.items() if k
        }
        assert {moment in optimizer.state[p] for p in net[0][0].parameters()} != {
            moment in optimizer.state[p] for p in net[3].parameters()
        }
    infinity.save_checkpoint(tmp_path / "saved", net, optimizer)
    plain, again = wrapped(make, None, tmp_path), wrapped(make, "host", tmp_path)
    for each in (plain, again):
        each[0].load_state_dict(net.state_dict())
        each[1].load_state_dict(copy.deepcopy(found))
    resumed = wrapped(make, "host", tmp_path)
    infinity.load_checkpoint(tmp_path / "saved", *resumed)
    for each in ((net, optimizer), plain, again, resumed):
        steps(*each, 3, seed=2)
    weights = [dict(each.state_dict()) for each in (net, plain[0], again[0], resumed[0])]
    assert furthest(weights[0], weights[1]) < 1e-4
    assert furthest(weights[0], weights[2]) == furthest(weights[0], weights[3]) == 0
    everywhere = {
        **settings[0],
        **settings[1],
        **{k: v for s in settings for k, v in s.items() if v},
    }
    other = wrapped(of_groups(everywhere, everywhere), "host", tmp_path)
    with pytest.raises(UsageError, match="settings of its group . have no .*: wrap the model"):
        infinity.load_checkpoint(tmp_path / "saved", *other)
    for group in optimizer.param_groups:
        group.update(everywhere)
    with pytest.raises(UsageError, match="and it was wrapped without"):
        steps(net, optimizer, 1)


def test_adam_and_adamw_with_amsgrad_are_told_apart(tmp_path):
    """Claim: neither goes on from a state dict or a checkpoint of the other."""
    adam = partial(optim.Adam, lr=1e-2, weight_decay=0.1, amsgrad=True)
    adamw = partial(optim.AdamW, lr=1e-2, weight_decay=0.1, amsgrad=True)
    one, other = wrapped(adam, "host", tmp_path), wrapped(adamw, "host", tmp_path)
    steps(*one, 1)
    with pytest.raises(UsageError, match="decoupled_weight_decay=False, and it was wrapped as"):
        other[1].load_state_dict(one[1].state_dict())
    infinity.save_checkpoint(tmp_path / "saved", *one)
    with pytest.raises(UsageError, match="is Adam with amsgrad, this one is AdamW with amsgrad"):
        infinity.load_checkpoint(tmp_path / "saved", *other)
    plain = wrapped(partial(optim.AdamW, lr=1e-2), "host", tmp_path)
    with pytest.raises(UsageError, match="is Adam with amsgrad, this one is ADAMW"):
        infinity.load_checkpoint(tmp_path / "saved", *plain)


@pytest.mark.parametrize(
    "make, key, said",
    [
        (lambda p: optim.ASGD(p), "alpha", "lacks alpha"),
        (lambda p: optim.NAdam(p), "momentum_decay", "lacks momentum_decay"),
    ],
)
def test_a_setting_that_is_missing_is_named(make, key, said, tmp_path):
    net, optimizer = wrapped(make, "host", tmp_path)
    del optimizer.param_groups[0][key]
    net(torch.ones(2, 64)).sum().backward()
    with pytest.raises(UsageError, match=said):
        optimizer.step()


def test_a_pair_of_one_number_is_refused(tmp_path):
    net, optimizer = wrapped(partial(optim.AdamW, lr=1e-2), "host", tmp_path)
    optimizer.param_groups[0]["betas"] = (0.9,)
    net(torch.ones(2, 64)).sum().backward()
    with pytest.raises(UsageError, match="give 2 numbers"):
        optimizer.step()
