"""Cost: dollars and hours of a job on rented machines, and the days on which it pays to move.

    dollars = sum over the days of price x hours + moves x (dollars of a move + its hours x price)

day      24 hours since the start of the job; it may move to another offer when one begins
rates    tokens per second that an offer is expected to train [offers]
prices   dollars per hour of each offer, when each day begins [days, offers]; the last ones hold on

Follows Narayanan et al., "Analysis and Exploitation of Dynamic Pricing in the Public Cloud for ML
Training", DISPA 2020. There a move costs nothing, and the job takes each day's cheapest offer. The
plan here is exact: it knows all prices that were seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...errors import ConfigError
from ...untrusted import Format
from .prices import Offer

FORMAT = Format("profile of a job", number=1, unnumbered=1)
DAY, HOUR = 86400.0, 3600.0  # seconds
MOST_DAYS = 3660  # with prices
START_SECONDS = 46.0  # until a job that lost a machine runs again: by Slurm, of docs/returns.md
CLOSER = 1e-12  # of the best plan: as much less makes a better one


@dataclass(frozen=True)
class Move:
    """What one move costs: dollars, and seconds on the new machine, less than a day, in which the
    job does not train."""

    dollars: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Bill:
    """Dollars and seconds of a job. ``path``: the offer of each day; the last one stays."""

    dollars: float
    seconds: float
    path: tuple[int, ...]

    @property
    def moves(self) -> int:
        """How often the job moves."""
        return sum(one != other for one, other in zip(self.path, self.path[1:]))


@dataclass(frozen=True)
class Profile:
    """What was measured: tokens a second by GPU (``A100``, or ``A100:8`` for eight), and seconds
    and bytes of a checkpoint; None if they are not known."""

    gpus: dict[str, float]
    save_seconds: float | None = None
    load_seconds: float | None = None
    restart_seconds: float | None = None  # from a loss until the job trains again
    checkpoint_nbytes: float | None = None
    median_step_seconds: float | None = None

    def tokens_per_second(self, gpu: str, count: int) -> float | None:
        """Returns the rate of a machine with ``count`` GPUs; None for an unknown GPU. If that
        number was not measured, the rate of the nearest one grows with the number."""
        rates = [(*_name_and_count(name), rate) for name, rate in self.gpus.items()]
        same = [each for each in rates if each[0].lower() == gpu.lower()]
        if not same and (words := {*_words(gpu)}):
            same = [each for each in rates if words <= _runs(_words(each[0]))]
        if not same:
            return None
        _, measured, rate = min(same, key=lambda each: abs(each[1] - count))
        return rate * count / measured

    def known_save(self, why: str) -> float:
        """Returns the seconds of a save. Raises ConfigError if they are not known."""
        if self.save_seconds is None:
            raise ConfigError(
                f"the profile has no save_seconds, which {why} needs: train with --checkpoint for"
                " the report, or add them"
            )
        return self.save_seconds

    @property
    def restart(self) -> float:
        """Seconds until a job goes on after a loss: if they are not known, those until processes
        run again, and a load, else a save."""
        if self.restart_seconds is not None:
            return self.restart_seconds
        load = self.save_seconds if self.load_seconds is None else self.load_seconds
        return START_SECONDS + (load or 0.0)


def _name_and_count(name: str) -> tuple[str, int]:
    """Returns a GPU's name and number of ``A100:8``."""
    gpu, _, count = name.rpartition(":")
    return (gpu, int(count)) if gpu and re.fullmatch("[1-9][0-9]{0,5}", count) else (name, 1)


def _words(text: str) -> list[str]:
    """Lists the words of a name, so that H100 is found in "NVIDIA H100 80GB HBM3"."""
    return re.findall(r"[a-z0-9]+", text.lower())


def _runs(words: list[str]) -> set[str]:
    """Returns words and neighbours in one, so that RTX4090 is found in "GeForce RTX 4090"."""
    return {*words, *map("".join, zip(words, words[1:]))}


@dataclass(frozen=True)
class Saves:
    """Seconds of saving a checkpoint, of going on from one, from one save to the next, and of a
    step."""

    save_seconds: float
    restart_seconds: float
    interval_seconds: float
    step_seconds: float = 0.0

    def fit(self, notice: float) -> bool:
        """Tells whether the running step and a save fit into the seconds between a machine's
        warning and its end."""
        return self.step_seconds + self.save_seconds <= notice

    def lost_seconds(self, notice: float) -> float:
        """Returns the seconds that the loss of a machine costs. If a save fits into the notice, no
        step is lost."""
        lost = self.save_seconds if self.fit(notice) else self.interval_seconds / 2
        return lost + self.restart_seconds

    def training_share(self, losses_per_second: float, notice: float) -> float:
        """Returns the expected share of the time in which the job trains: not while it saves, nor
        what losses take. It is 0 if a machine is lost before it has made up for the last loss."""
        saving = self.save_seconds / (self.interval_seconds + self.save_seconds)
        return (1 - saving) * max(0.0, 1 - losses_per_second * self.lost_seconds(notice))


