"""InfinityOptimizer: a ``torch.optim.Optimizer`` whose state is at home and whose step runs behind the next forward.

rule   the formula, recognised from the optimizer that was wrapped
span   consecutive parameters of a shard with the same hyperparameters and step count: one kernel call
shadow  the update of a shard that was made in the backward, on the chance that the step will be that one

A step is planned first, which changes nothing, then handed to the updater in one call, and then entered into the books. What is
cut short after the plan is carried to its end by the next use of the engine (:mod:`infinity.state.journal`), so a step is never made
by half, nor twice.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TYPE_CHECKING

import torch

from .. import native
from ..errors import UsageError
from ..gradients.record import GradState, refuse_torn
from ..state.handle import handle_of, ParamHandle
from ..state.shard import ParamShard
from ..state.shard_arrays import Shadow
from .device_step import DeviceUpdate, Span, steps_on_device
from .rules import moment_names, refuse_flags, saved_step

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..state.unit import ParamUnit

logger = logging.getLogger(__name__)


def _plainly(value: Any) -> Any:
    """``value`` as it reads the same on every rank: of what is not a number or text, its kind."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plainly(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _unit_landed(optimizer: weakref.ref[InfinityOptimizer], unit: ParamUnit) -> None:
    if (alive := optimizer()) is not None:
        alive.unit_landed(unit)


@dataclass(eq=False)
class ShardStep:
    """What a step does with one shard."""

    shard: ParamShard
    landed: list[tuple[ParamHandle, int]]  # whose gradients it applies, and the number of that step of theirs
    shadow: Shadow | None = None  # that is the update already
    update: native.UnitUpdate | None = None  # of the processor's part
    device_step: Callable[[], DeviceUpdate] | None = None  # of the device's
    device_update: DeviceUpdate | None = None
    has_begun: bool = False  # on the device, where it cannot be told how far it came


HYPERPARAMETERS = [name for name in dir(native.Hyperparameters) if not name.startswith("_")]


def _inputs_of(spans: list[Span]) -> list[tuple]:
    """Lists all that an update is made with, to be compared."""
    return [(begin, end, *(getattr(hyper, name) for name in HYPERPARAMETERS)) for begin, end, hyper in spans]


