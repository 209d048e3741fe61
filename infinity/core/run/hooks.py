"""Hooks on a wrapped model's modules and parameters: they call the engine for forwards and
gradients."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from ...errors import UsageError
from ...torch_private import current_task, uncompiled
from ..params import mistakes
from ..params.outside_modes import makes_hooks
from ..params.parameter import USERS_HOOKS
from ..units.handle import raw_hooks, set_raw_hooks
from ..units.unit import ParamUnit
from .engine import Engine
from .fixed_form import fix_forms
from .scoped_call import UNCOMPILED, ScopedCall

OURS = -1  # the key of the engine's hook; users' are 0 and above


class RefusedCopy:
    """Makes pickling, copying or scripting ``module`` raise a UsageError, until :meth:`remove`.
    Otherwise torch would fail at one of our hooks, with an unclear error."""

    # Looked up on the object itself by pickle and copy, and by torch.jit.script.
    NAMES = ("__reduce_ex__", "__prepare_scriptable__")

    def __init__(self, module: torch.nn.Module):
        self._module, kind = weakref.ref(module), type(module).__name__

        def refuse(*_: int) -> None:
            instead = mistakes.advice() or (
                "Save model.state_dict(), or infinity.save_checkpoint(path, model, optimizer); for"
                " a plain model call infinity.unwrap_model(model, optimizer) first."
            )
            raise UsageError(
                f"this {kind} is wrapped: its weights are at home, and cannot be pickled, copied or"
                f" scripted with it. {instead}"
            )

        module.__dict__ |= dict.fromkeys(self.NAMES, refuse)

    def remove(self) -> None:
        """Lets the module be pickled and copied again. Idempotent."""
        if (module := self._module()) is not None:
            for name in self.NAMES:
                module.__dict__.pop(name, None)


class LandingHook:
    """Calls ``landed`` with a parameter when autograd has accumulated its gradient, until
    :meth:`remove`. Autograd calls nothing else: users' hooks are ``landed``'s to call, for they see
    the sum at home.

    [Note: why only weak references] The garbage collector does not see a parameter's hooks. If a
    hook referred to a parameter, neither could be freed. So ``landed`` refers to the engine weakly,
    and this object to its parameter.
    """

    def __init__(self, param: torch.Tensor, landed: Callable[[torch.Tensor], None]):
        self._param, self._landed = weakref.ref(param), landed
        self.put()

    def put(self) -> None:
        """Hooks the parameter, again after :meth:`remove`. Idempotent."""
        if (param := self._param()) is None:
            return
        hooks = raw_hooks(param)
        if hooks is None or OURS not in hooks:
            # Always there, so that a handle of a hook from before the wrap removes it
            param.__dict__.setdefault(USERS_HOOKS, OrderedDict() if hooks is None else hooks)
            set_raw_hooks(param, OrderedDict({OURS: self._landed}))

    def come_last(self) -> None:
        """Moves this hook behind those that a distributed parameter got while it was resident, and
        an ordinary DTensor: transformers sums partial gradients over a mesh in such a hook."""
        if (param := self._param()) is not None and len(hooks := raw_hooks(param)) > 1:
            hooks[OURS] = hooks.pop(OURS)

    def remove(self) -> None:
        """Removes the hook, and leaves users' hooks to autograd. Idempotent."""
        if (param := self._param()) is None or USERS_HOOKS not in param.__dict__:
            return
        users, raw = param.__dict__[USERS_HOOKS], raw_hooks(param)
        raw.pop(OURS, None)
        # A handle removes its hook from the dict that it was registered in.
        if users or not raw:
            users.update(raw)
            set_raw_hooks(param, users)
        del param.__dict__[USERS_HOOKS]


class LandingHooks:
    """The landing hooks of all parameters that are stepped, until :meth:`remove`."""

    @makes_hooks
    def __init__(self, engine: Engine):
        self._hooks: list[LandingHook] = []
        self._late = engine.passes.reorder_hooks if engine.job.ranks.tp_group is not None else []
        backward = weakref.ref(engine.backward)

        def landed(param: torch.Tensor) -> None:
            if (running := backward()) is None:
                return
            if hooks := param.__dict__.get(USERS_HOOKS):
                running.accumulated(param, hooks)
            else:
                running.landed(param)

        self._landed = landed  # holds only a weak reference to the backward: see LandingHook

    def add(self, param: torch.Tensor) -> None:
        """Hooks a parameter that is stepped from now on."""
        self._hooks.append(LandingHook(param, self._landed))
        self._late.append(self._hooks[-1].come_last)

    def put(self) -> None:
        """Hooks all of the parameters, again after :meth:`remove`. Idempotent."""
        for hook in self._hooks:
            hook.put()

    def remove(self) -> None:
        """Removes all of the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()


class ForwardHooks:
    """Calls ``before`` and ``after`` around each forward of ``module``, until :meth:`remove`."""

    def __init__(self, module: torch.nn.Module, before: Callable, after: Callable):
        self.module, self._hooks, self._handles = weakref.ref(module), (before, after), []
        self.put()

    def put(self) -> None:
        """Hooks the module, again after :meth:`remove`. Idempotent."""
        self.remove()
        if (module := self.module()) is not None:
            before, after = self._hooks
            self._handles = [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ]

    def remove(self) -> None:
        """Removes both hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()


def install_hooks(
    engine: Engine, roots: Sequence[torch.nn.Module], owners: dict[torch.nn.Module, list[ParamUnit]]
) -> list:
    """Installs hooks on ``roots``, every owner, and every stepped parameter. Returns objects whose
    ``remove`` undoes that, each idempotent."""
    removers: list = []
    # TransformerEncoder checks the type of its first layer's weights before it calls that layer: it
    # uses nested tensors, whose padded rows are 0, only for plain tensors.
    encoders = [
        module
        for root in roots
        for module in root.modules()
        if isinstance(module, torch.nn.TransformerEncoder) and len(module.layers)
    ]
    for module in dict.fromkeys([*roots, *owners, *encoders]):
        units, is_root = owners.get(module, []), module in roots
        first = engine.units_of(module.layers[0]) if module in encoders else []
        first = [unit for unit in first if unit not in units]

        def before(module, args, kwargs, units=units, is_root=is_root, first=first):
            engine.passes.enter(module, units, is_root=is_root, args=args, kwargs=kwargs)
            if first and not module.layers[0].training and current_task() == -1:
                engine.passes.look_at(first)

        def after(module, args, kwargs, output, units=units):
            return engine.passes.leave(module, args, kwargs, output, units)

        # The graph of a compiled model breaks here: moving weights cannot be compiled.
        before, after = (uncompiled(hook, UNCOMPILED) for hook in (before, after))
        before.is_infinity = after.is_infinity = True
        removers.append(ForwardHooks(module, before, after))
        removers += [ScopedCall(engine.job, module), RefusedCopy(module)]
    landing = LandingHooks(engine)
    for unit in engine.job.units:
        for handle in unit.handles:
            if handle.grad is not None:
                landing.add(handle.param)
    engine.passes.hook = landing.add
    return [*removers, landing, *fix_forms(roots)]
