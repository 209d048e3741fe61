"""load_checkpoint: verifies all of a checkpoint, and only then changes model and optimizer."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.machine.kernel import running_kernel
from ...core.params.tensors import overwrite
from ...core.run.job import Job
from ...core.step.optimizer import InfinityOptimizer
from ...core.step.step_inputs import OF_PARAMETERS
from ...errors import CorruptionError, InfinityError, UsageError
from ...files.outputs import folder_of
from ...files.values import decode_value
from ...ranks.collectives import Collectives
from .beside_weights import BesideWeights
from .content import (
    Pair,
    describe_parameter,
    every_value_outside,
    groups_of_stages,
    pair_of,
    put_own_state,
    rest_of,
)
from .folder import OF_READERS, reading
from .home_loader import HomeLoader
from .manifest import MANIFEST, MOST_STEPS, check_files, check_sizes, read_manifest
from .operations import CheckpointOperation
from .parts import read_tensors
from .random_state import check_random_state, restore_random_state
from .read_once import ReadOnce, choose_files
from .repair import begin_repair
from .saved_tensors import SavedTensors

logger = logging.getLogger(__name__)

CUT_SHORT = "loading a checkpoint was cut short"
NOT_A_CHECKPOINT = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)  # errors from reading another file as a checkpoint


def load_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> Any:
    """Loads a checkpoint into a wrapped model, its optimizer (or their list) and the random
    number generators.

    Every rank calls this. Returns ``extra``. Verifies everything before any change: raises
    CorruptionError for damaged files, UsageError naming the parameters when it is of another model.
    """
    root = folder_of(path, "load_checkpoint's path", writes=False)
    pair = pair_of(model, optimizer)
    job = pair.engine.job
    with (
        job.uses.operation(CheckpointOperation.LOAD),
        job.collectives.together("load_checkpoint"),
    ):
        pair.engine.finish_background()
        with checkpoint_of(root, job.collectives) as (manifest, data):
            return _Load(manifest, data, pair).run()


@contextmanager
def checkpoint_of(root: Path, collectives: Collectives) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yields a checkpoint's manifest and data folder, equal on all ranks. Every rank calls this."""
    read: dict[str, Any] = {}

    def read_name() -> str:
        read.update(manifest=read_manifest(root))
        return read["manifest"]["data"]

    with reading(root, read_name) as data:
        first = collectives.collect(read["manifest"], "the checkpoint to load")[0]
        is_same = first["data"] == data.name
        # Else a save came between: the older one.
        with nullcontext(data) if is_same else reading(root, lambda: first["data"]) as data:
            yield read["manifest"] if is_same else first, data
            collectives.barrier(
                f"having read {data.name}, with which this rank is done", wherever=True
            )


@dataclass(frozen=True)
class _Checked:
    """The values read and verified before any change."""

    once: ReadOnce  # its files are verified as they are read
    other: dict[str, torch.Tensor]  # everything except the units' arrays
    # For each optimizer its groups, and users' entries in optimizer.state.
    books: list[tuple[list[dict], dict[str, dict]]]
    plain: list[dict]  # the state dicts of those without a parameter at home
    extra: Any
    generators: tuple | None  # None: this rank did not exist then, and keeps its generators


