"""What a test may be given as a parameter: `conftest.py` looks at all of them as they are
collected."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from marks import refuse_kept_errors


def test_an_exception_is_no_parameter():
    """One that is raised keeps its frames, and the engines in them, until the session ends."""
    refuse_kept_errors(
        [
            SimpleNamespace(nodeid="a"),
            SimpleNamespace(nodeid="b", callspec=SimpleNamespace(params={"kind": ValueError})),
        ]
    )
    with pytest.raises(pytest.UsageError, match="b: give the class"):
        refuse_kept_errors(
            [
                SimpleNamespace(
                    nodeid="b", callspec=SimpleNamespace(params={"error": ValueError("stop")})
                )
            ]
        )