@dataclass(frozen=True)
class Rental:
    """A job of ``tokens`` on machines for rent.

    start
        Seconds since 1970.
    rates, losses
        Of each offer: tokens per second, and losses expected per second, on all its machines.
    saves
        None if no machine is lost; then the job need not save.
    notice
        Seconds from the warning of a loss to the end of a spot machine. Others have none.
    nodes
        Machines of an offer that train together. The loss of one is a loss of the job.
    """

    tokens: float
    start: float
    offers: Sequence[Offer]
    rates: Sequence[float]
    losses: Sequence[float]
    saves: Saves | None = None
    notice: float = 0.0
    nodes: int = 1

    def name_of(self, offer: Offer) -> str:
        """Returns the name of an offer with the number of machines, if there are several."""
        return offer.name if self.nodes == 1 else f"{self.nodes} x {offer.name}"

    @property
    def expected_rates(self) -> np.ndarray:
        """Tokens per second with saves and losses [offers]; 0 where the job would never end."""
        shares = [
            self.saves.training_share(losses, self.notice if offer.market == "spot" else 0.0)
            if self.saves and losses
            else 1.0
            for offer, losses in zip(self.offers, self.losses)
        ]
        return np.array(self.rates) * shares

    @cached_property
    def prices(self) -> np.ndarray:
        """Dollars per hour of all machines when each day begins [days, offers]; infinite before the
        first one that was seen. Raises ConfigError for more than ten years."""
        last = max(each.times[-1] for each in self.offers)
        days = 1 + max(0, math.ceil((last - self.start) / DAY)) if last > self.start else 1
        if days > MOST_DAYS:
            raise ConfigError(
                f"the prices go on for {days} days from the start, more than {MOST_DAYS}: leave out"
                " others, or give a later start"
            )
        times = [self.start + day * DAY for day in range(days)]
        by_time = [[each.price_at(time) for each in self.offers] for time in times]
        return self.nodes * np.array(by_time)

    def stays(self) -> list[Bill | None]:
        """Returns the bill for staying at each offer; None where it has no price at the start, or
        the job would never end."""
        rates, prices = self.expected_rates, self.prices
        return [
            stay(rates, prices, self.tokens, at)
            if rates[at] > 0 and prices[0, at] < np.inf
            else None
            for at in range(len(self.offers))
        ]

    def moves(self, move: Move) -> Bill:
        """Plans moves. One offer at least must train the job from the start."""
        rates, prices = self.expected_rates, self.prices
        useful = np.flatnonzero(rates > 0)
        bill = plan_moves(rates[useful], prices[:, useful], self.tokens, move)
        return Bill(bill.dollars, bill.seconds, tuple(int(useful[at]) for at in bill.path))


def follow(
    rates: np.ndarray,
    prices: np.ndarray,
    tokens: float,
    choose: Callable[[int], int],
    move: Move | None = None,
) -> Bill:
    """Returns the bill for training ``tokens`` on the offer that ``choose`` names for each day. The
    one of the last day with prices stays."""
    move = move or Move()
    left, dollars, seconds = tokens, 0.0, 0.0
    path: list[int] = []
    for day, of_day in enumerate(prices):
        offer = choose(day)
        moves = bool(path) and offer != path[-1]
        path.append(offer)
        needed = move.seconds * moves + left / rates[offer]
        is_last = needed <= DAY or day == len(prices) - 1
        spent = needed if is_last else DAY
        seconds += spent
        dollars += move.dollars * moves + of_day[offer] * spent / HOUR
        if is_last:
            break
        left -= rates[offer] * (DAY - move.seconds * moves)
    return Bill(float(dollars), float(seconds), tuple(path))


def stay(rates: np.ndarray, prices: np.ndarray, tokens: float, offer: int) -> Bill:
    """Returns the bill for all days at one offer."""
    return follow(rates, prices, tokens, lambda _: offer)


