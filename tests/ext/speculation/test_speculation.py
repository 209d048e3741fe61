"""Speculation: updates made in the backward, ahead of the step, change no bit of what is trained.

Words used here:

**shadow**: a unit's update that was made ahead. ``job.shadows``: of each step, how many there were
before it, and how many it kept. **twins**: one script, played with ``speculate=True`` and without;
losses, weights, state and all else seen have the same bits. **spoiler**: what a user does between
the second backward and its step, and of how many shadows it leaves something.
"""

from __future__ import annotations

import copy
import errno
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import parts_of
from models import (
    at_home,
    differing,
    environment,
)
from ranks import launch
from speculation_cases import (
    FORMS,
    HOMES,
    LATE,
    Job,
    Lion,
    adamw,
    backwards,
    both_ends,
    steps,
    tiny,
    twins,
)
from torch import nn
from torch.nn.utils import clip_grad_value_

import infinity
from infinity.core.machine.tiers import Tier
from infinity.core.step.stepper import Stepper

CLIPS = {
    "never": ([1e9] * 4, None, "nnnn"),
    "once": ([1e9, 1e-4, 1e9, 1e9], None, "n00n"),
    "inside": ([None] * 4, 1e9, "nnnn"),
    "always": ([None] * 4, 1e-4, "0000"),
}


CASES = [
    (home, clip)
    for home in HOMES
    for clip in (CLIPS if "on nvme" in home or home in ("host", "cached") else ["once"])
]


@pytest.mark.parametrize(("home", "clip"), CASES)
def test_superoffload_clipping_decides_which_shadows_are_kept_and_no_bit(
    home, clip, tmp_path, monkeypatch
):
    """Method: twins in which clipping, by the loop or inside the step, changes gradients never,
    once or always."""
    monkeypatch.chdir(tmp_path)
    norms, inside, kept = CLIPS[clip]

    def script(job: Job) -> None:
        for step, norm in enumerate(norms):
            job.backward(step)
            job.clip(norm) if norm else None
            job.step()

    job = twins(script, tmp_path, max_grad_norm=inside, **HOMES[home])
    n, plan = len(parts_of(job).planned.plan.shadowed), parts_of(job).planned.plan
    assert (
        n and job.shadows[0][0] == n and job.kept == [n if letter == "n" else 0 for letter in kept]
    )
    assert bool(plan.kept) == (home == "cached") and (plan.tiers["grad"] is Tier.NVME) == (
        home == "gradients on nvme"
    )


