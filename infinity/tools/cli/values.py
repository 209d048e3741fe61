"""Values of options: parses them, and says what is wrong with one."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...amounts import number_of, parse_nbytes
from ...errors import ConfigError

MOST = 2**31 - 1  # of a count: more is a typo
MOST_TOKENS = 1e18
SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
MOST_SECONDS = 1e10  # of a duration: 300 years


def a_path(text: str) -> Path:
    """Parses a path."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty path given: name a file or folder")
    return Path(text)


def _whole(text: str, low: int, high: int = MOST, why: str = "") -> int:
    try:
        value = int(text)
    except ValueError:
        near = f", as {float(text):.0f}" if _is_whole(text) else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number{near}") from None
    if value > high:
        raise argparse.ArgumentTypeError(f"{text} given, at most {high} possible")
    if value < low:
        raise argparse.ArgumentTypeError(f"{text} given, {low} or more{why} needed")
    return value


def _is_whole(text: str) -> bool:
    try:
        return float(text).is_integer()
    except (ValueError, OverflowError):
        return False


def _real(text: str, low: float = 0.0, needed: str = "0 or more") -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text} given, a finite number needed")
    if not value >= low:
        raise argparse.ArgumentTypeError(f"{text} given, {needed} needed")
    return value


# Each parses a number of a kind.
a_count = partial(_whole, low=1)
zero_or_more = partial(_whole, low=0)
at_least_two = partial(_whole, low=2, why=" (a token and the one to predict)")
a_seed = partial(_whole, low=0, high=2**63 - 1)
positive_real = partial(_real, low=sys.float_info.min, needed="more than 0")
real_from_zero = _real


def a_pair(text: str) -> str:
    """Parses two numbers from 0 to 1, as AdamW's betas; returns them as text."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} given: two numbers needed, as 0.9,0.95")
    for part in parts:
        if _real(part) >= 1:
            raise argparse.ArgumentTypeError(f"{part} given, less than 1 needed")
    return ",".join(part.strip() for part in parts)


def value_of(option: str, words: Sequence[str]) -> str | None:
    """Returns the last value of ``option`` in ``words``, or None."""
    value = None
    for number, word in enumerate(words):
        if word == option and number + 1 < len(words):
            value = words[number + 1]
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


def parse_seconds(value: float | str, name: str) -> float:
    """Parses a duration from seconds, or text as ``"30s"``, ``"15m"``, ``"6h"``, ``"2d"``. Raises
    ConfigError that names ``name``."""
    if not isinstance(value, bool) and 0 <= (number := number_of(value, SECONDS)) <= MOST_SECONDS:
        return float(number)
    raise ConfigError(
        f"{name}={str(value)[:60]!r} is not a duration: give seconds, or text such as '30s', '15m',"
        " '6h' or '2d'"
    )


def svg_path(text: str) -> Any:
    """Parses the path of a picture."""
    path = a_path(text)
    if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".gif", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text}: the picture is an SVG, name it *.svg")
    return path


def a_number_of_tokens(text: str) -> float:
    """Parses a number of tokens, as 2B, 500M, 64K or 2e9."""
    number, letter = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    scale = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(letter)
    try:
        value = float(number) * (scale or math.nan)
    except ValueError:
        value = math.nan
    if not 1 <= value <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens from 1 on: give it as 2B, 500M or 2e9"
        )
    return value


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields rows with their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip()


def rating_of(args: argparse.Namespace) -> float | None:
    """Returns the bytes that a drive may be written in all; None if they are not given. Raises
    ConfigError."""
    if args.drive_rating is None:
        return None
    rating = float(parse_nbytes(args.drive_rating, "--drive-rating"))
    if rating <= 0:
        raise ConfigError(f"--drive-rating {args.drive_rating}: give bytes, as 1200TB")
    return rating
