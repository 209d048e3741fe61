"""Send home: copies values and optimizer state to their homes before a wrap changes the model."""

from __future__ import annotations

import math

import torch
from torch import nn

from ...errors import ConfigError
from ...files.boxes import Box, boxes_of_run
from ...progress import progress
from ...ranks.collectives import Collectives
from ..homes.write_behind import ArrayIO
from ..run.job import Job
from ..seams import FirstValues
from ..step.recognised import Optimizers
from ..units.flat_param import FlatParam
from ..units.forms import division_of, gathered, is_plain, like, local_of
from ..units.handle import raw_grad
from ..units.unit import flat_params_of


class HomeWriter:
    """Writes values to their homes, and reads them back, before the parameters are attached to the
    engine."""

    def __init__(self, job: Job, store: ArrayIO):
        self.store, self._collectives = store, job.collectives
        flat_params = flat_params_of(job.units)
        self._places = {
            param: (flat, index) for flat in flat_params for index, param in enumerate(flat.params)
        }

    def send(self, param: nn.Parameter, begin: int, values: torch.Tensor, *, drawn: bool) -> None:
        flat_param, index = self._places[param]
        if drawn:  # each rank has values of its own, such as random ones
            values = self._collectives.assemble(
                values.clone(), "the initial values", over_tensors=True
            )
        if is_plain(param):
            flat_param.write_first_values(self.store, index, begin, values)
            return
        part = self._part(param)
        for box, first in boxes_of_run(
            param.shape, range(param.dim()), begin, begin + values.numel()
        ):
            if (common := box.common(part)) is not None:
                run = values[first - begin : first - begin + box.numel].view(box.shape)
                # Consecutive in the part, too: it has the same rows, only shorter.
                here = common.moved(part.offset, -1)
                at = sum(
                    offset * math.prod(part.shape[dim + 1 :])
                    for dim, offset in enumerate(here.offset)
                )
                flat_param.write_first_values(
                    self.store, index, at, common.moved(box.offset, -1).of(run).reshape(-1)
                )

    def span(self, param: nn.Parameter) -> tuple[int, int]:
        flat_param, index = self._places[param]
        place = flat_param.layout.placements[index]
        if not place.is_row_major:
            return 0, param.numel()
        begin, end = (at - place.offset for at in flat_param.layout.shard_part(index))
        if is_plain(param) or begin == end:
            return begin, end
        last = torch.unravel_index(torch.tensor([begin, end - 1], device="cpu"), place.shape)
        part = self._part(param)
        first, behind = (
            sum(
                (int(at[which]) + offset) * math.prod(param.shape[dim + 1 :])
                for dim, (at, offset) in enumerate(zip(last, part.offset))
            )
            for which in (0, 1)
        )
        return first, behind + 1

    def recall(self, param: nn.Parameter) -> torch.Tensor:
        flat_param, index = self._places[param]
        return gathered(like(param, flat_param.read_value(self.store, index)))

    @staticmethod
    def _part(param: nn.Parameter) -> Box:
        """Returns this rank's part of the global tensor."""
        return Box(division_of(param).offset, tuple(local_of(param).shape))


class OwnValues(FirstValues):
    """What a model and its optimizers have in memory: values, moments and gradients."""

    def __init__(self, job: Job, optimizers: Optimizers):
        self._optimizers = optimizers
        self._units = list(zip(job.units, job.planned.sizes))

    def fill(self, writer: HomeWriter, sent: set[nn.Parameter]) -> None:
        total = sum(size.shard_nbytes for _, size in self._units)
        with progress("sending the values home", total) as advance:
            for unit, size in self._units:
                for flat_param in unit.flat_params:
                    send_flat_param_home(writer.store, flat_param, self._optimizers, done=sent)
                advance(size.shard_nbytes)


@torch.no_grad()
def send_flat_param_home(
    store: ArrayIO,
    flat_param: FlatParam,
    optimizers: Optimizers,
    *,
    done: set[nn.Parameter],
) -> None:
    """Copies values (except those of ``done``), moments and gradients to the flat param's homes.
    Every rank calls this."""
    collectives = flat_param.collectives
    for index, param in enumerate(flat_param.params):
        if not local_of(param).numel():
            continue
        if param not in done:
            flat_param.write_value(
                store,
                index,
                _of_first_rank(collectives, param, "a parameter"),
                version=0,
                fresh=True,
            )
        if (stepped_by := optimizers.of(param)) is None:
            continue
        state = stepped_by.optimizer.state.get(param, {})
        for name, array in optimizers.moments_of(param).items():
            if state.get(name) is not None:
                moment = _of_first_rank(collectives, state[name], "the optimizer's state")
                flat_param.write_moment(store, array, index, moment, version=0)
        if (grad := raw_grad(param)) is not None:
            if collectives.ranks.data_size > 1:
                raise ConfigError(
                    "a parameter has a gradient already, of one rank's batch: call zero_grad()"
                    " before wrap_model"
                )
            flat_param.write_flat(store, "grad", index, local_of(grad), version=0)


def _of_first_rank(collectives: Collectives, tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Returns the local part of the first data rank's ``tensor``. Every rank calls this."""
    local = local_of(tensor)
    if collectives.ranks.data_size == 1:
        return local
    return collectives.assemble(local.detach().clone(memory_format=torch.contiguous_format), what)