RULES = {
    "AdamW": adamw,
    "Adam": lambda model: torch.optim.Adam(
        model.parameters(), lr=1e-2, weight_decay=0.1, maximize=True
    ),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "momentum": lambda model: torch.optim.SGD(
        model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Lion": lambda model: Lion(model.parameters()),
}
PAIRS = (
    [(rule, "fp32") for rule in RULES]
    + [("AdamW", form) for form in FORMS if form != "fp32"]
    + [("momentum", "split"), ("Lion", "split"), ("Lion", "int8"), ("momentum", "int8")]
)


@pytest.mark.parametrize(
    ("home", "rule", "form"), [(["host", "nvme"][n % 2], *pair) for n, pair in enumerate(PAIRS)]
)
def test_every_rule_and_form(home, rule, form, tmp_path):
    """Method: twins; in the second step some parameters have no gradient, so units are stepped in
    spans from then on."""

    def lose(job: Job) -> None:
        for param in [param for param in job.params if param.ndim == 1]:
            param.grad = None

    assert twins(steps(4, lose), tmp_path, make=RULES[rule], **HOMES[home], **FORMS[form]).shadows[
        ::3
    ] == [(4, 4), (4, 4)]


def edit(job: Job, *, writeback: bool) -> None:
    with infinity.full_params(job.model, ["blocks.0.linear.weight"], writeback=writeback) as params:
        (
            params["blocks.0.linear.weight"].data.add_(0.5)
            if writeback
            else job.see(params["blocks.0.linear.weight"])
        )


def evaluate(job: Job) -> None:
    with torch.no_grad():
        job.see(job.loss_of(job.model.eval(), 5))
    job.model.train()


@torch.no_grad()
def overwrite(job: Job) -> None:
    job.params[0].copy_(torch.ones(()))


def again_from_none(job: Job) -> None:
    job.optimizer.zero_grad()
    job.backward(50)


def save(job: Job) -> None:
    """Refused here; and loaded from another job's checkpoint, which takes the gradients."""
    with pytest.raises(infinity.UsageError, match="between backward and step"):
        infinity.save_checkpoint(job.folder / "refused", job.model, job.optimizer)


def load(job: Job) -> None:
    other = Job(job.folder, False)
    other.backward(70)
    other.step()
    infinity.save_checkpoint(job.folder / "other", other.model, other.optimizer)
    infinity.load_checkpoint(job.folder / "other", job.model, job.optimizer)
    job.see(job.state()["blocks.0.linear.weight"])
    job.backward(60)


def settings(**changed: Any) -> Callable[[Job], None]:
    return lambda job: [group.update(changed) for group in job.optimizer.param_groups]


def every_grad(change: Callable[[torch.Tensor], Any]) -> Callable[[Job], None]:
    return lambda job: [change(param.grad) for param in job.params]


SPOILERS: dict[str, tuple[Callable[[Job], Any], set[int]]] = {
    "nothing": (lambda job: None, {4}),
    "halved": (every_grad(lambda grad: grad.mul_(0.5)), {0}),
    "scaled by a tensor": (every_grad(lambda grad: grad.mul_(torch.tensor(0.3))), {0}),
    "added to": (every_grad(lambda grad: grad.add_(0.1)), {0}),
    "one is added to": (lambda job: job.params[0].grad.add_(0.1), {3}),
    "a view is written": (lambda job: job.params[0].grad[0].mul_(2.0), {3}),
    "views of all": (every_grad(lambda grad: grad.view(-1)[:3].fill_(0.2)), {0}),
    "a slice is assigned": (lambda job: job.params[0].grad.__setitem__(slice(0, 1), 0.3), {3}),
    "one is None": (lambda job: setattr(job.params[0], "grad", None), {3}),
    "all are None": (lambda job: job.optimizer.zero_grad(), {0}),
    "one is given": (
        lambda job: setattr(job.params[0], "grad", job.params[0].grad.clone().fill_(0.1)),
        {3},
    ),
    "zeros": (lambda job: job.optimizer.zero_grad(set_to_none=False), {0}),
    "another backward": (lambda job: job.backward(50), {0}),
    "a backward anew": (again_from_none, {0, 4}),
    "clipped values": (lambda job: clip_grad_value_(job.model.parameters(), 1e-6), {0}),
    "a foreach": (lambda job: torch._foreach_mul_([param.grad for param in job.params], 0.7), {0}),
    "lr": (settings(lr=2e-2), {0}),
    "lr of one group": (lambda job: job.optimizer.param_groups[1].update(lr=0.5), {0}),
    "weight decay": (settings(weight_decay=0.3), {0}),
    "betas": (settings(betas=(0.5, 0.9)), {0}),
    "weights loaded": (
        lambda job: job.model.load_state_dict(
            {k: v + 1 for k, v in job.model.state_dict().items()}
        ),
        {0},
    ),
    "state loaded": (
        lambda job: job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict())),
        {0},
    ),
    "edited": (lambda job: edit(job, writeback=True), {3}),
    "looked at": (lambda job: edit(job, writeback=False), {4}),
    "overwritten": (overwrite, {3}),
    "saved": (save, {0, 4}),  # which is refused here, and what is refused may cost the shadows
    "loaded": (load, {0, 4}),
    "evaluated": (evaluate, {4}),
    "state read": (lambda job: job.seen.extend(job.state().values()), {4}),
    "gradients read": (
        lambda job: [
            job.see(param.grad.clone().norm() + param.grad.norm()) for param in job.params
        ],
        {4},
    ),
    "a forward": (lambda job: job.see(job.loss_of(job.model, 7)), {4}),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_what_comes_before_the_step_changes_no_bit(spoiler, tmp_path):
    """Method: twins; as many shadows are kept as the spoiler says, and all before it and soon
    after."""
    spoil, kept = SPOILERS[spoiler]
    job = twins(steps(4, spoil), tmp_path)
    assert job.ready == 4 and job.kept[0] == job.kept[3] == 4 and job.kept[1] in kept


