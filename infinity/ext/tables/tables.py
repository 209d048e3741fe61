"""Tables: lands the gradient of an embedding's weight use by use, without whole ones in between.

table   the weight of an Embedding, and often of the head that shares it
lookup  a use by an Embedding: its gradient comes as the rows that were looked up
whole   a use by a Linear: its gradient has every row

Autograd alone makes a whole gradient for each lookup, and keeps the head's until the last lookup's:
three tables at once. Here each use's gradient leaves autograd as it is made, and they meet at home
(:mod:`infinity.core.grads.meeting`), added in autograd's order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ...config import Config
from ...core.grads.meeting import GradUse, Meeting, lookup_gradient
from ...core.machine.device import Device
from ...core.params.outside_modes import outside_modes
from ...core.params.parameter import users_hooks
from ...core.params.transforms import are_running
from ...core.run.context import ForwardContext
from ...core.run.job import Job
from ...core.run.pass_state import Pass
from ...core.run.replaced_forward import ReplacedForward, own_forward
from ...core.seams import Events, Extension
from ...core.units.handle import COUNTS, DisableTorchFunction, handle_of, raw_hooks
from ...core.wrap.described_model import DescribedModel
from ...ranks.collectives import Collectives
from ...torch_private import GRAPH_NODES, current_task, node_references

# A smaller table's gradients are not worth the Python that each use costs.
WORTH_NBYTES = 1024 * 1024


def tables_of(
    users: Mapping[nn.Parameter, list[tuple[nn.Module, str]]],
) -> dict[nn.Parameter, list[nn.Module]]:
    """Finds the tables whose gradients land use by use, and the modules of each. ``users``: the
    modules that have a parameter, and their names for it. None in a torch that does not tell
    what leads to a weight."""
    if GRAPH_NODES.found is None:
        return {}
    return {
        param: [module for module, _ in using]
        for param, using in users.items()
        if type(param) is nn.Parameter and param.dim() == 2 and not hasattr(param, COUNTS)
        if param.nbytes >= WORTH_NBYTES and param.is_contiguous()
        if any(isinstance(module, nn.Embedding) for module, _ in using)
        if all(name == "weight" and _is_user(module) for module, name in using)
    }


def _is_user(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return isinstance(module, nn.Linear)


class Table:
    """One table of a job."""

    def __init__(self, find: Callable[[], ForwardContext], param: nn.Parameter):
        self._find, self.param = find, param
        self._uses: list[weakref.ref] = []  # of graphs that may still run backward

    @property
    def is_cast(self) -> bool:
        """Whether layers use autocast's copy of the weight. All of them share it, and autograd adds
        their gradients in its dtype before it makes one of the weight's. Lookups are not cast."""
        return torch.is_autocast_enabled(self.param.device.type)

    def add(self, ctx: Any) -> None:
        """Adds a use: the node of a lookup, which has its ids, or of a whole use."""
        ctx.table, ctx.handle, ctx.ran_in = self, handle_of(self.param), -1
        self._uses = [use for use in self._uses if use() is not None] + [weakref.ref(ctx)]

    def meet(self, ctx: Any) -> tuple[GradUse, Meeting | None]:
        """Tells what the running backward does with the gradient of ``ctx``'s use, and where it
        meets the others'. None: autograd adds them."""
        accumulator = ctx.next_functions[-1][0]
        use, task = GradUse.of(accumulator), current_task()
        ctx.ran_in = task
        handle = handle_of(self.param)
        if (
            use is not GradUse.ACCUMULATED
            or torch.is_grad_enabled()  # create_graph=True
            or handle is None
            or handle is not ctx.handle
            or handle.grad is None
            or self._is_watched()
        ):
            return use, None
        context = self._find()
        context.track_backward()
        alive = [other for ref in self._uses if (other := ref()) is not None]
        # Those of this backward that are still to come.
        coming = [other for other in alive if other.ran_in != task and GRAPH_NODES.found(other)]
        # Without a gradient of their own: `F.linear(x, table.weight)`, a penalty on the weight.
        others = node_references(accumulator) - len(alive)
        ids = [other.ids for other in (ctx, *coming) if other.ids is not None]
        wholes = sum(other.ids is None for other in (ctx, *coming))
        with context.store.guard:
            meeting = context.gradients.meet(handle, task, ids, wholes, others)
        if meeting is None and len(alive) + others > 1:
            context.expect_sum(handle)
        return use, meeting

    def _is_watched(self) -> bool:
        """Tells whether a user's hook has to see the whole gradient."""
        with DisableTorchFunction():
            hooks = self.param._backward_hooks
        return bool(hooks) or bool(users_hooks(self.param)) or len(raw_hooks(self.param)) > 1

    @outside_modes
    def land(self, grad: torch.Tensor) -> None:
        """Lands a whole use's gradient, but for the rows that meet those of lookups."""
        context = self._find()
        with context.store.guard:
            context.gradients.land(handle_of(self.param), grad)


