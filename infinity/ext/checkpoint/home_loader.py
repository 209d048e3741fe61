"""HomeLoader: copies the arrays of a checkpoint to this job's homes, whatever ranks and mesh have
saved them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import native
from ...core.homes.write_behind import ArrayIO, writing_behind
from ...core.run.job import Job
from ...core.units.encoding import encode
from ...core.units.flat_param import ENCODED_AT_ONCE
from ...core.units.flat_param_spec import EVERY_MOMENT, SCALES, block_numel
from ...core.units.handle import ParamHandle
from ...files.boxes import boxes_of_run, view_of_run
from .content import SAVED, part_of_rank
from .read_once import Home, ReadOnce
from .saved_tensors import SavedTensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HomeLoader:
    """The arrays of a checkpoint, and the job whose homes take them."""

    manifest: dict[str, Any]
    data: Path
    job: Job

    def handles(self) -> list[ParamHandle]:
        """Lists the parameters of this rank, in the order of the units."""
        return [handle for unit in self.job.units for handle in unit.handles]

    def homes(self) -> list[Home]:
        """Lists the homes to load: parameter and array name."""
        return [(handle, name) for handle in self.handles() for name in self.arrays_of(handle)]

    def arrays_of(self, handle: ParamHandle) -> list[str]:
        """Returns the names of a parameter's arrays that the checkpoint has."""
        if handle.grad is None:
            saved = ["weight"]
        else:
            saved = SAVED if self._has_state(handle) else ["weight", "master"]
        return [name for name in handle.flat_param.arrays if name in saved]

    def _has_state(self, handle: ParamHandle) -> bool:
        """Returns whether the checkpoint has moments of the parameter."""
        saved = self.manifest["parameters"][handle.name]
        return bool(saved["step"]) or saved.get("keeps_moments") is True

    def load(self, once: ReadOnce) -> None:
        """Loads this rank's arrays that ``once`` has not read. Requantises 8-bit moments that were
        saved in other parts."""
        handles = self.handles()
        for handle in handles:
            handle.changed(by_load=True)
        encoded_anew = []
        index = self.job.steps.index
        with (
            SavedTensors(self.data, self.manifest) as saved,
            writing_behind(self.job.store) as store,
        ):
            copies = _Copies(saved, store, index)
            for handle in handles:
                arrays = self.arrays_of(handle)
                moments = [name for name in EVERY_MOMENT if name in arrays]
                if self._has_state(handle) and not copies.are_exact(handle, moments):
                    encoded_anew.append(handle.name)
                    copies.encode(handle, moments)
                    arrays = [name for name in arrays if name in ("weight", "master")]
                for name in arrays:
                    if (handle, name) in once.homes:
                        handle.flat_param.arrays[name].extent.version = index
                    else:
                        copies.copy(handle, name)
                if handle.grad is None:
                    settle_master(store, handle, version=index)
                self._restore_step(store, handle)
        if encoded_anew:
            logger.warning(
                "the 8-bit moments of %d parameters (%s, ...) were saved in other parts than this"
                " mesh has: they are decoded and encoded anew, and differ from the saved ones by at"
                " most the distance of two codes",
                len(encoded_anew),
                encoded_anew[0],
            )

    def _restore_step(self, store: ArrayIO, handle: ParamHandle) -> None:
        """Restores the step count. A parameter saved without state gets zero moments."""
        has_state, flat_param = self._has_state(handle), handle.flat_param
        if handle.has_state and not has_state:
            shape = flat_param.layout.placements[handle.index].shape
            for name in (name for name in EVERY_MOMENT if name in flat_param.arrays):
                zeros = torch.zeros(shape, device="cpu")
                flat_param.write_moment(
                    store, name, handle.index, zeros, version=self.job.steps.index
                )
        handle.step = self.manifest["parameters"][handle.name]["step"]
        handle.keeps_moments = has_state and not handle.step
        if handle.grad is not None:
            self.job.gradients.clear(handle)


def settle_master(store: ArrayIO, handle: ParamHandle, *, version: int) -> None:
    """Sets a parameter's master, if it has one, from its weight at home."""
    flat_param = handle.flat_param
    if "master" in flat_param.arrays:
        begin, end = flat_param.layout.part_at_home("weight", handle.index)
        for at in range(begin, end, ENCODED_AT_ONCE):
            weight = store.read(flat_param.weight, at, min(end, at + ENCODED_AT_ONCE))
            master = encode(flat_param.spec, weight)["master"]
            store.write(flat_param.arrays["master"], at, master, version=version)


@dataclass(frozen=True)
class _Copies:
    """Copies saved arrays to homes in ``store``, as their ``version``."""

    saved: SavedTensors
    store: ArrayIO
    version: int

    def are_exact(self, handle: ParamHandle, moments: list[str]) -> bool:
        """Returns whether the parameter's moments can be copied: 8-bit ones only if the same part
        was saved."""
        if handle.flat_param.spec.moment_dtype != torch.uint8:
            return True
        part = part_of_rank(handle)
        return all(self.saved.has_part(name, handle.name, part) for name in moments)

    def copy(self, handle: ParamHandle, name: str) -> None:
        flat_param, stable = handle.flat_param, False
        begin, end = handle.flat_param.layout.part_of_param(name, handle.index)
        if flat_param.spec.moment_dtype == torch.uint8 and name not in ("weight", "master"):
            part = part_of_rank(handle)
            values = self.saved.read_codes(name, handle.name, part, begin, end)
        else:
            dtype = flat_param.arrays[name].dtype
            values, stable = read_run(self.saved, handle, name, begin, end, dtype)
        self._write(handle, name, values, begin, stable=stable)

    def encode(self, handle: ParamHandle, moments: list[str]) -> None:
        """Encodes moments of other parts as 8-bit codes of this rank's."""
        for name in moments:
            begin, end = handle.flat_param.layout.part_of_param(name, handle.index)
            if begin < end:
                values, _ = read_run(self.saved, handle, name, begin, end, torch.float32)
                codes, scales = native.encode_moments(values, sq=name == "exp_avg_sq")
                self._write(handle, name, codes, begin)
                self._write(handle, SCALES[name], scales, begin // block_numel(SCALES[name]))

    def _write(
        self,
        handle: ParamHandle,
        name: str,
        values: torch.Tensor,
        begin: int,
        *,
        stable: bool = False,
    ) -> None:
        handle.flat_param.parts.write(
            self.store,
            name,
            handle.index,
            values,
            begin=begin,
            version=self.version,
            stable=stable,
        )


def read_run(
    saved: SavedTensors, handle: ParamHandle, name: str, begin: int, end: int, dtype: torch.dtype
) -> tuple[torch.Tensor, bool]:
    """Reads elements ``begin`` to ``end`` of this rank's part, in memory order; read-only. Also
    returns whether they are in the mapped file: those are stable, and not the engine's memory."""
    part = part_of_rank(handle)
    boxes = list(boxes_of_run(part.box.shape, part.order, begin, end))
    if len(boxes) == 1 and part.order == tuple(range(len(part.order))):
        mapped = saved.mapped(name, handle.name, boxes[0][0].moved(part.box.offset))
        if mapped is not None and mapped.dtype == dtype:
            return mapped.reshape(-1), True
    values = torch.empty(end - begin, dtype=dtype, device="cpu")
    for box, at in boxes:
        here = view_of_run(values[at - begin : at - begin + box.numel], box, part.order)
        saved.read_into(here, name, handle.name, box.moved(part.box.offset))
    return values, False
