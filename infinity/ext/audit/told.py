"""What was audited, in words. Needs no torch: `infinity top` says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.machine.sizes import format_nbytes

DEFAULT_SHARE = 0.01  # of the work, of `infinity train --audit`


def line_of(audited: Mapping[str, Any]) -> str | None:
    """Says in one line what was ``audited``, of :meth:`.findings.Findings.told`; None if nothing
    is, or for other values."""
    pieces, nbytes, wrong = (audited.get(name) for name in ("pieces", "nbytes", "found"))
    if not isinstance(pieces, Mapping) or not isinstance(nbytes, Mapping):
        return None
    counts = [(str(kind), count) for kind, count in pieces.items() if isinstance(count, int)]
    kinds = ", ".join(f"{count:,} of {kind}" for kind, count in counts if count) or "nothing yet"
    total = sum(each for each in nbytes.values() if isinstance(each, int))
    verdict = f"WRONG: {wrong[0]}" if isinstance(wrong, list) and wrong else "none wrong"
    return f"audited pieces: {kinds}; {format_nbytes(total)}, {verdict}"
