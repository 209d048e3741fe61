"""Training runs, recorded so that one can be held against another.

Words used here:

**run**: what a training loop leaves: losses, gradient norms, weights before and after, buffers,
moments. **plain**: by torch alone. **wrapped**: between `infinity.wrap_model` and
`infinity.unwrap_model`. **same bits**: same names, shapes, dtypes and bytes; 0.0 and -0.0 differ.
**noise**: how far a gradient moves when every weight is off by a few ulps. **yardstick**: for every
element of every weight, how far a correct engine may end from plain torch.

Why a yardstick. Two right AdamWs agree within 4 ulps after one step from the same gradient, but not
after several: the ulps show in the next gradient, and Adam divides a gradient by its own size, so
where the true gradient is zero (the bias of attention keys, say, which the softmax cancels)
rounding alone decides between +lr and -lr. One bound for all elements is then either broken by
right code (torch's own fused and plain AdamW end 1.5 lr apart in Funnel) or too loose to see a
forgotten weight decay (1e-5 of the weight a step). So the noise is measured, by a plain run whose
weights are nudged by 4 ulps after every step, and carried through the formula. With u = m /
(sqrt(v) + eps), D = SAFETY x the tensor's largest noise so far, and first-order error propagation,

    |du| <= |dm| / (sqrt(v) + eps) + |m| |d sqrt(v)| / (sqrt(v) + eps)^2 <= 2 D / (sqrt(v) + eps)
    |du| <= 2.1, because |u| <= 1.05 in the first few steps (Cauchy-Schwarz, bias-corrected weights)
    |dp| <= sum over steps of  4 ulp(p) + lr (|du| + 1e-5)

The last term is the rounding of the clipping factor. An element that never had a gradient has no
|du|.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

State = dict[str, torch.Tensor]
LossOf = Callable[[nn.Module, Any], torch.Tensor]

ULPS = 4  # what the engine promises after one step from the same gradient
SAFETY = 4.0  # an engine's ulps may line up where the nudge's are random
CLIP_ROUNDING = 1e-5


@dataclass(kw_only=True)
class Run:
    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(
        default_factory=list
    )  # before clipping, of the steps that clip
    without_grad: list[set[str]] = field(
        default_factory=list
    )  # trainable, but grad is None after backward
    before: State = field(default_factory=dict)
    parameters: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    moments: State = field(default_factory=dict)  # "<parameter>.<key of the optimizer's state>"
    gradients: list[State] = field(
        default_factory=list
    )  # plain runs only: what each step was given
    weights: list[State] = field(default_factory=list)  # plain runs only: what each step left


def copied(named: Iterable[tuple[str, torch.Tensor]]) -> State:
    return {name: tensor.detach().clone() for name, tensor in named}


def ulp(tensor: torch.Tensor) -> torch.Tensor:
    """The distance from |tensor| to the next larger number of its dtype."""
    size = tensor.abs()
    return torch.nextafter(size, torch.full_like(size, torch.inf)) - size


def loss_of_output(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch).loss


# --------------------------------------------------------------------------------------------------
# Running
# --------------------------------------------------------------------------------------------------


def adamw(model: nn.Module, lr: float, **settings: Any) -> torch.optim.AdamW:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trainable, lr=lr, **{"weight_decay": 0.01, "foreach": False, **settings}
    )


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    *,
    clip_steps: Iterable[int] = (),
    loss_of: LossOf = loss_of_output,
    before_forward: Callable[[int], None] = lambda step: None,
    after_backward: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """The ordinary loop, and nothing that a wrapped model would have to allow for."""
    for step, batch in enumerate(batches):
        before_forward(step)
        loss = loss_of(model, batch)
        loss.backward()
        trainable = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        run.without_grad.append({name for name, parameter in trainable if parameter.grad is None})
        if step in set(clip_steps):
            run.norms.append(
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).detach().clone()
            )
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        run.losses.append(loss.detach().clone())


def collect(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    """Copy what plain torch objects hold at the end of a run."""
    run.parameters = copied(model.named_parameters())
    run.buffers = copied(model.named_buffers())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            run.moments[f"{name}.{key}"] = torch.as_tensor(value).detach().clone()
    return run


def plain_run(
    model: nn.Module, batches: Iterable[Any], *, lr: float, nudged: bool = False, **settings: Any
) -> Run:
    """Train by torch alone and keep each step's gradients; the weights too, or nudge them if
    `nudged`."""
    run = Run(before=copied(model.named_parameters()))
    optimizer = adamw(model, lr)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)

    def keep_gradients() -> None:
        named = model.named_parameters()
        run.gradients.append(copied((name, p.grad) for name, p in named if p.grad is not None))

    @torch.no_grad()
    def keep_weights() -> None:
        if not nudged:
            run.weights.append(copied(model.named_parameters()))
            return
        for parameter in model.parameters():
            sign = torch.empty_like(parameter).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
            parameter.addcmul_(sign, ulp(parameter), value=ULPS)

    train(
        run,
        model,
        optimizer,
        batches,
        after_backward=keep_gradients,
        after_step=keep_weights,
        **settings,
    )
    return collect(run, model, optimizer)


def wrapped_run(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    lr: float,
    config: dict[str, Any],
    look: Callable[[nn.Module], None] = lambda model: None,
    **settings: Any,
) -> Run:
    """Train wrapped, then unwrap; `look` sees the model while it is still wrapped."""
    import infinity

    run = Run(before=copied(model.named_parameters()))
    model, optimizer = infinity.wrap_model(model, adamw(model, lr), config)
    train(run, model, optimizer, batches, **settings)
    look(model)
    model, optimizer = infinity.unwrap_model(model, optimizer)
    return collect(run, model, optimizer)


# --------------------------------------------------------------------------------------------------
# Comparing
# --------------------------------------------------------------------------------------------------


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def steps_of(run: Run) -> dict[str, float]:
    """How often each parameter was stepped: torch counts for each on its own, and skips one without
    a gradient."""
    counts = {key: value.item() for key, value in run.moments.items() if key.endswith(".step")}
    return {key: count for key, count in counts.items() if count}


def check_same_bits(one: Run, other: Run) -> None:
    """Raise unless losses, norms, weights, buffers and moments of two runs have the same bits."""
    for kind in ("losses", "norms"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        assert len(ours) == len(theirs), f"{len(ours)} and {len(theirs)} {kind}"
        for step, (a, b) in enumerate(zip(ours, theirs)):
            assert same_bits(a, b), f"{kind}[{step}]: {a.item()!r} and {b.item()!r}"
    assert one.without_grad == other.without_grad, "not the same parameters lack a gradient"
    for kind in ("parameters", "buffers", "moments"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        assert ours.keys() == theirs.keys(), (
            f"{kind}: {sorted(ours.keys() ^ theirs.keys())} in one run only"
        )
        different = [name for name in ours if not same_bits(ours[name], theirs[name])]
        assert not different, (
            f"{len(different)} of {len(ours)} {kind} differ in bits, first {different[:5]}"
        )


@dataclass(frozen=True)
class Yardstick:
    """How far from `plain` a correct engine may end; `nudged` is the same run with 4 ulps of
    disturbance."""

    plain: Run
    bounds: State

    @classmethod
    def measure(
        cls,
        plain: Run,
        nudged: Run,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> Yardstick:
        bounds = {}
        for name, before in plain.before.items():
            bound = torch.zeros_like(before)
            second = torch.zeros_like(before)
            reached = torch.zeros_like(before, dtype=torch.bool)
            noise, stepped = 0.0, 0
            for ours, theirs, after in zip(plain.gradients, nudged.gradients, plain.weights):
                if name in ours and name in theirs and before.numel():
                    gradient, disturbed = ours[name], theirs[name]
                    stepped += 1
                    reached |= (gradient != 0) | (disturbed != 0)
                    noise = max(noise, (gradient - disturbed).abs().max().item())
                    second = betas[1] * second + (1 - betas[1]) * gradient.square()
                    spread = (second / (1 - betas[1] ** stepped)).sqrt() + eps
                    update = (2 * SAFETY * noise / spread).clamp(max=2.1) + CLIP_ROUNDING
                    bound += lr * torch.where(reached, update, 0.0)
                bound += ULPS * ulp(torch.maximum(before.abs(), after[name].abs()))
                before = after[name]
            bounds[name] = bound
        return cls(plain, bounds)

    def share_within(self, bound: float) -> float:
        """The share of all elements that are held to `bound` or less: 0 would make a comparison say
        nothing."""
        counts = [(int((b <= bound).sum()), b.numel()) for b in self.bounds.values()]
        return sum(within for within, _ in counts) / sum(total for _, total in counts)

    def check(self, run: Run) -> None:
        """Raise unless `run` is what plain torch did, within the yardstick."""
        plain = self.plain
        for kind, ours, theirs in (
            ("losses", run.losses, plain.losses),
            ("norms", run.norms, plain.norms),
        ):
            assert len(ours) == len(theirs), f"{len(ours)} {kind} instead of {len(theirs)}"
            for step, (a, b) in enumerate(zip(ours, theirs)):
                torch.testing.assert_close(
                    a, b, rtol=1e-5, atol=1e-6, msg=lambda m: f"{kind}[{step}]: {m}"
                )
        assert run.without_grad == plain.without_grad, "not the same parameters lack a gradient"
        assert run.parameters.keys() == plain.parameters.keys(), "not the same parameters"
        assert run.buffers.keys() == plain.buffers.keys(), "not the same buffers"
        assert steps_of(run) == steps_of(plain), "not the same parameters were stepped as often"
        for name, expected in plain.parameters.items():
            found = run.parameters[name]
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
            # Written so that a NaN fails.
            outside = ~((found - expected).abs() <= self.bounds[name])
            if outside.any():
                over = ((found - expected).abs() / self.bounds[name]).max().item()
                raise AssertionError(
                    f"{name}: {int(outside.sum())} of {outside.numel()} elements are further from"
                    f" plain torch than rounding explains, the worst by {over:.3g} times"
                )
        for name, expected in plain.buffers.items():
            torch.testing.assert_close(
                run.buffers[name],
                expected,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda m: f"buffer {name}: {m}",
            )


def check_moved(run: Run, plain: Run) -> None:
    """Raise unless `run` changed every parameter that got a gradient other than zero in `plain`."""
    reached = {
        name for step in plain.gradients for name, gradient in step.items() if gradient.any()
    }
    assert reached, "no parameter got a gradient"
    still = [name for name in sorted(reached) if same_bits(run.before[name], run.parameters[name])]
    assert not still, f"got a gradient but did not move: {still}"
