"""ScopedCall: runs every call of a module in a scope of the engine."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ...errors import InfinityError, UsageError
from ...ranks import failure_report
from ...ranks.pending import ranks_lost
from ...torch_private import uncompiled
from ..machine import storage_guard
from ..params.outside_modes import refuse_without_bytes
from ..params.parameter import StoredManaged
from ..units.handle import managed
from .job import Job
from .operations import Operation, State

UNCOMPILED = (
    "a wrapped model moves weights between its layers, which cannot be compiled: each block is"
    " compiled separately. Leave out fullgraph=True"
)


class ScopedCall:
    """Runs every call of ``module`` in a scope of the engine, until :meth:`remove`. However the
    call ends, the scope pops the hooks that it pushed on this thread, and records an exception.
    Torch calls no hook after Ctrl-C."""

    # Looked up by ``module(...)``; the second one first, if compiled.
    NAMES = ("_call_impl", "_compiled_call_impl")

    def __init__(self, job: Job, module: torch.nn.Module):
        self.module = weakref.ref(module)
        self._replaced = {name: module.__dict__.get(name) for name in self.NAMES}
        of_class = type(module)._call_impl
        reference = self.module

        def plain(*args: Any, **kwargs: Any) -> Any:
            return of_class(reference(), *args, **kwargs)

        self._calls = {"_call_impl": _scoped(job, self._replaced["_call_impl"] or plain)}
        if (compiled := self._replaced["_compiled_call_impl"]) is not None:
            self._calls["_compiled_call_impl"] = _scoped(job, compiled)
        self.put()

    def put(self) -> None:
        """Runs calls in scopes, again after :meth:`remove`. Idempotent."""
        if (module := self.module()) is not None:
            module.__dict__.update(self._calls)

    def remove(self) -> None:
        """Restores the module's own call, unless it was compiled since. Idempotent."""
        if (module := self.module()) is None:
            return
        for name, call in self._calls.items():
            if module.__dict__.get(name) is call:
                if self._replaced[name] is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = self._replaced[name]


def refuse_compiled_autograd() -> None:
    """Raises UsageError if torch would trace the engine's own hooks in the backward."""
    dynamo = sys.modules.get("torch._dynamo.config")
    if torch.is_grad_enabled() and getattr(dynamo, "compiled_autograd", False):
        raise UsageError(
            "compiled autograd would trace what moves weights in the backward, for minutes: set"
            " torch._dynamo.config.compiled_autograd = False. torch.compile of the model, without"
            " it, works"
        )


def _scoped(job: Job, call: Callable) -> Callable:
    @partial(uncompiled, reason=UNCOMPILED)
    def scope() -> AbstractContextManager:
        is_inside = job.uses.scopes.running_here  # of the call of another owner
        # A module compiled while wrapped still calls this.
        if not is_inside and job.uses.is_in(State.UNWRAPPED):
            return nullcontext()
        refuse_without_bytes("a forward")
        if is_inside:
            return job.uses.scopes.scope()
        refuse_compiled_autograd()
        return job.uses.begin(Operation.FORWARD)

    def scoped(*args: Any, **kwargs: Any) -> Any:
        with scope():
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                if isinstance(error, InfinityError):
                    raise
                if storage_guard.is_refusal(error):
                    raise _named(error) from error
                # A collective of torch's own (tensor parallelism) reports only a lost connection or
                # a timeout, not which rank failed.
                if not job.ranks.alone and failure_report.BROKEN.search(str(error)):
                    raise ranks_lost("a forward", error) from error
                for listener in job.events.forward_failed:
                    listener(job, error)
                raise

    # What it calls may be compiled.
    return torch.compiler.disable(scoped, recursive=False, reason=UNCOMPILED)


def _named(error: BaseException) -> UsageError:
    """Makes the error for a forward in which a function accessed a weight without its bytes. Names
    the parameters in the innermost frame that has any."""
    names: list[str] = []
    frame = error.__traceback__
    while frame is not None:
        at_rest = (
            tensor
            for tensor in frame.tb_frame.f_locals.values()
            if isinstance(tensor, StoredManaged)
        )
        names = list(dict.fromkeys(managed(tensor).name for tensor in at_rest)) or names
        frame = frame.tb_next
    which = f" ({', '.join(names[:5])})" if names else ""
    return UsageError(
        f"a weight at home{which} was used outside of its own module by a function that does not"
        " ask tensors how they are computed with (torch.tensor, torch.sparse_coo_tensor, a"
        " scripted function), or a view of it was kept from another forward. Give such a function"
        " a result of an ordinary operation, as weight.clone() is: that brings the weight. Torch"
        f" says: {str(error).strip().splitlines()[-1]}"
    )
