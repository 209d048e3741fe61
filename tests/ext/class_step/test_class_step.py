"""Class steps: an optimizer without a rule steps by its own code, from every home, with its bits.

Method: a small model takes 20 steps of its own gradients beside the library's optimizer, and has
its bits, in weights and state. Twins: another learning rate differs; what is not the class's alone,
or not at home here, is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
from marks import few
from models import at_home
from small_net import furthest, model, same, stepped_by_class, steps, wrapped
from torch import nn, optim
from twins import twin

import infinity
from infinity.errors import ConfigError, UsageError
from infinity.ext.class_step.class_step import ClassStepper
from infinity.ext.class_step.known_elsewhere import ANY_PART, WHOLE

pytestmark = pytest.mark.filterwarnings("ignore")
HOMES = ["device", "hostile"]
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def with_use_muon(params: list) -> list[dict]:
    """Groups of matrices and of others, of those that there are."""
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    found = []
    for is_matrix in (True, False):
        for group in groups:
            chosen = [each for each in group["params"] if (each.ndim == 2) == is_matrix]
            if chosen:
                found.append(group | {"params": chosen, "use_muon": is_matrix})
    return found


def of_library(module: str, name: str, params: list[nn.Parameter], **settings) -> optim.Optimizer:
    kind = getattr(pytest.importorskip(module), name)
    rate = inspect.signature(kind.__init__).parameters["lr"].default
    if rate in (None, inspect.Parameter.empty) and name != "Adafactor":
        settings = {"lr": 1e-3} | settings
    if module.startswith("optimi."):
        settings |= {"triton": False}  # chosen where Triton is installed, also on a processor
    if ".muon." in module:
        params = with_use_muon(params)
    optimizer = kind(params, **settings)
    if hasattr(optimizer, "train"):  # Schedule-Free
        optimizer.train()
    return optimizer


TORCHS: dict[str, Make] = {
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "in parts": stepped_by_class,
    "in parts, amsgrad": partial(stepped_by_class, ams_bound=True),
}
OTHERS: dict[str, Make] = {
    f"{module}.{name}": partial(of_library, module, name)
    for modules in (WHOLE, ANY_PART)
    for module, names in modules.items()
    for name in names.split()
} | {
    "Adafactor, first moment": lambda p: of_library(
        "transformers.optimization", "Adafactor", p, lr=1e-3, relative_step=False, beta1=0.9
    ),
    "Lion, decoupled": lambda p: of_library(
        "lion_pytorch", "Lion", p, decoupled_weight_decay=True, weight_decay=0.1
    ),
}
MADE = TORCHS | OTHERS


def state_of(optimizer: optim.Optimizer) -> dict:
    """Its state, flat: bitsandbytes has a dict in it."""
    inside = "__bnb_optimizer_quant_state__"
    return {
        i: {
            k: torch.as_tensor(v).clone()
            for k, v in (of | of.get(inside, {})).items()
            if k != inside and v is not None
        }
        for i, of in optimizer.state_dict()["state"].items()
    }


def values_of(net: nn.Module, optimizer: optim.Optimizer) -> tuple[dict, dict]:
    weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return weights, state_of(optimizer)


def run(make: Make, home: str | None, folder, count: int = 20, **config) -> tuple[dict, dict]:
    net, optimizer = wrapped(make, home, folder, **config)
    steps(net, optimizer, count)
    return values_of(net, optimizer)


def plain(case: str, count: int = 20) -> tuple[dict, dict]:
    return twin(lambda: run(MADE[case], None, None, count), case, count)


@pytest.mark.parametrize("case", few(MADE, 14))
def test_twenty_steps_have_the_librarys_bits_from_every_home(case, tmp_path):
    theirs = plain(case)
    for home in HOMES:
        found = run(MADE[case], home, tmp_path)
        assert same(theirs, found)
        assert {i: set(of) for i, of in found[1].items()} == {
            i: set(of) for i, of in theirs[1].items()
        }


@pytest.mark.parametrize("case", few(TORCHS, 2))
def test_another_rate_shows(case, tmp_path):
    """The twin."""

    def faster(params):
        optimizer = MADE[case](params)
        for group in optimizer.param_groups:
            group["lr"] *= 1.01
        return optimizer

    theirs, found = plain(case), run(faster, "host", tmp_path)
    assert furthest(found[0], theirs[0]) > 0 and not same(found, theirs)


@pytest.mark.parametrize("case", few(MADE, 10))
def test_states_load_both_ways(case, tmp_path):
    """Claim: a job goes on from the library's state with the library's bits, and the library from
    the job's."""
    plain = wrapped(MADE[case], None, tmp_path)
    steps(*plain, 5)
    try:
        wrapped(MADE[case], None, tmp_path)[1].load_state_dict(plain[1].state_dict())
    except KeyError as error:
        assert "Lion_adv" in case  # of adv_optm 2.5.16
        pytest.skip(f"the library does not load its own state: {error}")
    ours = wrapped(MADE[case], "host", tmp_path)
    ours[0].load_state_dict(plain[0].state_dict())
    ours[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    back = infinity.unwrap_model(*ours)
    again = wrapped(MADE[case], "nvme", tmp_path)
    again[0].load_state_dict(plain[0].state_dict())
    again[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    for net, optimizer in (plain, back, again):
        steps(net, optimizer, 5, seed=2)
    expected = values_of(*plain)
    assert same(values_of(*back), expected) and same(values_of(*again), expected)


@pytest.mark.parametrize("case", few(MADE, 6))
def test_a_checkpoint_goes_on_with_the_same_bits(case, tmp_path):
    expected = run(MADE[case], "nvme", tmp_path, 0)
    net, optimizer = wrapped(MADE[case], "nvme", tmp_path)
    steps(net, optimizer, 4)
    infinity.save_checkpoint(tmp_path / "saved", net, optimizer)
    steps(net, optimizer, 4, seed=2)
    expected = values_of(net, optimizer)
    net, optimizer = wrapped(MADE[case], "host", tmp_path)
    infinity.load_checkpoint(tmp_path / "saved", net, optimizer)
    steps(net, optimizer, 4, seed=2)
    assert same(values_of(net, optimizer), expected)


@pytest.mark.parametrize("case", ["in parts", "Adafactor", "in parts, amsgrad"])
def test_a_step_in_the_backward_has_the_same_bits(case, tmp_path):
    expected = run(MADE[case], "host", tmp_path, 4)
    net, optimizer = wrapped(MADE[case], "nvme", tmp_path)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(16, 64, generator=generator)
        target = torch.randint(0, 7, (16,), generator=generator)
        with optimizer.step_in_backward():
            nn.functional.cross_entropy(net(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(values_of(net, optimizer), expected)


@pytest.mark.parametrize("case", ["in parts", "Adafactor"])
def test_gradients_are_clipped_as_in_the_loop(case, tmp_path):
    net, optimizer = wrapped(MADE[case], None, tmp_path)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(16, 64, generator=generator)
        target = torch.randint(0, 7, (16,), generator=generator)
        nn.functional.cross_entropy(net(x), target).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    found = run(MADE[case], "nvme", tmp_path, 5, max_grad_norm=0.05)
    assert furthest(found[0], values_of(net, optimizer)[0]) < 1e-7


def test_masters_of_16_bit_weights_are_stepped(tmp_path):
    """Claim: bf16 weights with a split master move as fp32 ones by the same gradients. The twin has
    no masters."""

    def weights(dtype, **config):
        net = model().to(dtype)
        net, optimizer = infinity.wrap_model(
            net, optim.Adafactor(net.parameters(), lr=1e-4), {"params": "host", **config}
        )
        for turn in range(10):
            for param in net.parameters():
                grad = torch.cos(torch.arange(param.numel()) * (turn + 1.0)).view(param.shape)
                param.grad = grad.to(torch.bfloat16).to(dtype)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        net, _ = infinity.unwrap_model(net, optimizer)
        masters = [state[i].get("master", param) for i, param in enumerate(net.parameters())]
        return [master.detach().float().clone() for master in masters]

    torch.manual_seed(0)
    start = [p.detach().bfloat16().float() for p in model().parameters()]
    assert start
    split = weights(torch.bfloat16, master="split", grad_dtype=torch.bfloat16)
    own = weights(torch.bfloat16, master="none", grad_dtype=torch.bfloat16)
    fp32 = weights(torch.bfloat16, master="fp32", grad_dtype=torch.bfloat16)
    assert all(map(torch.equal, split, fp32)) and not all(map(torch.equal, split, own))


def test_a_group_has_the_moments_that_it_needs(tmp_path):
    """Claim: of one optimizer with `use_muon` groups, matrices have a momentum, the others Adam's
    two. Without room for its moments a parameter is not stepped as one of another group."""
    make = MADE["pytorch_optimizer.optimizer.muon.muon.Muon"]
    net, optimizer = wrapped(make, "nvme", tmp_path)
    steps(net, optimizer, 2)
    matrix, vector = net[0][0].weight, net[0][0].bias
    assert {*optimizer.state[matrix]} == {"momentum_buffer"}
    assert {*optimizer.state[vector]} == {"exp_avg", "exp_avg_sq"}
    arrays = [{*each._infinity.flat_param.arrays} - {"weight", "grad"} for each in (matrix, vector)]
    assert [len(each) for each in arrays] == [1, 2]
    before = values_of(net, optimizer)
    of_matrices, others = optimizer.param_groups
    of_matrices["params"].append(others["params"].pop())
    nn.functional.cross_entropy(net(torch.ones(2, 64)), torch.zeros(2, dtype=torch.long)).backward()
    with pytest.raises(UsageError, match="keeps momentum_buffer in group 0"):
        optimizer.step()
    others["params"].append(of_matrices["params"].pop())
    assert same(values_of(net, optimizer), before)
    optimizer.step()
    assert not same(values_of(net, optimizer), before)


def test_muon_and_another_optimizer_step_one_model(tmp_path):
    """Claim: a list of optimizers steps as torch's two, from every home."""

    def both(net):
        matrices = [p for p in net.parameters() if p.ndim == 2]
        others = [p for p in net.parameters() if p.ndim != 2]
        return [
            optim.Muon(matrices, lr=0.02, momentum=0.9),
            stepped_by_class(others),
        ]

    def trained(home):
        net = model()
        optimizers = both(net)
        if home:
            given = at_home(home, home, tmp_path)
            net, optimizers = infinity.wrap_model(net, optimizers, given)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            x = torch.randn(16, 64, generator=generator)
            target = torch.randint(0, 7, (16,), generator=generator)
            nn.functional.cross_entropy(net(x), target).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return net.state_dict(), state_of(optimizers[0])

    theirs, found = trained(None), [trained(home) for home in HOMES]
    for one in found:
        assert set(one[1][0]) == {"momentum_buffer"}
        assert same(one, theirs)


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_step_that_was_interrupted_is_completed(at, tmp_path, monkeypatch):
    """Claim: after an interrupt between the writes of a step, its repetition has the same bits."""
    expected = run(MADE["Adafactor"], "nvme", tmp_path, 3)
    net, optimizer = wrapped(MADE["Adafactor"], "nvme", tmp_path)
    steps(net, optimizer, 2)
    write, count = ClassStepper._write, iter(range(1000))

    def interrupted(self, *args):
        write(self, *args)
        if next(count) == at:
            raise KeyboardInterrupt

    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(16, 64, generator=generator)
        target = torch.randint(0, 7, (16,), generator=generator)
    nn.functional.cross_entropy(net(x), target).backward()
    monkeypatch.setattr(ClassStepper, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    assert same(values_of(net, optimizer), expected)


def test_the_books_are_the_users(tmp_path):
    """Claim: edits of values beside the homes, and deletions, are honoured as by the library."""

    def edited(home):
        net, optimizer = wrapped(MADE["Adafactor"], home, tmp_path)
        steps(net, optimizer, 3)
        params = list(net.parameters())
        optimizer.state[params[0]]["row_var"].mul_(4)
        optimizer.state[params[2]]["step"].fill_(9.0)
        del optimizer.state[params[4]]
        steps(net, optimizer, 3, seed=2)
        return values_of(net, optimizer)

    assert same(edited(None), edited("host")) and not same(
        edited(None), run(MADE["Adafactor"], None, tmp_path, 6)
    )


def test_schedule_free_counts_in_its_groups(tmp_path):
    """Claim: what the class counts in a group is counted once a step, however many parameters it
    has, and with none that has a gradient."""
    make = MADE["schedulefree.adamw_schedulefree.AdamWScheduleFree"]
    plain, ours = (wrapped(make, home, tmp_path) for home in (None, "host"))
    for net, optimizer in (plain, ours):
        steps(net, optimizer, 3)
        optimizer.step()  # without a gradient
    keys = ("k", "weight_sum", "lr_max")
    one, other = (optimizer.param_groups[0] for _, optimizer in (plain, ours))
    assert [one[key] for key in keys] == [other[key] for key in keys]


@pytest.mark.parametrize("name", ["AdamW", "RAdam", "SGD"])
def test_schedule_free_evaluates_with_its_averages(name, tmp_path):
    """Claim: eval() and train() change the weights as the library's, in any order, and a job goes
    on from them. The twin: without eval() the weights are others."""
    kind = getattr(pytest.importorskip("schedulefree"), f"{name}ScheduleFree")

    def trained(home):
        net, optimizer = wrapped(lambda p: kind(p, lr=0.01), home, tmp_path)
        optimizer.train()
        steps(net, optimizer, 8)
        before = values_of(net, optimizer)
        optimizer.eval()
        optimizer.eval()
        evaluated = values_of(net, optimizer)
        optimizer.train()
        steps(net, optimizer, 2, seed=2)
        return before, evaluated, values_of(net, optimizer), optimizer.param_groups[0]["k"]

    expected, found = trained(None), trained("nvme")
    assert all(map(same, expected[:3], found[:3])) and expected[3] == found[3] == 10
    assert not same(found[0], found[1])


def test_what_is_switched_on_later_is_refused(tmp_path):
    """Claim: a setting for which there is no home is refused, with nothing changed."""
    net, optimizer = wrapped(lambda p: optim.AdamW(p, lr=1e-2), "host", tmp_path)
    steps(net, optimizer, 1)
    before = values_of(net, optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    nn.functional.cross_entropy(net(torch.ones(2, 64)), torch.zeros(2, dtype=torch.long)).backward()
    with pytest.raises(UsageError, match="amsgrad=True, and it was wrapped without amsgrad"):
        optimizer.step()
    assert same(values_of(net, optimizer), before)


def test_an_error_of_the_class_leaves_no_step_behind(tmp_path, monkeypatch):
    """Claim: after a setting that raises, and after an error in the first parameter, everything
    works, and the step is made when its cause is gone."""
    make = MADE["schedulefree.adamw_schedulefree.AdamWScheduleFree"]
    plain, ours = (wrapped(make, home, tmp_path) for home in (None, "nvme"))
    x, target = torch.randn(4, 64), torch.zeros(4, dtype=torch.long)
    for net, optimizer in (plain, ours):
        optimizer.eval()
        nn.functional.cross_entropy(net(x), target).backward()
        with pytest.raises(Exception, match="not in train mode"):
            optimizer.step()
        net(x)
        net.state_dict()
        optimizer.train()
    with monkeypatch.context() as patch:
        patch.setattr(ClassStepper, "_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours[1].step()
        ours[0].state_dict()
    for net, optimizer in (plain, ours):
        optimizer.step()
    assert same(values_of(*plain), values_of(*ours))


@pytest.mark.parametrize("case", few(MADE, 4))
def test_two_groups_have_the_librarys_bits(case, tmp_path):
    """Claim: a class that looks at its first group, or counts in each, has what it looks for."""

    def of_two(params):
        return MADE[case]([{"params": params[:3]}, {"params": params[3:]}])

    assert same(run(of_two, None, tmp_path, 4), run(of_two, "host", tmp_path, 4))


def test_small_values_are_loaded_in_fp32(tmp_path):
    """Claim: a state dict in bf16 goes on, as with the library."""
    plain, ours = (wrapped(MADE["Adafactor"], home, tmp_path) for home in (None, "host"))
    for net, optimizer in (plain, ours):
        steps(net, optimizer, 3)
    saved = copy.deepcopy(plain[1].state_dict())
    for of in saved["state"].values():
        of |= {key: value.bfloat16() for key, value in of.items() if key != "step"}
    for net, optimizer in (plain, ours):
        optimizer.load_state_dict(copy.deepcopy(saved))
        steps(net, optimizer, 2, seed=2)
    assert same(values_of(*plain), values_of(*ours))


def test_the_state_of_one_element_is_deleted(tmp_path):
    def trained(home):
        net = nn.Linear(6, 1)
        with torch.no_grad():
            net.weight.fill_(0.5)
            net.bias.fill_(0.1)
        optimizer = stepped_by_class(net.parameters(), lr=0.1)
        if home:
            net, optimizer = infinity.wrap_model(net, optimizer, {"params": home})
        for turn in range(3):
            net(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn == 1:
                del optimizer.state[net.bias]
        return values_of(net, optimizer)

    assert same(trained(None), trained("host"))


def test_parameters_outside_are_evaluated_too(tmp_path):
    """Claim: eval() of Schedule-Free changes fp64 weights that the engine does not move."""
    kind = pytest.importorskip("schedulefree").AdamWScheduleFree

    def trained(home):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
        optimizer = kind(net.parameters(), lr=0.1)
        if home:
            net, optimizer = infinity.wrap_model(net, optimizer, {"params": home})
        optimizer.train()
        for _ in range(5):
            net[1](net[0](torch.ones(1, 4)).double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        return {name: value.detach().clone() for name, value in net.state_dict().items()}

    expected, found = trained(None), trained("host")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_helper_that_is_bound_to_the_optimizer_is_refused(tmp_path):
    kind = pytest.importorskip("adv_optm").AdamW_adv
    with pytest.raises(ConfigError, match="has a helper in kourkoutas_helper"):
        wrapped(lambda p: kind(p, kourkoutas_beta=True), "host", tmp_path)
