"""wrap_model and its counterparts: from plain torch objects to managed ones and back.

A wrap checks everything first, then takes all memory and disk space, then copies every value home, and only then
changes the model: whatever fails before leaves model and optimizer as they were.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from . import hooks, microbatch, native, tiling
from .checks import check, tell_of_the_rest
from .collectives import Peers
from .config import MOMENTS, Config
from .device import Device, make_device
from .engine import Engine
from .errors import CapacityError, ConfigError, UsageError
from .gradients import GradState
from .materialize import Materialized, overwrite
from .mesh import join_device, join_node, peers_of
from .optimizer import InfinityOptimizer
from .parameter import Lent, handle_of, raw_grad, set_raw_grad
from .partition import Group, held_nbytes, is_managed, parameter_names, partition
from .plan import MemoryPlan, ShardSize, UnitSize, check_folders, make_plan, measured_free
from .replaced import ReplacedForward
from .rules import moment_names, recognise, saved_step
from .shard import ParamShard, ShardSpec
from .store import ArrayIO
from .tiers import Tier, format_nbytes
from .trace import Traffic
from .unit import ParamUnit

logger = logging.getLogger(__name__)

RECORD = "_infinity"  # the attribute of a wrapped model that holds its record: it goes with the model


class Wrapped:
    """What is known of one wrapped model: its engine, and how to take the hooks off again."""

    def __init__(self, engine: Engine, removers: list, optimizer: InfinityOptimizer | None, came_from: dict):
        self.engine, self.removers = engine, removers
        self.came_from = came_from  # the device of each parameter before it was wrapped
        self.unwrapping: Callable[[], None] | None = None  # what an unwrap that has begun still has to do, any number of times
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None

    @property
    def optimizer(self) -> InfinityOptimizer | None:
        return self._optimizer()


def wrapped(model: nn.Module) -> Wrapped:
    """The record of a wrapped model. Raises UsageError for any other."""
    record = model.__dict__.get(RECORD) if isinstance(model, nn.Module) else None
    if record is None:
        raise UsageError(f"this {type(model).__name__} is not wrapped: call infinity.wrap_model(model, ...) first")
    return record


@torch.inference_mode(False)  # what is made here is trained on, whatever mode the caller is in
def wrap_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike | None = None,
    *,
    mesh: Any = None,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Gives ``model``'s parameters and ``optimizer``'s state their homes, and returns both, ready for a usual loop.

    model
        Any module on the CPU or on ``meta``. The same object comes back, hooked.
    optimizer
        ``torch.optim`` AdamW, Adam, SGD, or a Lion; its groups, hyperparameters and state are taken over. None: the
        weights stream and nothing is updated.
    config
        A :class:`Config`, a dict of its fields, or the path of a TOML or JSON file.
    mesh
        A ``torch.distributed.device_mesh.DeviceMesh`` of the whole job with axes ``dp``, or ``dp_replicate`` and
        ``dp_shard``. None: the default process group, where there is one. Every rank has to call, with the same model and
        configuration; values of the first rank count.

    Raises ConfigError, CapacityError or StorageError with model and optimizer as they were, on all ranks.
    """
    peers = peers_of(mesh, traffic=Traffic())
    try:
        with peers.together("checking what wrap_model was given"):
            config = Config.make(config)
            check(model, optimizer, config)
            description = {} if peers.alone else _description(model, optimizer, config)
        peers.compare(description, "wrap_model")
        _tell_of_other_values(model, peers)
        peers.shard, peers.compresses = config.shard, config.compress_gathers
        if config.shard_in_node:
            join_node(peers, mesh)
        peers.allow_flags(len(list(model.parameters())) + 1)
        return _wrap(model, optimizer, config, peers, mesh)
    except BaseException:
        peers.close()
        raise


