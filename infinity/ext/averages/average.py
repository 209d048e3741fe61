"""ema and swa: running averages of a wrapped model's weights, on the tiers of the masters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import swa_utils

from ...core.run.operations import OperationKind
from ...core.run.registry import engine_of, whole_of
from ...core.units.forms import like, part_of
from ...core.units.handle import ParamHandle, handle_of
from ...errors import ConfigError, UsageError
from .weight_average import AverageOperation, Blend, WeightAverage


def ema(model: nn.Module, decay: float) -> Average:
    """Makes an exponential moving average of the weights of a wrapped ``model``: ``decay`` times
    the old average, plus ``1 - decay`` times the new weights.

    Has the bits of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``,
    computed from the fp32 masters if there are any. Raises ConfigError for a decay outside of [0,
    1]. Raises UsageError for a model that is not wrapped with an optimizer, or already has an
    average. Raises CapacityError if the tiers of the masters have no room for it.
    """
    if not isinstance(decay, (int, float)) or isinstance(decay, bool) or not 0 <= decay <= 1:
        what = (
            f"={decay!r}"
            if isinstance(decay, (int, float, str))
            else f" is a {type(decay).__name__}"
        )
        raise ConfigError(f"decay{what}: give a number from 0 to 1, as ema(model, 0.999)")
    return Average(model, swa_utils.get_ema_multi_avg_fn(decay))


def swa(model: nn.Module) -> Average:
    """Makes the equal average of the weights of a wrapped ``model`` over all updates: stochastic
    weight averaging.

    Has the bits of ``torch.optim.swa_utils.AveragedModel(model)`` on the CPU. Raises as :func:`ema`
    does.
    """
    average = swa_utils.get_swa_avg_fn()

    def blend(
        averages: list[torch.Tensor], values: list[torch.Tensor], count: torch.Tensor
    ) -> None:
        for mean, value in zip(averages, values):
            mean.copy_(average(mean, value, count))

    return Average(model, blend)


class Average:
    """The running average of one wrapped model's trained parameters.
    :func:`infinity.save_checkpoint` saves it with the model, and load_checkpoint loads it into an
    average that was created before."""

    def __init__(self, model: nn.Module, blend: Blend):
        engine = engine_of(model)
        job = engine.job
        if not job.trained:
            raise UsageError(
                "this model was wrapped without an optimizer: its weights do not change"
            )
        self._model, self._average = model, WeightAverage(job, blend)
        try:
            with job.uses.begin():
                if job.find(WeightAverage) is not None:
                    raise UsageError("this model has an average already: call its remove() first")
                job.add(self._average)
        except BaseException:  # also an interrupt: no user could remove it
            job.remove(self._average)
            raise

    @property
    def updates(self) -> int:
        """The number of updates."""
        return self._average.count

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average: call it after ``optimizer.step()``. The first
        update copies them.

        If it is interrupted, the next use of the model completes it. Every rank calls this.
        """
        job = self._average.job
        with job.uses.operation(AverageOperation.UPDATE), job.store.guard:
            self._average.update()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Computes with the average as the weights inside the block: evaluate, generate,
        ``infinity.save_pretrained``. Swaps weights and averages at home, and swaps them back at the
        end, even if an exception interrupts the first swap.

        Inside it ``optimizer.step()``, ``update()``, state dicts of the average, checkpoints,
        ``unwrap_model`` and another ``applied()`` raise UsageError. Raises UsageError before the
        first update.
        """
        self._check(AverageOperation.APPLY)
        try:
            self._average.is_wanted = True
            self._exchange()
            yield
        finally:
            self._average.is_wanted = (
                False  # first: if the swap is interrupted, the next use makes it
            )
            self._bring_back()

    def _check(self, operation: OperationKind, *, updated: bool = True) -> None:
        """Raises UsageError while the averages are the model's weights and, with ``updated``,
        before the first update."""
        self._average.job.uses.check(operation)  # this also completes an interrupted exchange
        if updated and not self.updates:
            raise UsageError("there is no average yet: call update() after a step")

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swaps the weights with their moving averages. No-op if already so."""
        job = self._average.job
        with job.uses.operation(AverageOperation.EXCHANGE), job.store.guard:
            if not self._average.is_exchanged:
                self._average.exchange()

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Swaps the weights back. Asks no table: a refusal would leave the averages as weights."""
        with self._average.job.uses.begin():
            self._average.bring_back()

    def remove(self) -> None:
        """Frees the average's memory."""
        job = self._average.job
        with job.uses.operation(AverageOperation.REMOVE):  # also resumes a parked model
            job.lents.part(source=self._average, follow=False)
            job.remove(self._average)

    # --- state dicts ---

    @torch.no_grad()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the model's state dict with averages in place of the trained weights, in fp32 if
        they have masters: a plain model loads it. As in torch, a write to one of its tensors is a
        write to the average; one to a state dict from before an update raises UsageError at the
        next use. All of it is in memory together; ``save_pretrained`` in
        :meth:`applied` is streamed. Raises UsageError before the first
        update, and in :meth:`applied`, where the model's own state dict has the averages."""
        self._check(AverageOperation.STATE_DICT)
        state, job = self._model.state_dict(), self._average.job
        named = {name: each for name, each in self._handles().items() if name in state}
        with torch.inference_mode(False), job.uses.begin():  # its tensors can be changed
            wholes = {handle: self._whole(handle) for handle in dict.fromkeys(named.values())}
            for handle, whole in wholes.items():
                job.lents.lend(self._average, handle, whole)
        return state | {name: wholes[handle] for name, handle in named.items()}

    def _handles(self) -> dict[str, ParamHandle]:
        named = whole_of(self._model).named_parameters(remove_duplicate=False)
        handles = {name: handle_of(param) for name, param in named}
        return {
            name: handle
            for name, handle in handles.items()
            if handle is not None and self._average.kept.has(handle)
        }

    def _whole(self, handle: ParamHandle) -> torch.Tensor:
        place = handle.flat_param.layout.placements[handle.index]
        return like(
            handle.param,
            self._average.kept.read_whole(handle).as_strided(place.shape, place.stride),
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], *, updates: int = 1) -> None:
        """Sets the average from ``state_dict``, as that of ``updates`` updates. Tensors of the
        average's own state dict stay so: a write to them is a write to the average. Raises
        UsageError, before any change, if a parameter is missing or has another shape, and in
        :meth:`applied`.
        """
        self._check(AverageOperation.LOAD, updated=False)
        handles = self._handles()
        for name, handle in handles.items():
            if name not in state_dict or state_dict[name].shape != handle.param.shape:
                there = tuple(state_dict[name].shape) if name in state_dict else "missing"
                raise UsageError(
                    f"the average of {name} is {there} in the state dict, and has shape"
                    f" {tuple(handle.param.shape)}"
                )
        parts = {
            handle: part_of(handle.param, state_dict[name], f"the average of {name}").detach()
            for name, handle in handles.items()
        }
        values = {handle: state_dict[name] for name, handle in handles.items()}
        job = self._average.job
        with job.uses.begin(), job.lents.loading(self._average, values):
            self._average.replace(parts, updates)
