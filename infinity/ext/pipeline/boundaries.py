"""Boundaries: sends one part of a stage's output from each tp rank, and assembles the parts on the
receiving side.

[Note: why in parts] A block's output is the same on all ranks that have parts of its tensors. So
each rank sends one t-th of it, and the receivers gather it among themselves, over the faster
network (Narayanan et al., Megatron-LM, 2021, section 4.1: b s h / t between stages).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...core.params.tensors import digest_of
from ...errors import UsageError
from ...ranks.collectives import Collectives
from ..dtensor.plans import own_plan
from ..rows.experts import divides_experts


def axis_that_shares(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh | None:
    """Finds the axis of ``mesh``, tp or ep, on whose ranks the output of each block of ``model`` is
    the same. For a transformers model its plan decides: it must not leave sequences in parts.
    Returns None if there is no such axis, if its ranks have batches of their own, or if the
    features do not divide."""
    sharing = ("tp",) if divides_experts(model) else ("tp", "ep")
    axes = [
        mesh[name]
        for name in mesh.mesh_dim_names or ()
        if name in sharing and mesh[name].size() > 1
    ]
    if not axes or not hasattr(model, "config") or "sequence_parallel" in own_plan(model).values():
        return None
    width = getattr(model.config.get_text_config(), "hidden_size", 0)
    return axes[0] if width and width % axes[0].size() == 0 else None


class Boundaries:
    """The chunks of one rank, of a model whose block outputs are the same on every rank of
    ``mesh``."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        numbers: Sequence[int],
        count: int,
        mesh: DeviceMesh,
        collectives: Collectives,
    ):
        self._mesh, self._collectives = mesh, collectives
        self._takes = [chunk for chunk, number in zip(chunks, numbers) if number > 0]
        self._gives = [chunk for chunk, number in zip(chunks, numbers) if number < count - 1]
        self._compared: set[tuple] = set()

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Makes the chunks receive and return parts inside the block."""
        with ExitStack() as stack:
            for chunk in self._takes:
                stack.callback(chunk.register_forward_pre_hook(self._put_together).remove)
            for chunk in self._gives:
                stack.callback(chunk.register_forward_hook(self._take_part).remove)
            yield

    def _take_part(self, chunk: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        self._compare(chunk, output)
        part = (
            DTensor.from_local(output, self._mesh, [Replicate()], run_check=False)
            .redistribute(placements=[Shard(-1)])
            .to_local()
        )
        return part.clone()  # torch's schedules detach it in place, which a view does not allow

    def _put_together(self, chunk: nn.Module, inputs: tuple) -> tuple:
        part, *rest = inputs
        whole = (
            DTensor.from_local(part, self._mesh, [Shard(-1)], run_check=False)
            .redistribute(placements=[Replicate()])
            .to_local()
        )
        return (whole, *rest)

    def _compare(self, chunk: nn.Module, output: torch.Tensor) -> None:
        """Raises UsageError if ``output`` differs between ranks of the axis: a plan may not do what
        its names say.

        Compares a chunk's first output of each shape, which all ranks reach together. A collective.
        """
        if (key := (id(chunk), tuple(output.shape))) in self._compared:
            return
        channel = self._collectives.ranks.tp_group
        digests = self._collectives.collect(
            digest_of(output), "what a chunk gives to the next stage", [channel]
        )
        if len({*digests}) > 1:
            raise UsageError(
                "what a chunk gives to the next stage is not the same on all ranks of the tp axis:"
                " the plan by which the model was cut leaves its blocks' outputs in parts. Cut it"
                " by infinity.parallel.find_plan, or build the stages yourself and attach the"
                " schedule."
            )
        self._compared.add(key)
