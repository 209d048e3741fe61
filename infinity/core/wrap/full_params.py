"""full_params: gives a block of code whole parameters, and writes edits home."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ... import native
from ...errors import CapacityError, UsageError
from ..machine.tiers import Tier
from ..params.borrowed import Borrowed
from ..run.job import Job
from ..run.operations import Operation
from ..run.registry import engine_of, whole_of
from ..units.forms import local_of
from ..units.handle import handle_of, managed


@contextmanager
def full_params(
    model: nn.Module, names: str | list[str] | None = None, writeback: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Gathers parameters for reading or editing: yields ``{name: tensor}``. Every rank calls this.

    names
        Parameter names or module prefixes; None: all. The tensors are copies in the dtype in which
        the model computes; tied parameters are one tensor under all their names. They stay valid
        afterwards, charged to ``device_memory`` only inside. In the block they are the module's
        parameters. A parameter that tensor parallelism has sharded is a DTensor with this rank's
        part; its ``full_tensor()`` is the global tensor. A computation with either trains: its
        gradient is the parameter's. To avoid that (an average of weights, numpy()), use
        torch.no_grad() around it, or detach().
    writeback
        Writes edits to the master when the block ends. Elements that were not edited keep their
        master's bits.

    Raises UsageError at the end if a tensor was edited without ``writeback``. The old values then
    stay, as they do when the block raises. Raises CapacityError if the parameters exceed a given
    ``device_memory``.
    """
    engine = engine_of(model)
    job = engine.job
    with job.uses.operation(Operation.WRITE_FULL_PARAMS if writeback else Operation.FULL_PARAMS):
        selected = _select(whole_of(model), names)
        nbytes = sum(local_of(param).numel() * param.itemsize for param in set(selected.values()))
        charge = _reserve(job, nbytes)
        copies = {param: _borrowed(job, param) for param in dict.fromkeys(selected.values())}
    try:
        yield {name: copies[param].user_tensor() for name, param in selected.items()}
    finally:
        for copy in copies.values():
            copy.end()
        charge.release()
    with job.uses.begin():
        for copy in copies.values():
            copy.move()
        edited = {
            name: copies[param] for name, param in selected.items() if copies[param].has_other_bits
        }
        if edited and not writeback:
            raise UsageError(
                f"full_params: {', '.join(list(edited)[:5])} was edited without writeback=True; the"
                " old values stand. Use `with infinity.full_params(model, names, writeback=True)`."
            )
        for copy in edited.values():
            if copy.is_superseded:
                raise UsageError(
                    f"full_params: {copy.handle.name} was edited, but a step, a load or another"
                    " edit changed it meanwhile. End the block before that."
                )
        if writeback:
            copies_of = [(copy.handle, copy.bytes) for copy in dict.fromkeys(edited.values())]
            job.edits.write_changes(copies_of, "leaving full_params")


def _reserve(job: Job, nbytes: int) -> native.Charge:
    """Charges the copies to the device. Units that are there and not in use give way. Raises
    CapacityError."""
    try:
        return job.ledger.reserve(Tier.DEVICE, nbytes, "full_params")
    except CapacityError:
        job.prefetcher.release_all([unit for unit in job.units if not job.prefetcher.is_held(unit)])
        return job.ledger.reserve(Tier.DEVICE, nbytes, "full_params")


def _borrowed(job: Job, param: nn.Parameter) -> Borrowed:
    flat_param, index = managed(param).flat_param, managed(param).index
    value = flat_param.read_value(job.store, index, flat_param.spec.dtype)
    return Borrowed(job.edits, param, value.to(job.device.where))


def _select(model: nn.Module, names: str | list[str] | None) -> dict[str, nn.Parameter]:
    moved = {
        n: p for n, p in model.named_parameters(remove_duplicate=False) if handle_of(p) is not None
    }
    if names is None:
        return moved
    selected: dict[str, nn.Parameter] = {}
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, (list, tuple, set)) or not all(isinstance(n, str) for n in listed):
        raise UsageError(
            f"full_params takes names of parameters or modules, as '0.weight', not a"
            f" {type(names).__name__}"
        )
    for wanted in listed:
        matching = {
            n: p
            for n, p in moved.items()
            if n == wanted or n.startswith(wanted + ".") or wanted == ""
        }
        if not matching:
            near = difflib.get_close_matches(wanted, moved, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"full_params: no parameter or module {wanted!r}{hint}")
        selected |= matching
    return selected
