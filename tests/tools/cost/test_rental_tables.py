"""The published dollars of one job on rented machines, on the prices of spring 2020
(tests/support/data).

Method: for each of 30 days the published rules choose an offer; `follow` makes the bill. Words used
here:

**record**: one change of a price; it counts from the begin of its day. A rule takes the least
record of the day on which it chooses. A job that stays pays the newest one of each later day.
**type, packed, clouds, moves**: the published rules: the best of AWS's machines with one GPU, of
all of AWS's, of Azure's too, and the best anew on each day.
"""

from __future__ import annotations

import json
import lzma
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from infinity.tools.cost.cost import DAY, Bill, Move, follow, plan_moves
from infinity.tools.cost.prices import Offer, read_prices

DATA = Path(__file__).parents[2] / "support" / "data"
RATES = json.loads((DATA / "steps_per_second.json").read_text())["one job"]
MODELS = list(RATES)  # in the order of the columns
AWS = ("p2.xlarge", "p2.8xlarge", "p2.16xlarge", "p3.2xlarge", "p3.8xlarge", "p3.16xlarge")
ONE_GPU = ("p2.xlarge", "p3.2xlarge")
RULES = ("type", "packed", "clouds", "moves")
# Dollars on a V100 of AWS over those of a rule, means over the 30 starts
TABLES = {
    ("us-east-1", 4): """1.32 1.00 1.00 1.01 1.00 1.00
        1.71 1.08 1.08 1.31 1.08 1.11
        3.10 1.54 1.70 2.38 1.49 2.36
        3.53 1.64 1.81 2.76 1.53 3.21""",
    ("us-east-1", 8): """1.32 1.00 1.00 1.01 1.00 1.00
        1.72 1.09 1.09 1.32 1.09 1.12
        3.12 1.56 1.72 2.39 1.50 2.35
        3.72 1.72 1.91 2.88 1.58 3.47""",
    ("us-west-2", 4): """1.87 1.00 1.00 1.43 1.00 1.21
        1.87 1.14 1.14 1.43 1.14 1.21
        3.38 1.66 1.83 2.59 1.61 2.57
        3.86 1.78 1.96 3.03 1.66 3.52""",
    ("us-west-2", 8): """1.87 1.00 1.00 1.43 1.00 1.21
        1.87 1.13 1.13 1.43 1.13 1.21
        3.38 1.67 1.84 2.60 1.61 2.55
        4.05 1.86 2.07 3.14 1.72 3.78""",
}
GAINS = {  # of moves over clouds, means, for jobs of 1/8 to 8 days on a V100
    "A3C": (1, 1, 1, 1.02, 1.05, 1.11, 1.16),
    "ResNet-50 (batch size 128)": (1, 1, 1, 1, 1.01, 1.02, 1.05),
    "Transformer (batch size 256)": (1, 1, 1.02, 1.07, 1.17, 1.28, 1.41),
}


@cache
def all_offers(folder: Path) -> list[Offer]:
    path = folder / "prices.csv"
    path.write_bytes(lzma.decompress((DATA / "spot_prices_2020.csv.xz").read_bytes()))
    return read_prices(path)


