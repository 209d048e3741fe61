"""Groups, schedulers, clipping, freezing, and gradients that are missing: the ordinary loop's
steps."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from models import (
    at_home,
    differing,
    gradients,
    in_child,
    loss_of,
    prescribed,
    tokens,
    transformer,
)
from torch import nn
from training_cases import (  # noqa: F401
    CLIPS,
    LR,
    SEED,
    a_model,
    assert_trains_alike,
    both_ends,
    clipped,
    hardest,
    simple_step,
    well_conditioned,
)

import infinity


@pytest.mark.parametrize("fault", ["no weight decay", "a lost step", "a stale unit"])
def test_a_wrong_optimizer_is_seen(fault, tmp_path):
    """Method: the twin of everything below; a wrapped loop with one fault is told from the plain
    one."""

    def loop(model, optimizer):
        if isinstance(optimizer, torch.optim.AdamW):
            return [simple_step(model, optimizer, step) for step in range(3)]
        if fault == "no weight decay":
            optimizer.param_groups[0]["weight_decay"] = 0.0
        losses = [
            simple_step(model, optimizer, step) for step in range(3 - (fault == "a lost step"))
        ]
        if fault == "a stale unit":
            with infinity.full_params(model, ["blocks.1"], writeback=True) as params:
                params["blocks.1.norm2.bias"].add_(1e-4)
        return losses + losses[: 3 - len(losses)]

    with pytest.raises(AssertionError):
        assert_trains_alike(loop, transformer(SEED), "host", tmp_path)


def decay_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices and vectors apart, as most training scripts have it, and the embedding with its own
    rate."""
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "tokens" not in n]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.2},
            {"params": vectors, "weight_decay": 0.0, "lr": 3 * LR},
            {"params": [model.tokens.weight], "betas": (0.5, 0.9), "eps": 1e-2},
        ],
        lr=LR,
        eps=1e-3,
    )


@both_ends
def test_param_groups(home, tmp_path):
    """Method: three groups with other rates, decays and betas, which divide every block; equal to
    plain torch."""
    assert_trains_alike(
        lambda m, o: [simple_step(m, o, s) for s in range(3)],
        transformer(SEED),
        home,
        tmp_path,
        make=decay_groups,
    )


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    "Lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=LR, total_steps=8),
    "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@both_ends
def test_scheduler_created_after_the_wrap(make_scheduler, home, tmp_path):
    """Method: a scheduler over what wrap_model returned steers it as it does plain torch, betas
    included."""

    def loop(model, optimizer):
        scheduler = make_scheduler(optimizer)
        seen = []
        for step in range(5):
            seen.append(simple_step(model, optimizer, step))
            scheduler.step()
            seen += [torch.tensor(optimizer.param_groups[0][key]) for key in ("lr", "betas")]
        return seen

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("warning", ["ignore", "error"])
def test_scheduler_created_before_the_wrap(make_scheduler, warning, tmp_path):
    """Method: a scheduler over the plain optimizer steers the wrapped one after it, and without a
    warning."""
    plain, model = transformer(SEED), transformer(SEED)
    plain_optimizer, optimizer = well_conditioned(plain), well_conditioned(model)
    plain_scheduler, scheduler = make_scheduler(plain_optimizer), make_scheduler(optimizer)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest("nvme", model, optimizer, tmp_path)
    )
    torch.manual_seed(SEED)
    expected = []
    for step in range(5):
        expected.append(simple_step(plain, plain_optimizer, step))
        plain_scheduler.step()
    torch.manual_seed(SEED)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter(warning)
        for step in range(5):
            found.append(simple_step(model, optimizer, step))
            scheduler.step()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]


@both_ends
def test_learning_rate_as_tensor(home, tmp_path):
    """Method: a tensor as lr, changed in place between the steps by hand and by a scheduler."""

    def loop(model, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        seen = []
        for step in range(4):
            seen.append(simple_step(model, optimizer, step))
            scheduler.step()
            optimizer.param_groups[0]["lr"].mul_(0.9)
            seen.append(optimizer.param_groups[0]["lr"].clone())
        return seen

    def make(model):
        return torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(LR), eps=1e-3, weight_decay=0.1
        )

    assert_trains_alike(loop, transformer(SEED), home, tmp_path, make=make)


@both_ends
def test_momentum_switched_on_later(home, tmp_path):
    """Method: SGD without momentum gets some from its group (as OneCycleLR does it) after the wrap;
    equal to plain torch, or a typed error, and never a crash."""

    def loop(model, optimizer):
        for step in range(4):
            simple_step(model, optimizer, step)
            optimizer.param_groups[0]["momentum"] = 0.9

    def work():
        try:
            assert_trains_alike(
                loop,
                transformer(SEED),
                home,
                tmp_path,
                make=lambda m: torch.optim.SGD(m.parameters(), lr=LR),
            )
        except infinity.InfinityError as error:
            assert "momentum" in str(error)

    in_child(work)


