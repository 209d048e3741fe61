"""ZeRO files: assembles the weights of a DeepSpeed checkpoint of stage 1, 2 or 3 from the ranks'
parts.

The layout is that of DeepSpeed's own ``zero_to_fp32.py``
(https://github.com/deepspeedai/DeepSpeed): each rank's ``*_optim_states.pt`` has flat fp32 groups,
and ``*_model_states.pt`` the names and shapes of the parameters in the same order.

part       one rank's elements of a parameter. Stage 3: ceil(n / ranks) elements at one offset on
           all ranks, the last padded. Stages 1 and 2: the ranks' groups, concatenated, are the
           parameters, concatenated
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError, CorruptionError, InfinityError
from ...files.source import Source
from ...untrusted import read_text
from .pickled import load_pickled, stand_in

LATEST = "latest"  # the file that names the folder of the newest checkpoint
MODEL, OPTIMIZER = "*_model_states.pt", "*_optim_states.pt"
STAND_INS = [
    stand_in("deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    stand_in("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    stand_in("deepspeed.runtime.zero.config.ZeroStageEnum", int),
    stand_in("deepspeed.utils.tensor_fragment.fragment_address"),
]


def zero_folder(path: Path) -> Path | None:
    """Returns the folder of ``path``'s ZeRO checkpoint, the newest one if ``path`` has several;
    None if there is none."""
    if not path.is_dir():
        return None
    if (path / LATEST).exists():
        try:
            tag = read_text(path / LATEST, most_nbytes=4096).strip()
        except (OSError, ValueError) as error:
            raise CorruptionError(f"{path / LATEST} does not name a folder: {error}") from error
        if tag and Path(tag).name == tag and any((path / tag).glob(OPTIMIZER)):
            return path / tag
    return path if any(path.glob(OPTIMIZER)) else None


@contextlib.contextmanager
def zero_sources(folder: Path) -> Iterator[dict[str, Source]]:
    """Yields name -> source of the fp32 weights, buffers and frozen parameters. Parts are
    memory-mapped, and read on demand."""
    try:
        yield _sources(folder)
    except InfinityError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise CorruptionError(
            f"{folder} is not a ZeRO checkpoint of stage 1, 2 or 3: {error!r}"
        ) from error


def _sources(folder: Path) -> dict[str, Source]:
    optimizers = [_optimizer_of(path) for path in _ranks(folder, OPTIMIZER)]
    models = [load_pickled(path, stand_ins=STAND_INS) for path in _ranks(folder, MODEL)]
    first, stage = models[0], int(optimizers[0]["zero_stage"])
    counted = optimizers[0]["partition_count"]
    ranks = max(counted) if isinstance(counted, (list, tuple)) else int(counted)
    if ranks != len(optimizers):
        raise CorruptionError(
            f"{folder} is of {ranks} ranks, and has files of {len(optimizers)}: it is not whole"
        )
    if stage == 3 and len(models) != ranks:
        raise CorruptionError(
            f"{folder} is of {ranks} ranks, and has model states of {len(models)}: it is not whole"
        )
    groups = [
        [_checked(folder, name, shape) for name, shape in group.items()]
        for group in first["param_shapes"]
    ]
    parts = (
        _parts_of_stage_3(optimizers, groups)
        if stage == 3
        else _parts_of_stage_2(optimizers, groups)
    )
    sources = {name: Source(shape, torch.float32, part.read) for name, shape, part in parts}
    sources |= _frozen(models, stage)
    sources |= {name: Source.of(tensor) for name, tensor in _buffers(first).items()}
    return sources


def _ranks(folder: Path, pattern: str) -> list[Path]:
    """Returns the files of one kind, in the order of the ranks."""
    files = sorted(
        folder.glob(pattern),
        key=lambda path: [int(digits) for digits in re.findall(r"\d+", path.name)],
    )
    if not files:
        raise ConfigError(f"{folder} has no {pattern}: it is not a whole ZeRO checkpoint")
    if any("expp_rank" in path.name or re.search(r"mp_rank_0*[1-9]", path.name) for path in files):
        raise ConfigError(
            f"{folder} is cut over tensor or expert ranks too: write it with DeepSpeed's"
            " ds_to_universal.py, or as safetensors"
        )
    return files


def _optimizer_of(path: Path) -> Mapping[str, Any]:
    return load_pickled(path, stand_ins=STAND_INS)["optimizer_state_dict"]


def _checked(folder: Path, name: Any, shape: Any) -> tuple[str, torch.Size]:
    shape = torch.Size(shape)
    if not isinstance(name, str) or any(n < 0 for n in shape) or shape.numel() > 1 << 48:
        raise CorruptionError(
            f"{folder} has a parameter {str(name)[:80]!r} of shape {tuple(shape)[:8]}"
        )
    return name, shape


@dataclass(frozen=True)
class _Part:
    """A parameter in flat pieces, to be concatenated."""

    pieces: list[torch.Tensor]
    shape: torch.Size

    def read(self) -> torch.Tensor:
        """Concatenates the pieces."""
        flat = (
            torch.cat([piece.reshape(-1) for piece in self.pieces])
            if self.pieces
            else torch.empty(0)
        )
        return flat[: self.shape.numel()].to(torch.float32).view(self.shape)


def _parts_of_stage_3(
    optimizers: list[Mapping], groups: list[list]
) -> Iterator[tuple[str, torch.Size, _Part]]:
    flats = [_list(optimizer["fp32_flat_groups"]) for optimizer in optimizers]
    at = 0
    for name, shape in (entry for group in groups for entry in group):
        each = math.ceil(shape.numel() / len(optimizers))
        yield (
            name,
            shape,
            _Part([piece for flat in flats for piece in _span(flat, at, at + each)], shape),
        )
        at += each
    for flat in flats:
        if sum(group.numel() for group in flat) != at:
            raise CorruptionError(
                f"the parameters take {at} elements of each rank, and a rank has"
                f" {sum(group.numel() for group in flat)}"
            )


def _parts_of_stage_2(
    optimizers: list[Mapping], groups: list[list]
) -> Iterator[tuple[str, torch.Size, _Part]]:
    flats = [_list(optimizer["single_partition_of_fp32_groups"]) for optimizer in optimizers]
    align = 2 * len(optimizers)
    for number, group in enumerate(groups):
        ranks, at = [flat[number] for flat in flats], 0
        for name, shape in group:
            yield name, shape, _Part(_span(ranks, at, at + shape.numel()), shape)
            at += shape.numel()
        held = sum(rank.numel() for rank in ranks)
        if math.ceil(at / align) != math.ceil(held / align):
            raise CorruptionError(
                f"the parameters of group {number} have {at} elements, and the ranks {held}"
            )


def _list(value: Any) -> list[torch.Tensor]:
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() == 1 for tensor in tensors):
        raise TypeError("a rank's groups are not flat tensors")
    return tensors


def _span(flats: list[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    """Returns elements ``begin`` to ``end`` of concatenated flat tensors. Raises CorruptionError if
    there are fewer."""
    pieces, first = [], 0
    for flat in flats:
        low, high = max(begin, first) - first, min(end, first + flat.numel()) - first
        if low < high:
            pieces.append(flat[low:high])
        first += flat.numel()
    if sum(piece.numel() for piece in pieces) != end - begin:
        raise CorruptionError(f"elements {begin} to {end} of a rank are wanted, and it has {first}")
    return pieces


def _frozen(models: list[Mapping], stage: int) -> dict[str, Source]:
    shapes = models[0].get("frozen_param_shapes") or {}
    ranks = models if stage == 3 else models[:1]
    sources: dict[str, Source] = {}
    for name, shape in shapes.items():
        part = _Part([model["frozen_param_fragments"][name] for model in ranks], torch.Size(shape))
        sources[name] = Source(part.shape, torch.float32, part.read)
    return sources


def _buffers(model: Mapping) -> dict[str, torch.Tensor]:
    kept = model.get("module") or {}
    return {
        name: kept[name]
        for name in model.get("buffer_names") or ()
        if isinstance(kept.get(name), torch.Tensor)
    }
