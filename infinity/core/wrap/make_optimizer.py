"""Make optimizer: makes what steps the parameters of an optimizer that was given."""

from __future__ import annotations

from torch import nn

from ..grads.record import GradState
from ..run.engine import Engine
from ..step.optimizer import InfinityOptimizer
from ..step.recognised import Recognised
from ..step.rules import saved_step
from ..units.forms import local_of
from ..units.handle import handle_of, managed, raw_grad, set_raw_grad


def moved_by(given: Recognised) -> list[nn.Parameter]:
    """Lists the parameters of ``given`` that have a home."""
    params = [param for group in given.optimizer.param_groups for param in group["params"]]
    return [param for param in params if handle_of(param) is not None]


def make_optimizer(engine: Engine, given: Recognised, place: int) -> InfinityOptimizer:
    """Makes the optimizer that steps the parameters of the one ``given`` at ``place``, and takes
    over their gradients."""
    optimizer, moments = given.optimizer, given.moments
    stepping = InfinityOptimizer(engine.make_step_context(place), optimizer, given.known)
    engine.job.updates.clock.stepped = set()  # it steps from the next step on
    for param in moved_by(given):
        handle, state = managed(param), optimizer.state.get(param, {})
        handle.step = saved_step(state, moments)
        handle.keeps_moments = not handle.step and any(name in state for name in moments)
        if (grad := raw_grad(param)) is not None:
            set_raw_grad(param, None)
            handle.grad.move(GradState.LANDED)
            engine.gradients.assigned.watch(handle, grad, local_of(grad))
    stepping.plain.share_state(stepping.state, stepping)
    return stepping
