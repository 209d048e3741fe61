"""wrap_model: moves a model's parameters and its optimizer's state to their homes.

[Note: why a failed wrap changes nothing] A wrap checks everything first, then allocates all memory
and disk space, then copies every value home, and only then hooks the model. If any step fails,
model and optimizer are restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ... import native
from ...choices import AUTO
from ...config import Config
from ...ranks.collectives import Collectives
from ...ranks.mesh import join_device, join_node, parallel_dims
from ..homes.write_behind import writing_behind
from ..machine.traffic import Traffic
from ..params.state_dict import install_state_dict
from ..run.build import build_engine
from ..run.context import found_weakly
from ..run.engine import Engine
from ..run.hooks import install_hooks
from ..run.registry import RECORD, Wrapped, is_wrapped, wrapped
from ..seams import kinds
from ..step.recognised import Optimizers, as_given, like_given
from ..units.forms import division_of
from ..units.unit import ParamUnit, flat_params_of
from .agreement import (
    agree,
    broadcast_rest,
    declare,
    own_budgets,
)
from .aliases import OwnViews, warn_of_aliases
from .before import Before, MovedRest
from .changes import Changes
from .checks import check
from .described_model import DescribedModel, Unmoved, is_managed, read_model
from .lay_out import choose_device, lay_out_here
from .make_optimizer import make_optimizer
from .partition import Group
from .parts import Parts
from .remedies import with_larger_budgets
from .send_home import HomeWriter, OwnValues
from .unmoved import report_unmoved

logger = logging.getLogger(__name__)

NOTHING_CHOSEN = {"nvme_paths": AUTO}


# Tensors made here are trained, even if the caller is in inference mode.
@torch.inference_mode(False)
def wrap_model(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike | None = None,
    *,
    mesh: Any = None,
) -> tuple[nn.Module | list[nn.Module], Any]:
    """Moves ``model``'s parameters and ``optimizer``'s state to their homes, and returns both.

    model
        Any module, its parameters on one device or on ``meta``. It computes there unless
        ``Config(device=...)`` names another. The same object is returned, hooked. Or a list of
        modules, this rank's pipeline stages. A wrapped model gets one more optimizer.
    optimizer
        ``torch.optim`` AdamW, Adam, SGD, or a Lion; its groups, hyperparameters and state are
        kept. None: nothing is updated. Or a list of them with disjoint parameters, returned as one.
    config
        A :class:`Config`, a dict of its fields, or the path of a TOML, JSON or YAML file. None: the
        homes, and a scratch folder if needed, follow from the machine; a log line gives the reason.
    mesh
        A ``DeviceMesh`` of the whole job with axes ``dp``, or ``dp_replicate`` and ``dp_shard`` (or
        ``fsdp``), ``cp`` or ``sp``, ``tp`` (parameters are DTensors over it, Shard or Replicate)
        and ``pp`` (see :func:`infinity.parallel.attach`). None: that of its DTensors, else the
        default process group, if there is one.

    Every rank calls this, with the same model and configuration; the first data rank's values are
    used. Raises ConfigError, CapacityError, StorageError, UsageError or PeerError with model and
    optimizer restored."""
    if isinstance(model, (list, tuple)) and model and all(isinstance(m, nn.Module) for m in model):
        _, stepping = wrap_model(Parts(model), optimizer, config, mesh=mesh)
        return list(model), stepping
    if isinstance(model, nn.Module) and is_wrapped(model) and optimizer is not None:
        return model, wrapped(model).join(optimizer, config)
    if mesh is None and isinstance(model, nn.Module):
        meshes = (division_of(each).mesh for each in model.parameters())
        mesh = next((each for each in meshes if each is not None), None)
    changes = Changes()
    with contextlib.ExitStack() as undo:
        undo.callback(changes.undo)
        stepping = _wrap(model, as_given(optimizer), config, mesh, changes, undo)
        changes.settle()
        model.__dict__[RECORD].release = changes.release
        undo.pop_all()
        return model, like_given(stepping, optimizer)  # type: ignore[return-value]


def _wrap(
    model: Any,
    given: Sequence[torch.optim.Optimizer],
    config: Config | Mapping[str, Any] | str | os.PathLike | None,
    mesh: Any,
    changes: Changes,
    undo: contextlib.ExitStack,
) -> list[torch.optim.Optimizer]:
    """Moves the model home and hooks it. Returns what stands for the optimizers. Every rank calls
    this. ``undo`` gets what restores the state before."""
    divides = any(kind.divides(model) for kind in kinds())
    ranks, traffic = parallel_dims(mesh, divides_experts=divides), Traffic()
    collectives = Collectives(ranks, traffic)
    undo.callback(lambda: collectives.close())
    with collectives.together("checking what wrap_model was given"):
        config = Config.make(config if config is not None else NOTHING_CHOSEN)
        if isinstance(model, nn.Module):
            changes.prepare(model)
        described = read_model(model)
        check(described, given, config)
        if config.speculate and ranks.is_first:
            logger.warning(
                "speculate=True does nothing any more, and the option goes with the next"
                " release: leave it out. Updates run under the next forward, or, without"
                " max_grad_norm, in the backward by optimizer.step_in_backward()."
            )
        warn_of_aliases(described, given, OwnViews(described))
        described = changes.make(described, given, config)
        for kind in kinds():
            kind.check_model(described, config, ranks)
        tables = declare(described, given, config, ranks)
    local_size, share, prefix = agree(tables, described.nbytes, collectives)
    ranks = dataclasses.replace(ranks, local_size=local_size, shard=config.shard)
    for kind in kinds():
        ranks = kind.describe_ranks(config, ranks)
    ranks = join_node(ranks, mesh) if config.shard_in_node else ranks
    collectives = Collectives(ranks, traffic, most_flags=2 * len(described.params) + 1)
    with collectives.together("finding what stays where it is"):
        named = [p for kind in kinds() for p in kind.unmoved(described, given, config, ranks)]
        unmoved = Unmoved(named)
        undo.callback(unmoved.remove)
    moved = set(filter(is_managed, described.users))
    optimizers = Optimizers(given, moved.__contains__, described.names)
    config = own_budgets(config, share)
    with collectives.together("planning"):
        device = choose_device(described, config, collectives)
        undo.callback(device.close)
        laid = lay_out_here(
            described,
            config,
            optimizers,
            device,
            collectives,
            share=share,
            reuses=isinstance(model, Parts) or ranks.pp_group is not None,
        )
    # An engine keeps these, and not the parameters that are laid out.
    fitted, refuses_window = laid.config, laid.refuses_window

    before, views = Before(described, given), OwnViews(described)
    if ranks.data_size > 1 and (device.backend is not None or device.where.type != "cpu"):
        join_device(ranks, mesh, device.backend)
    with collectives.together("allocating"):
        blocks = [
            (described.modules[block], block) for group in laid.groups for block in group.called
        ]
        for kind in kinds():
            kind.check_blocks(fitted, model, blocks)
        units = [
            ParamUnit(place, group.name, own, device)
            for place, (group, own) in enumerate(zip(laid.groups, laid.flat_params))
        ]
        for unit, group in zip(units, laid.groups):
            if group.reader is not None:
                unit.arrival.bring_rows(group.reader.choose)
        engine = build_engine(
            fitted,
            laid.plan,
            units,
            laid.sizes,
            stepping=len(optimizers) > 0,
            device=device,
            collectives=collectives,
            fraction=share,
            prefix=prefix,
            explain=lambda error, *nbytes: with_larger_budgets(
                error, fitted, partial(refuses_window, *nbytes), share
            ),
        )
        undo.callback(native.insist, engine.shut_down)
    undo.callback(native.insist, before.restore)
    with collectives.together("sharing weights"):
        for listener in engine.job.events.allocated:
            listener(engine.job)
    with collectives.together("sending the values home"):
        before.values = [
            found for kind in kinds() if (found := kind.first_values(described, fitted)) is not None
        ]
        # Every value, moment and gradient. Meta tensors become real.
        with writing_behind(engine.job.store) as store:
            writer, sent = HomeWriter(engine.job, store), set[nn.Parameter]()
            for values in (*before.values, OwnValues(engine.job, optimizers)):
                values.fill(writer, sent)
        engine.job.store.allocator.await_pages()
        device.warm(laid.plan.device_window_nbytes)
        for unit in units:
            unit.allocate()
        described.read_rest()
        broadcast_rest(described, collectives)
        rest = MovedRest(described, device.where)
        report_unmoved(described)
    stepping = _commit(described, optimizers, engine, laid.groups, blocks, [unmoved, rest])
    views.take()
    model.__dict__[RECORD].take_views = views.take
    return stepping


def _commit(
    model: DescribedModel,
    optimizers: Optimizers,
    engine: Engine,
    groups: list[Group],
    blocks: list[tuple[str, nn.Module]],
    first: list,
) -> list[torch.optim.Optimizer]:
    """Changes the model. All steps that can fail for lack of space or for bad input are done."""
    job = engine.job
    came_from = {param: param.device for flat in flat_params_of(job.units) for param in flat.params}
    owners = _find_owners(model, job.units, groups)
    engine.attach(
        {param: [job.prefix + name for name in names] for param, names in model.names.items()}
    )
    removers = [
        *first,
        *install_hooks(engine, model.parts, owners),
        *install_state_dict(engine, model.parts),
    ]
    find = found_weakly(engine.make_forward_context)
    of_blocks = [(name, block, engine.units_of(block)) for name, block in blocks]
    for extension in job.extensions:
        removers += extension.replace_forwards(job, model, find, of_blocks)
    stepping = [make_optimizer(engine, each, place) for place, each in enumerate(optimizers)]
    try:
        for extension in job.extensions:
            extension.install(job, model.module)
    except BaseException:
        for remover in reversed(removers[len(first) :]):
            remover.remove()
        raise
    record = Wrapped(engine, model.module, removers, stepping, came_from, optimizers.plain)
    for module in (*model.parts, model.module):
        module.__dict__[RECORD] = record
    return optimizers.results(stepping)


def _find_owners(
    model: DescribedModel, units: list[ParamUnit], groups: list[Group]
) -> dict[nn.Module, list[ParamUnit]]:
    """Maps each module whose call needs weights to its units, and marks units that several modules
    use."""
    owners: dict[nn.Module, list[ParamUnit]] = {}
    for group, unit in zip(groups, units):
        for owner in group.owners:
            for called in model.meant(owner):
                owners.setdefault(called, []).append(unit)
    # Experts are left out: they run once in a layer, and no gradient of it comes before theirs.
    inside = owners.keys() - {
        owner for group in groups if group.is_divided for owner in group.owners
    }
    for group, unit in zip(groups, units):
        # Also a unit whose module contains others: its gradients may come before and after theirs.
        around = any(
            module in inside
            for owner in group.owners
            for module in model.inside(owner)
            if module is not owner
        )
        if group.at_once is not None or group.has_distant_users or around:
            unit.lands_apart = True
    return owners
