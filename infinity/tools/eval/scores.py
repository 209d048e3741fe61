"""Scores: what `infinity eval` measured, as rows of text and as one line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

ERROR = "_stderr"  # the end of the name that lm-eval gives the error of a metric


def finite(value: Any) -> Any:
    """Returns results with None for each number that JSON has not."""
    if isinstance(value, dict):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def rows_of(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of a table of results."""
    if "tasks" not in result:
        tokens = f"{result['predicted_tokens']:,} tokens predicted"
        yield "held-out loss", f"{result['held_out_loss']:.4f} nats per token, {tokens}"
        perplexity = result["perplexity"]
        yield "perplexity", "more than 1e307" if perplexity is None else f"{perplexity:.4f}"
        if result["bits_per_byte"] is not None:
            yield "bits per byte", f"{result['bits_per_byte']:.3f}"
        return
    yield "task", "examples", "metric", "value", "error"
    for name, measured in result["tasks"].items():
        shown = name, str(result["fewshot"].get(name, ""))
        for metric, value, error in _metrics(measured):
            yield *shown, metric, _number(value), _number(error)


def line_of(result: Any) -> str:
    """Returns results on one line. Raises ValueError for what `infinity eval` has not written."""
    try:
        if "tasks" in result:
            parts = [
                f"{name} {metric} {_number(value)}"
                for name, measured in result["tasks"].items()
                for metric, value, _ in _metrics(measured)
            ]
            return f"lm-eval: {'; '.join(parts)}"
        parts = [" ".join(row) for row in rows_of(result)]
        return f"{result['data']}: {'; '.join(parts)}"
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"no results in it ({error!r})") from None


def _metrics(measured: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields each metric's name, value and error. lm-eval names the filter behind a comma."""
    for key, value in measured.items():
        metric, comma, chosen = key.partition(",")
        if comma and isinstance(value, (int, float)) and not metric.endswith(ERROR):
            name = metric if chosen == "none" else f"{metric} ({chosen})"
            yield name, value, measured.get(f"{metric}{ERROR},{chosen}")


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else ""