@pytest.mark.parametrize("how", ["optimizer", "model", "by hand"])
@pytest.mark.parametrize("set_to_none", [True, False])
@both_ends
def test_zero_grad_in_both_forms(home, set_to_none, how, tmp_path):
    """Method: zero by the optimizer, by the model and by hand; zeros are applied by the next step
    where a parameter got nothing else (moments decay, weight decay acts, the count goes up), and
    None is not, as in torch.
    """
    skipped = ("pairs.1.matrix", "pairs.5.vector", "scalar")

    def zero(model, optimizer):
        if how == "optimizer":
            return optimizer.zero_grad(set_to_none=set_to_none)
        if how == "model":
            return model.zero_grad(set_to_none=set_to_none)
        for param in model.parameters():
            if param.grad is not None:
                param.grad = None if set_to_none else torch.zeros_like(param.grad)

    def loop(model, optimizer):
        shapes = prescribed(SEED)
        seen = []
        for step in range(4):
            model(gradients(shapes, SEED + step, without=skipped if step % 2 else ())).backward()
            optimizer.step()
            zero(model, optimizer)
            seen.append(torch.tensor([p.grad is None for p in model.parameters()]))
        return seen

    _, optimizer = assert_trains_alike(loop, prescribed(SEED), home, tmp_path)
    steps = [int(state["step"]) for state in optimizer.state_dict()["state"].values()]
    assert set(steps) == ({4, 2} if set_to_none else {4})


@both_ends
def test_step_without_any_gradient_changes_nothing(home, tmp_path):
    """Method: call step() before any backward, and twice after one; torch applies a gradient as
    often as it is asked to, the engine once: the second step must apply it again or raise, never do
    nothing."""
    model = prescribed(SEED)
    optimizer = well_conditioned(model)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path)
    )
    before = model.state_dict()
    optimizer.step()
    assert differing(model.state_dict(), before) == []
    plain = prescribed(SEED)
    plain_optimizer = well_conditioned(plain)
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        one(gradients(plain, SEED)).backward()
        its.step()
    plain_optimizer.step()
    try:
        optimizer.step()
    except infinity.UsageError as error:
        assert "zero_grad" in str(error) or "backward" in str(error)
    else:
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("clip", CLIPS)
@both_ends
def test_changing_gradients_between_backward_and_step(clip, home, clipped):
    """Method: clip, scale and edit gradients in the ways that training code has; what it sees and
    what the step does are plain torch's, or a UsageError says that this way is not open."""
    complaint = clipped(home).get(clip)
    assert complaint is None, complaint


@pytest.mark.parametrize(
    "clip",
    [
        "norm",
        "norm-foreach",
        "norm-single",
        "norm-inf",
        "total-norm",
        "value",
        "value-foreach",
        "by-hand",
        "data",
        "finite",
    ],
)
@both_ends
def test_common_ways_to_change_gradients_are_open(clip, home, tmp_path):
    """Method: what the contract names (norms, scaling, clipping by norm or value) works, and no
    UsageError is raised."""

    def loop(model, optimizer):
        loss_of(model, tokens(SEED)).backward()
        CLIPS[clip](list(model.parameters()))
        optimizer.step()

    assert_trains_alike(loop, transformer(SEED, dropout=0.0), home, tmp_path)


def test_max_grad_norm_clips_as_the_call_does(tmp_path):
    """Method: the config's max_grad_norm gives the bits of clip_grad_norm_ before each step."""
    states = []
    for settings, clip in (({"max_grad_norm": 0.3}, False), ({}, True)):
        model, optimizer = a_model()
        model, optimizer = infinity.wrap_model(
            model, optimizer, at_home("nvme", "nvme", tmp_path, **settings)
        )
        for step in range(3):
            torch.manual_seed(step)
            loss_of(model, tokens(SEED + step)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert differing(*states) == []


def test_error_if_nonfinite_raises_as_torch_does(tmp_path):
    """Method: clip gradients that are not finite with error_if_nonfinite=True."""
    model = prescribed(SEED)
    optimizer = well_conditioned(model)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest("nvme", model, optimizer, tmp_path)
    )
    given = gradients(prescribed(SEED), SEED)
    given["scalar"].fill_(float("inf"))
    model(given).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@both_ends
