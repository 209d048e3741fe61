"""What a rank that ends leaves behind for the others."""

from __future__ import annotations

from infinity.ranks.failure_report import LONGEST, describe_chain


def raised(error: Exception, cause: Exception, note: str = "") -> Exception:
    error.__cause__ = cause
    if note:
        error.add_note(note)
    return error


def test_what_is_behind_an_error_is_told_first_then_where():
    bottom = ValueError("the user's own")
    assert describe_chain(bottom) == "ValueError: the user's own"
    above = raised(RuntimeError("Failed to run stage backward"), bottom, "in a backward of stage 3")
    told = describe_chain(raised(RuntimeError("step 7"), above))
    assert told == "ValueError: the user's own (in a backward of stage 3), in RuntimeError: step 7"


def test_a_long_reason_leaves_room_for_where_it_was():
    told = describe_chain(raised(RuntimeError("in a step"), ValueError("x" * 2 * LONGEST)))
    assert told.endswith(", in RuntimeError: in a step") and len(told) < LONGEST


def test_causes_in_a_circle_end():
    """`raise cause from error` where error was raised from cause: a rank that followed the circle
    would never end."""
    cause, error = ValueError("why"), RuntimeError("where")
    cause.__cause__, error.__cause__ = error, cause
    assert describe_chain(error) == "ValueError: why, in RuntimeError: where"