class Lookup(torch.autograd.Function):
    """Looks up rows of a table, as ``F.embedding`` does."""

    @staticmethod
    def forward(ctx, ids, weight, padding_idx: int | None, table: Table):
        ctx.ids, ctx.padding_idx = ids.detach(), padding_idx
        table.add(ctx)
        return F.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx, dy):
        table: Table = ctx.table
        use, meeting = table.meet(ctx)
        if use is GradUse.NONE:
            return None, None, None, None
        if meeting is not None:
            meeting.add(ctx.ids, dy, ctx.padding_idx)
            return None, None, None, None
        rows = table.param.shape[0]
        return None, lookup_gradient(dy, ctx.ids, rows, ctx.padding_idx), None, None


class WholeUse(torch.autograd.Function):
    """Gives a table to a layer that uses all of it. Returns an alias."""

    @staticmethod
    def forward(ctx, weight, table: Table):
        ctx.ids = None
        table.add(ctx)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dw):
        use, meeting = ctx.table.meet(ctx)
        if meeting is None:
            return (None if use is GradUse.NONE else dw), None
        ctx.table.land(dw)
        return None, None


class _Uses(TorchFunctionMode):
    """Finds the uses of a table inside its module's forward, also of a subclass."""

    def __init__(self, table: Table):
        self._table = table

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        table, kwargs = self._table, kwargs or {}
        if len(args) > 1 and args[1] is table.param:
            if func is F.embedding:
                padding_idx = kwargs.get("padding_idx")
                if padding_idx is not None and padding_idx < 0:
                    padding_idx += table.param.shape[0]
                return Lookup.apply(args[0], args[1], padding_idx, table)
            if func is F.linear and not table.is_cast:
                alias = WholeUse.apply(args[1], table)
                return func(args[0], alias, *args[2:], **kwargs)
        return func(*args, **kwargs)


class Tables(Extension):
    """The tables of one model, on one rank: several average whole gradients."""

    may_stand_aside = True

    @classmethod
    def describe_model(cls, model: DescribedModel) -> None:
        """Finds the tables."""
        model.tables.update(tables_of(model.users))

    @classmethod
    def begin(
        cls, config: Config, device: Device, collectives: Collectives, events: Events
    ) -> Tables:
        """Returns the extension."""
        return cls()

    def replace_forwards(
        self, job: Job, model: DescribedModel, find: Callable[[], ForwardContext], blocks: Any
    ) -> list[ReplacedForward]:
        """Replaces the forward of every module with a table that is stepped, and gathered whole, by
        one whose uses of the weight are told apart."""
        if job.reducer is not None:
            return []
        found = [
            (handle.param, model.tables[handle.param])
            for handle in job.trained
            if handle.param in model.tables
            if not job.planned.sizes[handle.unit.index].at_once_nbytes
        ]
        made = ((Table(find, param), modules) for param, modules in found)
        return [
            ReplacedForward(module, _forward(module, table, job.running))
            for table, modules in made
            for module in modules
        ]


def _forward(module: nn.Module, table: Table, running: Pass) -> Callable[..., Any]:
    forward = own_forward(module)

    @functools.wraps(forward)
    def with_single_uses(*args: Any, **kwargs: Any) -> Any:
        lands = torch.is_grad_enabled() and table.param.requires_grad and not running.stands_aside
        if torch.compiler.is_compiling() or not lands or are_running():
            return forward(*args, **kwargs)
        with _Uses(table):
            return forward(*args, **kwargs)

    return with_single_uses
