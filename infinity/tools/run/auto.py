"""infinity.auto: wraps the models that a script trains, which stays as it is.

    infinity.auto("host")  # at the top of a notebook or a script

waiting  an optimizer whose model was not trained yet
meeting  the first forward with gradients of a module that has a waiting optimizer's parameters, or
         the optimizer's first step: there model and optimizer are wrapped
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from ...choices import AUTO
from ...config import Config
from ...core.params.books import OptimizerBooks
from ...core.run.registry import is_wrapped
from ...core.step.optimizer import InfinityOptimizer
from ...core.step.rules import WAITS
from ...core.units.handle import handle_of
from ...core.wrap.wrap import wrap_model
from ...ext.integrations.plain_loops import as_torch_steps
from ..train.ranks import count_of
from .copies import plain_copies
from .meeting import STEPPING, Together, find_root, hand_over, params_of
from .places import Places, release
from .replicas import pass_on, refuse_sharded, replicas_of

HOMES = ("device", "host", "nvme")
CHOSEN = ("shard",)  # in a Config or a file
MakeConfig = Callable[[nn.Module], Config | None]
logger = logging.getLogger(__name__)


class Auto:
    """Wraps each model that is trained from now on. As a context manager, until its block ends;
    what is wrapped stays so.

    wrapped
        What was wrapped, in words.
    spawned
        Whether the script has spawned processes, in which models are wrapped as well.
    given
        The fields of Config that the user chose. Without ``shard`` each rank has all state, as
        under DistributedDataParallel: scripts evaluate and save on the first rank alone.
    """

    def __init__(
        self,
        make_config: MakeConfig,
        tell: Callable[[str], None],
        *,
        given: Container[str],
        in_child: Callable[..., Any],
    ):
        self.wrapped: list[str] = []
        self.spawned, self._shards, self._in_child = False, "shard" in given, in_child
        self._make_config, self._tell, self._undo = make_config, tell, contextlib.ExitStack()
        self._places, self._waiting = Places(self._stays, self._watch), Waiting()
        self._at_work = False  # the engine makes optimizers and calls modules, too
        self._replace(torch.optim.Optimizer, "__init__", self._made)
        self._own_call = nn.Module.__call__
        self._call = functools.wraps(self._own_call)(self._called(self._own_call))
        self._places.replace(self._replace)
        pass_on(self._replace)
        self._replace(torch.multiprocessing, "spawn", self._spawn)

    def __enter__(self) -> Auto:
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Wraps no more models."""
        self._undo.close()
        self._unwatch()
        self._waiting.remove(list(self._waiting))

    def _replace(self, owner: Any, name: str, make: Callable[..., Any]) -> None:
        """Replaces a function of ``owner`` until :meth:`stop`."""
        own = getattr(owner, name)
        setattr(owner, name, functools.wraps(own)(make(own)))
        self._undo.callback(setattr, owner, name, own)

    def _made(self, own: Callable[..., None]) -> Callable[..., None]:
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            if not (self._at_work or isinstance(optimizer, InfinityOptimizer)):
                self._waiting.add(optimizer)
                self._watch()
                optimizer.step = MethodType(self._make_step(optimizer), optimizer)  # type: ignore[method-assign]

        return __init__

    def _watch(self) -> None:
        """Watches calls of modules from now on."""
        nn.Module.__call__ = self._call  # type: ignore[method-assign]

    def _unwatch(self) -> None:
        """Watches them no more: the compiler breaks its graphs at calls that are watched."""
        if nn.Module.__call__ is self._call:
            nn.Module.__call__ = self._own_call  # type: ignore[method-assign]

    def _spawn(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def spawn(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.spawned = True
            return own(partial(self._in_child, fn), *args, **kwargs)

        return spawn

    def _called(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._at_work:
                if self._waiting or self._places:
                    self._meet(module)
                if not (self._waiting or self._places):
                    self._unwatch()
            return own(module, *args, **kwargs)

        # The compiler begins at the forward, past the hooks of the engine
        return torch.compiler.disable(__call__, recursive=False)

    def _make_step(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        """Makes the step of an optimizer that may wait: a function, as schedulers need it."""

        @functools.wraps(type(optimizer).step)
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if optimizer in self._waiting and not self._at_work:
                self._wrap([optimizer])
            return vars(optimizer).get(STEPPING, partial(type(optimizer).step, optimizer))(
                *args, **kwargs
            )

        setattr(step, WAITS, True)
        return step

    def _meet(self, module: nn.Module) -> None:
        """Wraps ``module`` if it has parameters of waiting optimizers and is trained, or would be
        moved to its device now."""
        asked = self._places.device_for(module) is not None
        if asked or torch.is_grad_enabled():
            own = set(module.parameters())
            if any(not own.isdisjoint(params_of([each])) for each in self._waiting):
                gc.collect()  # those that the script has dropped wait no more
            met = [each for each in self._waiting if not own.isdisjoint(params_of([each]))]
            if wrapped_already := [each for each in met if isinstance(each.state, OptimizerBooks)]:
                self._waiting.remove(wrapped_already)  # the script has called wrap_model itself
                met = [each for each in met if each in self._waiting]
            if met:
                self._wrap(met, module)
        if asked:
            self._places.move(lambda params: not params.isdisjoint(module.parameters()))

    def _wrap(
        self, optimizers: list[torch.optim.Optimizer], called: nn.Module | None = None
    ) -> None:
        self._at_work = True
        try:
            root = find_root(params_of(optimizers), called)
            if root is not None:
                refuse_sharded(root)
                config = None if is_wrapped(root) else self._config_of(root, optimizers)
                release(root)
                mesh = None if is_wrapped(root) or self._shards else replicas_of(root)
                with contextlib.nullcontext() if is_wrapped(root) else plain_copies(root):
                    _, stepping = wrap_model(root, optimizers, config, mesh=mesh)
                for own, ours in zip(optimizers, stepping, strict=True):
                    hand_over(root, own, ours)
                self.wrapped.append(told(root, optimizers))
                moves = any(handle_of(param) is not None for param in root.parameters())
                stays = "wrapped, but no weight moves (fp64, complex and sparse ones stay)"
                self._tell(f"{'at home now' if moves else stays}: {self.wrapped[-1]}")
                if self._shards and count_of() > 1:
                    self._tell("each rank has its shard: all of them have to evaluate and save")
            self._waiting.remove(optimizers)
            # What no optimizer steps is used beside the model from now on: a copy for an average
            stepped = set(params_of(self._waiting))
            self._places.move(lambda params: params.isdisjoint(stepped))
        finally:
            self._at_work = False

    def _config_of(self, root: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Config:
        """Returns the configuration, with the device that the script asked for, and with the
        precision of its own optimizer if none was given."""
        config = self._make_config(root) or Config.make({"nvme_paths": AUTO})
        config = as_torch_steps(config, optimizers)
        device = self._places.device_for(root)
        if config.device is not None or device is None:
            return config
        return dataclasses.replace(config, device=device)

    def _stays(self, module: nn.Module) -> bool:
        config = self._make_config(module)
        return config is None or config.params != "device"


class Waiting:
    """Optimizers in the order in which they were made, as far as the script keeps them."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[torch.optim.Optimizer]] = []

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter([alive for each in self._all if (alive := each()) is not None])

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, optimizer: object) -> bool:
        return any(each() is optimizer for each in self._all)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds an optimizer."""
        self._all.append(weakref.ref(optimizer, self._all.remove))

    def remove(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Removes optimizers."""
        self._all[:] = [each for each in self._all if all(each() is not one for one in optimizers)]


def _in_child(config: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Runs ``function`` in a process that the script has spawned."""
    auto(config)
    return function(*args)


def auto(config: Config | Mapping[str, Any] | str | os.PathLike | None = None) -> Auto:
    """Wraps each model that is trained from now on, with the optimizer that steps it, at its first
    forward with gradients. The script stays as it is, and so does the optimizer that it holds.

    config
        A home for parameters and optimizer ("device", "host" or "nvme"), or what
        :func:`infinity.wrap_model` takes.

    Returns a context manager, which ends this; a second call ends the first. Raises ConfigError.
    """
    if isinstance(config, str) and config in HOMES:
        config = {"params": config, "optimizer": config}
        if "nvme" in config.values():
            config["nvme_paths"] = AUTO
    made = None if config is None else Config.make(config)
    options = (config or {}) if config is None or isinstance(config, Mapping) else CHOSEN
    return start(lambda root: made, logger.info, given=options, in_child=partial(_in_child, config))


def told(root: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Returns what was wrapped in words."""
    models = list(root) if isinstance(root, Together) else [root]
    count = sum(param.numel() for param in root.parameters())
    return (
        f"{' and '.join(type(each).__name__ for each in models)} ({count:,} parameters) and"
        f" {' and '.join(type(each).__name__ for each in optimizers)}"
    )


def start(make_config: MakeConfig, tell: Callable[[str], None], **more: Any) -> Auto:
    """Starts to wrap models, in the place of what was started before."""
    global _running
    if _running is not None:
        _running.stop()
    _running = Auto(make_config, tell, **more)
    return _running


_running: Auto | None = None