def test_parameters_without_a_gradient_keep_their_count(home, tmp_path):
    """Method: leave different parameters out of every step; counts, moments and weights are
    torch's, which counts for each parameter alone."""
    without = [
        (),
        ("pairs.0.vector",),
        ("pairs.0.vector", "pairs.1.matrix", "scalar"),
        ("transposed",),
    ]

    def loop(model, optimizer):
        shapes = prescribed(SEED)
        for step, names in enumerate(without):
            model(gradients(shapes, SEED + step, without=names)).backward()
            assert {n for n, p in model.named_parameters() if p.grad is None} == set(names)
            optimizer.step()
            optimizer.zero_grad()

    _, optimizer = assert_trains_alike(loop, prescribed(SEED), home, tmp_path)
    names = [name for name, _ in prescribed(SEED).named_parameters()]
    steps = {names[i]: int(state["step"]) for i, state in optimizer.state_dict()["state"].items()}
    assert steps == {name: sum(name not in left for left in without) for name in names}


@both_ends
def test_frozen_parameters_stay(home, tmp_path):
    """Method: freeze a block, the embedding and half of another block; only the rest is in the
    optimizer."""
    model = transformer(SEED)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].attention.requires_grad_(False)
    model.positions.requires_grad_(False)

    def make(model):
        return torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=LR, eps=1e-3
        )

    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    model, _ = assert_trains_alike(
        lambda m, o: [simple_step(m, o, s) for s in range(3)], model, home, tmp_path, make=make
    )
    state = model.state_dict()
    assert differing({name: state[name] for name in frozen}, frozen) == []


@both_ends
def test_freezing_and_unfreezing_parameters_of_the_optimizer(home, tmp_path):
    """Method: the optimizer has all parameters; some are frozen at the wrap and thawed later,
    others frozen later."""
    model = transformer(SEED)
    model.blocks[0].requires_grad_(False)
    model.positions.requires_grad_(False)

    def loop(model, optimizer):
        seen = [simple_step(model, optimizer, 0)]
        model.blocks[0].requires_grad_(True)
        model.positions.requires_grad_(True)
        model.blocks[2].requires_grad_(False)
        for step in (1, 2):
            loss_of(model, tokens(SEED + step)).backward()
            seen.append(torch.tensor([p.grad is None for p in model.parameters()]))
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_trains_alike(loop, model, home, tmp_path)


@both_ends
def test_parameters_outside_the_optimizer_gather_gradients_as_in_torch(home, tmp_path):
    """Method: the optimizer has only the head; the rest still gets gradients, which nobody
    zeroes."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss_of(model, tokens(SEED + step)).backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_trains_alike(
        loop,
        transformer(SEED),
        home,
        tmp_path,
        make=lambda m: torch.optim.AdamW(m.blocks[2].parameters(), lr=LR, eps=1e-3),
    )


@both_ends
def test_state_and_gradients_from_before_the_wrap_are_honoured(home, tmp_path):
    """Method: train two steps by torch alone, half of a third, then wrap and go on."""
    model = transformer(SEED)
    optimizer = well_conditioned(model)
    torch.manual_seed(SEED)
    for step in range(2):
        simple_step(model, optimizer, step)
    loss_of(model, tokens(SEED + 2)).backward()
    plain, plain_optimizer = copy.deepcopy((model, optimizer))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        one.grad = other.grad.clone()  # deepcopy leaves it out
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path)
    )
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        torch.manual_seed(1)
        loss_of(one, tokens(SEED + 3)).backward()
        its.step()
        its.zero_grad()
        simple_step(one, its, 4)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    assert {int(s["step"]) for s in optimizer.state_dict()["state"].values()} == {4}


class Looking(nn.Module):
    """Calls ``look`` in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.look = nn.Linear(8, 8), nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.look is not None:
            self.look()
        return self.last(x)


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_a_step_inside_a_forward_that_has_what_it_changes_is_refused(home, tmp_path):
    """Nothing has changed then. Twins: a home on the device takes it, with torch's bits; so does an
    optimizer of other weights, at any home."""

    def run(home: str | None, inside: int) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        model = nn.Sequential(Looking(), Looking())
        optimizers = [torch.optim.AdamW(block.parameters(), lr=LR, fused=True) for block in model]
        if home is not None:
            config = at_home(home, home, tmp_path, units=["Looking"])
            model, optimizers = infinity.wrap_model(model, optimizers, config)
        x = torch.linspace(-1, 1, 16).view(2, 8)
        model(x).square().sum().backward()
        model[1].look = optimizers[inside].step
        with torch.no_grad():
            seen = model(x).clone()
        model[1].look = None
        for optimizer in optimizers:
            optimizer.step()
        return [seen, model(x).detach().clone()]

    assert all(map(torch.equal, run(home, inside=0), run(None, inside=0)))
    if home == "device":
        assert all(map(torch.equal, run(home, inside=1), run(None, inside=1)))
    else:
        with pytest.raises(infinity.UsageError, match="inside a forward that computes with"):
            run(home, inside=1)
