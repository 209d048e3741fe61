"""infinity/_C.pyi tells type checkers what the native core has: all of it, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import infinity
from infinity import native

STUB = Path(infinity.__file__).parent / "_C.pyi"


def names_of(body: list[ast.stmt]) -> set[str]:
    """What a module or class body of a stub declares."""
    found = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found |= {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    return found | {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets}


def differences(source: str, module: object) -> list[str]:
    """Names that only one of stub and module has, inside classes too. Of what Python gives every class, none counts."""
    tree, found = ast.parse(source), []

    def compare(where: str, declared: set[str], there: object) -> None:
        own = {name for name in vars(there) if not name.startswith("_")}
        found.extend(f"{where}{name} is not declared" for name in own - declared)
        found.extend(f"{where}{name} is not there" for name in declared if not hasattr(there, name) and name != "__buffer__")

    compare("", names_of(tree.body), module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and hasattr(module, node.name):
            ours = getattr(module, node.name)
            compare(f"{node.name}.", names_of(node.body) | ({"name", "value"} if hasattr(ours, "__members__") else set()), ours)
    return found


def test_the_stub_declares_what_the_core_has():
    """Compares the names of both, class by class."""
    assert not differences(STUB.read_text(), native._C)


def test_a_difference_is_found():
    """The twin: a name less, and one more."""
    source = STUB.read_text()
    assert differences(source.replace("def try_lease(", "def lease("), native._C) == [
        "PinnedPool.try_lease is not declared",
        "PinnedPool.lease is not there",
    ]
