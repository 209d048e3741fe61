"""Blocks: runs a model's repeated blocks in micro-batches, and chooses what to do with what each
block saves, or with each part of its batch, if there is a device budget to spend on it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from ...config import Config
from ...core.machine.device import Device
from ...core.machine.traffic import Traffic
from ...core.run.context import ForwardContext
from ...core.run.job import Job
from ...core.run.replaced_forward import ReplacedForward
from ...core.seams import Events, Extension
from ...core.units.unit import ParamUnit
from ...core.wrap.described_model import DescribedModel
from ...errors import ConfigError
from ...ext.rates.rates import memory_rate
from ...ranks.collectives import Collectives
from ...ranks.parallel_dims import ParallelDims
from .compiled import CompiledBlock, check_options
from .micro_batch import check_block, install_chunks
from .no_memory import note_memory
from .recompute import ActivationPlanner, MeasuredRoom
from .unaided import Unaided

logger = logging.getLogger(__name__)

LINK_RATE = 25e9  # bytes per second, of a link that nothing was measured on: PCIe 4.0


class Blocks(Extension):
    """How the blocks of one model run."""

    may_stand_aside = True

    def __init__(self, *, places_saved: bool):
        self.places_saved = places_saved
        self._planner: ActivationPlanner | None = None

    @classmethod
    def check_blocks(
        cls, config: Config, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
    ) -> None:
        """Raises ConfigError if torch refuses to compile as ``config`` asks, or if that has a
        micro-batch, and ``model`` no blocks, or one that depends on the whole batch."""
        if config.compile is not False:
            check_options(config.compile)
        if config.micro_batch is None:
            return
        if not blocks:
            raise ConfigError(
                f"micro_batch: {type(model).__name__} has no repeated block to run in parts of a"
                " batch. Name the classes that are: Config(units=[...])"
            )
        for name, block in blocks:
            check_block(name, block)

    @classmethod
    def begin(
        cls, config: Config, device: Device, collectives: Collectives, events: Events
    ) -> Blocks:
        """Returns the extension."""
        blocks = cls(places_saved=config.recompute and not _are_divided(collectives.ranks))
        events.allocated.append(_tell_if_nothing_is_chosen)
        events.forward_failed.append(note_memory)
        return blocks

    def replace_forwards(
        self,
        job: Job,
        model: DescribedModel,
        find: Callable[[], ForwardContext],
        blocks: Sequence[tuple[str, nn.Module, list[ParamUnit]]],
    ) -> list[Any]:
        """Lets blocks run in micro-batches, and as a planner chooses from now on, and compiles
        them."""
        compiled = self._compile(job.config, model.module, [block for _, block, _ in blocks])
        samples, recomputes = job.config.micro_batch, job.config.recompute
        if samples is None or recomputes:
            self._planner = plan_activations(job, find)
        planner = self._planner
        if samples is not None:
            return compiled + [install_chunks(find, *block, samples, planner) for block in blocks]
        if planner is None:
            return compiled
        return compiled + [
            ReplacedForward(block, planner.add(block, units)) for _, block, units in blocks
        ]

    def _compile(
        self, config: Config, model: nn.Module, blocks: Sequence[nn.Module]
    ) -> list[CompiledBlock]:
        if config.compile is False:
            return []
        if not blocks:
            logger.warning(
                "compile has no effect: %s repeats no block. Use torch.compile(model), or name the"
                " classes that are blocks: Config(units=[...])",
                type(model).__name__,
            )
        options = {} if config.compile is True else dict(config.compile)
        return [CompiledBlock(block, options) for block in blocks]

    def drop(self, job: Job) -> None:
        """Forgets what the planner has measured of the pass."""
        if self._planner is not None:
            self._planner.drop()


def plan_activations(job: Job, find: Callable[[], ForwardContext]) -> ActivationPlanner | None:
    """Chooses from now on which blocks' activations are kept, sent or recomputed, if there is a
    device budget to spend on them."""
    if job.activations is None or job.activations.spare_nbytes is None or _are_divided(job.ranks):
        return None
    spare_nbytes, memory = job.activations.spare_nbytes, job.device.memory
    room = None
    if memory is not None:
        # The planner alone says what stays
        job.activations.spare_nbytes = sys.maxsize
        job.activations.home.limit_in_flight(0)
        room = MeasuredRoom(
            memory,
            several_ranks=not job.ranks.alone,
            is_shown=lambda steps=job.steps, stepped=job.trained: steps.index > 0 or not stepped,
            limit_in_flight=job.activations.home.limit_in_flight,
        )
    planner = ActivationPlanner(
        find,
        job.device,
        spare_nbytes=spare_nbytes,
        # Not of the job: a graph that a user keeps leads to the planner.
        send_rate=partial(_send_rate, job.device, job.traffic, job.config),
        recomputes=job.config.recompute,
        unaided=Unaided(job.schedule, job.ranks, job.storages),
        home_nbytes=job.activations.home.room_nbytes,
        room=room,
    )
    job.activations.planner = planner
    return planner


def _tell_if_nothing_is_chosen(job: Job) -> None:
    if job.config.recompute and (why := _why_not_chosen(job)):
        logger.warning("recompute=True has no effect here: %s", why)


def _are_divided(ranks: ParallelDims) -> bool:
    """Tells whether other ranks have parts of a block, or of its sequences."""
    return ranks.is_cut or ranks.cp_group is not None


def _why_not_chosen(job: Job) -> str | None:
    """Returns why nothing is chosen for blocks; None if it is."""
    if _are_divided(job.ranks):
        return (
            "blocks that are divided over ranks (tp, cp, ep, pp) keep what they save. Use the"
            " model's own gradient checkpointing."
        )
    if job.config.activations != "auto":
        return f"activations={job.config.activations!r} is the home of all that is saved."
    if job.activations is None:
        return "no device_memory was given, so that all that is saved stays where it is computed."
    return None


def _send_rate(device: Device, traffic: Traffic, config: Config) -> float:
    """Returns the bytes per second of an activation's way home and back."""
    if device.is_host:
        # Every byte is read and written twice, in both directions.
        return memory_rate(room=config.host_memory) / 4
    ways = ("device->host", "host->device")
    return 1 / sum(1 / (traffic.rate(way) or LINK_RATE) for way in ways)
