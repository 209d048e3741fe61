"""Values of options: durations."""

from __future__ import annotations

import pytest

from infinity.errors import ConfigError
from infinity.tools.cli.values import parse_seconds


@pytest.mark.parametrize(
    "text, seconds",
    [(0, 0), (1.5, 1.5), ("90", 90), ("30s", 30), ("15 min", 900), ("1.5H", 5400), ("2d", 172800)],
)
def test_durations_are_read_as_they_are_written(text, seconds):
    """Reads numbers and units in either case. Twin: what is none is refused by name."""
    assert parse_seconds(text, "notice") == seconds
    for wrong in ("", "-5", "5 weeks", "1e9", "9" * 400, -1, True, None, float("nan"), [], "h"):
        with pytest.raises(ConfigError, match="notice=.*is not a duration"):
            parse_seconds(wrong, "notice")
