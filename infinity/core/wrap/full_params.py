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
from ..params.tensors import checksum_of
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
        copies = {param: _FullCopy(job, param) for param in dict.fromkeys(selected.values())}
    try:
        yield {name: copies[param].borrowed.tensor for name, param in selected.items()}
    finally:
        for copy in copies.values():
            copy.borrowed.end()
        charge.release()
    with job.uses.begin():
        edited = {
            name: copies[param] for name, param in selected.items() if copies[param].is_edited()
        }
        if edited and not writeback:
            raise UsageError(
                f"full_params: {', '.join(list(edited)[:5])} was edited without writeback=True; the"
                " old values stand. Use `with infinity.full_params(model, names, writeback=True)`."
            )
        for copy in edited.values():
            copy.check_unchanged_at_home()
        if writeback:
            copies_of = [(copy.handle, copy.tensor) for copy in dict.fromkeys(edited.values())]
            engine.job.edits.write_changes(copies_of, "leaving full_params")


def _reserve(job: Job, nbytes: int) -> native.Charge:
    """Charges the copies to the device. Units that are there and not in use give way. Raises
    CapacityError."""
    try:
        return job.ledger.reserve(Tier.DEVICE, nbytes, "full_params")
    except CapacityError:
        job.prefetcher.release_all([unit for unit in job.units if not job.prefetcher.is_held(unit)])
        return job.ledger.reserve(Tier.DEVICE, nbytes, "full_params")


class _FullCopy:
    """One gathered parameter: the user's copy, and a checksum of its first value."""

    def __init__(self, job: Job, param: nn.Parameter):
        self.handle = managed(param)
        self._version = self.handle.version
        value = self.handle.flat_param.read_value(
            job.store, self.handle.index, self.handle.flat_param.spec.dtype
        )
        self.borrowed = Borrowed(param, value.to(job.device.where))
        self._checksum = checksum_of(self.tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The current value on this rank."""
        return local_of(self.borrowed.tensor).detach()

    def is_edited(self) -> bool:
        return checksum_of(self.tensor) != self._checksum

    def check_unchanged_at_home(self) -> None:
        if self.handle.version != self._version:
            raise UsageError(
                f"full_params: {self.handle.name} was edited, but a step, a load or another"
                " full_params changed it meanwhile. End the block before that."
            )


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
        found = {
            n: p
            for n, p in moved.items()
            if n == wanted or n.startswith(wanted + ".") or wanted == ""
        }
        if not found:
            near = difflib.get_close_matches(wanted, moved, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"full_params: no parameter or module {wanted!r}{hint}")
        selected |= found
    return selected
