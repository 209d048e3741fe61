"""Wording: what a message prints to be copied ends where it ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import infinity
from infinity.tools.train.wording import in_options

SOURCES = Path(infinity.__file__).parent
# An option with its value, or a configuration, and what follows it at once. A list of bare options
# is none, a colon says something of what was given, and a command ends with its quote.
GLUED = re.compile(
    r"(?:--[a-z][\w-]*(?:[ =][^\s`'\".,;)]+)?|\bConfig\([^()]*\))"
    r"[.,;](?=\s(?!--)|$)"
)


def glued(text: str) -> list[str]:
    return [found[0] for found in GLUED.finditer(text)]


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts of a file that are not docstrings, with X for what they put in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(text(each) or "X" for each in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return text(node.left) + text(node.right)
        return ""

    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # a docstring
            skipped.add(node.value)
        if node not in skipped and (found := text(node)):
            skipped |= set(ast.walk(node))
            yield node.lineno, found


def test_no_message_glues_punctuation_to_what_is_copied():
    """Reads every text of the package. The twin is below."""
    found = [
        f"{path.relative_to(SOURCES)}:{line}: {each}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line, text in messages(ast.parse(path.read_text()))
        for each in glued(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Raise it: --device-memory 700MiB.", 1),
        ("Give Config(params='nvme'), or less.", 1),
        ("Leave out --pack.", 1),
        ("`infinity export A --to B`; then go on.", 0),
        ("add --lora, whose adapters are", 1),
        ("--device-memory 700MiB or move more", 0),
        ("--prompt: it is of a saved model.", 0),
        ("what --checkpoint, --out and --trace hold", 0),
        ("Raise device_memory by 1.5 MiB: Config(device_memory=15)", 0),
    ],
)
def test_glued_punctuation_is_found(text, count):
    """The twin: messages as they were, and as they are."""
    assert len(glued(text)) == count
    tree = ast.parse(f"raise ValueError({text!r})")
    assert [each for _, message in messages(tree) for each in glued(message)] == glued(text)


def test_options_in_place_of_a_configuration_end_where_it_did():
    """Turns a remedy into a command's options: what is split by blanks is what may be copied."""
    options = ("--device-memory", "--params", "--nvme-path")
    said = in_options(
        "Raise device_memory by 1.0 MiB: Config(device_memory=15) or move more to disk:"
        " Config(params='nvme', nvme_paths=['/a/b'])",
        options,
    )
    assert (
        said.split()
        == (
            "Raise --device-memory by 1.0 MiB: --device-memory 15 or move more to disk:"
            " --params nvme --nvme-path /a/b"
        ).split()
    )
