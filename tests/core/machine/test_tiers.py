"""Sizes as people write them, and the ledger that never charges more than a budget."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.amounts import parse_nbytes
from infinity.config import Config
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.sizes import format_nbytes, round_up
from infinity.core.machine.tiers import Tier
from infinity.errors import CapacityError, ConfigError

GIB = 1024**3


# --- sizes ---


@pytest.mark.parametrize(
    "text, nbytes",
    [
        (0, 0),
        (48_000_000, 48_000_000),
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("1 b", 1),
        ("1k", 1024),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("500MB", 500_000_000),
        ("500 mib", 500 * 1024**2),
        ("48GiB", 48 * GIB),
        ("48g", 48 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("0.5GiB", GIB // 2),
        (" 2 TiB ", 2 * 1024**4),
        ("3TB", 3 * 10**12),
        ("1.25k", 1280),
    ],
)
def test_sizes_are_read_as_they_are_written(text, nbytes):
    """Reads numbers, binary and decimal units in either case, with and without a space."""
    assert parse_nbytes(text, "host_memory") == nbytes


def test_no_size_stays_no_size():
    """None means: measure. It is not zero."""
    assert parse_nbytes(None, "host_memory") is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "GiB",
        "-5",
        "-1GiB",
        "1e9",
        "5 XB",
        "5 GiB/s",
        "1.2.3",
        "0x10",
        -1,
        True,
        False,
        1.5,
        [],
        {},
        b"5",
    ],
)
def test_what_is_not_a_size_is_refused_by_name(value):
    """Reads nonsense; the message names the setting, the value, and what would do."""
    with pytest.raises(ConfigError, match="host_memory=") as caught:
        parse_nbytes(value, "host_memory")
    assert repr(value) in str(caught.value) and "48GiB" in str(caught.value)


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 2**53))
def test_whole_bytes_as_text_are_exact(nbytes):
    """Reads numbers of bytes up to 8 PiB as text and as a number: both are that number."""
    assert parse_nbytes(nbytes, "x") == nbytes
    assert parse_nbytes(str(nbytes), "x") == nbytes


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 1024**2, "5.0 MiB"),
        (48 * GIB, "48.0 GiB"),
        (2 * 1024**4, "2.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit_that_fits(nbytes, text):
    """Formats sizes around the unit boundaries."""
    assert format_nbytes(nbytes) == text


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 2**50))
def test_a_written_size_reads_back_to_what_it_shows(nbytes):
    """Formats and parses: the difference is at most half of the last digit that was shown."""
    text = format_nbytes(nbytes)
    back = parse_nbytes(text, "x")
    unit = parse_nbytes("1 " + text.split()[1], "x")
    assert abs(back - nbytes) <= 0.05 * unit + 1
    assert float(text.split()[0]) <= 1024


# --- the ledger ---


def ledger_of(**budgets: int) -> Ledger:
    ledger = Ledger()
    for tier, budget in budgets.items():
        ledger.accounts[Tier(tier)].budget_nbytes = budget
    return ledger


def charged(ledger: Ledger) -> dict[str, int]:
    return {str(tier): account.charged_nbytes for tier, account in ledger.accounts.items()}


@settings(derandomize=True, deadline=None)
@given(
    budget=st.integers(0, 1000),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 600)), max_size=60),
)
def test_the_ledger_never_exceeds_a_budget(budget, moves):
    """Reserves and releases at random beside a plain sum: refused exactly where the sum would go
    over."""
    ledger, held, peak = ledger_of(host=budget), [], 0
    for give_back, value in moves:
        if give_back and held:
            held.pop(value % len(held)).release()
        elif sum(reservation.nbytes for reservation in held) + value > budget:
            before = charged(ledger)
            with pytest.raises(CapacityError):
                ledger.reserve(Tier.HOST, value, "something")
            assert charged(ledger) == before
        else:
            held.append(ledger.reserve(Tier.HOST, value, "something"))
        total = sum(reservation.nbytes for reservation in held)
        peak = max(peak, total)
        account = ledger.accounts[Tier.HOST]
        assert account.charged_nbytes == total <= budget
        assert account.peak_nbytes == peak
    for reservation in held:
        reservation.release()
    assert charged(ledger) == {"device": 0, "host": 0, "nvme": 0}


def test_a_budget_is_met_to_the_byte():
    """Reserves exactly the budget; the twin is one byte more."""
    ledger = ledger_of(device=1000)
    whole = ledger.reserve(Tier.DEVICE, 1000, "weights")
    with pytest.raises(CapacityError):
        ledger.reserve(Tier.DEVICE, 1, "one byte")
    whole.release()
    with pytest.raises(CapacityError):
        ledger.reserve(Tier.DEVICE, 1001, "weights")
    assert ledger.accounts[Tier.DEVICE].charged_nbytes == 0


def test_tiers_are_charged_apart_and_without_a_budget_freely():
    """Fills one tier; the others take what they are given, and remember their peaks."""
    ledger = ledger_of(device=10)
    held = [ledger.reserve(Tier.DEVICE, 10, "a"), ledger.reserve(Tier.NVME, 7, "c")]
    ledger.reserve(Tier.HOST, 10**15, "b").release()
    assert charged(ledger) == {"device": 10, "host": 0, "nvme": 7}
    assert ledger.accounts[Tier.HOST].peak_nbytes == 10**15


def test_releasing_a_reservation_twice_gives_back_once():
    """Releases twice, beside another reservation that must stay charged."""
    ledger = ledger_of(host=10)
    first, second = ledger.reserve(Tier.HOST, 4, "a"), ledger.reserve(Tier.HOST, 6, "b")
    first.release()
    first.release()
    assert ledger.accounts[Tier.HOST].charged_nbytes == 6
    second.release()
    assert ledger.accounts[Tier.HOST].charged_nbytes == 0


@pytest.mark.parametrize("tier", list(Tier))
def test_a_refusal_says_what_how_much_and_which_setting(tier):
    """Goes 5 MiB over the budget of each tier: the setting that the message names must be one of
    Config's."""
    ledger = ledger_of(**{tier: 10 * 1024**2})
    held = ledger.reserve(tier, 8 * 1024**2, "weights")
    with pytest.raises(CapacityError, match="optimizer state") as caught:
        ledger.reserve(tier, 7 * 1024**2, "optimizer state")
    message = str(caught.value)
    for size in ("7.0 MiB", "8.0 MiB", "10.0 MiB", "5.0 MiB"):
        assert size in message
    named = message.split("Config(")[1].split("=")[0]
    assert named in {field.name for field in dataclasses.fields(Config)}


def test_sizes_are_rounded_up_to_a_multiple():
    """Against a search, for every small value and multiple."""
    for multiple in range(1, 12):
        for value in range(40):
            assert round_up(value, multiple) == next(
                n for n in range(value, value + multiple) if n % multiple == 0
            )