@pytest.mark.parametrize("first", range(3))
def test_nor_on_disk(first, tmp_path):
    """Method: the same with all state on disk: a third of the spoilers in turn, each after a step
    whose shadows are kept."""
    names = list(SPOILERS)[first::3]
    spoilers = [SPOILERS[name] for name in names]
    script = steps(
        3 * len(names),
        lambda job: spoilers[len(job.shadows) // 3][0](job),
        at=tuple(range(1, 3 * len(names), 3)),
    )
    job = twins(script, tmp_path, **HOMES["nvme"])
    assert job.kept[::3] == [4] * len(names)
    assert [
        name for name, (_, kept), found in zip(names, spoilers, job.kept[1::3]) if found not in kept
    ] == []


@pytest.mark.parametrize("seed", range(6))
def test_spoilers_in_any_order_on_a_late_disk(seed, tmp_path):
    """Method: twins of random homes, forms, micro-batches and spoilers; transfers are late, in
    pieces and out of order."""
    draw = random.Random(seed)
    setup = {"home": (draw.choice(["host", "nvme"]), "nvme"), **FORMS[draw.choice(list(FORMS))]}
    plan = [
        (draw.choice([1, 1, 1, 2]), draw.sample(list(SPOILERS), draw.choice([0, 0, 1, 2])))
        for _ in range(7)
    ]

    def script(job: Job) -> None:
        for step, (micro, spoilers) in enumerate(plan):
            for turn in range(micro):
                job.backward(10 * step + turn)
            for name in spoilers:
                if any(param.grad is None for param in job.params):
                    job.backward(99)
                SPOILERS[name][0](job)
            job.step()

    with environment(INFINITY_FAULTS=LATE):
        assert sum(twins(script, tmp_path, **setup).kept)


def over_one_graph(job: Job) -> None:
    for step in range(4):
        loss = job.loss_of(job.model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        job.step()


def failing(then: Callable[[Job], Any]) -> Callable[[Job], None]:
    """The second step's backward fails half-way."""

    def script(job: Job) -> None:
        for step in range(4):
            if step == 1:
                job.model.fails = True
                with pytest.raises(ValueError, match="stop"):
                    job.backward(step)
                assert job.count() in (0, 2)
                job.model.fails = False
                then(job)
            else:
                job.backward(step)
            job.step()

    return script


def refused(then: Callable[[Job], Any]) -> Callable[[Job], None]:
    """What goes on without zero_grad cannot be stepped: part of a gradient is the failed
    backward's."""

    def script(job: Job) -> None:
        then(job)
        with pytest.raises(infinity.UsageError, match="half done"):
            job.optimizer.step()
        again_from_none(job)

    return script


def inside(job: Job) -> None:
    """Two steps in three are made inside the last backward."""
    for step in range(6):
        job.backward(10 * step)
        if step % 3:
            with job.optimizer.step_in_backward():
                job.backward(10 * step + 1)
        else:
            job.backward(10 * step + 1)
        job.step()


def closures(job: Job) -> None:
    for step in range(2):
        job.optimizer.zero_grad()
        before = infinity.stats(job.model).shadows["kept"]
        job.optimizer.step(lambda: job.backward(step))
        job.shadows.append((0, infinity.stats(job.model).shadows["kept"] - before))


def hooked(
    register: Callable, change: Callable, which: slice = slice(None)
) -> Callable[[Job], None]:
    def script(job: Job) -> None:
        for param in job.params[which]:
            register(param, lambda value: change(job, value))
        steps(3)(job)

    return script


def quietly(change: Callable[[torch.Tensor], Any]) -> Callable:
    return lambda job, param: [change(param.grad), None][1]


after = nn.Parameter.register_post_accumulate_grad_hook
SCRIPTS: dict[
    str, tuple[Callable[[Job], None], list[int | None]]
] = {  # and the shadows each step keeps
    "two backwards": (backwards(2, 2, 2, 2), [0, None, None, 4]),
    "one or two": (backwards(1, 2, 1, 1, 1, 1), [4, 0, None, None, None, 4]),
    "over one graph": (over_one_graph, [0, None, None, 4]),
    "failed, zeroed": (failing(again_from_none), [4, None, None, 4]),
    "failed, not zeroed": (failing(refused(lambda job: job.backward(1))), [4, None, None, 4]),
    "failed, stepped": (failing(refused(lambda job: None)), [4, None, None, 4]),
    "inside": (inside, [0, 0, 0, 4, 0, 0]),
    "closures": (closures, [4, 4]),
    "gradients hooked": (
        hooked(nn.Parameter.register_hook, lambda job, grad: grad * 0.5),
        [4, 4, 4],
    ),
    "landed hooked": (hooked(after, quietly(lambda grad: grad.mul_(0.5))), [4, 4, 4]),
    "landed bytes hooked": (
        hooked(after, quietly(lambda grad: grad.clamp_(-1e-6, 1e-6))),
        [4, 4, 4],
    ),
    "another's hooked": (
        hooked(
            after,
            lambda job, _: quietly(torch.Tensor.neg_)(job, job.model.blocks[3].gain),
            slice(0, 1),
        ),
        [3, None, 3],
    ),
}


@pytest.mark.parametrize("script", SCRIPTS)
@both_ends
def test_every_kind_of_backward(home, script, tmp_path):
    """Method: twins of several backwards in a step, failed ones, steps inside, closures and hooks;
    as many shadows are kept."""
    play, kept = SCRIPTS[script]
    found = twins(play, tmp_path, **HOMES[home]).kept
    assert len(found) == len(kept) and all(
        wanted in (None, number) for wanted, number in zip(kept, found)
    ), found


@pytest.mark.parametrize("unscale", [False, True], ids=["in the step", "unscaled first"])
@both_ends
def test_grad_scaler_in_fp16(home, unscale, tmp_path):
    """Method: twins in fp16 whose scale overflows at first: skipped steps leave nothing, the
    others' gradients are unscaled."""

    def script(job: Job) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
        job.scales = [scaler.get_scale()]
        for step in range(10):
            scaler.scale(job.loss_of(job.model, step)).backward()
            if unscale:
                scaler.unscale_(job.optimizer)
                job.clip(1.0)
            scaler.step(job.optimizer)
            scaler.update()
            job.optimizer.zero_grad()
            job.scales.append(scaler.get_scale())

    job = twins(script, tmp_path, **HOMES[home], param_dtype="fp16", grad_dtype="fp32")
    assert any(b < a for a, b in zip(job.scales, job.scales[1:])) and any(
        b > a for a, b in zip(job.scales, job.scales[1:])
    )


FROZEN: dict[str, Callable[[nn.Module], list[nn.Parameter]]] = {
    "a unit": lambda model: list(model.blocks[0].parameters()),
    "one of a unit": lambda model: [model.blocks[0].norm1.weight],
    "all but one": lambda model: [
        p for p in model.parameters() if p is not model.blocks[1].norm1.weight
    ],
    "of every unit": lambda model: [
        model.blocks[0].norm1.bias,
        model.blocks[1].norm1.bias,
        model.positions,
    ],
}


@pytest.mark.parametrize("known", [False, True], ids=["unknown to the optimizer", "thawed later"])
@pytest.mark.parametrize("which", FROZEN)
def test_frozen_parameters(which, known, tmp_path):
    """Method: twins with parameters that are not trained, which are thawed in the middle where the
    optimizer knows them."""

    def build() -> nn.Module:
        model = tiny()["build"]()
        for param in FROZEN[which](model):
            param.requires_grad_(False)
        return model

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [param for param in model.parameters() if known or param.requires_grad], lr=1e-2
        )

    def thaw(job: Job) -> None:
        for param in job.params:
            param.requires_grad_(True)

    job = twins(steps(5, thaw, at=(2,)), tmp_path, **tiny() | {"build": build, "make": make})
    assert all(kept == there > 0 for there, kept in job.shadows[:2]) and job.kept[-1] >= job.kept[0]


@both_ends
def test_parameters_with_step_counts_of_their_own(home, tmp_path):
    """Method: twins in which units, and single parameters of others, get no gradient in some steps;
    the sixth is clipped."""

    def script(job: Job) -> None:
        for step in range(12):
            for index, block in enumerate(job.model.blocks):
                block.gains = step > 8 or (step + index) % 3 > 0
            job.model.skipped = {step % 4} if step in (2, 3, 6) else set()
            job.backward(step)
            job.clip(1e-4 if step == 5 else 1e9)
            job.step()

    job = twins(script, tmp_path, **HOMES[home])
    assert len({handle.step for unit in parts_of(job).units for handle in unit.handles}) > 3
    assert job.kept[1] and job.kept[5:7] == [0, 0] and job.kept[-1] == 4


def test_shadowing_comes_back_beside_a_unit_that_is_not_used_again(tmp_path):
    """Method: twins; after a step whose shadows are dropped one block is skipped. The others'
    shadows are kept soon."""

    def spoil(job: Job) -> None:
        job.clip(1e-4)
        job.model.skipped = {3}

    assert twins(steps(8, spoil, at=(0,)), tmp_path).kept[3:] == [3] * 5


MISSED: dict[str, Callable[[Job], Any]] = {
    "clipped": lambda job: job.clip(1e-4),
    "clipped values": SPOILERS["clipped values"][0],
    "added to": SPOILERS["added to"][0],
    "viewed": every_grad(lambda grad: grad.view(-1)),
    "one backward more each time": lambda job: [
        job.backward(50) for _ in range(1 + len(job.shadows) % 3)
    ],
    "thrown away": lambda job: job.optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("how", MISSED)
def test_next_to_nothing_is_spent_on_shadows_that_always_miss(how, tmp_path):
    """Method: 40 steps whose shadows are always spoiled update little more than they must; then
    nothing spoils them, and they are kept again. Twin: 40 steps whose shadows are kept update just
    what they must."""
    for spoil, least in ((MISSED[how], 0), (lambda job: None, 40)):
        job = Job(tmp_path, True)
        steps(40, spoil, at=tuple(range(40)))(job)
        job.engine.wait_idle()
        assert parts_of(job).updates.updater.elements <= 1.25 * 40 * sum(
            flat.layout.shard_numel for flat in job.flat_params
        )
        assert sum(kept == 4 for kept in job.kept) >= least
        steps(40)(job)
        assert job.kept[-1] == 4


def test_a_disk_error_in_a_shadow_ends_the_job(tmp_path, monkeypatch):
    """Method: a shadow is refused by the disk; the error comes out of the backward, and nothing
    goes on from there."""
    job, submit = Job(tmp_path, True, home=("nvme", "nvme")), Stepper._processor_update

    def refuse(self, *args, ahead=False, **more):
        if ahead:
            raise infinity.StorageError(errno.EIO, "the disk is gone", "swap")
        return submit(self, *args, **more)

    monkeypatch.setattr(Stepper, "_processor_update", refuse)
    for _ in range(2):
        with pytest.raises(infinity.StorageError):
            job.backward(0)
        monkeypatch.setattr(Stepper, "_processor_update", submit)


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """Method: twins on two ranks; shadows are made, and kept by both."""
    (tmp_path / "swap").mkdir()
    cases = {"parameters": {"clip": 1e9, "micro": 2}, "gradients": {}}
    jobs = {
        f"parity:{mode}-{ahead}": {
            "config": at_home("host", "host", tmp_path, shard=mode, speculate=ahead),
            "steps": 3,
            **how,
        }
        for mode, how in cases.items()
        for ahead in (False, True)
    }
    found, done = launch(tmp_path / "ranks", 2, jobs)
    assert done.returncode == 0, done.stderr
    taken = {}
    for mode in cases:
        for plain, ahead in zip(found[f"parity:{mode}-False"], found[f"parity:{mode}-True"]):
            assert (plain["losses"], plain["norms"]) == (ahead["losses"], ahead["norms"])
            assert (
                differing(plain["weights"], ahead["weights"])
                == differing(plain["unwrapped"], ahead["unwrapped"])
                == []
            )
            for index, state in plain["optimizer"]["state"].items():
                assert differing(state, ahead["optimizer"]["state"][index]) == []
            planned = [job["stats"]["tiers"]["host"]["planned_nbytes"] for job in (plain, ahead)]
            taken.setdefault(mode, set()).add(
                (planned[1] > planned[0], ahead["stats"]["shadows"]["kept"] > 0)
            )
    assert taken["parameters"] == taken["gradients"] == {(True, True)}