def _wrap(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, peers: Peers, mesh: Any) -> tuple:
    rule = recognise(optimizer) if optimizer is not None else None
    group_of = _groups_of_optimizer(optimizer)
    config = _own_part(config, peers)

    def make_shards(group: Group) -> list[ParamShard]:
        return _make_shards(group, group_of, rule, optimizer, config, peers)

    device = None
    try:
        with peers.together("planning"):
            device = _device_of(model, config, peers)
            groups, shards, plan = _lay_out(model, config, make_shards, device, _free(config, peers, device))
    except BaseException:  # on another rank, perhaps
        if device is not None:
            device.close()
        raise
    engine = None
    before = Before(model, optimizer)
    try:
        if not peers.alone and (device.backend is not None or device.where.type != "cpu"):
            join_device(peers, mesh, device.backend)
        with peers.together("allocating"):
            if config.micro_batch is not None:
                _check_micro_batch(model, groups)
            units = [ParamUnit(i, group.name, s, device) for i, (group, s) in enumerate(zip(groups, shards))]
            engine = Engine(config, plan, units, stepping=optimizer is not None, device=device, peers=peers)
            engine.sizes = [_size_of(group, unit_shards) for group, unit_shards in zip(groups, shards)]
        with peers.together("sending the values home"):
            materialized = Materialized(model, config.weights, is_managed)  # meta tensors become real
            before.materialized = materialized
            with engine.store.writing_behind() as store:
                materialized.fill(_Homes(engine, store))
                for unit in units:
                    for shard in unit.shards:
                        _send_home(engine.peers, store, shard, optimizer, rule, done=materialized.sent)
            engine.store.await_pages()
            device.warm(plan.device_window_nbytes)
            for unit in units:
                unit.allocate()
            _broadcast_rest(model, peers)
            moved = _Moved(model, device.where)
            tell_of_the_rest(model)
        return _commit(model, optimizer, rule, engine, groups, group_of, moved)
    except BaseException:
        native.insist(partial(_undo, before, engine, device))
        raise


def _undo(before: Before, engine: Engine | None, device: Device) -> None:
    """Puts everything back as it was before a wrap that failed. Cut short, it is called again."""
    before.restore()
    device.close() if engine is None else engine.shut_down()


def _check_micro_batch(model: nn.Module, groups: list[Group]) -> None:
    blocks = [group for group in groups if group.block is not None]
    if not blocks:
        raise ConfigError(
            f"micro_batch: {type(model).__name__} has no repeated block to run in parts of a batch. Name the classes "
            "that are: Config(units=[...])"
        )
    for group in blocks:
        microbatch.check(group.name, group.block)


def _device_of(model: nn.Module, config: Config, peers: Peers) -> Device:
    """What computes: what the configuration says, else where the parameters are."""
    places = {param.device for param in model.parameters() if is_managed(param) and not param.is_meta}
    if config.device is None and len(places) > 1:
        raise ConfigError(
            f"the model's parameters are on {', '.join(sorted(map(str, places)))}: move it to one device, or say which computes: "
            "Config(device='cuda')"
        )
    where = torch.device(config.device) if config.device is not None else next(iter(places), torch.device("cpu"))
    if where.type != "cpu" and where.index is None and not peers.alone:  # each rank of a machine has a device of its own
        where = torch.device(where.type, int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.accelerator.device_count()))
        torch.accelerator.set_device_index(where.index)  # else every rank would have a context on the first one as well
    if where.type == "cpu" and config.device is None and torch.accelerator.is_available():
        there = torch.accelerator.current_accelerator()
        logger.warning("this model is on the CPU and is computed there, though there is %s: Config(device=%r)", there, str(there))
    return make_device(where, peers.traffic)


# --- many ranks ---


