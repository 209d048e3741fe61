"""Optimizer state at home, read and written in the form of torch's optimizers."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import torch

from ...errors import UsageError
from ..step.context import StepContext
from ..step.known import Known
from ..step.rules import saved_step
from ..units.flat_param import FlatParam
from ..units.forms import like, local_of, part_of
from ..units.handle import ParamHandle, handle_of
from .books import OptimizerBooks
from .borrowed_state import STEP, StateSource
from .lent import Source
from .value_edits import compare_values

logger = logging.getLogger(__name__)

MASTER = "master"  # the key of a 16-bit parameter's fp32 master, which torch does not have
# Outcomes: not in the state dict, of other weights than the model's, written
OUTCOMES = "absent", "others", "loaded"


class _Masters(Source):
    """The masters of the parameters, which nothing but their weights changes."""

    is_state = True

    def name_of(self, handle: ParamHandle) -> str:
        """Names the master of a parameter."""
        return f"master of {handle.name}"

    def stamp(self, handle: ParamHandle) -> Any:
        """Returns the weight's."""
        return handle.version, handle.forward_edits

    def check(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Raises UsageError."""
        raise UsageError(
            f"{self.name_of(handle)} in optimizer.state_dict() was written to: it has the bits of"
            " the weight below its precision, which torch's state has not. Change the weight,"
            " through model.state_dict() or full_params."
        )


MASTERS = _Masters()


class OptimizerState:
    """The state dict of an optimizer whose state is at home. ``moments``: torch's name -> array."""

    def __init__(
        self,
        context: StepContext,
        known: Known,
        param_groups: list[dict[str, Any]],
        moments: dict[str, str],
    ):
        self._context, self._known = context, known
        self._param_groups, self.moments = param_groups, moments

    def read(self, books: OptimizerBooks, *, lends: bool) -> dict[str, Any]:
        """Returns a state dict in torch's form, with the user's own values from ``books``.
        ``lends``: with the fp32 masters of 16-bit parameters; users' writes to its tensors are sent
        home."""
        store = self._context.store
        param_groups, indices = [], {}
        for group in self._param_groups:
            for param in group["params"]:
                indices.setdefault(param, len(indices))
            packed = {key: value for key, value in group.items() if key != "params"}
            param_groups.append(packed | {"params": [indices[param] for param in group["params"]]})
        state: dict[Any, Any] = {}
        of_flat_params: dict[FlatParam, list[torch.Tensor]] = {}
        for param in indices:
            if (handle := handle_of(param)) is not None and handle.has_state:
                of_flat_params.setdefault(handle.flat_param, []).append(param)
        for flat_param, params in of_flat_params.items():
            arrays = self._moments_at(flat_param).values()
            masters = lends and flat_param.hides_bits
            with flat_param.assembling_state(store, arrays, masters=masters):
                state |= {indices[param]: self._read_one(param, lends=lends) for param in params}
        entries = {index: state[index] for index in sorted(state) if state[index]}
        for key, values in books.own_values().items():
            if key not in indices:
                entries[key] = values
            else:
                entries[indices[key]] = entries.get(indices[key], {}) | values
        return {"state": entries, "param_groups": param_groups}

    def _moments_at(self, flat_param: FlatParam) -> dict[str, str]:
        """Returns the moments that the parameters of ``flat_param`` have."""
        return {name: a for name, a in self.moments.items() if a in flat_param.arrays}

    def outside_groups(self) -> list[ParamHandle]:
        """Lists the parameters that have state and are in no group any more."""
        inside = {handle_of(param) for group in self._param_groups for param in group["params"]}
        return [
            handle
            for handle in self._context.trained
            if self.moments and handle.has_state and handle not in inside
        ]

    def refuse_outside(self) -> None:
        """Raises UsageError if a state dict would lack state."""
        if outside := self.outside_groups():
            raise UsageError(
                f"optimizer.state_dict(): {len(outside)} parameters ({outside[0].name}, ...) have"
                " state and are in no group, so a state dict has no number for them. Put them back"
                " into a group, delete their state, or use infinity.save_checkpoint()."
            )

    def _read_one(self, param: torch.Tensor, *, lends: bool) -> dict[str, torch.Tensor]:
        handle, store = handle_of(param), self._context.store
        entry = {}
        if self.moments and self._known.counts_steps:
            entry[STEP] = torch.tensor(float(handle.step), dtype=torch.float32, device="cpu")
        for name, array in self._moments_at(handle.flat_param).items():
            entry[name] = like(param, handle.flat_param.read_moment(store, array, handle.index))
        if lends and handle.flat_param.hides_bits:
            entry[MASTER] = like(param, handle.flat_param.read_master(store, handle.index))
        for name, value in entry.items() if lends else ():
            state = StateSource(self._context.borrowed, self.moments.get(name, name))
            self._context.lents.lend(MASTERS if name == MASTER else state, handle, value)
        return entry

    def check(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the groups after loading ``state_dict``. Raises UsageError if it does not fit.
        Changes nothing."""
        saved_groups = state_dict["param_groups"]
        ours = [len(group["params"]) for group in self._param_groups]
        theirs = [len(group["params"]) for group in saved_groups]
        if ours != theirs:
            raise UsageError(
                f"the state dict has groups of {theirs} parameters, this optimizer of {ours}"
            )
        params = self._params_of(state_dict)
        for index in state_dict["state"].keys() & params.keys():
            state = state_dict["state"][index]
            for name in (*self.moments, "master"):
                value = state.get(name)
                if value is not None and not value.is_floating_point():
                    raise UsageError(
                        f"{name} of parameter {index} is of {value.dtype}, which are codes of"
                        " another library, whose scales are not read here: load a state dict in"
                        " fp32"
                    )
                if value is not None and tuple(value.shape) != tuple(params[index].shape):
                    handle = handle_of(params[index])
                    raise UsageError(
                        f"{name} of {handle.name if handle is not None else f'parameter {index}'}"
                        f" has shape {tuple(value.shape)}, the parameter"
                        f" {tuple(params[index].shape)}"
                    )
        # That of an optimizer before its first step has no count
        first = {STEP: 0} if self._known.counts_in_groups else {}
        return [
            group
            | first
            | {key: copy.deepcopy(value) for key, value in saved.items() if key != "params"}
            for group, saved in zip(self._param_groups, saved_groups)
        ]

    def _all_params_of(self, state_dict: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Maps the indices of ``state_dict`` to our parameters."""
        return {
            index: param
            for group, saved in zip(self._param_groups, state_dict["param_groups"])
            for index, param in zip(saved["params"], group["params"])
        }

    def _params_of(self, state_dict: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Maps the indices of ``state_dict`` to our parameters at home."""
        params = self._all_params_of(state_dict).items()
        return {index: param for index, param in params if handle_of(param) is not None}

    def by_number(self, state_dict: dict[str, Any]) -> dict[int, Any]:
        """Returns the state of ``state_dict`` by the numbers of our parameters."""
        numbered = enumerate(self._all_params_of(state_dict))
        return {n: state_dict["state"][key] for n, key in numbered if key in state_dict["state"]}

    def write(
        self, state_dict: dict[str, Any], param_groups: list[dict[str, Any]], books: OptimizerBooks
    ) -> None:
        """Loads ``state_dict`` and the hyperparameters ``param_groups`` of :meth:`check`. Users'
        own values go into ``books``. With several ranks every rank calls this."""
        of_masters = {kind: [] for kind in OUTCOMES}
        change = partial(self._set, state_dict, param_groups, books, of_masters)
        params = self._params_of(state_dict)
        handles = list(map(handle_of, params.values()))
        edits = [
            (handle, local_of(value))
            for index, handle in zip(params, handles)
            for value in state_dict["state"].get(index, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        said, collectives = "loading the optimizer's state", self._context.collectives
        self._context.journal.carry_out(change, partial(compare_values, collectives, said, edits))
        loaded = set(of_masters["loaded"])
        are_absent = collectives.meet(
            "masters that were loaded", flags=[handle.name not in loaded for handle in handles]
        )
        for handle, is_absent in zip(handles, are_absent):
            handle.has_loaded_master = not is_absent
        if absent := of_masters["absent"]:
            logger.warning(
                "this optimizer's state dict has no fp32 masters of %d 16-bit parameters (%s, ...):"
                " they go on from the 16-bit weights",
                len(absent),
                absent[0],
            )
        if others := of_masters["others"]:
            logger.warning(
                "this optimizer's state dict has fp32 masters of other weights than the model has,"
                " in %d parameters (%s, ...): there the model's weights count. To resume, load the"
                " model's state dict first.",
                len(others),
                others[0],
            )

    def _set(
        self,
        state_dict: dict[str, Any],
        param_groups: list[dict[str, Any]],
        books: OptimizerBooks,
        of_masters: dict[str, list[str]],
    ) -> None:
        """Writes all of it. ``of_masters``: filled with parameter names by the outcome for their
        masters."""
        absent, others, loaded = (of_masters[kind] for kind in OUTCOMES)
        for names in of_masters.values():
            names.clear()  # of an interrupted call
        params, everyones = self._params_of(state_dict), self._all_params_of(state_dict)
        for group, taken in zip(self._param_groups, param_groups):
            group.update(taken)
        self._context.borrowed.forget()
        books.take_own(
            {everyones.get(k, k): self._cast(value) for k, value in state_dict["state"].items()}
        )
        for index, param in params.items():
            state, handle = state_dict["state"].get(index, {}), handle_of(param)
            self._adopt(param, state)
            if handle.flat_param.hides_bits and handle.step:
                master = state.get("master")
                if master is None or master.dtype != torch.float32:
                    absent.append(handle.name)
                elif handle.flat_param.write_master(
                    self._context.store,
                    handle.index,
                    part_of(param, master, f"the master of {handle.name}"),
                    version=self._context.steps.index,
                ):
                    others.append(handle.name)
                else:
                    loaded.append(handle.name)

    def _cast(self, values: Any) -> Any:
        """Returns a parameter's state with the sums that a class keeps in fp32, as those of an fp32
        parameter are loaded by torch."""
        if self._known.rule is not None or not isinstance(values, dict):
            return values
        return {
            name: value.float()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and name != STEP
            else value
            for name, value in values.items()
        }

    def _adopt(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        """Writes ``state``, in torch's per-parameter form, home. Empty is a fresh start."""
        handle, context = handle_of(param), self._context
        step = saved_step(state, (*self.moments, "master"))
        has_values = step or any(state.get(name) is not None for name in self.moments)
        if has_values or handle.has_state:
            for name, array in self._moments_at(handle.flat_param).items():
                value = state.get(name)
                if value is None:
                    value = torch.zeros(local_of(param).shape, dtype=torch.float32, device="cpu")
                else:
                    value = part_of(param, value, f"{name} of {handle.name}")
                handle.flat_param.write_moment(
                    context.store, array, handle.index, value, version=context.steps.index
                )
        handle.step, handle.keeps_moments = step, bool(has_values and not step)
