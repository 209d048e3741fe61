"""Answers: with `--json` a command prints one object on standard output. What it and its libraries
print besides goes to standard error."""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any


class _Aside:
    """Standard output while an object is to come. ``own``: the stream that it is printed on."""

    def __init__(self, own: Any):
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@contextmanager
def others_aside() -> Iterator[None]:
    """Sends to standard error what is printed inside, and as the process ends."""
    with redirect_stdout(_Aside(sys.stdout)):
        yield
    # The last to be registered is the first to be called: libraries say farewell after it
    atexit.register(lambda: setattr(sys, "stdout", sys.stderr))


def print_object(answer: Any) -> None:
    """Prints a command's answer as JSON, on standard output."""
    print(json.dumps(answer), file=getattr(sys.stdout, "own", sys.stdout), flush=True)