def plan_moves(
    rates: np.ndarray, prices: np.ndarray, tokens: float, move: Move | None = None
) -> Bill:
    """Plans the cheapest way through the days.

    Searches all choices of an offer for each day, and keeps of those that are at the same offer
    the ones that no other beats in both tokens left and dollars. So it is exact, and never dearer
    than staying anywhere. Of equal plans it keeps the one that stays.
    """
    move = move or Move()
    useful = _undominated(rates, prices)
    rates, prices = rates[useful], prices[:, useful]
    stays = [stay(rates, prices, tokens, offer) for offer in range(len(rates))]
    best = min(stays, key=lambda bill: (bill.dollars, bill.seconds))
    per_token = (prices / rates).min(axis=1) / HOUR
    least = np.minimum.accumulate(per_token[::-1])[::-1]  # dollars a token, from a day on
    nothing, every = np.zeros(len(rates)), np.arange(len(rates))[:, None]
    ways = _Ways(nothing + tokens, nothing, nothing, every)
    for day, of_day in enumerate(prices):
        needed = ways.lost + ways.left / rates[ways.offer]
        dollars = ways.dollars + of_day[ways.offer] * needed / HOUR
        ends = (needed <= DAY) | (day == len(prices) - 1)
        if ends.any():
            first = int(np.argmin(np.where(ends, dollars, np.inf)))
            if dollars[first] < best.dollars * (1 - CLOSER):
                seconds = day * DAY + float(needed[first])
                best = Bill(float(dollars[first]), seconds, tuple(ways.path[first]))
        if ends.all():  # also when no way is left that could be cheaper
            break
        rest = ways.only(~ends).after_a_day(rates, of_day)
        hopeful = rest.dollars + rest.left * least[day + 1] < best.dollars * (1 - CLOSER)
        rest = rest.only(hopeful)
        ways = rest.unbeaten(rest.offer).with_moves(len(rates), move)
    return Bill(best.dollars, best.seconds, tuple(int(useful[offer]) for offer in best.path))


def _undominated(rates: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """Returns the offers that no other is as fast as, at no higher price on any day."""
    kept: list[int] = []
    for offer in np.lexsort((prices.sum(axis=0), -rates)):
        if not any((prices[:, other] <= prices[:, offer]).all() for other in kept):
            kept.append(int(offer))
    return np.array(kept)


@dataclass(frozen=True)
class _Ways:
    """Ways to the begin of a day, as arrays [ways]: tokens left, dollars spent, seconds lost by a
    move on this day; and the offers of the days, this one included [ways, days]."""

    left: np.ndarray
    dollars: np.ndarray
    lost: np.ndarray
    path: np.ndarray

    @property
    def offer(self) -> np.ndarray:
        return self.path[:, -1]

    def only(self, chosen: np.ndarray) -> _Ways:
        """Returns the ways of a mask or of places."""
        return _Ways(self.left[chosen], self.dollars[chosen], self.lost[chosen], self.path[chosen])

    def after_a_day(self, rates: np.ndarray, prices: np.ndarray) -> _Ways:
        """Returns them a day later, before a choice."""
        left = self.left - rates[self.offer] * (DAY - self.lost)
        dollars = self.dollars + prices[self.offer] * DAY / HOUR
        return _Ways(left, dollars, np.zeros_like(left), self.path)

    def unbeaten(self, group: np.ndarray) -> _Ways:
        """Returns those that no other of its group beats in both tokens left and dollars."""
        order = np.lexsort((self.dollars, self.left, group))
        kept, least, last = [], np.inf, None
        for place in order:
            if group[place] != last:
                least, last = np.inf, group[place]
            if self.dollars[place] < least:
                least = self.dollars[place]
                kept.append(place)
        return self.only(np.array(kept, dtype=int))

    def with_moves(self, offers: int, move: Move) -> _Ways:
        """Returns them with every choice for the next day: staying, and each move that no other
        beats."""
        stay = _Ways(self.left, self.dollars, self.lost, np.hstack([self.path, self.path[:, -1:]]))
        leaving = self.unbeaten(np.zeros(len(self.left)))
        places, to = (each.ravel() for each in np.indices((len(leaving.left), offers)))
        moving = leaving.only(places)
        moved = _Ways(
            moving.left,
            moving.dollars + move.dollars,
            np.full(len(places), move.seconds),
            np.hstack([moving.path, to[:, None]]),
        ).only(to != moving.offer)
        return _Ways(
            np.concatenate([stay.left, moved.left]),
            np.concatenate([stay.dollars, moved.dollars]),
            np.concatenate([stay.lost, moved.lost]),
            np.concatenate([stay.path, moved.path]),
        )