class Market:
    """The offers of one AWS region and of Azure, by day. ``least``, ``newest``: dollars per GPU
    and hour of the day's records [days, offers], infinite without one."""

    def __init__(self, offers: list[Offer], region: str):
        self.offers = sorted(
            (each for each in offers if each.cloud == "azure" or each.zone.startswith(region)),
            key=lambda each: (each.cloud, each.instance not in AWS or AWS.index(each.instance)),
        )
        self.first = int(min(each.times[0] for each in self.offers) // DAY)
        last = int(max(each.times[-1] for each in self.offers) // DAY)
        self.least = np.full((last - self.first + 1, len(self.offers)), np.inf)
        self.newest = self.least.copy()
        for at, offer in enumerate(self.offers):
            for time, dollars in zip(offer.times, offer.dollars):
                day = int(time // DAY) - self.first
                self.least[day, at] = min(self.least[day, at], dollars / offer.count)
                self.newest[day, at] = dollars / offer.count
        days = sorted(
            {
                int(time // DAY) - self.first
                for each in self.offers
                if each.instance == "p3.2xlarge"
                for time in each.times
            }
        )
        self.starts, self.end = days[-35:-5], days[-1]

    def rates(self, model: str) -> np.ndarray:
        return np.array([RATES[model][each.gpu] for each in self.offers])

    def best(self, model: str, day: int, rule: str, by_gpu: bool) -> int:
        """The offer that trains most for a dollar. Not ``by_gpu``: Azure's dollars are those of the
        whole machine, as published."""
        most, best = 0.0, 0
        for at, offer in enumerate(self.offers):
            names = {"v100": ("p3.2xlarge",), "type": ONE_GPU}.get(rule, AWS)
            if offer.cloud == "azure" and rule not in ("clouds", "moves"):
                continue
            if offer.cloud == "aws" and offer.instance not in names:
                continue
            whole = 1 if by_gpu or offer.cloud == "aws" else offer.count
            gain = RATES[model][offer.gpu] / (self.least[day, at] * whole)
            if gain > most:
                most, best = gain, at
        return best

    def bill(self, model: str, start: int, days: float, rule: str, by_gpu: bool = False) -> Bill:
        tokens = days * DAY * RATES[model]["v100"]
        if rule == "moves":
            prices = self.least[start : self.end + 1]
            chosen = [self.best(model, day, rule, by_gpu) for day in range(start, self.end + 1)]
            return follow(self.rates(model), prices, tokens, lambda day: chosen[day])
        offer = self.best(model, start, rule, by_gpu)
        paid = [self.least[start, offer]]
        for day in range(start + 1, self.end + 1):
            seen = self.newest[day, offer]
            paid.append(seen if math.isfinite(seen) else paid[-1])
        prices = np.array(paid)[:, None]
        return follow(self.rates(model)[[offer]], prices, tokens, lambda _: 0)

    def mean(self, model: str, days: float, rule: str, by_gpu: bool = False) -> float:
        return float(
            np.mean([self.bill(model, at, days, rule, by_gpu).dollars for at in self.starts])
        )


@pytest.fixture(scope="module")
def markets(tmp_path_factory) -> dict[str, Market]:
    offers = all_offers(tmp_path_factory.mktemp("prices"))
    return {region: Market(offers, region) for region in ("us-east-1", "us-west-2")}


def cells(markets: dict[str, Market], by_gpu: bool) -> list[tuple[float, float]]:
    """(found, printed) of every cell of the four tables."""
    found = []
    for (region, days), table in TABLES.items():
        market = markets[region]
        base = {model: market.mean(model, days, "v100") for model in MODELS}
        for rule, line in zip(RULES, table.splitlines()):
            for model, printed in zip(MODELS, line.split()):
                ours = base[model] / market.mean(model, days, rule, by_gpu)
                found.append((ours, float(printed)))
    return found


def test_cross_cloud_cost_has_the_four_tables(markets):
    """95 of 96 cells as printed; the other is 0.01 off, for which of equal prices came first is not
    known. Twin: ranked by GPU on Azure too, as is right, one more cell differs by 0.01."""
    wrong = [each for each in cells(markets, by_gpu=False) if f"{each[0]:.2f}" != f"{each[1]:.2f}"]
    assert len(wrong) == 1 and abs(wrong[0][0] - wrong[0][1]) < 0.0151
    right = [each for each in cells(markets, by_gpu=True) if f"{each[0]:.2f}" != f"{each[1]:.2f}"]
    assert len(right) == 2 and all(abs(ours - printed) < 0.0151 for ours, printed in right)


def test_the_dollars_of_one_model(markets):
    market = markets["us-east-1"]
    found = [market.mean("A3C", 4, rule) for rule in ("v100", *RULES)]
    assert found == pytest.approx([95.52, 72.20, 55.73, 30.78, 27.08], abs=0.0151)


@pytest.mark.parametrize("model", GAINS)
def test_gains_by_duration(markets, model):
    market, found = markets["us-east-1"], []
    for days in (0.125, 0.25, 0.5, 1, 2, 4, 8):
        gains = [
            market.bill(model, start, days, "clouds").dollars
            / market.bill(model, start, days, "moves").dollars
            for start in market.starts
        ]
        found.append(round(float(np.mean(gains)), 2))
    assert tuple(found) == GAINS[model]


def test_a_move_pays_what_it_saves(markets):
    """Azure's prices begin on February 24. Method: A3C, 4 days on a V100, from the day before. With
    free moves the job moves after a day; at 9 dollars and 15 minutes it does too, and pays both.
    Twin: a move that costs more than it saves is not planned."""
    market = markets["us-east-1"]
    start = market.starts[0] + 5
    prices, rates = market.least[start:].copy(), market.rates("A3C")
    for day in range(1, len(prices)):
        prices[day] = np.where(np.isfinite(prices[day]), prices[day], prices[day - 1])
    tokens = 4 * DAY * RATES["A3C"]["v100"]
    free, priced, dear = (
        plan_moves(rates, prices, tokens, move) for move in (Move(), Move(9, 900), Move(28))
    )
    assert free.dollars == pytest.approx(28.17, abs=0.005) and free.moves == 1
    lost = 900 / 3600 * prices[1, priced.path[-1]]
    assert priced.moves == 1 and priced.dollars == pytest.approx(free.dollars + 9 + lost)
    assert dear.moves == 0 and dear.dollars == pytest.approx(55.73, abs=0.005)