class InfinityOptimizer(torch.optim.Optimizer):
    """What :func:`infinity.wrap_model` gives back. Shares the wrapped optimizer's ``param_groups``."""

    def __init__(self, engine: Engine, wrapped: torch.optim.Optimizer, rule: native.Rule):
        self._engine, self.wrapped, self._rule = engine, wrapped, rule
        self._ready = False
        self._shadowed = 0  # shadows since the last step
        self.is_unwrapped = False  # by an unwrap_model that raised, for it was interrupted
        super().__init__(wrapped.param_groups, dict(wrapped.defaults))
        self._ready = True
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(self, kind, getattr(wrapped, kind))
        wrapped.param_groups = self.param_groups  # a scheduler made for the wrapped one steers this one
        self._moments = moment_names(rule, self.param_groups)
        engine.listen_to_landed(partial(_unit_landed, weakref.ref(self)))  # the engine does not keep its optimizer alive

    @property
    def rule_name(self) -> str:
        """Which formula: ADAMW, ADAM, SGD or LION."""
        return self._rule.name

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after wrapping: the new parameters have no home."""
        if self._ready:
            raise UsageError("add_param_group after wrap_model: unwrap_model first, add the group, and wrap again")
        super().add_param_group(param_group)

    def check_groups(self, groups: list[dict[str, Any]], where: str) -> None:
        """Raises UsageError where ``groups``, which come from ``where``, ask for what the rule does not do."""
        refuse_flags(self._rule, groups, moments=len(self._moments), where=where)

    # --- the step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies what has landed, as torch's step does, and returns while the updates are still under way.

        A unit's update ends before its weights or its gradients are used next; nothing else waits for it. An error of
        an earlier update is raised here or where the unit is used. ``closure`` is called first, with gradients on.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._engine
        engine.check_alive()
        with engine.using():
            if engine.finished_step == engine.step_index and self._is_consumed():
                engine.finished_step = -1  # this very step was cut short, and has been carried to its end since
            else:
                self._step()
        return loss

    def _step(self) -> None:
        engine = self._engine
        self.check_groups(self.param_groups, "step()")
        engine.gradients.average()
        begun = engine.step_begun
        if not begun:
            self._check_unconsumed()
        for handle in engine.group_of:
            refuse_torn(handle)
        self.wrapped._opt_called = True  # a scheduler made for the wrapped optimizer watches for its steps
        clip = self._clip_factor() if engine.config.max_grad_norm is not None else 1.0
        if not engine.ranks.alone:
            engine.collectives.rendezvous(self._told(clip))
        if not begun:
            engine.begin_step()
        version = engine.step_index if begun else engine.step_index + 1
        order = list(engine.schedule.first())
        order += [unit.index for unit in engine.units if unit.index not in set(order)]
        steps: list[ShardStep] = []
        backwards = engine.backwards
        with engine.store.guarding():
            for index in order:
                steps += self._plan(engine.units[index], version, clip)
            engine.journal.carry_out(partial(self._finish, steps, version))
            if engine.speculation is not None:
                for shard in self._shards():  # of what this step does not step
                    shard.drop_shadow()
                kept = sum(step.shadow is not None for step in steps)
                engine.speculation.end_step(made=self._shadowed, kept=kept, backwards=backwards)
                self._shadowed = 0
        engine.end_step()
        engine.finished_step = -1  # the caller is told by the return

    def _clip_factor(self) -> float:
        """What ``max_grad_norm`` multiplies every gradient by: as torch.nn.utils.clip_grad_norm_ does, but nothing is changed, so
        that a step that is cut short can be made again."""
        grads = [grad for group in self.param_groups for param in group["params"] if (grad := param.grad) is not None]
        total = torch.nn.utils.get_total_norm(grads)
        factor = torch.clamp(self._engine.config.max_grad_norm / (total + 1e-6), max=1.0)
        # torch, too, multiplies by the number's fp32 value, in gradients of every dtype.
        return torch.tensor(factor.item(), dtype=torch.float32, device="cpu").item()

    def _plan(self, unit: ParamUnit, version: int, clip: float = 1.0) -> list[ShardStep]:
        """What a step does with ``unit``: gradients that have landed go home, nothing else is changed."""
        engine = self._engine
        landed = [shard for shard in unit.shards if shard.spec.stepped and self._has_landed(unit, shard)]
        if landed:
            engine.prefetcher.release_all([unit])
        steps = []
        for shard in landed:
            handles = [handle_of(param) for param in shard.params]
            shard.wait()
            for handle in handles if clip != 1.0 else ():
                if handle.grad.state is GradState.LANDED and len(handle.grad.factors) == native.MAX_GRAD_FACTORS:
                    engine.gradients.apply_factors(handle)  # there is no room for another
            after = engine.gradients.close_shard(shard)
            spans = list(self._spans(shard, handles, clip))
            step = ShardStep(shard, [(h, h.step + 1) for h in handles if h.grad.state is GradState.LANDED])
            shadow = shard.shadow
            if shadow is not None and shadow.ticket is not None and shadow.inputs == _inputs_of(spans):
                step.shadow = shadow
            elif spans:  # else other ranks have these parameters in their slices
                self._plan_update(step, spans, after, label=unit.index, version=version)
            steps.append(step)
        return steps

    def _carry_out(self, steps: list[ShardStep]) -> None:
        """Makes the planned ``steps``. Called again it does what is left."""
        engine = self._engine
        for step in steps:
            if step.device_step is not None and step.device_update is None:
                if step.has_begun:
                    engine.halt("a step was cut short on the device")
                    raise engine.halted()
                step.has_begun = True
                step.device_update = step.device_step()
        engine.updater.submit_all([step.update for step in steps if step.update is not None])
        for step in steps:
            shard = step.shard
            if step.shadow is not None:
                if shard.shadow is step.shadow:
                    shard.keep_shadow()
            elif step.device_update is not None:
                step.device_update.ticket = step.update.ticket if step.update is not None else None
                shard.submit(step.device_update)
            elif step.update is not None:
                shard.submit(step.update.ticket)
            for handle, number in step.landed:
                handle.step = number
                handle.changed()
                handle.grad.move(GradState.CONSUMED)

    def _finish(self, steps: list[ShardStep], version: int) -> None:
        self._carry_out(steps)
        engine = self._engine
        engine.count_backwards(0)
        engine.step_index, engine.step_begun, engine.finished_step = version, False, version

    def _told(self, clip: float) -> str:
        """What a step does, in few words that differ where it does not do the same on another rank."""
        told: list = [clip]
        told += [{key: _plainly(value) for key, value in group.items() if key != "params"} for group in self.param_groups]
        for handle in self._engine.group_of:
            told.append((handle.step, handle.grad.state.name, handle.grad.factors))
        digest = hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()
        rates = ", ".join(f"{float(group['lr']):g}" for group in self.param_groups)
        return f"a step ({digest} stands for all settings, clipping and gradients) with learning rates {rates}"

    @contextmanager
    def step_in_backward(self) -> Iterator[None]:
        """Around the last backward before :meth:`step`: a unit is stepped as soon as its gradients have landed, while the
        backward goes on; ``step()`` does the rest. The arithmetic is the same.

        What has been stepped cannot be clipped, unscaled or changed any more: that raises UsageError, as does clipping
        by the engine itself (``max_grad_norm``) here. An exception inside leaves part of the step done, and the job can
        then only go on from a checkpoint.
        """
        engine = self._engine
        engine.check_alive()
        if engine.config.max_grad_norm is not None:
            raise UsageError(
                "step_in_backward: max_grad_norm needs the norm of all gradients before the first unit is stepped. Leave "
                "out one of the two, or let Config(speculate=True) update units ahead."
            )
        with engine.using():
            self.check_groups(self.param_groups, "step_in_backward()")
            self._check_unconsumed()
            engine.begin_step()
            engine.step_index += 1
            engine.step_begun = engine.streams_step = True
            yield  # an exception leaves the marks, which the next use of the engine goes by
            if engine.passes.is_cut_short or engine.gradients.is_changing:
                engine.scopes.interrupted = True  # the backward failed, and somebody caught that inside the block
            else:
                engine.streams_step = False

    def unit_landed(self, unit: ParamUnit) -> None:
        """All of a unit's gradients have landed, and the backward is done with it."""
        if self._engine.streams_step:
            self._step_unit(unit)
        elif self._engine.speculation is not None:
            self.shadow(unit)

    @torch.no_grad()
    def _step_unit(self, unit: ParamUnit) -> None:
        """One with parameters that are not trained waits: the backward may still need those, and a unit's values change
        together."""
        engine = self._engine
        params = [param for shard in unit.shards for param in shard.params]
        if all(shard.spec.stepped for shard in unit.shards) and all(param.requires_grad for param in params):
            steps = self._plan(unit, engine.step_index)
            engine.journal.carry_out(partial(self._carry_out, steps))

    def _is_consumed(self) -> bool:
        return any(handle.grad.state is GradState.CONSUMED for handle in self._engine.group_of)

    def _check_unconsumed(self) -> None:
        for handle in self._engine.group_of:
            if handle.grad.state is GradState.CONSUMED:
                raise UsageError(
                    f"step() without a new gradient: the one of {handle.name} was consumed by the last step. "
                    "Call zero_grad() and run backward before the next step()."
                )

    @staticmethod
    def _has_landed(unit, shard: ParamShard) -> bool:
        return any(h.shard is shard and h.grad.state is GradState.LANDED for h in unit.handles)

    @torch.no_grad()
    def shadow(self, unit: ParamUnit) -> None:
        """Makes the update of ``unit``, whose gradients have landed, beside its state: the step may turn out to be that."""
        engine = self._engine
        if not engine.speculation.is_wanted(engine.backwards + 1):
            return
        with engine.store.guarding():
            for shard in unit.shards:
                handles = [handle_of(param) for param in shard.params]
                if not shard.shadow_extents or any(handle.grad.viewed for handle in handles):
                    continue
                spans = list(self._spans(shard, handles))
                if not spans:
                    continue
                shard.wait()
                shard.drop_shadow()
                after, version = engine.gradients.close_shard(shard), engine.step_index + 1
                update = self._processor_update(shard, spans, after, label=unit.index, version=version, ahead=True)
                shard.cast_shadow(Shadow(update, _inputs_of(spans)))
                engine.updater.submit_all([update])
                self._shadowed += 1

    def _shards(self) -> Iterator[ParamShard]:
        return (shard for unit in self._engine.units for shard in unit.shards)

    def _plan_update(self, step: ShardStep, spans: list[Span], after: list[native.Ticket], *, label: int, version: int) -> None:
        """``spans`` of a shard are to be stepped: where its state is, and of state on the host a part on the device too."""
        engine, shard = self._engine, step.shard
        stepper = engine.stepper
        if stepper is None:
            step.update = self._processor_update(shard, spans, after, label=label, version=version)
            return
        first = 0 if steps_on_device(shard) else stepper.first_own(shard)
        own = [(max(begin, first), end, hyper) for begin, end, hyper in spans if end > first]
        rest = [(begin, min(end, first), hyper) for begin, end, hyper in spans if begin < first]
        if rest:
            step.update = self._processor_update(shard, rest, after, label=label, version=version)
        if own:
            behind = engine.gradients.landing_of(shard)
            step.device_step = partial(
                stepper.step, shard, shard.native_layout(self._rule), own, version=version, behind=behind
            )

    def _processor_update(
        self,
        shard: ParamShard,
        spans: list[Span],
        after: list[native.Ticket],
        *,
        label: int,
        version: int,
        ahead: bool = False,
    ) -> native.UnitUpdate:
        """The processor's update of ``spans`` of a shard; ``ahead``: beside its state, as a shadow."""
        extents = {name: array.extent for name, array in shard.arrays.items()}
        if shard.ranks.keeps_gradients:
            extents["grad"] = shard.slice_of_grad()
        read = self._engine.device.ticket([shard.last_read])  # a copy to the device may still read what is about to change
        after = [*after, read] if read is not None else after
        beside = shard.shadow_extents if ahead else {}
        return native.UnitUpdate(
            layout=shard.native_layout(self._rule),
            count=shard.slice_numel,
            weight=extents["weight"],
            master=extents.get("master"),
            exp_avg=extents.get("exp_avg"),
            exp_avg_sq=extents.get("exp_avg_sq"),
            grad=extents["grad"],
            runs=[native.Run(begin, end, hyper) for begin, end, hyper in spans],
            version=version,
            after=native.joined(after) if after else None,
            exp_avg_scale=extents.get("exp_avg_scale"),
            exp_avg_sq_scale=extents.get("exp_avg_sq_scale"),
            label=label,
            shadow=native.Shadow(**beside),
        )

    def _spans(self, shard: ParamShard, handles: list[ParamHandle], clip: float = 1.0) -> Iterator[Span]:
        """The spans of what has landed: neighbours with the same hyperparameters, step and factors are one. ``clip``: a factor
        after the gradients' own."""
        last = () if clip == 1.0 else (clip,)
        key, begin, end = None, 0, 0
        first = shard.own_slice[0]
        for handle in handles:
            record = handle.grad
            low, high = shard.slice_part(handle.index)
            landed = record.state is GradState.LANDED and low < high
            group = self._engine.group_of[handle]
            current = (group, handle.step + 1, (*record.factors, *last)) if landed else None
            if current != key:
                if key is not None:
                    yield begin, end, self._hyperparameters(*key)
                key, begin = current, low - first
            end = high - first
        if key is not None:
            yield begin, end, self._hyperparameters(*key)

    def _hyperparameters(self, group_index: int, step: int, factors: tuple[float, ...]) -> native.Hyperparameters:
        group = self.param_groups[group_index]
        hyper = native.Hyperparameters()
        hyper.lr = float(group["lr"])
        hyper.weight_decay = float(group.get("weight_decay", 0))
        hyper.maximize = bool(group.get("maximize", False))
        if self._rule == native.Rule.SGD:
            hyper.momentum, hyper.dampening = float(group["momentum"]), float(group["dampening"])
            hyper.nesterov = bool(group["nesterov"])
        else:
            hyper.beta1, hyper.beta2 = (float(beta) for beta in group["betas"])
            hyper.eps = float(group.get("eps", 0))
        hyper.step = step
        hyper.grad_factors = list(factors)
        return hyper

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's: gradients become None, or zeros which the next step applies."""
        with self._engine.using():
            for group in self.param_groups:
                for param in group["params"]:
                    if set_to_none:
                        param.grad = None
                    elif param.grad is not None:
                        param.grad.zero_()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer's: plain torch loads it. Moments are full tensors, in fp32 or their dtype at rest. The entry of a
        16-bit parameter with an fp32 master has that too, as ``master``: the model's state dict shows its upper half only."""
        with self._engine.using():
            return self._state_dict()

    def plain_state_dict(self) -> dict[str, Any]:
        """The same without masters, which a plain optimizer has no use for."""
        return self._state_dict(masters=False)

    def _state_dict(self, *, masters: bool = True) -> dict[str, Any]:
        store = self._engine.store
        groups, indices = [], {}
        for group in self.param_groups:
            for param in group["params"]:
                indices.setdefault(param, len(indices))
            packed = {key: value for key, value in group.items() if key != "params"}
            groups.append(packed | {"params": [indices[param] for param in group["params"]]})
        state = {}
        for param, index in indices.items():
            handle = handle_of(param)
            with_master = masters and handle.step and handle.shard.hides_bits
            master = {"master": handle.shard.read_master(store, handle.index)} if with_master else {}
            if master:
                state[index] = master
            if handle.step and self._moments:
                moments = {
                    name: handle.shard.read_moment(store, array, handle.index) for name, array in self._moments.items()
                }
                counted = self._rule in (native.Rule.ADAMW, native.Rule.ADAM)
                step = {} if not counted else {"step": torch.tensor(float(handle.step), dtype=torch.float32, device="cpu")}
                state[index] = step | moments | master
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict of this or of the plain optimizer. Raises UsageError before anything is changed."""
        with self._engine.using():
            self._load_state_dict(state_dict)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved_groups = state_dict["param_groups"]
        ours = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in saved_groups]
        if ours != theirs:
            raise UsageError(f"the state dict has groups of {theirs} parameters, this optimizer of {ours}")
        params = {}
        for group, saved in zip(self.param_groups, saved_groups):
            params |= dict(zip(saved["params"], group["params"]))
        for index, state in state_dict["state"].items():
            handle = handle_of(params[index])
            for name in (*self._moments, "master"):
                value = state.get(name)
                if value is not None and tuple(value.shape) != tuple(params[index].shape):
                    raise UsageError(
                        f"{name} of {handle.name} has shape {tuple(value.shape)}, the parameter {tuple(params[index].shape)}"
                    )
        groups = [group | {key: value for key, value in saved.items() if key != "params"}
                  for group, saved in zip(self.param_groups, saved_groups)]  # fmt: skip
        self.check_groups(groups, "load_state_dict()")
        moments = [value for state in state_dict["state"].values() for value in state.values() if isinstance(value, torch.Tensor)]
        self._engine.collectives.same("loading the optimizer's state", *moments)
        for group, taken in zip(self.param_groups, groups):
            group.update(taken)
        absent, others, loaded = [], [], []
        for index, param in params.items():
            state, handle = state_dict["state"].get(index, {}), handle_of(param)
            self._adopt(param, state)
            if handle.shard.hides_bits and handle.step:
                master = state.get("master")
                if master is None or master.dtype != torch.float32:
                    absent.append(handle.name)
                elif handle.shard.write_master(self._engine.store, handle.index, master, version=self._engine.step_index):
                    others.append(handle.name)
                else:
                    loaded.append(handle.name)
        handles = [handle_of(param) for param in params.values()]
        everywhere = self._engine.collectives.least([handle.name in loaded for handle in handles], "masters that were loaded")
        for handle, whole in zip(handles, everywhere):
            handle.has_loaded_master = bool(whole)
        if absent:
            logger.warning(
                "this optimizer's state dict has no fp32 masters of %d 16-bit parameters (%s, ...): they go on from the 16-bit weights",
                len(absent), absent[0],
            )  # fmt: skip
        if others:
            logger.warning(
                "this optimizer's state dict has fp32 masters of other weights than the model has, in %d parameters (%s, ...): there the "
                "model's weights count. To resume, load the model's state dict first.", len(others), others[0],
            )  # fmt: skip

    def _adopt(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        """Makes ``state``, as torch's optimizers keep it per parameter, the state at home; empty is a fresh start."""
        handle, engine = handle_of(param), self._engine
        step = saved_step(state)
        if step or handle.step:
            for name, array in self._moments.items():
                value = state.get(name)
                value = torch.zeros(param.shape, dtype=torch.float32, device="cpu") if value is None else value
                handle.shard.write_moment(engine.store, array, handle.index, value, version=engine.step_index)
        handle.step = step
