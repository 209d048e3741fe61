"""OuterStep: moves the groups of a job together every so many steps, unit by unit, by a step of an
outer optimizer (Douillard et al. 2023, DiLoCo; overlapped as in Douillard et al. 2025).

anchor      fp32: the last value that all groups had in common. At home beside the master
momentum    fp32, of the outer optimizer: at home there, too
exchange    of a unit: what each group has moved since the anchor, on its way to the others. A plain
            average (lr 1, no momentum) sends the values themselves, and keeps no anchor
due         the step after which the mean of an exchange is applied
position    where the job stands between two averages

If an exception interrupts a change, the next use of the engine completes it: what a piece becomes
is computed first, which changes nothing, and then written, which may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ... import native
from ...core.homes.arrays import StateArray
from ...core.machine.tiers import Tier
from ...core.seams import Extension
from ...core.units.encoding import encode
from ...core.units.flat_param import FlatParam
from ...core.units.kept import Kept, KeptArrays
from ...core.units.pieces import Piece, pieces_of, read_value
from ...core.units.unit import ParamUnit
from ...errors import UsageError
from ..averages.change import Progress, change_pieces
from .climber import PERIODS, Climber
from .slow_axis import Exchange, SlowAxis

OUTER = "outer"  # what a checkpoint calls it
ANCHOR, MOMENTUM = "outer_anchor", "outer_momentum"
MEAN = "outer_mean"  # of an exchange that a checkpoint came between


@dataclass(frozen=True)
class OuterSettings:
    """The outer optimizer: SGD with Nesterov momentum. ``alpha``: the share of this group's own
    value that stays in the weights."""

    lr: float
    momentum: float
    alpha: float

    @property
    def is_plain(self) -> bool:
        """Whether the groups take their mean."""
        return self.lr == 1 and self.momentum == 0


@dataclass(frozen=True)
class Position:
    """Position of a job: ``steps`` made, ``at`` of them in the present period of ``period`` steps.
    ``probed``: steps at the last probe; ``climber``: what the choice of the period remembers.
    Raises ValueError for what is none."""

    steps: int
    at: int
    period: int
    probed: int = 0
    climber: list[Any] = field(default_factory=lambda: [1])

    def __post_init__(self) -> None:
        numbers = self.steps, self.at, self.period, self.probed
        is_whole = all(type(number) is int and number >= 0 for number in numbers)
        if not is_whole or self.at >= self.period or Climber(*self.climber).period not in PERIODS:
            raise ValueError(f"{self} is not a position")


@dataclass(eq=False)
class _Pending:
    """An exchange of a unit that was not applied yet. ``loaded``: the mean, if a checkpoint had
    it."""

    due: int
    exchange: Exchange | None
    loaded: torch.Tensor | None = None
    progress: Progress = field(default_factory=Progress)

    def mean(self) -> torch.Tensor:
        """Returns the packed mean of the groups. Blocks until it has arrived."""
        return self.loaded if self.exchange is None else self.exchange.mean()


class OuterStep(Extension):
    """The anchors, momenta and exchanges of one rank. Used from the thread that runs the model,
    inside a use of the engine and, where it changes values, inside the journal.

    ``most``: units whose exchanges run at a time. ``release``: sends units home. Raises
    CapacityError if the tiers of the masters, or the host, have no room.
    """

    def __init__(
        self,
        arrays: KeptArrays,
        units: Iterable[ParamUnit],
        axis: SlowAxis,
        settings: OuterSettings,
        *,
        most: int,
        release: Callable[[Iterable[ParamUnit]], None],
        position: Position,
    ):
        self.axis, self.settings, self.position = axis, settings, position
        self._arrays, self._store, self._release = arrays, arrays.store, release
        self.units = {unit: flats for unit in units if (flats := _stepped(unit))}
        self._pending: dict[ParamUnit, _Pending] = {}
        self.kept: dict[str, Kept] = {}  # anchors and momenta, if there are any
        self._charge: native.Charge | None = None
        try:
            self._allocate(most)
        except BaseException:
            self.free()
            raise

    # --- memory ---

    def _allocate(self, most: int) -> None:
        kinds = () if self.settings.is_plain and not self.axis.compresses else (ANCHOR,)
        kinds += (MOMENTUM,) if self.settings.momentum else ()
        numel = max(map(_numel, self.units.values()), default=0)
        # Each exchange: all groups' rows and their mean; then what is sent, and a row decoded.
        each = self.axis.size * self.axis.nbytes_of(numel) + 4 * numel
        nbytes = most * each + 2 * 4 * numel
        flat_params = [flat for flats in self.units.values() for flat in flats]
        wanted = [(flat, torch.float32) for flat in flat_params]
        what = f"the state of LocalSteps ({', '.join((*map(_kind, kinds), 'exchanges'))})"
        self._arrays.make_room(wanted * len(kinds), what, reserved={Tier.HOST: nbytes})

        def keep(name: str, flat_params: Iterable[FlatParam]) -> Kept:
            return self._arrays.keep(name, torch.float32, flat_params, keeper=self, saved_as=OUTER)

        self.kept = {kind: keep(kind, flat_params) for kind in kinds}
        self._means = keep(MEAN, ())  # passing
        self._charge = self._store.ledger.admit(Tier.HOST, nbytes, "exchanges between groups")

    def free(self) -> None:
        """Frees the memory, and ends the line. Waits for running exchanges. Idempotent."""
        self.drop_pending()
        self.axis.close()
        self._arrays.free_of(self)
        if self._charge is not None:
            self._store.ledger.accounts[Tier.HOST].planned_nbytes -= self._charge.nbytes
            self._charge.release()
            self._charge = None

    # --- the begin ---

    @torch.no_grad()
    def take_first(self) -> None:
        """Gives every group the values of the first one, which become the anchors. Every rank of
        every group calls this. Blocks; may be repeated."""
        for unit, flat_params in self.units.items():
            self._wait_idle(unit)
            values = self._pack(flat_params, self._value)
            self.axis.broadcast(values, f"sharing {unit.name} with other groups")
            parts = partial(self._of_first, _split(flat_params, values))
            change_pieces(flat_params, parts, self._arrays.write, Progress())

    def _of_first(self, values: dict[FlatParam, torch.Tensor], piece: Piece) -> dict:
        value = values[piece.flat_param][piece.begin : piece.end]
        written = {} if self.axis.group_index == 0 else encode(piece.flat_param.spec, value)
        return written | ({ANCHOR: value} if ANCHOR in self.kept else {})

    @property
    def is_whole(self) -> bool:
        """Whether no exchange waits to be applied."""
        return not self._pending

    @torch.no_grad()
    def restart(self, position: Position) -> None:
        """Begins anew from the present values: they become the anchors, with no momentum."""
        for flat_params in self.units.values():
            for piece in pieces_of(flat_params):
                value = self._value(piece)
                parts = {kind: torch.zeros_like(value) for kind in self.kept}
                self._arrays.write(piece, parts | ({ANCHOR: value} if ANCHOR in parts else {}))
        self.position = position

    def refuse_others(self, units: Iterable[ParamUnit]) -> None:
        """Raises UsageError if the optimizer steps parameters that it did not step at the begin."""
        for unit in units:
            if _stepped(unit) != self.units.get(unit, []):
                raise UsageError(
                    f"parameters of {unit.name} were added to the optimizer after LocalSteps was"
                    " made: make it after add_param_group, or call its remove() and make another"
                )

    # --- exchanges ---

    @torch.no_grad()
    def start(self, unit: ParamUnit, due: int, tag: tuple[int, int]) -> None:
        """Sends what this group has to tell of ``unit``; :meth:`finish` applies the mean.
        Idempotent until then. Waits for the unit's update, but not for other groups."""
        if unit not in self._pending:
            for flat_param in self.units[unit]:
                flat_param.homes.wait()
            sent = self._pack(self.units[unit], self._moved)
            exchange = self.axis.start(sent, tag, f"average of {unit.name} over groups")
            self._pending[unit] = _Pending(due, exchange)
        if (exchange := self._pending[unit].exchange) is not None:
            exchange.begin()

    def due(self, step: int) -> list[ParamUnit]:
        """Lists the units whose exchanges are to be applied after ``step``."""
        return [unit for unit, pending in self._pending.items() if pending.due <= step]

    @torch.no_grad()
    def finish(self, unit: ParamUnit) -> None:
        """Applies the mean of the groups to ``unit``. Idempotent. Blocks until it has arrived."""
        if (pending := self._pending.get(unit)) is None:
            return
        means = _split(self.units[unit], pending.mean())
        self._wait_idle(unit)
        compute = partial(self._stepped, means)
        change_pieces(self.units[unit], compute, self._arrays.write, pending.progress)
        del self._pending[unit]
        for flat_param in self.units[unit]:
            self._means.passing.pop(flat_param, None)

    def _stepped(self, means: dict[FlatParam, torch.Tensor], piece: Piece) -> dict:
        """Computes the outer step of one piece, as torch.optim.SGD(nesterov=True) does."""
        mean = new = means[piece.flat_param][piece.begin : piece.end]
        written, settings = {}, self.settings
        if ANCHOR in self.kept:
            step = mean
            if settings.momentum:
                momentum = self.kept[MOMENTUM].read(piece).mul_(settings.momentum).add_(mean)
                step = mean.add(momentum, alpha=settings.momentum)
                written[MOMENTUM] = momentum
            written[ANCHOR] = new = self.kept[ANCHOR].read(piece).add_(step, alpha=-settings.lr)
        if settings.alpha:
            new = torch.lerp(new, self._value(piece), settings.alpha)
        return written | encode(piece.flat_param.spec, new)

    def drop_pending(self) -> None:
        """Waits for running exchanges, and discards them."""
        while self._pending:
            if (exchange := self._pending.popitem()[1].exchange) is not None:
                exchange.drop()

    def _wait_idle(self, unit: ParamUnit) -> None:
        """Waits until nothing reads or writes the unit's arrays, which are about to change."""
        for flat_param in self.units[unit]:
            flat_param.homes.wait_idle()
        self._release([unit])
        for handle in unit.handles:
            handle.changed()

    # --- checkpoints ---

    def describe(self) -> dict[str, Any]:
        """Describes the position and the running exchanges. Blocks until these have arrived."""
        self._show_means()
        return {
            "kinds": self._kinds,
            "position": asdict(self.position),
            "due": {unit.name: pending.due for unit, pending in self._pending.items()},
        }

    @property
    def _kinds(self) -> list[str]:
        return list(map(_kind, self.kept))

    def expect(self, told: dict[str, Any]) -> dict[str, list[FlatParam]]:
        """Reads what :meth:`describe` told. Raises UsageError if its arrays are not those of this
        job; changes nothing."""
        names = {unit.name: flat_params for unit, flat_params in self.units.items()}
        if told["kinds"] != self._kinds or not set(told["due"]) <= set(names):
            raise UsageError(
                f"the checkpoint's groups have {told['kinds']} and exchanges of"
                f" {list(told['due'])}, this LocalSteps {self._kinds} and units"
                f" {list(names)[:3]}. Make it with the same lr, momentum, codes and units."
            )
        Position(**told["position"])  # raises
        if not all(type(due) is int for due in told["due"].values()):
            raise ValueError(f"exchanges are due at {told['due']!r}")
        means = [flat_param for name in told["due"] for flat_param in names[name]]
        return {kind: list(kept.flat_params) for kind, kept in self.kept.items()} | {MEAN: means}

    def resume(self, told: dict[str, Any] | None) -> None:
        """Takes the position of a checkpoint; None: begins anew from the present values."""
        self.drop_pending()
        if told is None:
            self.restart(replace(self.position, steps=0, at=0, probed=0))
            return
        self.position = Position(**told["position"])
        for unit, flat_params in self.units.items():
            if (due := told["due"].get(unit.name)) is not None:
                empty = torch.zeros(_numel(flat_params), device="cpu")
                self._pending[unit] = _Pending(due, None, empty)
        self._show_means()

    def _show_means(self) -> None:
        """Lets a checkpoint have the means of exchanges that were not applied yet. Blocks until
        they have arrived."""
        self._means.passing = {
            flat_param: _in_memory(part)
            for unit, pending in self._pending.items()
            for flat_param, part in _split(self.units[unit], pending.mean()).items()
        }

    # --- values ---

    def _pack(
        self, flat_params: list[FlatParam], compute: Callable[[Piece], torch.Tensor]
    ) -> torch.Tensor:
        flat = torch.zeros(_numel(flat_params), device="cpu")
        parts = _split(flat_params, flat)
        for piece in pieces_of(flat_params):
            parts[piece.flat_param][piece.begin : piece.end] = compute(piece)
        return flat

    def _value(self, piece: Piece) -> torch.Tensor:
        return read_value(self._store, piece).float()

    def _moved(self, piece: Piece) -> torch.Tensor:
        """Returns what is sent of a piece."""
        value = self._value(piece)
        return self.kept[ANCHOR].read(piece).sub_(value) if ANCHOR in self.kept else value


def _kind(name: str) -> str:
    return name.removeprefix(f"{OUTER}_")


def _stepped(unit: ParamUnit) -> list[FlatParam]:
    return [flat_param for flat_param in unit.flat_params if flat_param.spec.stepped]


def _numel(flat_params: Iterable[FlatParam]) -> int:
    return sum(flat_param.layout.shard_numel for flat_param in flat_params)


def _split(flat_params: list[FlatParam], flat: torch.Tensor) -> dict[FlatParam, torch.Tensor]:
    """Splits what is packed of a unit into views of its flat params."""
    sizes = [flat_param.layout.shard_numel for flat_param in flat_params]
    return dict(zip(flat_params, flat.split(sizes)))


def _in_memory(flat: torch.Tensor) -> StateArray:
    extent = native.Extent.in_memory(flat.data_ptr(), flat.nbytes, None)
    return StateArray(Tier.HOST, flat.dtype, flat.numel(), extent, flat)
