"""Optimizer state: reads and writes it at home in the form of torch's optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from .. import native
from ..errors import UsageError
from ..state.dtensors import like, local_of, part_of
from ..state.handle import handle_of
from ..state.shard import ParamShard
from .rules import saved_step
from .step_target import StepTarget

logger = logging.getLogger(__name__)


class OptimizerState:
    """The state dict of an optimizer whose state is at home. ``moments``: torch's name of each -> the array that holds it."""

    def __init__(self, target: StepTarget, rule: native.Rule, groups: list[dict[str, Any]], moments: dict[str, str]):
        self._target, self._rule, self._groups, self.moments = target, rule, groups, moments

    def read(self, *, masters: bool) -> dict[str, Any]:
        """Returns a state dict as torch's optimizers have it. ``masters``: with the fp32 masters of 16-bit parameters."""
        store = self._target.store
        groups, indices = [], {}
        for group in self._groups:
            for param in group["params"]:
                indices.setdefault(param, len(indices))
            packed = {key: value for key, value in group.items() if key != "params"}
            groups.append(packed | {"params": [indices[param] for param in group["params"]]})
        state: dict[int, dict[str, torch.Tensor]] = {}
        of_shards: dict[ParamShard, list[torch.Tensor]] = {}
        for param in indices:
            if handle_of(param).step:
                of_shards.setdefault(handle_of(param).shard, []).append(param)
        for shard, params in of_shards.items():
            with_masters = masters and shard.hides_bits
            with shard.assembling_state(store, self.moments.values(), masters=with_masters):
                state |= {indices[param]: self._read_one(param, with_master=with_masters) for param in params}
        return {"state": {index: state[index] for index in sorted(state) if state[index]}, "param_groups": groups}

    def _read_one(self, param: torch.Tensor, *, with_master: bool) -> dict[str, torch.Tensor]:
        handle, store = handle_of(param), self._target.store
        found = {}
        if self.moments and self._rule in (native.Rule.ADAMW, native.Rule.ADAM):
            found["step"] = torch.tensor(float(handle.step), dtype=torch.float32, device="cpu")
        for name, array in self.moments.items():
            found[name] = like(param, handle.shard.read_moment(store, array, handle.index))
        if with_master:
            found["master"] = like(param, handle.shard.read_master(store, handle.index))
        return found

    def check(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the groups that loading ``state_dict`` gives. Raises UsageError where it does not fit; changes nothing."""
        saved_groups = state_dict["param_groups"]
        ours = [len(group["params"]) for group in self._groups]
        theirs = [len(group["params"]) for group in saved_groups]
        if ours != theirs:
            raise UsageError(f"the state dict has groups of {theirs} parameters, this optimizer of {ours}")
        params = self._params_of(state_dict)
        for index, state in state_dict["state"].items():
            for name in (*self.moments, "master"):
                value = state.get(name)
                if value is not None and tuple(value.shape) != tuple(params[index].shape):
                    raise UsageError(
                        f"{name} of {handle_of(params[index]).name} has shape {tuple(value.shape)}, the parameter "
                        f"{tuple(params[index].shape)}"
                    )
        return [
            group | {key: value for key, value in saved.items() if key != "params"}
            for group, saved in zip(self._groups, saved_groups)
        ]

    def _params_of(self, state_dict: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Our parameters by the numbers that ``state_dict`` gives them."""
        return {
            index: param
            for group, saved in zip(self._groups, state_dict["param_groups"])
            for index, param in zip(saved["params"], group["params"])
        }

    def write(self, state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Makes ``state_dict`` the state, and ``groups``, which :meth:`check` gave for it, the hyperparameters."""
        moments = [value for state in state_dict["state"].values() for value in state.values() if isinstance(value, torch.Tensor)]
        absent: list[str] = []
        others: list[str] = []
        loaded: list[str] = []

        def meet(then: Callable[[], None]) -> None:
            self._target.collectives.same("loading the optimizer's state", *map(local_of, moments), then=then)

        def change() -> None:
            for each in (absent, others, loaded):
                each.clear()
            self._set(state_dict, groups, absent, others, loaded)

        self._target.journal.carry_out(change, meet)
        handles = list(map(handle_of, self._params_of(state_dict).values()))
        everywhere = self._target.collectives.least([handle.name in loaded for handle in handles], "masters that were loaded")
        for handle, whole in zip(handles, everywhere):
            handle.has_loaded_master = bool(whole)
        self._tell_of_masters(absent, others)

    def _set(
        self, state_dict: dict[str, Any], groups: list[dict[str, Any]], absent: list[str], others: list[str], loaded: list[str]
    ) -> None:
        """Writes it all. Names go to the lists of masters that are ``absent`` in ``state_dict``,
        are of ``others``' weights, or were ``loaded``."""
        for group, taken in zip(self._groups, groups):
            group.update(taken)
        params = self._params_of(state_dict)
        for index, param in params.items():
            state, handle = state_dict["state"].get(index, {}), handle_of(param)
            self._adopt(param, state)
            if handle.shard.hides_bits and handle.step:
                master = state.get("master")
                if master is None or master.dtype != torch.float32:
                    absent.append(handle.name)
                elif handle.shard.write_master(
                    self._target.store,
                    handle.index,
                    part_of(param, master, f"the master of {handle.name}"),
                    version=self._target.steps.index,
                ):
                    others.append(handle.name)
                else:
                    loaded.append(handle.name)

    @staticmethod
    def _tell_of_masters(absent: list[str], others: list[str]) -> None:
        """Logs which parameters go on without their own fp32 master: ``absent`` in the state dict, or of ``others``' weights."""
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
        handle, target = handle_of(param), self._target
        step = saved_step(state)
        if step or handle.step:
            for name, array in self.moments.items():
                value = state.get(name)
                if value is None:
                    value = torch.zeros(local_of(param).shape, dtype=torch.float32, device="cpu")
                else:
                    value = part_of(param, value, f"{name} of {handle.name}")
                handle.shard.write_moment(target.store, array, handle.index, value, version=target.steps.index)
        handle.step = step
