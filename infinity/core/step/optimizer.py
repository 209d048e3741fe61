"""InfinityOptimizer: steps state at home, behind the next forward, as a ``torch.optim.Optimizer``.

rule   the formula, recognised from the optimizer that was wrapped

It has torch's interface. The objects that it holds do the work: Given (the optimizer that was
wrapped), Members (the parameters in its groups), OptimizerBooks (its state) and OptimizerStep.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...errors import ConfigError, UsageError
from ..params.books import OptimizerBooks
from ..params.optimizer_state import OptimizerState
from ..params.state_entry import GONE
from ..run.operations import Operation
from ..seams import OutsideSteps, kinds
from ..units.forms import gathered
from ..units.handle import HANDLE, ParamHandle, handle_of
from ..units.unit import ParamUnit
from .clipping import clip_factor
from .context import StepContext
from .known import Known
from .members import Members
from .optimizer_step import OptimizerStep
from .plain_optimizer import PlainOptimizer
from .rules import check_groups
from .spans import numbers_of
from .step_inputs import settings_of


def _parts(optimizer: weakref.ref[InfinityOptimizer]) -> tuple[StepContext, list[dict[str, Any]]]:
    """Returns the context and the groups of an optimizer, which its books do not keep alive."""
    if (alive := optimizer()) is None:
        raise UsageError(GONE)
    return alive.context, alive.param_groups


class InfinityOptimizer(torch.optim.Optimizer):
    """Steps a wrapped optimizer's state at home. Shares its ``param_groups``."""

    def __init__(self, context: StepContext, wrapped: torch.optim.Optimizer, known: Known):
        self.context, self._known = context, known
        self._ready = False
        self._moments = known.moments_of(wrapped.param_groups)
        self._books = OptimizerBooks(
            partial(_parts, weakref.ref(self)),
            self._moments,
            counts_steps=known.counts_steps,
            by_class=known.rule is None,
        )
        self.plain = PlainOptimizer(wrapped)
        outside = [kind.steps_outside(wrapped, self._books, known) for kind in kinds()]
        self._outside = next(filter(None, outside), OutsideSteps())
        self._members = Members(context, has_outside=any(outside))
        self._stepping = OptimizerStep(context, known, self._members, wrapped, self._books)
        self.is_unwrapped = False  # by an unwrap_model that was interrupted and raised
        super().__init__(wrapped.param_groups, dict(wrapped.defaults))
        self._ready = True
        for kind in PlainOptimizer.HOOKS:
            setattr(self, kind, getattr(wrapped, kind))
        self.read_groups()  # shared from now on: a scheduler made for the wrapped one works here
        # A weak reference, so that nothing keeps the optimizer.
        me = weakref.ref(self)
        context.events.unit_landed.append(lambda unit: (alive := me()) and alive.unit_landed(unit))
        self._made_with = frozenset(vars(self))

    def __getattr__(self, name: str) -> Any:
        if (plain := vars(self).get("plain")) is None:
            raise AttributeError(name)
        if name in ("train", "eval") and callable(getattr(type(plain.optimizer), name, None)):
            return partial(self._switch, name)
        return plain.attribute(name)

    def __deepcopy__(self, memo: dict) -> InfinityOptimizer:
        raise UsageError(
            "an optimizer of a wrapped model cannot be deep-copied: its state is at home. Use"
            " model.state_dict() and optimizer.state_dict(), or infinity.unwrap_model() first."
        )

    def _switch(self, method: str) -> None:
        """Runs ``train`` or ``eval`` of the class, which Schedule-Free optimizers have: they change
        the weights. Every rank calls this."""
        with self.context.uses.operation(Operation.SWITCH_OPTIMIZER):
            self._read_books(f"{method}()")
            self._outside.switch(self.param_groups, method)
            self._stepping.switch(self.param_groups, method)

    @property
    def own_attributes(self) -> dict[str, Any]:
        """The attributes that users gave this optimizer since the wrap."""
        taken = {*self._made_with, *dir(type(self))}  # a scheduler replaces step()
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and name not in taken
        }

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The plain optimizer that was given to wrap_model."""
        return self.plain.optimizer

    @property
    def rule_name(self) -> str:
        """The rule, or the class that steps, by its name in :mod:`.known`."""
        return self._known.name

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The groups' hyperparameters in a form that compares equal across ranks."""
        return settings_of(self.param_groups)

    @property
    def state(self) -> OptimizerBooks:
        """The state of each parameter, under torch's keys. A lookup reads from home; writes reach
        home before the next use. With several ranks all make the same accesses."""
        return self._books

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        if self._ready:
            self._books.replace(state)

    def read_groups(self) -> None:
        """Reads which parameters ``param_groups`` step. Raises UsageError for unusable ones."""
        self.param_groups = self.plain.share_groups(self.param_groups)
        self._members.read(self.param_groups)

    def _read_books(self, where: str) -> None:
        """Reads users' changes since the last step. Changes nothing if it raises."""
        self.read_groups()
        self.check_groups(self.param_groups, where)
        self._books.at_home.settle()
        if self._known.counters is not None:  # before anything changes
            for handle, index in self._members.group_index_of.items():
                numbers_of(self._known.counters, self.param_groups[index], handle, self._books)

    @property
    def _state(self) -> OptimizerState:
        return OptimizerState(self.context, self._known, self.param_groups, self._moments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters to step, as torch does: frozen ones that are at home.
        Allocates their state in the tiers of the plan.

        Raises UsageError, with nothing changed, for unknown parameters, unsupported settings, or in
        the middle of a step; CapacityError if there is no room.
        """
        if not self._ready:
            super().add_param_group(param_group)
            return
        context = self.context
        with context.uses.operation(Operation.ADD_PARAM_GROUP):
            before = len(self.param_groups)
            try:
                super().add_param_group(param_group)  # checks and completes it
                group = self.param_groups[before]
            finally:
                del self.param_groups[before:]
            self.check_groups([group], "add_param_group()")

            def then() -> None:
                if all(other is not group for other in self.param_groups):
                    self.param_groups.append(group)

            moved = [param for param in group["params"] if handle_of(param) is not None]
            arrays = self._known.added_arrays(group, self._moments, context.config)
            context.admit(
                moved,
                moments_of=lambda _: arrays,
                needs=self._known.needs,
                then=then,
            )

    def check_groups(self, param_groups: list[dict[str, Any]], where: str) -> None:
        """Raises UsageError if ``param_groups``, from ``where``, need what the rule does not do."""
        try:
            check_groups(self._known, param_groups, self.defaults, self._moments)
            self._known.check_shapes(param_groups, lambda param: handle_of(param) is not None)
        except ConfigError as error:
            raise UsageError(f"{where}: {error}") from None
        self._known = self._known.checked(self, self.wrapped, param_groups, where)

    def check_saved_groups(self, param_groups: list[dict[str, Any]]) -> None:
        """Raises UsageError if a checkpoint with ``param_groups`` cannot be loaded: by their
        settings, or for a moment that it lacks."""
        where = "this checkpoint"
        self.check_groups(param_groups, where)
        for index, both in enumerate(zip(self.param_groups, param_groups)):
            ours, theirs = (self._known.moments_of([param_group]) for param_group in both)
            if lacking := [name for name in ours if name not in theirs]:
                raise UsageError(
                    f"{where}: the settings of its group {index} have no {', '.join(lacking)},"
                    " which this job's have: wrap the model with the checkpoint's settings"
                )

    # --- the step ---

    @partial(
        torch.compiler.disable,
        reason="the engine's step runs in kernels of its own: call it outside of what is compiled",
    )
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the landed gradients, as torch's step does. Every rank calls this.

        Returns while the updates still run. A unit's update ends before its weights or gradients
        are used next; nothing else waits for it. An error of an earlier update is raised here or at
        a use of the unit. ``closure`` is called first, with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        context = self.context
        with context.uses.operation(Operation.STEP):
            # Else this step was interrupted, and has been completed since.
            if context.steps.untold != context.steps.index or not self._members.are_consumed:
                self._step()
        return context.steps.reported(loss)

    def _step(self) -> None:
        self._read_books("step()")
        self._stepping.prepare()
        self.wrapped._opt_called = True  # read by a scheduler made for the wrapped optimizer
        most = self.context.config.max_grad_norm
        clip = 1.0 if most is None else clip_factor(self.total_norm(), most)
        self._outside.step(self.param_groups, clip)
        self._stepping.make(self.param_groups, clip)

    def total_norm(
        self, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Computes the norm of all ranks' gradients, as torch.nn.utils.get_total_norm does.

        Every rank calls this, and gets the same bits. Raises RuntimeError, as torch does, for a
        non-finite norm with ``error_if_nonfinite``.
        """
        context = self.context
        if not context.collectives.ranks.is_cut:
            grads = [
                grad
                for group in self.param_groups
                for param in group["params"]
                if (grad := param.grad) is not None
            ]
            total = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite)
            return gathered(total)
        with context.uses.begin():
            self.read_groups()
            context.gradients.average(context.steps_flat_param)
            total = context.gradients.values.total_norm(
                float(norm_type), among=self._members.group_index_of
            )
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot"
                " be clipped"
            )
        return total

    @contextmanager
    def step_in_backward(self) -> Iterator[None]:
        """Surrounds the last backward before :meth:`step`. A unit is stepped as soon as its
        gradients have landed; ``step()`` does the rest. The arithmetic is the same.

        A stepped gradient cannot be clipped, unscaled or changed any more: that raises UsageError,
        as does ``max_grad_norm`` here. After an exception with some units stepped, the job can only
        go on from a checkpoint.
        """
        self._stepping.check_stream()
        with self.context.uses.begin():
            self._read_books("step_in_backward()")
            self._stepping.begin_stream()
            yield  # an exception leaves marks for the next use
            self._stepping.end_stream()

    def unit_landed(self, unit: ParamUnit) -> None:
        """Steps a unit that the backward has left, if it steps units: its gradients landed."""
        if self.context.steps.streaming:
            self._stepping.unit_landed(unit, self.param_groups)

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets gradients to None, or to zeros that the next step applies, as torch does."""
        with self.context.uses.operation(Operation.ZERO_GRAD):
            managed: list[ParamHandle] = []  # cleared at once
            for param in [param for group in self.param_groups for param in group["params"]]:
                handle = param.__dict__.get(HANDLE)
                if (
                    set_to_none
                    and handle in self._members.group_index_of
                    and not handle.has_raw_grad
                ):
                    managed.append(handle)
                elif set_to_none:
                    param.grad = None
                elif handle is not None and handle.grad is not None and not handle.has_raw_grad:
                    self.context.gradients.zero_here(handle)
                elif param.grad is not None:
                    param.grad.zero_()
            if set_to_none:
                self.context.gradients.clear(*managed)
            else:
                self.context.gradients.clips.clear()
                self.context.steps.forget_backwards()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Returns a state dict, which plain torch loads, too. Every rank calls this. Moments are
        full tensors, in fp32 or their dtype at rest; writes to them reach home. A 16-bit
        parameter's fp32 master is ``master``: the model's state dict has only its upper half."""
        with (
            self.context.uses.operation(Operation.OPTIMIZER_STATE_DICT),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            for hook in self._optimizer_state_dict_pre_hooks.values():
                hook(self)
            self.read_groups()
            self._state.refuse_outside()
            self._books.at_home.settle()
            state = self._state.read(self._books, lends=True)
            for hook in self._optimizer_state_dict_post_hooks.values():
                state = returned if (returned := hook(self, state)) is not None else state
            return state

    def plain_state_dict(self) -> dict[str, Any]:
        """Returns the state dict without masters, for a plain optimizer."""
        self.read_groups()
        self._books.at_home.settle()
        return self._state.read(self._books, lends=False)

    def state_outside_groups(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Returns the state of parameters removed from the groups: no state dict has it."""
        return {
            handle.param: dict(self._books[handle.param]) for handle in self._state.outside_groups()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this or the plain optimizer. Raises UsageError before changes."""
        with self.context.uses.operation(Operation.LOAD_OPTIMIZER_STATE_DICT):
            state_dict = state_dict.copy()
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = (
                    returned if (returned := hook(self, state_dict)) is not None else state_dict
                )
            self.read_groups()
            state_dict = self._known.flat(state_dict)
            param_groups = self._state.check(state_dict)
            self.check_groups(param_groups, "load_state_dict()")
            self._state.write(state_dict, param_groups, self._books)
            params = [param for group in self.param_groups for param in group["params"]]
            self._outside.load(self._state.by_number(state_dict), self.param_groups, params)
            for hook in self._optimizer_load_state_dict_post_hooks.values():
                hook(self)
