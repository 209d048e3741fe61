"""Meetings: what several ranks compare before a step, and gathered weights on each of them.

gathered   weights on the device: the same bits as at home, and on every rank that gathered them
reduced    averaged gradients: the sum of what all ranks gave, in their order, computed again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.params.tensors import fingerprint
from ...core.run.job import Job
from ...core.units.residency import Residency
from ...core.units.unit import ParamUnit, flat_params_of
from .findings import GATHERS, REDUCTIONS, Findings, bits, differs, place_of
from .homes import HomeChecks
from .rotation import ChosenPieces, Piece, coming


class Gathered:
    """The audits of weights on the device."""

    def __init__(self, job: Job, share: float, findings: Findings, homes: HomeChecks):
        self._units, self._store, self._ranks = job.units, job.store, job.ranks
        self._collectives, self._running, self._steps = job.collectives, job.running, job.steps
        self._findings, self._homes = findings, homes
        self._chosen = ChosenPieces(share, seed=4)
        # Of this step, by piece: the fingerprint, and the version of the unit's values
        self._digests: dict[Piece, tuple[int, int]] = {}
        self._at_step = -1

    def _choose(self) -> dict[Any, list[Piece]]:
        if self._at_step != (step := coming(self._steps) - 1):
            self._at_step = step
            self._digests.clear()
        return self._chosen.choose(step, lambda: flat_params_of(self._units), whole=True)

    def forward_begun(self, module: Any, units: Sequence[ParamUnit]) -> None:
        """Compares the weights of a forward, before it computes."""
        self._findings.raise_found()
        for unit in units:
            if self._running.holds.get(unit) == 1:  # else one around it may have changed them
                self.check(unit)

    def unit_landed(self, unit: ParamUnit) -> None:
        """Compares the weights that a backward has computed with."""
        if unit not in self._running.holds:
            self.check(unit)

    def check(self, unit: ParamUnit) -> None:
        """Compares the chosen pieces of a unit with their home. Raises CorruptionError."""
        chosen = self._choose()
        if not any(flat_param in chosen for flat_param in unit.flat_params):
            return
        if unit.residency is not Residency.RESIDENT or unit.computes_at_home:
            return
        if unit.older or unit.reader is not None or unit.arrival.rows is not None:
            self._findings.leave_out("weights of older versions, and rows of weights")
            return
        for flat_param, flat in zip(unit.flat_params, unit.buffers.flats):
            encoding = flat_param.collectives.ranks.encoding
            if encoding is not None and not flat_param.spec.exact:
                self._findings.leave_out("compressed gathers")
                continue
            if pieces := chosen.get(flat_param):
                self._homes.check(flat_param, names=("weight",))
                for piece in pieces:
                    self._compare(unit, flat_param, flat, piece)

    def _compare(self, unit: ParamUnit, flat_param: Any, flat: torch.Tensor, piece: Piece) -> None:
        arrived = flat[piece.begin : piece.end]
        self._findings.count(GATHERS, arrived.nbytes)
        first, last = flat_param.layout.own_shard
        if first <= piece.begin < last:
            home = flat_param.weight
            expected = self._store.read(home, piece.begin - first, piece.end - first)
            if wrong := differs(expected, arrived.cpu()):
                count, at = wrong
                self._findings.fail(
                    f"the weights of unit {unit.name} on the device are not those at home, in step"
                    f" {coming(self._steps)}: {count} elements, the first in"
                    f" {place_of(flat_param, piece.begin + at)}"
                )
                self._findings.raise_found()
        if flat_param.collectives is self._collectives and self._ranks.size > 1:
            self._digests[piece] = fingerprint(arrived) % 2**62 + 1, unit.version + 1

    def drop(self) -> None:
        """Forgets what was gathered in a pass that an exception ended."""
        self._digests.clear()

    def meet(self) -> None:
        """Compares the fingerprints of all ranks of the shard group. Every rank calls this."""
        pieces = [piece for of_flat in self._choose().values() for piece in of_flat]
        if self._ranks.size == 1 or not pieces:
            return
        mine = torch.tensor([self._digests.get(piece, (0, 0)) for piece in pieces], device="cpu")
        row = [self._ranks.shard_group]
        everyones = self._collectives.collect(mine, "auditing gathered weights", row)
        for piece, said in zip(pieces, everyones.unbind(1)):
            owner = piece.begin // piece.flat_param.layout.shard_numel
            others = [
                rank
                for rank, (digest, version) in enumerate(said.tolist())
                if digest and version == said[owner, 1] and digest != said[owner, 0]
            ]
            if others and said[owner, 0]:
                self._findings.fail(
                    f"the weights of {place_of(piece.flat_param, piece.begin)} and"
                    f" {piece.end - piece.begin - 1} more, gathered before step"
                    f" {coming(self._steps)}, have other bits on ranks {others} of the shard"
                    f" group than on rank {owner}, whose home they have"
                )
        self._findings.raise_found()


class Reduced:
    """The audits of averaged gradients."""

    def __init__(self, job: Job, share: float, findings: Findings):
        self._units, self._ranks, self._collectives = job.units, job.ranks, job.collectives
        self._steps, self._findings = job.steps, findings
        self._chosen = ChosenPieces(share, seed=5)
        # By piece: the number of the backward, this rank's gradient, and the average if it has it
        self._kept: dict[Piece, tuple[int, torch.Tensor, torch.Tensor | None]] = {}
        is_shared = self._ranks.replicate_group is None and self._ranks.ep_size == 1
        if self._ranks.size > 1 and not is_shared:
            findings.leave_out("sums over replicas and over divided experts")
        self._is_on = self._ranks.size > 1 and is_shared

    def _choose(self) -> dict[Any, list[Piece]]:
        return self._chosen.choose(coming(self._steps) - 1, self._flat_params, whole=True)

    def _flat_params(self) -> list[Any]:
        return [flat for flat in flat_params_of(self._units) if flat.spec.stepped]

    def averaged(
        self, flat_param: Any, given: torch.Tensor, begin: int, average: torch.Tensor
    ) -> None:
        """Keeps the chosen pieces of what this rank gave and got: of each rank's shard the elements
        from ``begin``. Those that a bucket has a part of are not audited."""
        if not self._is_on or self._collectives.weighing is not None:
            return
        each, rank = flat_param.layout.shard_numel, flat_param.ranks.rank
        rows = given.view(-1, len(average))
        for piece in self._choose().get(flat_param, ()):
            shard, at = divmod(piece.begin, each)
            part = slice(at - begin, at - begin + piece.end - piece.begin)
            if part.start < 0 or part.stop > len(average):
                continue
            mine = rows[shard, part].to("cpu", copy=True)
            own = average[part].to("cpu", copy=True) if shard == rank else None
            self._kept[piece] = self._steps.backwards + 1, mine, own

    def drop(self) -> None:
        """Forgets what was reduced."""
        self._kept.clear()

    def meet(self) -> None:
        """Computes the chosen averages again, from what every rank gave. Every rank calls this."""
        chosen = [piece for of_flat in self._choose().values() for piece in of_flat]
        kept, self._kept = self._kept, {}
        if not self._is_on or not chosen:
            return
        nothing = (0, None, None)
        numbers = torch.tensor([kept.get(piece, nothing)[0] for piece in chosen], device="cpu")
        samples = [
            torch.zeros(piece.end - piece.begin, dtype=piece.flat_param.spec.grad_dtype)
            if piece not in kept
            else kept[piece][1]
            for piece in chosen
        ]
        mine = torch.cat([bits(numbers), *map(bits, samples)])
        what = f"auditing {mine.numel()} bytes of reductions"
        everyones = self._collectives.collect(mine, what, [self._ranks.shard_group])
        tags = everyones[:, : numbers.nbytes].contiguous().view(torch.int64)
        at = numbers.nbytes
        for index, (piece, value) in enumerate(zip(chosen, samples)):
            raw, at = everyones[:, at : at + value.nbytes].contiguous(), at + value.nbytes
            same = tags[0, index] > 0 and (tags[:, index] == tags[0, index]).all()
            if same and (average := kept[piece][2]) is not None:
                self._compare(piece, raw.view(value.dtype), average)
        self._findings.raise_found()

    def _compare(self, piece: Piece, given: torch.Tensor, average: torch.Tensor) -> None:
        self._findings.count(REDUCTIONS, given.nbytes)
        if wrong := differs(average_of(given, self._ranks.data_size), average):
            count, at = wrong
            self._findings.fail(
                f"the average of the gradient of {place_of(piece.flat_param, piece.begin + at)}"
                f" before step {coming(self._steps)} is not the sum of what the ranks gave:"
                f" {count} of {average.numel()} elements"
            )


def average_of(given: torch.Tensor, count: int) -> torch.Tensor:
    """Computes the fp32 average of the rows, summed first to last."""
    total = given[0].to(torch.float32, copy=True)
    for part in given[1:]:
        total.add_(part, alpha=1.0)
    return total.div_(count)
