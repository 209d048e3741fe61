"""save_checkpoint: writes all state to resume bit for bit, and replaces the last checkpoint
atomically.

[Note: why a checkpoint is always whole] A checkpoint folder holds ``manifest.json`` and one folder
``infinity-<random>`` of data files, new at every save. A save writes its data, syncs it, and then
replaces the manifest in one rename. Until then the old manifest names the old data, which is
removed afterwards. So the manifest always names complete data. :mod:`.folder` has the locks of
writers and readers.

With several ranks each rank writes the arrays that it has at home, in files of its own. A file's
header gives the elements of each tensor that it holds. Any number of ranks reads them: each reads
what its own homes need. The header's form is that of torch.distributed.checkpoint, whose
``HuggingFaceStorageReader`` also loads the data folder.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.grads.record import has_landed
from ...core.run.job import Job
from ...core.step.optimizer import InfinityOptimizer
from ...core.units.handle import ParamHandle
from ...core.wrap.parts import parts_of
from ...errors import ConfigError, InternalError, UsageError
from ...files.outputs import folder_of
from ...files.values import encode_value
from ...ranks.collectives import Collectives
from .background_save import Saving, save_in_background
from .beside_weights import OF_EVERY_SAVE, describe
from .content import (
    Pair,
    describe_own_state,
    describe_parameter,
    describe_plain,
    every_value_outside,
    flat_bytes,
    groups_of_stages,
    pair_of,
    rest_of,
)
from .described import description_of
from .manifest import FORMAT, check_same_model
from .operations import CheckpointOperation
from .publish import Draft, files_of_rank, publish
from .random_state import random_state_tensors, read_random_state


def save_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    extra: Any = None,
    *,
    overwrite: bool = False,
    wait: bool = True,
) -> Saving | None:
    """Writes model, optimizer, random number generators and ``extra`` to the folder ``path``,
    replacing the model's last checkpoint. Every rank calls this.

    extra
        Nested dicts, lists, numbers, strings, None, tensors; :func:`load_checkpoint` returns it.
    overwrite
        Also replaces the checkpoint of another model.
    wait
        True: blocks until everything is on the disk. False: saves beside the next forward and
        backward, and returns a :class:`Saving` with ``done`` and ``wait()``. The next step's update
        of a unit waits until the unit is saved. The bytes are the same. An error is raised by
        ``wait()``, or by the next save, load, park or unwrap of the model, which wait for it. It
        blocks all the same, and returns None, if ``host_memory`` has no room for its buffers of
        20 MiB.

    One piece of the state at a time is in memory. Raises StorageError with the old checkpoint
    intact, UsageError while another process saves to that folder, ConfigError if another model's
    checkpoint is there.
    """
    root = folder_of(path, "save_checkpoint's path")
    for name, value in (("overwrite", overwrite), ("wait", wait)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be True or False")
    pair = pair_of(model, optimizer)
    engine, job = pair.engine, pair.engine.job
    with (
        job.uses.operation(CheckpointOperation.SAVE),
        job.collectives.together("save_checkpoint"),
    ):
        engine.finish_background()
        job.lents.settle_all()
        draft = _draft(root, pair, extra, overwrite=overwrite)
        if not wait and (saving := save_in_background(draft, engine)) is not None:
            return saving
        engine.wait_idle()
        publish(draft, job.collectives)
        return None


def _draft(root: Path, pair: Pair, extra: Any, *, overwrite: bool) -> Draft:
    """Describes a save. Copies all that is not at home. Raises as :func:`save_checkpoint`."""
    engine, model, *_ = pair
    job, collectives = engine.job, engine.job.collectives
    rest = rest_of(model, job.prefix)
    job.gradients.assigned.settle_all()
    if landed := [handle.name for handle in job.trained if would_be_lost(handle)]:
        raise UsageError(
            f"save_checkpoint between backward and step: the gradients of {len(landed)} parameters"
            f" ({landed[0]}, ...) would be lost. Save after step(), or call zero_grad() first."
        )
    tensors: dict[str, torch.Tensor] = {}
    kept_values = {name: describe(kept) for name, kept in job.kept.saved().items()}
    content = {
        "format": FORMAT.number,
        "data": f"infinity-{_token(collectives)}",
        "parameters": _describe_parameters(root, job, overwrite=overwrite),
        "optimizers": [
            _describe_optimizer(optimizer, place, tensors, collectives)
            for place, optimizer in enumerate(pair.optimizers)
        ],
        "plain": describe_plain(pair.plain, tensors),
        "random": collectives.collect(read_random_state(), "random state"),
        "data_ranks": job.ranks.data_size,
        "parts": job.ranks.tp_size,
        "step_index": job.steps.index,
        "average": 0,  # in every manifest of this format, also if no average is kept
        "extra": encode_value(extra, tensors, "extra"),
        "persistent_buffers": list(_of_stages(dict.fromkeys(rest.persistent), collectives)),
        "config": description_of(parts_of(model)[0]),
    }
    if taken := OF_EVERY_SAVE & kept_values.keys():
        raise InternalError(f"a manifest has another {min(taken)!r}: keep arrays by another name")
    content |= kept_values
    tensors |= every_value_outside(pair)
    own = {f"buffer/{name}": buffer for name, buffer in rest.buffers.items()}
    own |= {f"unmanaged/{name}": param for name, param in rest.unmanaged.items()}
    tensors |= _of_stages(own, collectives) | _buffers_of_others(rest.buffers, collectives)
    for rank, states in enumerate(collectives.collect(random_state_tensors(), "random state")):
        tensors |= {f"random/{rank}/{name}": state for name, state in states.items()}
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return Draft(root, content, tensors, files_of_rank(job, kept_values))


def _describe_optimizer(
    optimizer: InfinityOptimizer,
    place: int,
    tensors: dict[str, torch.Tensor],
    collectives: Collectives,
) -> dict[str, Any]:
    """Describes an optimizer's rule, groups, and the users' entries in ``optimizer.state``. Tensors
    in them go to ``tensors``."""
    own = describe_own_state(optimizer)
    own = {kind: _of_stages(values, collectives) for kind, values in own.items()}
    groups = groups_of_stages(optimizer, collectives)
    description = {
        "rule": optimizer.rule_name,
        "groups": encode_value(groups, tensors, f"groups/{place}"),
    }
    if any(own.values()):
        description["own_state"] = encode_value(own, tensors, f"own_state/{place}")
    return description


def _describe_parameters(root: Path, job: Job, *, overwrite: bool) -> dict[str, Any]:
    """Returns the manifest's entries. Raises ConfigError if ``root`` has another model's
    checkpoint, which must not be replaced."""
    own = {handle.name: describe_parameter(handle) for unit in job.units for handle in unit.handles}
    parameters = _of_stages(own, job.collectives)
    if job.ranks.is_first and not overwrite:
        check_same_model(root, parameters)
    return parameters


def _buffers_of_others(
    mine: dict[str, torch.Tensor], collectives: Collectives
) -> dict[str, torch.Tensor]:
    """Returns the buffers of other ranks that differ from the first one's, such as running
    statistics of other batches. Every rank calls this."""
    if collectives.ranks.alone:
        return {}
    digests = {
        name: hashlib.blake2b(flat_bytes(buffer), digest_size=16).digest()
        for name, buffer in mine.items()
    }
    first = collectives.collect(digests, "digests of the buffers", collectives.ranks.unit_channels)[
        0
    ]
    others = collectives.collect(
        {name: mine[name].cpu() for name in mine if digests[name] != first.get(name)},
        "buffers that differ",
    )
    # Ranks of a stage; each stage's buffers have their own names.
    each = collectives.ranks.data_size * collectives.ranks.tp_size
    return {
        f"buffer-of-rank/{rank % each}/{name}": buffer
        for rank, of_one in enumerate(others)
        for name, buffer in of_one.items()
    }


def _of_stages(mine: dict[str, Any], collectives: Collectives) -> dict[str, Any]:
    """Joins the dicts of all pipeline stages; earlier stages take precedence. Every rank calls
    this."""
    if collectives.ranks.pp_group is None:
        return mine
    merged: dict[str, Any] = {}
    for theirs in collectives.collect(mine, "what each stage has", [collectives.ranks.pp_group]):
        merged |= {key: value for key, value in theirs.items() if key not in merged}
    return merged


def _token(collectives: Collectives) -> str:
    """Returns a new unique name, the same on all ranks. Every rank calls this."""
    return collectives.collect(secrets.token_hex(6), "naming a checkpoint")[0]


def would_be_lost(handle: ParamHandle) -> bool:
    """Returns whether a landed gradient has more than the zeros of
    ``zero_grad(set_to_none=False)``.

    May block until its norm has arrived. The test uses the max norm, which does not round small
    elements away. Every change of a gradient invalidates its norm.
    """
    if not has_landed(handle):
        return False
    record = handle.grad
    record.landing.precede()
    known_zero = (
        record.norm is not None and record.norm[0] == math.inf and record.norm[1].item() == 0
    )
    return not known_zero or bool(record.factors)
