"""Lay out: groups a model's parameters into units of flat params, and plans their homes. If memory
does not hold the state, chooses a scratch folder."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ... import native
from ...choices import AUTO, MOMENT_DTYPES
from ...config import Config
from ...errors import CapacityError, ConfigError, InternalError
from ...files.kept_dtypes import computing_dtypes
from ...ranks.collectives import Collectives
from ...ranks.parallel_dims import ParallelDims
from ..machine import limits, scratch
from ..machine.accelerator import make_device
from ..machine.device import Device
from ..machine.scratch import Candidate
from ..machine.sizes import format_nbytes
from ..machine.tiers import BUDGETS, Tier
from ..plan.budgets import measured_free
from ..plan.memory_plan import MemoryPlan, term_of
from ..plan.plan import make_plan
from ..plan.unit_sizes import SUMMED_AT_ONCE, FlatParamSize, UnitSize
from ..seams import kinds
from ..step.recognised import Optimizers, as_given
from ..units.flat_param import FlatParam
from ..units.flat_param_spec import ARRAYS, FlatParamSpec
from .agreement import free_everywhere, least
from .changes import Changes
from .checks import check
from .described_model import DescribedModel, read_model
from .partition import Group, held_nbytes, partition
from .remedies import with_remedies
from .unmoved import unmoved_nbytes

logger = logging.getLogger(__name__)


def choose_device(model: DescribedModel, config: Config, collectives: Collectives) -> Device:
    """Chooses the device that computes: the configured one, else that of the parameters. Raises
    ConfigError if these are on several devices."""
    places = {p.device for p in model.managed.values() if not p.is_meta}
    if config.device is None and len(places) > 1:
        raise ConfigError(
            f"the model's parameters are on {', '.join(sorted(map(str, places)))}: move it to one"
            " device, or say which computes: Config(device='cuda')"
        )
    where = (
        torch.device(config.device)
        if config.device is not None
        else next(iter(places), torch.device("cpu"))
    )
    # One device for each rank of a machine.
    if where.type != "cpu" and where.index is None and not collectives.ranks.alone:
        where = torch.device(
            where.type,
            int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.accelerator.device_count()),
        )
        # Else every rank would also have a context on device 0.
        torch.accelerator.set_device_index(where.index)
    if where.type == "cpu" and config.device is None and torch.accelerator.is_available():
        there = torch.accelerator.current_accelerator()
        logger.warning(
            "this model is on the CPU and is computed there, though there is %s:"
            " Config(device='%s')",
            there,
            there,
        )
    return make_device(where, collectives.traffic)


def lay_out(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    config: Config,
    ranks: ParallelDims | None = None,
    device: Device | None = None,
    *,
    reuses: bool = False,
    explains: bool = True,
) -> tuple[MemoryPlan, list[UnitSize]]:
    """Returns :func:`wrap_model`'s plan for the model, and the sizes of its units, without
    allocating or changing anything. ``ranks`` and ``device``: the planned ones, which need not
    exist; None: one rank, and the device that would compute here. ``reuses``: see
    :func:`make_plan`. ``explains``: see :func:`lay_out_here`."""
    given, alone, changes = as_given(optimizer), Collectives(ranks), Changes()
    with contextlib.ExitStack() as undo:
        undo.callback(changes.undo)
        changes.prepare(model)
        described = read_model(model)
        check(described, given, config)
        described = changes.make(described, given, config)
        device = device or choose_device(described, config, alone)
        undo.callback(device.close)
        laid = lay_out_here(
            described,
            config,
            Optimizers(given, names=described.names),
            device,
            alone,
            reuses=reuses,
            explains=explains,
        )
    return laid.plan, laid.sizes


class Ways:
    """The ways to lay one model out: its groups, flat params and sizes by the classes of ``units``
    and by the weights that are not gathered whole. They are the same for all homes and budgets."""

    def __init__(
        self,
        model: DescribedModel,
        config: Config,
        optimizers: Optimizers,
        device: Device,
        collectives: Collectives,
        *,
        reuses: bool = False,
    ):
        """``config``: its dtypes and master are those of every way. ``reuses``: see
        :func:`make_plan`."""
        self.model, self.device, self._reuses = model, device, reuses
        self._config, self._optimizers, self.collectives = config, optimizers, collectives
        # The dtype in which a parameter computes
        self.dtype_of = computing_dtypes(model, cast("torch.dtype | None", config.param_dtype))
        self._buffers_nbytes = unmoved_nbytes(model)
        self._made: dict[tuple, _Way | None] = {}

    def lay_out(
        self,
        config: Config,
        free: Mapping[Tier, int] | None,
        *,
        splits: bool = True,
        surely: bool = False,
    ) -> Laid:
        """Makes the groups, their flat params and the plan. If the device's budget is below the
        bytes that are held together, the first split of an extension's that fits is taken. Without
        a budget that is what is free, if ``splits`` lets them. ``surely``: only by a split that
        holds whatever the code does. ``free``: see :func:`make_plan`. Raises CapacityError if no
        plan fits."""
        refused: CapacityError | None = None
        whole: partial[MemoryPlan] | None = None
        for split in itertools.chain(
            [None], *(each.splits(config, free, self) for each in kinds())
        ):
            if split is not None and surely and not split.is_sure:
                break
            if split is not None and config.device_memory is None:
                # What is free of the device is too small, or of the memory that it shares with the
                # host. Splits do little for budgets that were given.
                if not splits or refused is None:
                    break
                if any(getattr(config, name) is not None for name in refused.needed):
                    break
            way = self._way(config, split)
            if way is None:
                continue
            plan_of = partial(
                make_plan,
                way.sizes,
                held_nbytes=way.held_nbytes,
                free=free,
                device=self.device,
                reuses=self._reuses,
                buffers_nbytes=self._buffers_nbytes,
            )
            whole = whole or plan_of
            try:
                plan = plan_of(config)
            except CapacityError as error:
                if split is None or split.is_sure:
                    refused = error
                continue
            refuses_window = partial(_refuses_window, whole)
            return Laid(config, way.groups, way.flat_params, way.sizes, plan, refuses_window, split)
        if refused is None:
            raise InternalError("no plan was tried")
        raise refused

    def sizes(self, config: Config) -> list[UnitSize]:
        """Returns the sizes of the units that are gathered whole."""
        way = self._way(config, None)
        return [] if way is None else way.sizes

    def refusal(
        self,
        config: Config,
        *,
        given: Config,
        free: Mapping[Tier, int] | None,
        room: Mapping[Tier, int],
    ) -> CapacityError | None:
        """Returns the error of a configuration that does not fit, or has a larger budget than the
        ``given`` one for which there is no ``room``."""
        for tier, most in room.items():
            budget, before = (getattr(each, BUDGETS[tier]) for each in (config, given))
            if budget is not None and (before is None or budget > before) and budget > most:
                return CapacityError(f"{BUDGETS[tier]}: there are {format_nbytes(most)}")
        if free is not None and config.nvme_paths and not free[Tier.NVME]:
            free = {**free, Tier.NVME: measured_free(Tier.NVME, config, self.device)}
        try:
            self.lay_out(config, free, surely=True)
        except CapacityError as error:
            return error
        return None

    def _way(self, config: Config, split: Any) -> _Way | None:
        """Returns the way with ``split``; None: it has nothing to split."""
        key = config.units, None if split is None else split.key
        if key in self._made:
            return self._made[key]
        at_once = {} if split is None else split.rows(self)
        if split is not None and not at_once:
            self._made[key] = None
            return None
        groups = partition(self.model, cast("str | tuple[str, ...]", config.units), at_once)
        flat_params = [self._flat_params_of(group) for group in groups]
        for group in groups:
            if group.at_once is None:
                group.tables = {p for p in group.params if p in self.model.tables}
        sizes = [_unit_size(*of_unit) for of_unit in zip(groups, flat_params)]
        held = held_nbytes(
            self.model,
            groups,
            {id(group): size.weight_nbytes for group, size in zip(groups, sizes)},
        )
        self._made[key] = way = _Way(groups, flat_params, sizes, held)
        return way

    def _flat_params_of(self, group: Group) -> list[FlatParam]:
        """Makes one flat param for each kind of parameter in the group, and for each optimizer.
        Inside a flat param, parameters of one optimizer group are adjacent."""
        by_spec: dict[FlatParamSpec, list[nn.Parameter]] = {}
        for param in group.params:
            by_spec.setdefault(self._spec_of(param), []).append(param)
        collectives = self.collectives
        return [
            FlatParam(
                spec,
                sorted(params, key=self._optimizers.order_of),
                collectives.of_experts if group.is_divided else collectives,
                is_whole=group.at_once is None,
            )
            for spec, params in by_spec.items()
        ]

    def _spec_of(self, param: nn.Parameter) -> FlatParamSpec:
        config, dtype = self._config, self.dtype_of(param)
        # A gradient is not narrower than its parameter: one kept in fp32 has an fp32 gradient.
        grad_dtype = dtype if dtype == torch.float32 else config.grad_dtype or dtype
        frozen = FlatParamSpec(
            wrapped_dtype=param.dtype,
            dtype=dtype,
            master=native.Master.OWN,
            grad_dtype=cast(torch.dtype, grad_dtype),
            moment_dtype=MOMENT_DTYPES[config.moments],
            moments=(),
            stepped=False,
            exact=param in self.model.codes,
        )
        place, stepped_by = self._optimizers.optimizer_index_of(param), self._optimizers.of(param)
        if place is None or stepped_by is None:
            return frozen
        moments = self._optimizers.arrays_of(param, config)
        return frozen.trained(config.master, moments, place, needs=stepped_by.known.needs)


class _Way(NamedTuple):
    groups: list[Group]
    flat_params: list[list[FlatParam]]
    sizes: list[UnitSize]
    held_nbytes: int


class Laid(NamedTuple):
    """The result of :meth:`Ways.lay_out`. ``refuses_window``: plans without a split for a window of
    so many bytes, and so many of gradients and of what is not planned beside it. Returns the error
    of a configuration that is too small for them, or None. An engine keeps it, so it refers to no
    parameter."""

    config: Config
    groups: list[Group]
    flat_params: list[list[FlatParam]]
    sizes: list[UnitSize]
    plan: MemoryPlan
    refuses_window: Callable[[int, int, int, Config], CapacityError | None]
    split: Any  # an extension's; None: all weights are gathered whole


def _refuses_window(
    whole: partial[MemoryPlan],
    window_nbytes: int,
    grad_nbytes: int,
    beside_nbytes: int,
    config: Config,
) -> CapacityError | None:
    try:
        plan = whole(config)
    except CapacityError as error:
        return error
    units, budget = whole.args[0], cast(int, config.device_memory)
    moved = sum(
        unit.weight_nbytes
        for index, unit in enumerate(units)
        if plan.tiers_of(index)["weight"] is not Tier.DEVICE
    )
    window = min(window_nbytes, moved)
    room = plan.device_window_nbytes
    # A window is no larger than all weights: all else uses what is left, too.
    left = budget - plan.planned_nbytes(Tier.DEVICE)
    short = max(
        window - room,
        window + grad_nbytes - room - plan.autograd_nbytes - left,
        window + beside_nbytes - room - left,
    )
    if short <= 0:
        return None
    if config.params == AUTO:  # more memory becomes a home before it becomes a window
        short = max(short, budget // 8)
    refused = CapacityError(f"the device window lacks {format_nbytes(short)}")
    refused.needed = {BUDGETS[Tier.DEVICE]: budget + short}
    return refused


def _unit_size(group: Group, flat_params: list[FlatParam]) -> UnitSize:
    at_once_nbytes = 0
    if group.at_once is not None:
        at_once_nbytes = group.at_once.numel * flat_params[0].spec.dtype.itemsize
    return UnitSize(
        group.name,
        tuple(_size_of_flat_param(flat) for flat in flat_params),
        at_once_nbytes,
        group.place,
        sum(_autograd_nbytes(flat, group) for flat in flat_params),
    )


def _autograd_nbytes(flat_param: FlatParam, group: Group) -> int:
    """Counts the gradients of a flat param that a backward holds at once. Those of a tied weight
    wait for each other: one waits, one is made, and their sum. Only one rank lands those of tables
    use by use."""
    if not flat_param.spec.stepped:
        return 0
    if group.at_once is not None:
        itemsize = flat_param.spec.dtype.itemsize + group.at_once.summed_itemsize
        return group.at_once.numel * itemsize
    by_use = set() if _size_of_flat_param(flat_param).is_averaged else group.tables
    return flat_param.spec.dtype.itemsize * sum(
        place.numel * (SUMMED_AT_ONCE if param in group.tied - by_use else 1)
        for param, place in zip(flat_param.params, flat_param.layout.placements)
    )


def _size_of_flat_param(flat_param: FlatParam) -> FlatParamSize:
    ranks = flat_param.ranks
    return FlatParamSize(
        flat_param.spec,
        flat_param.layout.numel,
        shards=ranks.size,
        replicas=ranks.replicate_group.size if ranks.replicate_group is not None else 1,
        data_size=ranks.data_size,
        whole_grad=ranks.keeps_gradients,
        node_size=ranks.node_group.size if ranks.node_group is not None else 0,
        shapes=tuple(place.shape for place in flat_param.layout.placements),
    )


def _within_device(
    model: DescribedModel, config: Config, device: Device, collectives: Collectives
) -> tuple[Config, int | None]:
    """Returns ``config`` with no more ``device_memory`` than the device can give, and how much that
    is (None: unknown). Every rank calls this. Raises CapacityError if it can give nothing."""
    if config.device_memory is None or device.memory is None:
        return config, None
    left = device.memory.left_nbytes(several_ranks=not collectives.ranks.alone)
    if left is None:
        return config, None
    # Parameters that are there move into the plan's homes.
    own = sum(param.nbytes for param in model.users if param.device == device.where)
    (most,) = least(collectives, [left + own], "device memory", collectives.ranks.unit_channels)
    asked = int(config.device_memory)
    if asked <= most:
        return config, most
    if not most:
        raise CapacityError(
            f"device_memory is {format_nbytes(asked)}, but {device.where} has nothing left beside"
            " other tensors and processes and what cuBLAS and NCCL need. Free some of it, or"
            " compute elsewhere: Config(device='cpu')"
        )
    logger.warning(
        "device_memory is %s, but %s can give %s, beside other tensors and processes and what"
        " cuBLAS%s needs: it is planned with that. Activations need room, too.",
        format_nbytes(asked),
        device.where,
        format_nbytes(most),
        "" if collectives.ranks.alone else " and NCCL",
    )
    return dataclasses.replace(config, device_memory=most), most


def lay_out_here(
    model: DescribedModel,
    config: Config,
    optimizers: Optimizers,
    device: Device,
    collectives: Collectives,
    *,
    share: Fraction = Fraction(1),
    reuses: bool = False,
    explains: bool = True,
) -> Laid:
    """Lays the model out on this machine. With ``nvme_paths="auto"`` it uses memory only if that
    holds the state, else also a scratch folder, which it puts into the layout's configuration. One
    log line gives the choice and its reason. ``explains``: an error for too little memory says what
    to change. ``share``: this rank's fraction of its machine.

    Every rank calls this. Raises CapacityError, or ConfigError if a folder is needed and none can
    be used.
    """

    config, most = _within_device(model, config, device, collectives)
    ways = Ways(model, config, optimizers, device, collectives, reuses=reuses)
    placed = partial(_placed, ways, share, most)
    if config.nvme_paths != AUTO:
        return placed(config, explains=explains)
    left, limit = limits.tightest()
    homes = config.params, config.optimizer

    def in_memory(*, splits: bool) -> Laid | None:
        if "nvme" in (*homes, config.activations):
            return None
        without = dataclasses.replace(config, nvme_paths=())
        # On all ranks alike: they plan with the minimum of their free bytes.
        with contextlib.suppress(CapacityError):
            laid = placed(without, splits=splits, explains=False)
            if AUTO in homes and collectives.ranks.is_first:
                _tell(laid.plan, left, limit, None)
            return laid
        return None

    if (laid := in_memory(splits=False)) is not None:
        return laid
    folders = scratch.candidates()
    # All arrays that this rank has at home: the upper bound for the disk.
    needed = sum(
        flat.nbytes(name)
        for size in ways.sizes(config)
        for flat in size.flat_params
        for name in ARRAYS
    )
    chosen = scratch.choose(folders, needed * collectives.ranks.local_size)
    everywhere, usable = least(
        collectives,
        [chosen is not None, chosen.usable_nbytes // collectives.ranks.local_size if chosen else 0],
        "scratch folders",
        collectives.ranks.unit_channels,
    )
    if not everywhere or chosen is None:
        if (laid := in_memory(splits=True)) is not None:
            return laid
        looked_at = ", ".join(map(str, folders)) or "no folder"
        raise ConfigError(
            f"weights, optimizer state and gradients are {format_nbytes(needed)}, and {limit}"
            f" leaves {format_nbytes(left)}, of which a part is activations'. A folder on a disk is"
            " needed, and none was found here, or on another machine of the job: looked at"
            f" {looked_at}. Name one: Config(nvme_paths=['/path/on/the/disk'])"
        )
    capacity = usable if config.nvme_capacity is None else config.nvme_capacity
    config = dataclasses.replace(config, nvme_paths=(chosen.folder,), nvme_capacity=capacity)
    laid = placed(config, explains=explains)
    if collectives.ranks.is_first:
        _tell(laid.plan, left, limit, chosen)
    return laid


def _placed(
    ways: Ways,
    share: Fraction,
    most: int | None,
    config: Config,
    *,
    splits: bool = True,
    explains: bool,
) -> Laid:
    """Lays the model out in the homes of ``config``, and says what that costs. ``most``: the bytes
    of the device, if they are known. Every rank calls this. Raises CapacityError."""
    collectives, device = ways.collectives, ways.device
    free = free_everywhere(config, collectives, device, share)
    try:
        laid = ways.lay_out(config, free, splits=splits)
    except CapacityError as error:
        if not explains:
            raise
        room = _room(config, device, most)
        works = partial(ways.refusal, given=config, free=free, room=room)
        sizes = ways.sizes(config)
        raise with_remedies(
            error,
            config,
            works,
            steps=any(flat.spec.stepped for size in sizes for flat in size.flat_params),
            largest_nbytes=max((size.weight_nbytes for size in sizes), default=0),
            frees=device.on_paper is None,
            share=share,
        ) from None
    if laid.split is not None:
        laid.split.tell(laid.groups, config)
    if collectives.ranks.is_first:
        trained = [flat for size in laid.sizes for flat in size.flat_params if flat.spec.stepped]
        kept_off = sum(flat.nbytes(name) for flat in trained for name in ARRAYS)
        if kept_off and not device.is_host and device.kernels is None:
            logger.warning(
                "%s has no optimizer kernels (%s): the processor steps, and %s of weights, state"
                " and gradients have their home outside of the device, though they may fit.",
                device.where,
                device.kernels_refusal,
                format_nbytes(kept_off),
            )
    return laid


def _room(config: Config, device: Device, most: int | None) -> dict[Tier, int]:
    """Returns the bytes of each tier that this machine can give, or that of a device on paper.
    ``most``: of the device, if that was found already."""
    if device.on_paper is not None:
        return device.on_paper
    tiers = [tier for tier in Tier if tier is not Tier.NVME or config.nvme_paths]
    room = {tier: measured_free(tier, config, device) for tier in tiers}
    return room if most is None else room | {Tier.DEVICE: most}


def _tell(plan: MemoryPlan, left: int, limit: str, chosen: Candidate | None) -> None:
    homes: dict[str, list[str]] = {term_of(name): [] for name in ARRAYS}
    for tier in Tier:
        for what, places in homes.items():
            if nbytes := plan.terms[tier].get(what, 0):
                places.append(f"{format_nbytes(nbytes)} on {tier}")
    held = "; ".join(f"{what} {' and '.join(places)}" for what, places in homes.items() if places)
    logger.warning(
        "homes chosen, for %s leaves %s, of which %s stay free for activations and data: %s%s."
        " To choose others: Config(params=, optimizer=, nvme_paths=)",
        limit,
        format_nbytes(left),
        format_nbytes(left - limits.for_the_engine(left)),
        held,
        f", swap files in {chosen.folder} ({chosen.usable_nbytes >> 30} GiB usable)"
        if chosen is not None
        else "",
    )
