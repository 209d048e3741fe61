"""GradProxy: the tensor that ``p.grad`` is for a gradient at home.

Norms, scaling, clipping and zeroing act on the bytes there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ...errors import UsageError
from ...torch_private import uncompiled
from ..machine.tiers import Tier
from ..params import mistakes
from ..params.torch_functions import mutated_arguments
from ..units.forms import local_of
from ..units.handle import ParamHandle
from .at_home import AtHome
from .record import refuse_torn, writable
from .values import GradValues

aten = torch.ops.aten
WITHOUT_VALUES = (
    aten.detach.default,
    aten.zero_.default,
    aten._foreach_zero_.default,
)  # which ask no other rank


class GradProxy(AtHome):
    """Stands for a landed gradient as ``p.grad``. It has shape, dtype and device, and operations
    run on the bytes at home.

    Reads, in-place writes, norms, clipping and ``GradScaler.unscale_`` act exactly as on a plain
    gradient. A proxy
    that users hold when its parameter gets another gradient becomes a plain tensor, as in torch. On
    one rank a view or an array of it has memory of its own, and writes to that count; with several
    ranks a view is a :class:`GradView`.
    """

    @staticmethod
    def __new__(cls, handle: ParamHandle):
        placement = handle.flat_param.layout.placements[handle.index]
        dtype, device = handle.flat_param.spec.grad_dtype, handle.engine.device.where
        return cls.make(
            handle, placement.shape, stride=placement.stride, dtype=dtype, device=device
        )

    @property
    def _values(self) -> GradValues:
        return self._bank.values

    @property
    def _bank(self) -> Any:
        """The GradientBank, whose module imports this one."""
        handle = self._infinity_grad
        if not handle.is_alive or not handle.flat_param.arrays:
            raise UsageError(f"the gradient of {handle.name} went with its model")
        if handle.grad.proxy is not self:
            raise UsageError(
                f"a gradient of {handle.name} from before zero_grad() was used: read"
                f" {handle.name}.grad anew"
            )
        return handle.engine.gradients

    def _in_memory(self) -> torch.Tensor | None:
        """Returns the plain tensor that is this gradient now, or None: its bytes are at home."""
        handle = self._infinity_grad
        if self.plain is not None or handle.grad is None or handle.grad.proxy is not self:
            return self.plain
        shown = None if handle.grad.assigned is None else self._bank.assigned.shown(handle)
        return None if shown is None else local_of(shown)

    def _lent(self) -> torch.Tensor:
        if self.plain is not None:
            return self.plain
        with self._infinity_grad.engine.uses.begin():
            refuse_torn(self._infinity_grad)
            self._bank.refresh(self._infinity_grad)
            return self._bank.assigned.lend(self._infinity_grad)

    @classmethod
    @uncompiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        grads = [
            leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, GradProxy)
        ]
        plain = {id(grad): value for grad in grads if (value := grad._in_memory()) is not None}
        if plain:
            args, kwargs = tree_map_only(
                GradProxy, lambda grad: plain.get(id(grad), grad), (args, kwargs or {})
            )
            result = func(*args, **kwargs)
            return next((grad for grad in grads if plain.get(id(grad)) is result), result)
        with grads[0]._infinity_grad.engine.uses.begin():
            for grad in grads if func not in WITHOUT_VALUES else ():
                grad._bank.refresh(grad._infinity_grad)
            return cls._run(func, args, kwargs or {})

    @classmethod
    def _run(cls, func, args: tuple, kwargs: dict) -> Any:
        subject = args[0] if args and isinstance(args[0], GradProxy) else None
        if subject is not None and (result := _shortcut(func, subject, args)) is not None:
            return result
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(func, args)
        if (
            func is aten.linalg_vector_norm.default
            and subject is not None
            and len(args) < 3
            and not kwargs
        ):
            return _norm(subject, float(args[1]) if len(args) > 1 else 2.0)
        if func is aten._foreach_zero_.default:
            for grad in args[0]:
                grad.zero_()
            return None
        grads = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, GradProxy)]
        for grad in grads:
            grad._values  # noqa: B018 - raises for a stale one
            refuse_torn(grad._infinity_grad)
        if func.is_view and subject is not None:
            if not subject._is_alone:
                return views_of(subject, func, args, kwargs)
            return func(subject._bank.assigned.lend(subject._infinity_grad), *args[1:], **kwargs)
        borrowed = _Borrowed(grads, mutated_arguments(func, args, kwargs))
        borrowed_args, borrowed_kwargs = tree_map_only(GradProxy, borrowed.lend, (args, kwargs))
        result = func(*borrowed_args, **borrowed_kwargs)
        if func.namespace == "c10d":
            # It may be asynchronous, and writes to a copy.
            for output in result if isinstance(result, (list, tuple)) else (result,):
                if hasattr(output, "wait"):
                    output.wait()
        borrowed.end()
        return (
            borrowed.mutated[0] if borrowed.mutated and isinstance(result, torch.Tensor) else result
        )


class _Borrowed:
    """The bytes of gradients that one operation reads or writes."""

    def __init__(self, grads: list[GradProxy], mutated: list):
        self.mutated = [grad for grad in mutated if isinstance(grad, GradProxy)]
        self.copied = {id(grad) for grad in grads if grad._values.lends_copies(grad._infinity_grad)}
        # A gradient from disk is borrowed in its staging slot. Several may not fit there at once,
        # so those are copied.
        self.from_disk = [
            grad
            for grad in grads
            if grad._infinity_grad.flat_param.arrays["grad"].tier is Tier.NVME
        ]
        self._borrowed: dict[int, torch.Tensor] = {}

    def lend(self, grad: GradProxy) -> torch.Tensor:
        """Returns the bytes as a plain tensor."""
        if id(grad) not in self._borrowed:
            write = any(grad is other for other in self.mutated)
            handle = writable(grad._infinity_grad) if write else grad._infinity_grad
            value = grad._values.value(handle, write=write)
            if len(self.from_disk) > 1 and id(grad) not in self.copied:
                value = value.clone()
            self._borrowed[id(grad)] = value
        return self._borrowed[id(grad)]

    def end(self) -> None:
        """Stores what the operation has written to copies."""
        for grad in self.mutated:
            grad._values.note_edit(grad._infinity_grad, self._borrowed[id(grad)])
            if len(self.from_disk) > 1 or id(grad) in self.copied:
                grad._values.put(grad._infinity_grad, self._borrowed[id(grad)])


def _norm(grad: GradProxy, order: float) -> torch.Tensor:
    refuse_torn(grad._infinity_grad)
    if grad._values.ranks.pp_group is not None and mistakes.is_called_from(
        "torch/nn/utils/clip_grad.py"
    ):
        raise UsageError(
            "torch's clip_grad_norm_ sees the gradients of this stage of the pipeline only, and"
            " would clip each stage by another norm: use infinity.clip_grad_norm_(optimizer,"
            " max_norm) or Config(max_grad_norm=...)"
        )
    return grad._values.norm(grad._infinity_grad, order)


def _unscale(func, args: tuple) -> None:
    """Runs GradScaler's check and division on one gradient after the other: they need not fit in
    memory together. Then combines the overflow flag over all ranks. Gradients whose norms show no
    overflow are not touched: their scale is a factor of the step."""
    at_home = [grad for grad in args[0] if isinstance(grad, GradProxy)]
    if at_home and at_home[0]._values.are_finite([grad._infinity_grad for grad in at_home]):
        factor = at_home[0]._values.number(args[2])
        for grad in at_home:
            grad._values.scale(writable(grad._infinity_grad), factor)
        args = ([grad for grad in args[0] if not isinstance(grad, GradProxy)], *args[1:])
    for grad in args[0]:
        if isinstance(grad, GradProxy):
            grad._values.change_own(
                writable(grad._infinity_grad), lambda shard: func([shard], *args[1:])
            )
        else:
            func([grad], *args[1:])
    if landed := [grad for grad in args[0] if isinstance(grad, GradProxy)]:
        values, what = landed[0]._values, "overflow of gradients"
        if not values.ranks.alone:
            # The scale must be equal on every rank
            what = f"{what} that are multiplied by {args[2].item()!r}"
        args[1].copy_(values.collectives.collect(args[1], what).amax(0))


class GradView(AtHome):
    """A read-only view of a gradient that several ranks have. It reads the home at each use."""

    @staticmethod
    def __new__(
        cls, source: GradProxy, take: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
    ):
        tensor = cls.make(
            source._infinity_grad,
            like.shape,
            stride=like.stride(),
            dtype=like.dtype,
            device=source.device,
            offset=like.storage_offset(),
        )
        tensor._source, tensor._take = source, take
        return tensor

    def _lent(self) -> torch.Tensor:
        with self._infinity_grad.engine.uses.begin():
            return self.value().clone()

    def value(self) -> torch.Tensor:
        """Returns the view as a plain tensor, valid until other gradients are read."""
        self._source._values  # noqa: B018 - raises for a stale one
        refuse_torn(self._infinity_grad)
        self._source._bank.refresh(self._infinity_grad)
        return self._take(self._source._values.value(self._infinity_grad, write=False))

    @classmethod
    @uncompiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        views = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, GradView)]
        name = views[0]._infinity_grad.name
        if any(isinstance(output, GradView) for output in mutated_arguments(func, args, kwargs)):
            raise UsageError(
                f"{func} of a view of {name}.grad: with several ranks a view can be read only."
                f" Change {name}.grad itself, or a .clone()."
            )
        if func is aten.detach.default:
            return views[0]
        if func.is_view and isinstance(args[0], GradView):
            return views_of(args[0], func, args, kwargs)
        with views[0]._infinity_grad.engine.uses.begin():
            # Several may not fit into staging memory at once, and a result may share the bytes.
            args, kwargs = tree_map_only(
                GradView, lambda view: view.value().clone(), (args, kwargs)
            )
        return func(*args, **kwargs)


def views_of(source: GradProxy | GradView, func, args: tuple, kwargs: dict) -> Any:
    """Makes the results of ``func``, a view of ``source``: one GradView or several."""
    landed, before = (
        (source, None) if isinstance(source, GradProxy) else (source._source, source._take)
    )

    def take(whole: torch.Tensor) -> Any:
        if func is aten.as_strided.default:
            whole = whole.clone()  # alone in its storage: the offset counts from there
        return func(whole if before is None else before(whole), *args[1:], **kwargs)

    likes = func(
        torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"),
        *args[1:],
        **kwargs,
    )
    if isinstance(likes, torch.Tensor):
        return GradView(landed, take, likes)
    return [
        GradView(landed, lambda whole, i=i: take(whole)[i], like) for i, like in enumerate(likes)
    ]


def _shortcut(func, subject: GradProxy, args: tuple):
    """Runs operations that need no bytes: scaling, zeroing, detaching. Also divides by a number in
    place. Returns None for any other."""
    if func in (aten.detach.default, aten.detach_.default):
        return subject
    if torch.Tag.inplace_view in func.tags:
        raise UsageError(
            f"{func} of {subject._infinity_grad.name}.grad would give the gradient another shape or"
            " other memory, and it keeps those of its parameter. Work on a copy:"
            " grad.detach().clone()"
        )
    handle = subject._infinity_grad
    if func is aten.zero_.default:
        subject._values.note_edit(handle, 0.0)
        subject._bank.assigned.zero(handle)
        return subject
    if func in (aten.mul_.Tensor, aten.mul_.Scalar):
        factor = args[1]
        if (
            isinstance(factor, torch.Tensor)
            and factor.dim() == 0
            and not isinstance(factor, GradProxy)
        ):
            factor = subject._values.number(factor)
        if isinstance(factor, (int, float)):
            # torch, too, multiplies by the number's fp32 value, for gradients of every dtype.
            subject._values.scale(
                writable(handle), torch.tensor(factor, dtype=torch.float32, device="cpu").item()
            )
            return subject
    if (
        func in (aten.div_.Tensor, aten.div_.Scalar)
        and isinstance(args[1], (int, float))
        and len(args) == 2
    ):
        subject._values.note_edit(writable(handle), 1 / args[1])
        subject._values.change_own(handle, lambda shard: shard.div_(args[1]))
        return subject
    return None