def _description(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> dict[str, str]:
    """What has to be the same on every rank."""
    told = {f"Config({field.name})": repr(getattr(config, field.name)) for field in dataclasses.fields(config)
            if field.name not in ("nvme_paths", "trace", "device")}  # fmt: skip
    told["the model"] = type(model).__name__
    names_of = {param: name for name, param in model.named_parameters()}
    given = {param for group in (optimizer.param_groups if optimizer is not None else []) for param in group["params"]}
    for name, param in model.named_parameters(remove_duplicate=False):
        told[f"parameter {name}"] = f"{tuple(param.shape)} {param.dtype} {'trained' if param.requires_grad else 'frozen'}"
        if raw_grad(param) is not None:
            told[f"the gradient of {name}"] = "present"
        if state := optimizer.state.get(param) if optimizer is not None else None:
            told[f"the optimizer's state of {name}"] = ", ".join(sorted(state))
        if optimizer is not None and param.requires_grad and param not in given and is_managed(param):
            raise ConfigError(
                f"parameter {name} requires a gradient but is not in the optimizer: with several ranks nobody would average it. "
                "Give it to the optimizer, or set requires_grad=False."
            )
    told["the optimizer"] = type(optimizer).__name__
    for i, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        names = [names_of.get(param, "another") for param in group["params"]]
        told[f"the optimizer's group {i}"] = f"{len(names)} parameters, {', '.join(names[:3])}, ..."
        told[f"all names of the optimizer's group {i}"] = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
    return told


SAMPLED = 64  # elements of a parameter that are compared over the ranks


def _tell_of_other_values(model: nn.Module, peers: Peers) -> None:
    """Says where the ranks have been given other values: of replicas the first one's count, but stages of a pipeline are none."""
    if peers.alone:
        return
    mine = {}
    with peers.together("comparing the values"):
        for name, param in model.named_parameters():
            if is_managed(param) and not param.is_meta and param.numel():
                sample = param.detach().reshape(-1)[:: max(1, param.numel() // SAMPLED)].cpu().contiguous()
                mine[name] = hashlib.blake2b(sample.view(torch.uint8).numpy().tobytes(), digest_size=8).digest()
    everyones = peers.collect(mine, "samples of the values")
    others = sorted({name for theirs in everyones for name, digest in theirs.items() if digest != everyones[0].get(name)})
    if others and peers.is_first:
        logger.warning(
            "wrap_model was given other values on other ranks, in %d of %d parameters (%s, ...): the first rank's count on all of them. If the ranks "
            "have different parts of a model, stages of a pipeline say, they are no replicas: give wrap_model a mesh that says so.",
            len(others), len(mine), others[0],
        )  # fmt: skip


def _broadcast_rest(model: nn.Module, peers: Peers) -> None:
    """Buffers and parameters that the engine does not move are the first rank's from here on."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not peers.alone and tensor.layout is torch.strided and not (isinstance(tensor, nn.Parameter) and is_managed(tensor)):
            overwrite(tensor, peers.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), name))


def _own_part(config: Config, peers: Peers) -> Config:
    """The configuration with this rank's part of what the ranks of one machine share."""
    if not peers.alone:
        peers.local_size = -peers.least([-peers.local_size], "ranks on a machine")[0]
    shared = {name: getattr(config, name) for name in ("host_memory", "nvme_capacity")}
    return dataclasses.replace(config, **{name: n // peers.local_size for name, n in shared.items() if n is not None})


def _free(config: Config, peers: Peers, device: Device) -> dict[Tier, int] | None:
    """What every rank has free at least: plans must not differ between ranks."""
    if peers.alone:
        return None
    check_folders(config)
    shared = {tier: 1 if tier is Tier.DEVICE and not device.is_host else peers.local_size for tier in Tier}
    mine = [measured_free(tier, config, device) // shared[tier] if tier is not Tier.NVME or config.nvme_paths else 0 for tier in Tier]
    return dict(zip(Tier, peers.least(mine, "free memory")))


def lay_out(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
) -> tuple[MemoryPlan, list[UnitSize]]:
    """The plan that :func:`wrap_model` would follow, and the sizes of the model's units. Nothing is allocated or changed."""
    check(model, optimizer, config)
    rule = recognise(optimizer) if optimizer is not None else None
    group_of = _groups_of_optimizer(optimizer)
    alone = Peers()
    device = _device_of(model, config, alone)
    try:
        shards_of = partial(_make_shards, group_of=group_of, rule=rule, optimizer=optimizer, config=config, peers=alone)
        groups, shards, plan = _lay_out(model, config, shards_of, device)
    finally:
        device.close()
    return plan, [_size_of(group, unit_shards) for group, unit_shards in zip(groups, shards)]


def _lay_out(
    model: nn.Module,
    config: Config,
    make_shards: Callable[[Group], list[ParamShard]],
    device: Device,
    free: Mapping[Tier, int] | None = None,
) -> tuple[list[Group], list[list[ParamShard]], MemoryPlan]:
    """Groups, their shards and the plan. Where the device's budget is below what one moment holds, large layers run in
    tiles, of the largest size that fits."""
    refused: CapacityError | None = None
    for limit in (None, *_tile_limits(config)):
        tiled = tiling.candidates(model, limit, config.param_dtype) if limit is not None else {}
        if limit is not None and not tiled:
            continue
        groups = partition(model, config.units, tiled)
        shards = [make_shards(group) for group in groups]
        sizes = [_size_of(group, unit_shards) for group, unit_shards in zip(groups, shards)]
        held = held_nbytes(model, groups, {id(group): size.weight_nbytes for group, size in zip(groups, sizes)})
        try:
            plan = make_plan(sizes, config, held_nbytes=held, free=free, device=device)
        except CapacityError as error:
            refused = error
            if any(size.is_sliced for size in sizes):
                break  # tiles would be gathered one by one
            continue
        if tiled:
            _tell_of_tiles([group for group in groups if group.tile_rows], config)
        return groups, shards, plan
    raise refused


def _tell_of_tiles(groups: list[Group], config: Config) -> None:
    counts = [f"{group.name} x {-(-group.params[0].size(0) // group.tile_rows)}" for group in groups]
    logger.warning(
        "device_memory=%s does not hold the largest unit: %d layers run in tiles (%s%s). Their sums are added in another "
        "order than untiled ones.", format_nbytes(config.device_memory), len(groups), ", ".join(counts[:4]),
        ", ..." if len(counts) > 4 else "",
    )  # fmt: skip


def _tile_limits(config: Config) -> Iterator[int]:
    """Sizes of a tile to try, in bytes, largest first."""
    if config.device_memory is not None and config.params != "device":
        limit = 1 << max(0, (config.device_memory // 4).bit_length() - 1)
        while limit > tiling.SMALLEST_TILE_NBYTES:
            yield limit
            limit //= 2
        yield tiling.SMALLEST_TILE_NBYTES


def _size_of(group: Group, shards: list[ParamShard]) -> UnitSize:
    tile_nbytes = group.tile_rows * group.params[0].size(1) * shards[0].spec.dtype.itemsize if group.tile_rows else 0
    return UnitSize(group.name, tuple(_size_of_shard(shard) for shard in shards), tile_nbytes)


def _size_of_shard(shard: ParamShard) -> ShardSize:
    node_size = shard.peers.node.size if shard.peers.node is not None else 0
    return ShardSize(shard.spec, shard.layout.numel, shard.peers.size, shard.peers.keeps_gradients, node_size)


class Before:
    """Model and optimizer as they were before a wrap: what is changed there is known before it is changed, and :meth:`restore` may
    be called at any time, and more than once. Values are referred to, not copied."""

    HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
             "_forward_hooks_always_called", "_state_dict_hooks", "_load_state_dict_pre_hooks")  # fmt: skip

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None):
        self.materialized: Materialized | None = None  # what else has to be undone
        self._modules = [
            (module, _attributes_of(module), {name: type(hooks)(hooks) for name in self.HOOKS if (hooks := getattr(module, name, None))})
            for module in model.modules()
        ]
        self._params = [_ParamBefore(param) for param in model.parameters()]
        self._buffers = [(buffer, buffer.data) for buffer in model.buffers()]
        self._optimizer, self._attributes, self._state = optimizer, {}, {}
        if optimizer is not None:
            self._attributes, self._state = dict(optimizer.__dict__), dict(optimizer.state)

    def restore(self) -> None:
        for module, attributes, hooks_of in self._modules:
            for name in _attributes_of(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name in self.HOOKS:
                if (hooks := getattr(module, name, None)) is not None:
                    hooks.clear()
                    hooks.update(hooks_of.get(name, {}))
        for param in self._params:
            param.restore()
        if self.materialized is not None:
            self.materialized.undo()
        for buffer, data in self._buffers:
            if buffer.device != data.device:
                buffer.data = data
        if self._optimizer is not None:
            self._optimizer.__dict__.update(self._attributes)
            self._optimizer.state.update(self._state)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Its own attributes, but weak references to its weights: while there is one, torch does not let their contents be swapped."""
    return {name: value for name, value in module.__dict__.items() if name != "_flat_weight_refs"}


class _ParamBefore:
    """One parameter as it was."""

    def __init__(self, param: nn.Parameter):
        self._param, self._class, self._data, self._grad = param, param.__class__, param.data, param.grad
        self._wanted = param.requires_grad
        self._has_data = param.layout is torch.strided and not param.is_meta
        hooks = param._post_accumulate_grad_hooks
        self._attributes, self._hooks = dict(param.__dict__), None if hooks is None else type(hooks)(hooks)

    def restore(self) -> None:
        param = self._param
        if param.__class__ is not self._class:
            param.__class__ = self._class
        if param.__dict__.keys() != self._attributes.keys():
            for name in param.__dict__.keys() - self._attributes.keys():
                del param.__dict__[name]
        if param._post_accumulate_grad_hooks is not None:
            param._post_accumulate_grad_hooks = self._hooks
        if self._has_data and not param.is_meta and param.untyped_storage()._cdata != self._data.untyped_storage()._cdata:
            param.data = self._data
        if param.grad is not self._grad:
            param.grad = self._grad
        param.requires_grad_(self._wanted)


class _Moved:
    """What a model has beside managed parameters, on the device that computes; :meth:`remove` puts it back."""

    def __init__(self, model: nn.Module, where: torch.device):
        self._from: dict[torch.Tensor, torch.device] = {}
        for tensor in _rest_of(model):
            if not tensor.is_meta and tensor.device != where:
                self._from[tensor] = tensor.device
                tensor.data = tensor.data.to(where)

    def remove(self) -> None:
        """A second call does nothing."""
        for tensor, where in self._from.items():
            tensor.data = tensor.data.to(where)


def _rest_of(model: nn.Module) -> list[torch.Tensor]:
    """Buffers, and parameters that the engine does not move."""
    return [*model.buffers(), *(param for param in model.parameters() if not is_managed(param))]


def _commit(
    model, optimizer, rule, engine: Engine, groups: list[Group], group_of: dict, moved: _Moved
) -> tuple:
    """Changes the model. Everything that can fail for want of space or for bad input is behind us."""
    came_from = {param: param.device for unit in engine.units for shard in unit.shards for param in shard.params}
    engine.attach(parameter_names(model), group_of)
    owners: dict[nn.Module, list[ParamUnit]] = {}
    for group, unit in zip(groups, engine.units):
        for owner in group.owners:
            owners.setdefault(owner, []).append(unit)
    for group, unit in zip(groups, engine.units):
        # Also one whose module runs around others: its gradients may come before and after theirs.
        around = any(module in owners for owner in group.owners for module in owner.modules() if module is not owner)
        unit.is_shared = len(group.owners) != 1 or around
    removers = [moved, *hooks.install(engine, model, owners), *_install_state_dict(engine, model)]
    removers += tiling.install(engine, model, {g.params[0]: g.tile_rows for g in groups if g.tile_rows})
    if engine.config.micro_batch is not None:
        blocks = [(group.name, group.block) for group in groups if group.block is not None]
        removers += [microbatch.install(engine, name, block, engine.config.micro_batch) for name, block in blocks]
    if engine.activations is not None and (planner := engine.activations.planner) is not None:
        blocks = [group.block for group in groups if group.block is not None]
        removers += [ReplacedForward(block, planner.add(block, engine.units_of(block))) for block in blocks]
    managed = None
    if optimizer is not None:
        managed = InfinityOptimizer(engine, optimizer, rule)
        for param in group_of:
            handle = handle_of(param)
            handle.step = saved_step(optimizer.state.get(param, {}))
            if raw_grad(param) is not None:
                set_raw_grad(param, None)
                handle.grad.state = GradState.LANDED
        optimizer.state.clear()
    model.__dict__[RECORD] = Wrapped(engine, removers, managed, came_from)
    return model, managed


def _groups_of_optimizer(optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, int]:
    groups = optimizer.param_groups if optimizer is not None else []
    return {param: index for index, group in enumerate(groups) for param in group["params"]}


# --- building ---


def _make_shards(group: Group, group_of: dict, rule, optimizer, config: Config, peers: Peers) -> list[ParamShard]:
    """One shard per kind of parameter in the group; inside one, parameters of an optimizer group are neighbours."""
    by_spec: dict[ShardSpec, list[nn.Parameter]] = {}
    for param in group.params:
        spec = _spec(param, param in group_of, rule, optimizer, config)
        by_spec.setdefault(spec, []).append(param)
    return [
        ParamShard(spec, sorted(params, key=lambda param: group_of.get(param, 0)), peers) for spec, params in by_spec.items()
    ]


def _spec(param: nn.Parameter, stepped: bool, rule, optimizer, config: Config) -> ShardSpec:
    dtype = config.param_dtype if config.param_dtype and param.is_floating_point() else param.dtype
    master = native.Master.OWN
    if stepped and dtype != torch.float32 and config.master != "none":
        split = config.master == "split" and dtype == torch.bfloat16
        master = native.Master.SPLIT if split else native.Master.FLOAT32
    return ShardSpec(
        wrapped_dtype=param.dtype,
        dtype=dtype,
        master=master,
        grad_dtype=config.grad_dtype or dtype,
        moment_dtype=MOMENTS[config.moments],
        moment_count=len(moment_names(rule, optimizer.param_groups)) if stepped else 0,
        stepped=stepped,
    )


class _Homes:
    """Takes values home and back before the parameters know of the engine."""

    def __init__(self, engine: Engine, store: ArrayIO):
        self._store = store
        shards = [shard for unit in engine.units for shard in unit.shards]
        self._places = {param: (shard, index) for shard in shards for index, param in enumerate(shard.params)}

    def send(self, param: nn.Parameter, begin: int, values: torch.Tensor, *, drawn: bool) -> None:
        shard, index = self._places[param]
        if drawn:  # at random, by every rank for itself
            values = shard.peers.broadcast(values.clone(), "the initial values")
        shard.write_first_values(self._store, index, begin, values)

    def span(self, param: nn.Parameter) -> tuple[int, int]:
        shard, index = self._places[param]
        place = shard.layout.placements[index]
        if not place.is_row_major:
            return 0, place.numel
        begin, end = shard.slice_part(index)
        return begin - place.offset, end - place.offset

    def recall(self, param: nn.Parameter) -> torch.Tensor:
        shard, index = self._places[param]
        return shard.read_value(self._store, index)


@torch.no_grad()
def _send_home(
    peers: Peers, store: ArrayIO, shard: ParamShard, optimizer: torch.optim.Optimizer | None, rule, *, done: set[nn.Parameter]
) -> None:
    """Copies values (but of those that are ``done``), moments and gradients to the shard's homes."""
    for index, param in enumerate(shard.params):
        if not param.numel():
            continue
        if param not in done:
            shard.write_value(store, index, _first(peers, param, "a parameter"), version=0, fresh=True)
        if not shard.spec.stepped:
            continue
        state = optimizer.state.get(param, {})
        for name, array in moment_names(rule, optimizer.param_groups).items():
            if state.get(name) is not None:
                moment = _first(peers, state[name], "the optimizer's state")
                shard.write_moment(store, array, index, moment, version=0)
        if (grad := raw_grad(param)) is not None:
            if not peers.alone:
                raise ConfigError("a parameter has a gradient already, of one rank's batch: call zero_grad() before wrap_model")
            shard.write_flat(store, "grad", index, grad, version=0)


def _first(peers: Peers, tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The first rank's ``tensor``."""
    return tensor if peers.alone else peers.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), what)


# --- state dicts of the model ---


def _install_state_dict(engine: Engine, model: nn.Module) -> list:
    """Hooks that put full tensors into state dicts, and refuse a load that would replace the parameters."""
    removers = []

    def fill(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        with engine.using():
            for name, param in module._parameters.items():
                value = state.get(prefix + name)
                # With keep_vars the value is the Parameter itself, and stays it.
                if value is not None and handle_of(param) is not None and not isinstance(value, nn.Parameter):
                    state[prefix + name] = _full_value(engine, handle_of(param), state)

    def before_load(module, state, prefix, metadata, strict, missing, unexpected, errors) -> None:
        with engine.using():
            pass  # what an exception left of the last use is put right
        if metadata.get("assign_to_params_buffers"):
            raise UsageError("load_state_dict(assign=True) would replace managed parameters: load without assign")

    for module in model.modules():
        if any(handle_of(param) is not None for param in module.parameters(recurse=False)):
            removers.append(module._register_state_dict_hook(fill))
            removers.append(module.register_load_state_dict_pre_hook(before_load))
    return removers


def _full_value(engine: Engine, handle, state: dict) -> torch.Tensor:
    """The value of a parameter. A tied one is one tensor under all its names in one state dict, as torch has it."""
    known = engine.tied_copies.get(handle, lambda: None)()
    if known is not None and any(value is known for value in state.values()):
        return known
    value = handle.shard.read_value(engine.store, handle.index)
    if len(handle.names) > 1:
        engine.tied_copies[handle] = weakref.ref(value)
    return value


# --- the other public functions ---


@contextmanager
def full_params(
    model: nn.Module, names: str | list[str] | None = None, writeback: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Gathers parameters for reading or editing: yields ``{name: tensor}``.

    names
        Parameter names or module prefixes; None: all. The tensors are copies in the dtype the model computes in, tied
        parameters one under all their names. They stay valid afterwards, charged to ``device_memory`` only inside. In the
        block the parameters of the module stand for them. What is computed from either trains: a gradient of it is the
        parameter's. Where that is not wanted (an average of weights, numpy()), use torch.no_grad() around it, or detach().
    writeback
        Writes edits to the master when the block ends. Elements that were not edited keep their master's bits.

    Raises UsageError at the end when something was edited without ``writeback``; the old values stand then, as they do
    when the block raises. Raises CapacityError when the parameters exceed a given ``device_memory``.
    """
    engine = engine_of(model)
    with engine.using():
        selected = _select(model, names)
        nbytes = sum(param.numel() * param.itemsize for param in set(selected.values()))
        charge = engine.ledger.reserve(Tier.DEVICE, nbytes, "full_params")
        copies = {param: _Copy(engine, param) for param in dict.fromkeys(selected.values())}
    try:
        yield {name: copies[param].lent.tensor for name, param in selected.items()}
    finally:
        for copy in copies.values():
            copy.lent.end()
        charge.release()
    with engine.using():
        edited = {name: copies[param] for name, param in selected.items() if copies[param].is_edited()}
        if edited and not writeback:
            raise UsageError(
                f"full_params: {', '.join(list(edited)[:5])} was edited without writeback=True; the old values stand. "
                "Use `with infinity.full_params(model, names, writeback=True)`."
            )
        for copy in edited.values():
            copy.check_unchanged_at_home()
        if writeback and not engine.peers.alone:
            engine.peers.same(f"leaving full_params with {len(edited)} edited", *(copy.tensor for copy in edited.values()))
        engine.write_edits([(copy.handle, copy.tensor) for copy in dict.fromkeys(edited.values())])


def engine_of(model: nn.Module) -> Engine:
    """The engine of a wrapped model. Raises UsageError where its unwrap has begun."""
    record = wrapped(model)
    if record.unwrapping is not None:
        raise UsageError("unwrap_model was cut short by an exception: call it again, with the same model")
    return record.engine


class _Copy:
    """One gathered parameter: the copy that the user has, and what it was."""

    def __init__(self, engine: Engine, param: nn.Parameter):
        self.handle = handle_of(param)
        self._version = self.handle.version
        value = self.handle.shard.read_value(engine.store, self.handle.index, self.handle.shard.spec.dtype)
        self.lent = Lent(param, value.to(engine.device.where))
        self._digest = self._hash()

    @property
    def tensor(self) -> torch.Tensor:
        """The value as it is now."""
        return self.lent.tensor.detach()

    def _hash(self) -> bytes:
        flat = self.tensor.cpu().contiguous().view(-1)
        return hashlib.blake2b(flat.view(torch.uint8).numpy() if flat.numel() else b"").digest()

    def is_edited(self) -> bool:
        return self._hash() != self._digest

    def check_unchanged_at_home(self) -> None:
        if self.handle.version != self._version:
            raise UsageError(
                f"full_params: {self.handle.name} was edited, but a step, a load or another full_params changed it "
                "meanwhile. End the block before that."
            )


def _select(model: nn.Module, names: str | list[str] | None) -> dict[str, nn.Parameter]:
    managed = {n: p for n, p in model.named_parameters(remove_duplicate=False) if handle_of(p) is not None}
    if names is None:
        return managed
    selected = {}
    for wanted in [names] if isinstance(names, str) else names:
        found = {n: p for n, p in managed.items() if n == wanted or n.startswith(wanted + ".") or wanted == ""}
        if not found:
            near = difflib.get_close_matches(wanted, managed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"full_params: no parameter or module {wanted!r}{hint}")
        selected |= found
    return selected


@torch.no_grad()
def unwrap_model(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Gives plain torch objects back: parameters with their bytes in memory, in the dtypes they were wrapped with, and
    the optimizer that was wrapped, with its state. The homes are closed and removed.

    Raises UsageError when ``model`` is not wrapped, or its optimizer is not given.
    """
    if isinstance(optimizer, InfinityOptimizer) and optimizer.is_unwrapped and RECORD not in model.__dict__:
        return model, optimizer.wrapped  # an exception struck, and the unwrap came to its end all the same
    record = wrapped(model)
    engine = record.engine
    managed = optimizer if optimizer is not None else record.optimizer
    if managed is not None and (not isinstance(managed, InfinityOptimizer) or managed._engine is not engine):
        raise UsageError("this optimizer is not the one that wrap_model returned with this model")
    plain = managed.wrapped if managed is not None else None
    if record.unwrapping is None:
        with engine.using():
            change = _plan_unwrap(model, record, managed)
        engine.halted = partial(UsageError, "unwrap_model was cut short by an exception: call it again, with the same model")
        record.unwrapping = change
    try:
        native.insist(record.unwrapping)
    except BaseException:
        if managed is not None:
            managed.is_unwrapped = True
        raise
    return model, plain


def _plan_unwrap(model: nn.Module, record: Wrapped, managed: InfinityOptimizer | None) -> Callable[[], None]:
    """Reads all that goes back into memory. Returns what makes the model and its optimizer plain ones: nothing is changed before
    that is called, and it may be called until it comes to its end."""
    engine = record.engine
    engine.settle()
    state = managed.plain_state_dict() if managed is not None else None
    values: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for unit in engine.units:
        for shard in unit.shards:
            for index, param in enumerate(shard.params):
                value, grad, place = shard.read_value(engine.store, index), param.grad, record.came_from[param]
                values[param] = value.to(place), None if grad is None else grad.clone().to(place, shard.spec.wrapped_dtype)
    engine.prefetcher.release_all(engine.units)

    def change() -> None:
        for remover in reversed(record.removers):  # a forward may have been replaced twice
            remover.remove()
        for param, (value, grad) in values.items():
            param.__class__ = nn.Parameter
            param.__dict__.pop("_infinity", None)
            param.data, param.grad = value, grad
        if managed is not None:
            managed.wrapped.load_state_dict(state)
        engine.shut_down()
        model.__dict__.pop(RECORD, None)
        engine.halted = None

    return change
