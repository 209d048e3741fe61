"""Scores: what was measured, as rows, as one line, and as JSON."""

from __future__ import annotations

import json
import math

import pytest

from infinity.tools.eval.scores import finite, line_of, rows_of

LOSS = {
    "data": "chat.jsonl",
    "predicted_tokens": 1234,
    "held_out_loss": 0.5,
    "perplexity": 1.64872,
    "bits_per_byte": 0.721,
}
TASKS = {
    "tasks": {
        "sums": {"alias": "sums", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.25},
        "gsm": {"exact_match,strict": 1.0, "exact_match_stderr,strict": None},
    },
    "fewshot": {"sums": 2},
}


def test_rows_have_every_metric_with_its_error():
    """Twin: names that are no metric have no row."""
    assert list(rows_of(TASKS)) == [
        ("task", "examples", "metric", "value", "error"),
        ("sums", "2", "acc", "0.5000", "0.2500"),
        ("gsm", "", "exact_match (strict)", "1.0000", ""),
    ]
    assert [row[1] for row in rows_of(LOSS)] == [
        "0.5000 nats per token, 1,234 tokens predicted",
        "1.6487",
        "0.721",
    ]
    assert ("perplexity", "more than 1e307") in rows_of(LOSS | {"perplexity": None})


def test_one_line_has_them_all():
    assert line_of(TASKS) == "lm-eval: sums acc 0.5000; gsm exact_match (strict) 1.0000"
    assert line_of(LOSS).startswith("chat.jsonl: held-out loss 0.5000 nats per token")


@pytest.mark.parametrize(
    "other", [{}, [], None, 3, {"tasks": 3}, {"tasks": {"a": 1}}, LOSS | {"held_out_loss": "x"}]
)
def test_what_is_no_result_is_refused(other):
    """Twin: the results themselves are not."""
    with pytest.raises(ValueError, match="no results in it"):
        line_of(other)
    assert line_of(LOSS) and line_of(TASKS)


def test_numbers_that_json_has_not_are_none():
    """Twin: as they are, another program's parser would refuse them."""
    given = {"a": math.nan, "b": {"c": math.inf, 4: "N/A"}, "d": print}
    found = finite(given)
    assert found == {"a": None, "b": {"c": None, "4": "N/A"}, "d": str(print)}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    with pytest.raises(ValueError):
        json.dumps(given["b"], allow_nan=False)
