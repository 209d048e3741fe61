"""Bills, plans of moves, losses, and the CSV files they are made of.

Words used here:

**sequence**: an offer for each day; **brute force**: the bills of all sequences.
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from infinity.errors import ConfigError
from infinity.tools.cost.cost import (
    DAY,
    Bill,
    Move,
    Profile,
    Rental,
    Saves,
    follow,
    plan_moves,
    stay,
)
from infinity.tools.cost.prices import Offer, read_lifetimes, read_prices

HEADER = "cloud,zone,instance,gpu,count,market,time,dollars_per_hour\n"
SEED = 20261127


def market(random_: random.Random, days: int, offers: int) -> tuple[np.ndarray, np.ndarray]:
    """Rates and prices; now and then an offer comes a day later, or equals another."""
    rates = np.array([random_.uniform(1, 5) for _ in range(offers)])
    prices = np.array([[random_.uniform(0.5, 5) for _ in range(offers)] for _ in range(days)])
    if random_.random() < 0.3:
        prices[0, 1:] = np.where(rates[1:] > 3, np.inf, prices[0, 1:])
    if random_.random() < 0.3:
        rates[1], prices[:, 1] = rates[0], prices[:, 0]
    return rates, prices


def of_path(bill: Bill, rates, prices, tokens, move: Move) -> Bill:
    return follow(rates, prices, tokens, lambda day: bill.path[min(day, len(bill.path) - 1)], move)


def test_the_plan_is_the_best_of_all_sequences():
    """Method: brute force over 4 days and 4 offers, moves free or dear, short or long. The bill of
    the plan's own path is the plan's. Twin: the greedy path is dearer somewhere."""
    print(SEED)
    random_, greedy_was_dearer = random.Random(SEED), 0
    for _ in range(120):
        rates, prices = market(random_, 4, 4)
        move = Move(random_.choice([0.0, 1.0, 9.0]), random_.choice([0.0, 900.0, 20000.0]))
        tokens = random_.uniform(0.1, 14) * DAY
        found = plan_moves(rates, prices, tokens, move)
        bills = [
            follow(rates, prices, tokens, lambda day: path[day], move)
            for path in itertools.product(range(4), repeat=4)
        ]
        assert found.dollars == pytest.approx(min(each.dollars for each in bills), rel=1e-9)
        assert of_path(found, rates, prices, tokens, move).dollars == pytest.approx(found.dollars)
        best = (prices / rates).argmin(axis=1)
        greedy = follow(rates, prices, tokens, lambda day: int(best[day]), move)
        greedy_was_dearer += greedy.dollars > found.dollars * 1.01
    assert greedy_was_dearer > 20


def write_random_prices(path, random_: random.Random) -> None:
    lines, offers = [], random_.randint(2, 8)
    for number in range(offers):
        gpu, count = random_.choice("AB"), random_.choice([1, 4])
        of = f"aws,z{number % 3},m{number},{gpu},{count},spot"
        for _ in range(random_.randint(1, 12)):
            when = f"2026-03-{random_.randint(1, 14):02}T{random_.randint(0, 23):02}:00Z"
            lines.append(f"{of},{when},{random_.uniform(0.1, 9):.3f}")
    random_.shuffle(lines)
    path.write_text(HEADER + "\n".join(lines) + "\n")


def test_no_plan_is_dearer_than_staying_or_than_the_cheapest_of_each_day(tmp_path):
    """Method: 500 random price files, read, with the moves free, and at a price."""
    random_ = random.Random(SEED)
    path = tmp_path / "prices.csv"
    for _ in range(500):
        write_random_prices(path, random_)
        offers = read_prices(path)
        start = min(each.times[0] for each in offers)
        rates = [{"A": 100.0, "B": 230.0}[each.gpu] * each.count for each in offers]
        job = Rental(random_.uniform(0.1, 30) * DAY * 100, start, offers, rates, [0.0] * len(rates))
        stays = min(bill.dollars for bill in job.stays() if bill is not None)
        best = (job.prices / rates).argmin(axis=1)
        for move in (Move(), Move(random_.uniform(0, 20), random_.uniform(0, 7200))):
            greedy = follow(
                job.expected_rates, job.prices, job.tokens, lambda day: int(best[day]), move
            )
            found = job.moves(move).dollars
            assert found <= stays * (1 + 1e-9) and found <= greedy.dollars * (1 + 1e-9)


def test_a_bill_by_hand():
    """Method: 30 hours at rate 1 and 2 dollars, then at 1 dollar from the second day on."""
    rates, prices = np.array([1.0]), np.array([[2.0], [1.0]])
    assert stay(rates, prices, 30 * 3600, 0) == Bill(54.0, 30 * 3600, (0, 0))
    rates, prices = np.array([1.0, 2.0]), np.array([[2.0, 9.0], [2.0, 1.0]])
    moved = follow(rates, prices, 30 * 3600, lambda day: day, Move(5.0, 1800.0))
    assert moved == Bill(48 + 5 + 3.5, 27.5 * 3600, (0, 1)) and moved.moves == 1


def test_losses_take_their_time():
    """Method: by hand. A save of 10 s each 490 s takes 2 %; a loss costs half of that interval and
    20 s, without notice; with notice for the save and the step, 10 s and 20 s."""
    saves = Saves(10.0, 20.0, 490.0, step_seconds=5.0)
    assert saves.lost_seconds(0.0) == 265.0 and not saves.fit(14.0)
    assert saves.lost_seconds(15.0) == 30.0 and saves.fit(15.0)
    assert saves.training_share(1 / 2650, 0.0) == pytest.approx(0.98 * 0.9)
    assert saves.training_share(1 / 265, 0.0) == 0.0, "it never gets ahead"
    offers = [Offer("aws", "a", "m", "A", 1, market, (0.0,), (1.0,)) for market in ("spot", "x")]
    job = Rental(3600.0, 0.0, offers, [1.0, 1.0], [1 / 2650, 0.0], saves)
    spot, other = job.stays()
    assert other.seconds == 3600 and spot.seconds == pytest.approx(3600 / 0.882)
    assert Rental(3600.0, 0.0, offers, [1.0, 1.0], [1.0, 0.0], saves).stays()[0] is None


def test_rates_are_found_by_name_and_number():
    """A driver's name has the words of a price's; another number of GPUs scales the nearest."""
    profile = Profile({"NVIDIA H100 80GB HBM3:1": 10.0, "A100:8": 70.0, "a100:1": 10.0})
    assert profile.tokens_per_second("H100", 1) == 10 and profile.tokens_per_second("H100", 8) == 80
    assert profile.tokens_per_second("A100", 8) == 70 and profile.tokens_per_second("A100", 2) == 20
    assert profile.tokens_per_second("H10", 1) is None and profile.tokens_per_second("-", 1) is None


# --- files ---


def test_every_way_to_write_a_file_is_read(tmp_path):
    """Method: a byte order mark, CRLF, quoted commas, other columns between, unsorted times, a time
    zone, and no time, against the plain file. Twin: another price is another offer."""
    plain, other = tmp_path / "plain.csv", tmp_path / "other.csv"
    plain.write_text(HEADER + 'aws,"us, east",m,A,2,spot,2026-03-01,1\n')
    with plain.open("a") as file:
        file.write('aws,"us, east",m,A,2,spot,2026-03-03T12:00Z,3\ngcp,b,,B,1,on-demand,,2\n')
    rows = [
        "note,dollars_per_hour,time,market,count,gpu,instance,zone,cloud",
        'x,3,2026-03-03T14:00+02:00,SPOT,2,A,m,"us, east",aws',
        "x,2,,on-demand,1,B,,b,gcp",
        '"a ""b""",1,2026-03-01,spot,2,A,m,"us, east",aws',
    ]
    other.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    found = read_prices(plain)
    assert found == read_prices(other) and len(found) == 2
    spot, steady = found
    noon = spot.times[1]
    assert spot.price_at(noon) == 3 and spot.price_at(noon - 1) == 1
    assert spot.price_at(spot.times[0] - 1) == math.inf and steady.price_at(-1e9) == 2
    other.write_text(plain.read_text().replace(",3\n", ",4\n"))
    assert read_prices(other) != found


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("aws,a,m,A,1,spot,2026-03-01,-1", "dollars_per_hour '-1'"),
        ("aws,a,m,A,1,spot,2026-03-01,", "dollars_per_hour ''"),
        ("aws,a,m,A,1,spot,2026-03-01,nan", "dollars_per_hour 'nan'"),
        ("aws,a,m,A,1,spot,2026-03-01", "dollars_per_hour ''"),
        ("aws,a,m,A,0,spot,2026-03-01,1", "count '0'"),
        ("aws,a,m,A,1.5,spot,2026-03-01,1", "count '1.5'"),
        ("aws,a,m,,1,spot,2026-03-01,1", "gpu is missing"),
        ("aws,a,m,A,1,cheap,2026-03-01,1", "market 'cheap'"),
        ("aws,a,m,A,1,spot,yesterday,1", "time 'yesterday'"),
        ("aws,a,m,A,1,spot,0001-01-01T00:00+23:00,1", "time '0001"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path, row, named):
    (tmp_path / "p.csv").write_text(HEADER + "aws,a,m,A,1,spot,,1\n" + row + "\n")
    with pytest.raises(ConfigError, match="line 3") as raised:
        read_prices(tmp_path / "p.csv")
    assert named in str(raised.value)


