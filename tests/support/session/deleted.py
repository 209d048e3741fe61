"""Folders of extensions and tools that were deleted in this copy: tests that ask for them are
skipped, by the folder's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[3] / "infinity"
ASKED = re.compile(r"No module named 'infinity\.(ext\.\w+|ext|tools)")
skipped: list[str] = []  # tests and files that a deleted folder failed: what they made may stay


def is_deleted(folder: str) -> bool:
    return not (PACKAGE / folder).exists()


def needs(*folders: str) -> pytest.MarkDecorator:
    """Makes the mark of a test that is about these folders below infinity/, too."""
    gone = list(filter(is_deleted, folders))
    return pytest.mark.skipif(bool(gone), reason=f"{', '.join(gone)} was deleted here")


def skip_without(node: pytest.Item | pytest.Collector, report: Any) -> Any:
    """Returns ``report``, as one of a skipped ``node`` if that asked for such a folder."""
    if report.failed and (folder := deleted_in(str(report.longrepr))) is not None:
        skipped.append(node.nodeid)
        report.outcome = "skipped"
        report.longrepr = (str(node.path), 0, f"Skipped: infinity/{folder} was deleted here")
        report.result = []
    return report


def deleted_in(text: str) -> str | None:
    """Returns the folder that was deleted and for which ``text``, of an error, asks."""
    asked = (match[1].replace(".", "/") for match in ASKED.finditer(text))
    return next(filter(is_deleted, asked), None)
