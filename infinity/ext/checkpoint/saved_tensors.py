"""SavedTensors: finds and reads any box of any tensor in a checkpoint, for any number of writing
ranks and any mesh.

A file holds each array of a parameter as boxes of the global tensor, which the readers of
torch.distributed.checkpoint also accept. 8-bit moments are an exception: their scales are of blocks
of a local part's elements, in memory order. They are stored as runs of a part, which the header
names, and are exact if the reader has the same part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ... import native
from ...core.units.flat_param_spec import EVERY_MOMENT, SCALES, block_numel
from ...errors import CorruptionError
from ...files.boxes import Box, cover, view_of_run
from ...files.weight_files import FILE_DTYPES
from .parts import opened_file, read_header

OF_UNITS = ("weight", "master", *EVERY_MOMENT, *SCALES.values())  # arrays that a save may write


@dataclass(frozen=True)
class _Stored:
    """One box of a tensor, in a file."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class LocalPart:
    """The part of a tensor on one rank of its mesh: a box, and the memory order of its elements."""

    box: Box
    order: tuple[int, ...]

    @classmethod
    def told(cls, told: Any, shape: Sequence[int], key: str) -> LocalPart:
        """Reads the output of :meth:`describe`. Raises ValueError if no tensor of ``shape`` has
        that part."""
        part = cls(Box(tuple(told["offset"]), tuple(told["shape"])), tuple(told["order"]))
        numbers = [*part.box.offset, *part.box.shape, *part.order]
        if (
            not all(type(n) is int for n in numbers)
            or not part.box.within(shape)
            or sorted(part.order) != list(range(len(shape)))
        ):
            raise ValueError(f"{key} is of part {told!r}")
        return part

    def describe(self) -> dict[str, Any]:
        """Describes the part as plain data."""
        return {
            "offset": list(self.box.offset),
            "shape": list(self.box.shape),
            "order": list(self.order),
        }


@dataclass(frozen=True)
class _Run:
    """Elements of a part's flat array, in a file."""

    file: str
    key: str
    begin: int
    end: int