@pytest.mark.parametrize(
    "raw", [b"", b"a,b\n1,2\n", HEADER.encode(), b"\xff\xfe\x00", HEADER.encode() + b'"\x00' * 99]
)
def test_what_is_no_price_file_is_refused(tmp_path, raw):
    (tmp_path / "p.csv").write_bytes(raw)
    for path in (tmp_path / "p.csv", tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError):
            read_prices(path)


def test_a_hundred_thousand_rows(tmp_path):
    """Method: 100 offers with 1,000 hourly changes each, read and planned, in well under a second.
    Twin: the plan beats staying, so it has read the changes."""
    random_, lines = random.Random(SEED), []
    for row in range(100_000):
        hour = row // 100
        when = f"2026-{1 + hour // 672:02}-{1 + hour // 24 % 28:02}T{hour % 24:02}:00Z"
        lines.append(f"aws,z{row % 100},m,A,{1 + row % 2},spot,{when},{random_.uniform(1, 2):.4f}")
    (tmp_path / "p.csv").write_text(HEADER + "\n".join(lines))
    offers = read_prices(tmp_path / "p.csv")
    rates = [float(each.count) for each in offers]
    job = Rental(20 * DAY, offers[0].times[0], offers, rates, [0.0] * 100)
    found = job.moves(Move(1.0, 300.0))
    assert len(offers) == 100 and all(len(each.times) == 1000 for each in offers)
    assert found.moves > 1 and found.dollars < min(each.dollars for each in job.stays())