@dataclass(frozen=True)
class _Load:
    """A checkpoint, and what takes its values."""

    manifest: dict[str, Any]
    data: Path
    pair: Pair

    @property
    def job(self) -> Job:
        return self.pair.engine.job

    @property
    def homes(self) -> HomeLoader:
        return HomeLoader(self.manifest, self.data, self.job)

    @property
    def beside(self) -> BesideWeights:
        return BesideWeights(self.manifest, self.data, self.job.kept)

    def run(self) -> Any:
        """Checks everything, then loads it. Returns ``extra``. Every rank calls this."""
        checked, name = self._check(), self.manifest["data"]
        job, collectives = self.job, self.job.collectives
        collectives.barrier(f"loading {name}, which every rank can", wherever=True)
        # Names the load, not the checkpoint: values may have changed since it was loaded before.
        mine = f"{name}-{secrets.token_hex(4)}"
        origin = collectives.collect(mine, "what this load is called")[0]
        once = self._read_once(checked.once)
        begin_repair(job, CUT_SHORT)  # until the load is complete
        job.steps.resume(self.manifest["step_index"])
        self.homes.load(once)
        self.beside.load()
        for name, param in every_value_outside(self.pair).items():
            param.detach().copy_(checked.other[name])
        for optimizer, (groups, own_state) in zip(self.pair.optimizers, checked.books):
            for group, saved in zip(optimizer.param_groups, groups):
                group.update({k: value for k, value in saved.items() if k not in OF_PARAMETERS})
            put_own_state(optimizer, own_state)
        for optimizer, state in zip(self.pair.plain, checked.plain):
            optimizer.load_state_dict(state)
        _load_rest(self._rest(), checked.other)
        job.steps.count_backwards(0)
        if checked.generators is not None:
            restore_random_state(checked.generators, checked.other, self._rank())
        # Ranks report the load they hold. A rank interrupted before its load reports another, and
        # is refused: its old values must not mix with theirs.
        collectives.note_origin(origin)
        job.uses.go_on()
        return checked.extra

    def _check(self) -> _Checked:
        """Raises CorruptionError or UsageError for a broken or foreign checkpoint. Changes
        nothing."""
        manifest, data, job = self.manifest, self.data, self.job
        try:
            rank = self._rank()
            _check_parameters(job, manifest["parameters"])
            files = manifest["files"]
            check_sizes(data, files)
            once = self._choose_files()
            before = {name: entry for name, entry in files.items() if name not in once.files}
            _check_files(data, before, job.collectives)
            other = read_tensors(data / OF_READERS)
            books = [
                (
                    decode_value(saved["groups"], other),
                    decode_value(saved.get("own_state", {"$dict": []}), other),
                )
                for saved in manifest["optimizers"]
            ]
            plain = [decode_value(saved["state"], other) for saved in manifest["plain"]]
            extra = decode_value(manifest["extra"], other)
            generators, random = None, manifest["random"]
            if rank < len(random):
                generators = check_random_state(random[rank], other, rank)
            self._check_optimizers([groups for groups, _ in books], other)
            self._check_complete()
            for prefix, targets in self._rest().items():
                _check_shapes({prefix + name: value for name, value in targets.items()}, other)
        except InfinityError:
            raise
        except NOT_A_CHECKPOINT as error:
            # Its checksum is right, so another program or version wrote it like this.
            raise CorruptionError(
                f"{data.parent / MANIFEST} does not describe a checkpoint: {error!r}"
            ) from error
        return _Checked(once, other, books, plain, extra, generators)

    def _rest(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the tensors that the engine does not move, by the prefixes of their saved
        names."""
        buffers, _, unmanaged = rest_of(self.pair.model, self.job.prefix)
        of_rank = f"buffer-of-rank/{self._rank(of_stage=True)}/"
        return {"buffer/": buffers, of_rank: buffers, "unmanaged/": unmanaged}

    def _check_optimizers(self, groups: list[list[dict]], tensors: dict[str, torch.Tensor]) -> None:
        """Raises UsageError unless the checkpoint is of the given optimizers, if there are any."""
        ours, plain, collectives = self.pair.optimizers, self.pair.plain, self.job.collectives
        kinds = [saved["kind"] for saved in self.manifest["plain"]]
        if (ours or plain) and (len(groups), kinds) != (
            len(ours),
            [type(each).__name__ for each in plain],
        ):
            raise UsageError(
                f"the checkpoint has {len(groups) + len(kinds) or 'no'} optimizers, and"
                f" {len(ours) + len(plain)} are given"
            )
        for place, (optimizer, of_one) in enumerate(zip(ours, groups)):
            rule = self.manifest["optimizers"][place]["rule"]
            _check_optimizer(optimizer, rule, of_one, collectives)
        outside = every_value_outside(self.pair)
        if missing := outside.keys() - tensors.keys():
            raise UsageError(f"the checkpoint lacks {len(missing)} parameters of these optimizers")
        _check_shapes(outside, tensors)

    def _choose_files(self) -> ReadOnce:
        """Chooses the files to read once; none if a file is malformed, which its check reports."""
        try:
            homes = self.homes.homes()
            return choose_files(self.manifest, self.data, self.job, homes)
        except (InfinityError, *NOT_A_CHECKPOINT):
            return ReadOnce()

    def _check_complete(self) -> None:
        """Raises an error unless the files hold every array that the manifest's steps need."""
        index = self.manifest["step_index"]
        if type(index) is not int or not 0 <= index < MOST_STEPS:
            raise TypeError(f"step_index is {index!r}")
        saved, homes = SavedTensors(self.data, self.manifest), self.homes
        for handle in homes.handles():
            step = self.manifest["parameters"][handle.name]["step"]
            if type(step) is not int or not 0 <= step < MOST_STEPS:
                raise ValueError(f"{handle.name} has taken {step!r} steps")
            for array in homes.arrays_of(handle):
                saved.check(array, handle.name, handle.flat_param.arrays[array].dtype)
        self.beside.check()

    def _read_once(self, once: ReadOnce) -> ReadOnce:
        """Reads the files that are read once, if there is room for the old values; else verifies
        them. Returns the files that were read."""
        if once.files and not once.take_room(self.job):
            check_files(self.data, {name: self.manifest["files"][name] for name in once.files})
            return ReadOnce()
        if once.files:
            once.load(self.job, CUT_SHORT)
        return once

    def _rank(self, *, of_stage: bool = False) -> int:
        """Returns the rank whose saved generators (``of_stage``: buffers) this rank takes."""
        manifest, ranks = self.manifest, self.job.ranks
        count = len(manifest["random"])
        saved = manifest.get("data_ranks", count)
        if type(saved) is not int or saved < 1:
            raise TypeError(f"data_ranks is {saved!r}")
        parts = manifest.get("parts", 1)
        if type(parts) is not int or parts < 1:
            raise TypeError(f"parts is {parts!r}")
        place = ranks.data_rank + saved * (
            ranks.tp_rank + (0 if of_stage else parts * ranks.pp_rank)
        )
        return place if ranks.data_rank < saved and place < count else ranks.data_rank


def _of_codes(*sides: list[str]) -> str:
    """Returns what to do if weights are in codes on one of the ``sides``, and dense on the other;
    else nothing."""
    one, other = map(set, sides)
    if not any(f"{name}.codes" in (one | other) for name in (one | other)):
        return ""
    return (
        ". On one side weights are in the codes of their files, on the other dense: freeze the same"
        " weights as in the saved job (docs/packed.md)"
    )


def _check_parameters(job: Job, saved: dict[str, Any]) -> None:
    ours = {
        handle.name: describe_parameter(handle) for unit in job.units for handle in unit.handles
    }
    everyones = ours.keys()
    if (stages := job.ranks.pp_group) is not None:
        everyones = set().union(
            *job.collectives.collect(set(ours), "names of the stages' parameters", [stages])
        )
    only_saved, only_ours = sorted(saved.keys() - everyones), sorted(everyones - saved.keys())
    if only_saved or only_ours:
        raise UsageError(
            f"the checkpoint is of another model: {len(only_saved)} of its parameters are not in"
            f" this one ({', '.join(only_saved[:3])}), {len(only_ours)} of this one's are not in it"
            f" ({', '.join(only_ours[:3])}){_of_codes(only_saved, only_ours)}"
        )
    for name, mine in ours.items():
        # A model wrapped without an optimizer takes only the weights.
        keys = ("shape", "dtype", "master", "moments") if mine["master"] else ("shape", "dtype")
        for key in keys:
            if saved[name][key] != mine[key]:
                raise UsageError(
                    f"{name}: {key} is {saved[name][key]} in the checkpoint and {mine[key]} in this"
                    " model"
                )


def _check_files(data: Path, files: dict[str, dict[str, Any]], collectives: Collectives) -> None:
    """Raises CorruptionError for a damaged file, PeerError if another rank found one. Ranks of one
    machine that read the same files verify a part of them each. Every rank calls this."""
    if collectives.ranks.alone:
        check_files(data, files)
        return
    rank, status = collectives.ranks.world_rank, data.parent.stat()
    place = running_kernel() or rank, status.st_dev, status.st_ino
    here = [
        peer
        for peer, theirs in collectives.collect((rank, place), "where the checkpoint is read")
        if theirs == place
    ]
    check_files(data, files, turn=(here.index(rank), len(here)))
    collectives.barrier(f"having checked the files of {data.name}", wherever=True)


def _check_optimizer(
    optimizer: InfinityOptimizer,
    rule_name: str,
    groups: list[dict],
    collectives: Collectives,
) -> None:
    if rule_name != optimizer.rule_name:
        raise UsageError(
            f"the checkpoint's optimizer is {rule_name}, this one is {optimizer.rule_name}"
        )
    ours = [group["params"] for group in groups_of_stages(optimizer, collectives)]
    theirs = [group["params"] for group in groups]
    if list(map(sorted, ours)) != list(map(sorted, theirs)):
        raise UsageError(
            f"the checkpoint's optimizer groups ({[len(names) for names in theirs]} parameters) are"
            f" not this optimizer's ({[len(names) for names in ours]})"
        )
    optimizer.check_saved_groups(groups)


def _check_shapes(ours: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    for name, mine in ours.items():
        if name in saved and saved[name].shape != mine.shape:
            raise UsageError(
                f"{name} has shape {tuple(saved[name].shape)} in the checkpoint,"
                f" {tuple(mine.shape)} here"
            )


@torch.no_grad()
def _load_rest(rest: dict[str, dict[str, torch.Tensor]], other: dict[str, torch.Tensor]) -> None:
    for prefix, targets in rest.items():
        for name, target in targets.items():
            if prefix + name in other:
                overwrite(target, other[prefix + name])
