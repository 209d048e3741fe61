"""Sizes that CONTRIBUTING promises: what grows beyond them hides a noun.

Words used here:

**length**: lines from the `def` or `class` to the last one, both counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import infinity

PACKAGE = Path(infinity.__file__).parent
BENCH = PACKAGE.parent / "bench"
TESTS = Path(__file__).parent.parent

FUNCTION_NLINES, CLASS_NLINES, FILE_NLINES, TEST_FILE_NLINES = 50, 300, 400, 800


def too_long(source: str, path: str) -> Iterator[tuple[str, str]]:
    """Yields (path, name) of every function and class in ``source`` that is longer than it may
    be."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            limit = CLASS_NLINES if isinstance(node, ast.ClassDef) else FUNCTION_NLINES
            if node.end_lineno - node.lineno + 1 > limit:
                yield path, node.name


def test_functions_and_classes_fit_their_sizes():
    """Measures every function and class of the package and of the benchmarks."""
    paths = [path for folder in (PACKAGE, BENCH) for path in folder.rglob("*.py")]
    found = {
        each
        for path in paths
        for each in too_long(path.read_text(), str(path.relative_to(PACKAGE.parent)))
    }
    assert not found


def test_files_fit_their_sizes():
    """Counts the lines of every file of the package, of the benchmarks and of the tests."""
    for folder, limit in ((PACKAGE, FILE_NLINES), (BENCH, FILE_NLINES), (TESTS, TEST_FILE_NLINES)):
        long = {
            str(path.relative_to(PACKAGE.parent))
            for path in folder.rglob("*.py")
            if len(path.read_text().splitlines()) > limit
        }
        assert not long


def test_what_is_too_long_is_found():
    """The twin: one line more than the limit, as a method and inside a function too."""
    body = "\n".join(f"        x{i} = {i}" for i in range(FUNCTION_NLINES))
    assert list(too_long(f"class A:\n    def f(self):\n{body}\n", "a.py")) == [("a.py", "f")]
    assert not list(
        too_long(f"class A:\n    def f(self):\n{body[: body.rindex(chr(10))]}\n", "a.py")
    )
    long_class = "class A:\n" + "\n".join(f"    x{i} = {i}" for i in range(CLASS_NLINES))
    assert list(too_long(long_class, "a.py")) == [("a.py", "A")]