class SavedTensors:
    """The tensors of the units in a checkpoint's data folder. Use it as a context: files stay open
    inside. ``files``: the prefix of the file names to read; ``arrays``: the names of arrays that
    these may hold."""

    def __init__(
        self,
        data: Path,
        manifest: dict[str, Any],
        *,
        files: str = "unit-",
        arrays: Collection[str] = OF_UNITS,
    ):
        self._data, self._parameters = data, manifest["parameters"]
        self._boxes: dict[str, list[_Stored]] = {}  # array/name
        # The same for 8-bit moments and their scales, by part.
        self._runs: dict[str, dict[LocalPart, list[_Run]]] = {}
        self._dtypes: dict[str, set[torch.dtype | None]] = {}
        self._arrays = arrays
        self._files, self._opened = ExitStack(), {}
        for file in manifest["files"]:
            if file.startswith(files):
                self._list(file)

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(self, *_: Any) -> None:
        self._opened.clear()
        self._files.close()

    # --- content ---

    def _list(self, file: str) -> None:
        with opened_file(self._data / file) as opened:
            header = read_header(opened)
            for key in opened.keys():
                entry, noted = opened.get_slice(key), header.get(key, {})
                self._add(
                    file, key, tuple(entry.get_shape()), FILE_DTYPES.get(entry.get_dtype()), noted
                )

    def _add(
        self,
        file: str,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        told: dict[str, Any],
    ) -> None:
        array, _, name = key.partition("/")
        if self.is_coded(array, name.rpartition("#")[0]):
            name = name.rpartition("#")[0]
        described = self._parameters.get(name)
        if described is None or array not in self._arrays:
            raise CorruptionError(
                f"{self._data} holds {key[:80]!r}, which is of no parameter of the checkpoint"
            )
        whole, offset = f"{array}/{name}", told.get("saved_offsets") or [0] * len(shape)
        if len(offset) != len(shape) or not all(type(at) is int and at >= 0 for at in offset):
            raise ValueError(f"{key} begins at {offset!r}")
        self._dtypes.setdefault(whole, set()).add(dtype)
        if self.is_coded(array, name):
            part = LocalPart.told(told["part"], tuple(described["shape"]), key)
            run = _Run(file, key, offset[0], offset[0] + math.prod(shape))
            self._runs.setdefault(whole, {}).setdefault(part, []).append(run)
        else:
            self._boxes.setdefault(whole, []).append(_Stored(file, key, Box(tuple(offset), shape)))

    def is_coded(self, array: str, name: str) -> bool:
        """Returns whether the elements of ``array`` of parameter ``name`` are 8-bit codes, or their
        scales."""
        described = self._parameters.get(name)
        return array in SCALES.values() or (
            array in EVERY_MOMENT and described is not None and described["moments"] == "uint8"
        )

    def check(self, array: str, name: str, dtype: torch.dtype) -> None:
        """Raises CorruptionError unless every element of ``array`` of parameter ``name`` is present
        once, in ``dtype``."""
        key, shape = f"{array}/{name}", self._parameters[name]["shape"]
        if self.is_coded(array, name):
            parts = self._runs.get(key, {})
            whole = cover([part.box for part in parts], shape) and all(
                _reach(runs) == -(-part.box.numel // block_numel(array))
                for part, runs in parts.items()
            )
        else:
            whole = key in self._boxes and cover([stored.box for stored in self._boxes[key]], shape)
        if not whole:
            raise CorruptionError(
                f"{self._data} holds no {array} of {name} with {math.prod(shape)} elements"
            )
        if math.prod(shape) and self._dtypes[key] != {dtype}:
            raise CorruptionError(
                f"{self._data} holds {array} of {name} in another dtype than {dtype}"
            )

    # --- reading ---

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = self._files.enter_context(
                safe_open(self._data / file, framework="pt")
            )
        return self._opened[file]

    def read(self, array: str, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Reads ``box`` of the global tensor. Decodes 8-bit moments to fp32."""
        out = torch.empty(box.shape, dtype=dtype, device="cpu")
        self.read_into(out, array, name, box)
        return out

    def read_into(self, out: torch.Tensor, array: str, name: str, box: Box) -> None:
        """Reads as :meth:`read` does, into ``out`` of the box's shape."""
        if self.is_coded(array, name):
            for part in self._runs[f"{array}/{name}"]:
                if (common := part.box.common(box)) is not None:
                    values = common.moved(part.box.offset, -1).of(self._decoded(array, name, part))
                    common.moved(box.offset, -1).of(out).copy_(values)
            return
        for stored in self._boxes[f"{array}/{name}"]:
            if (common := stored.box.common(box)) is not None:
                if common == stored.box:
                    # Mapped memory of the file, not a copy.
                    values = self._open(stored.file).get_tensor(stored.key)
                else:
                    here = common.moved(stored.box.offset, -1)
                    values = self._open(stored.file).get_slice(stored.key)
                    values = values[
                        tuple(slice(at, at + n) for at, n in zip(here.offset, here.shape))
                    ]
                target = common.moved(box.offset, -1).of(out)
                if (
                    target.is_contiguous()
                    and values.is_contiguous()
                    and target.dtype == values.dtype
                ):
                    native.copy_flat(target.view(-1), values.view(-1))
                else:
                    target.copy_(values)

    def mapped(self, array: str, name: str, box: Box) -> torch.Tensor | None:
        """Returns ``box`` of the global tensor as mapped memory of the file, read-only; None if it
        is not one entry."""
        entry = self.entry_of(array, name, box)
        return self._open(entry[0]).get_tensor(entry[1]) if entry is not None else None

    def entry_of(self, array: str, name: str, box: Box) -> tuple[str, str] | None:
        """Finds the file and the entry that is exactly ``box`` of the global tensor; None if there
        is none."""
        for stored in self._boxes.get(f"{array}/{name}", ()):
            if stored.box == box:
                return stored.file, stored.key
        return None

    def entry_of_codes(
        self, array: str, name: str, part: LocalPart, begin: int, end: int
    ) -> tuple[str, str] | None:
        """Finds the file and the entry that is exactly ``begin`` to ``end`` of the flat array of
        ``part``; None if there is none."""
        for run in self._runs.get(f"{array}/{name}", {}).get(part, ()):
            if (run.begin, run.end) == (begin, end):
                return run.file, run.key
        return None

    def has_part(self, array: str, name: str, part: LocalPart) -> bool:
        """Returns whether 8-bit moments of the same part were saved, so that they are read
        exactly."""
        return part in self._runs.get(f"{array}/{name}", {})

    def read_codes(
        self, array: str, name: str, part: LocalPart, begin: int, end: int
    ) -> torch.Tensor:
        """Reads entries ``begin`` to ``end`` of the flat array of ``part``."""
        codes = [torch.empty(0, dtype=torch.uint8, device="cpu")]
        for run in sorted(self._runs[f"{array}/{name}"][part], key=lambda run: run.begin):
            low, high = max(begin, run.begin), min(end, run.end)
            if low < high:
                codes.append(
                    self._open(run.file).get_slice(run.key)[low - run.begin : high - run.begin]
                )
        return torch.cat(codes)

    def _decoded(self, array: str, name: str, part: LocalPart) -> torch.Tensor:
        numel = part.box.numel
        codes = self.read_codes(array, name, part, 0, numel)
        scales = self.read_codes(
            SCALES[array], name, part, 0, -(-numel // block_numel(SCALES[array]))
        )
        return view_of_run(
            native.decode_moments(codes, scales, sq=array == "exp_avg_sq"), part.box, part.order
        )


def _reach(runs: list[_Run]) -> int:
    """Returns how far ``runs`` are contiguous from the first element; -1 if there is a gap."""
    reached = 0
    for run in sorted((run for run in runs if run.begin < run.end), key=lambda run: run.begin):
        if run.begin != reached:
            return -1
        reached = run.end
    return reached