def test_a_rate_of_losses_counts_what_still_ran(tmp_path):
    """Method: by hand: two losses in 10 hours of one kind; others together. Twin: a life that ends
    before it begins is refused."""
    rows = """cloud,zone,gpu,count,started,seen_last,end
        aws,a,A,1,2026-03-01T00:00Z,2026-03-01T04:00Z,lost
        aws,a,A,1,2026-03-01T00:00Z,2026-03-01T05:00Z,still running
        aws,b,A,8,2026-03-01T00:00Z,2026-03-01T01:00Z,lost
        gcp,b,B,1,2026-03-01T00:00Z,2026-03-01T10:00Z,still running\n"""
    (tmp_path / "l.csv").write_text(rows)
    lives = read_lifetimes(tmp_path / "l.csv")
    offer = Offer("aws", "c", "m", "A", 1, "spot")
    assert lives.per_second(offer) == pytest.approx(2 / 36000)
    assert lives.per_second(Offer("gcp", "b", "m", "B", 1, "spot")) == 0
    assert lives.per_second(Offer("azure", "b", "m", "B", 1, "spot")) == pytest.approx(2 / 72000)
    (tmp_path / "l.csv").write_text(rows.replace("T10:00Z,still", "T10:00Z,gone"))
    with pytest.raises(ConfigError, match="line 5.*gone"):
        read_lifetimes(tmp_path / "l.csv")
