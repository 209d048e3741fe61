"""Imports go downward only: every module of infinity/ stands on a floor and uses what lies below it.

Words used here:

**floor**: modules that do not know of each other.
**import**: any import statement, inside functions too; those under TYPE_CHECKING are for the reader and do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import infinity

PACKAGE = Path(infinity.__file__).parent

# Lowest first. `bench` and `cli` are whole folders.
FLOORS = [
    ["cgroups", "untrusted", "errors", "farewell", "guard", "mistakes", "replaced", "numa", "speculation", "lookahead", "journal"],
    ["processors", "limits", "tiers", "layout", "native", "partition", "trace", "logits", "checkpoint_folder"],
    ["rules"],
    ["ledger", "heap"],
    ["weights", "collectives", "device", "write_behind"],
    ["materialize", "mesh"],
    ["config", "disks", "parameter"],
    ["store", "recompute"],
    ["shard"],
    ["stepper"],
    ["unit", "schedule", "plan", "gradients", "activations"],
    ["reducer"],
    ["hooks", "optimizer", "microbatch", "tiling", "predict"],
    ["prefetch", "checks"],
    ["engine"],
    ["wrap"],
    ["checkpoint", "pretrained", "measure"],
    ["export"],
    ["__init__"],
    ["bench"],
    ["cli"],
    ["__main__"],
]
FLOOR_OF = {module: number for number, floor in enumerate(FLOORS) for module in floor}

CORES = ("_C", "_cuda")  # the compiled modules

Import = tuple[str, str, int]  # who imports, what, and in which line


def without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of ``if TYPE_CHECKING:`` blocks."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        yield node
        pending += ast.iter_child_nodes(node)


def imports_of(source: str, path: str) -> Iterator[Import]:
    """The imports of infinity's own modules in ``source``, which lies at ``path`` below the package."""
    parts = Path(path).with_suffix("").parts
    module, package = parts[0], list(parts[:-1])
    for node in without_type_checking(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
            found = [target[1:] or ["__init__"] for target in targets if target[0] == "infinity"]
        elif isinstance(node, ast.ImportFrom):
            target = node.module.split(".") if node.module else []
            if node.level:
                target = package[: len(package) - node.level + 1] + target
            elif target[:1] == ["infinity"]:
                target = target[1:]
            else:
                continue
            found = [target] if target else [[alias.name] for alias in node.names]
        else:
            continue
        for target in found:
            known = target[0] in FLOOR_OF or target[0].startswith(CORES)
            yield module, target[0] if known else "__init__", node.lineno


def violations(sources: dict[str, str]) -> list[str]:
    """What in ``sources`` (path below the package -> text) goes against the floors."""
    found = []
    for path, source in sorted(sources.items()):
        for module, target, line in imports_of(source, path):
            where = f"{path}:{line}: {module} imports {target}"
            if target.startswith(CORES):
                if module != "native":
                    found.append(f"{where}; only native may")
            elif module == target:
                continue  # inside cli
            elif FLOOR_OF[target] >= FLOOR_OF[module]:
                found.append(f"{where}, which is not below it")
    return found


def sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_every_module_stands_on_one_floor():
    """Compares the package's files with the floors: a new module has to be given its place here."""
    modules = {Path(path).with_suffix("").parts[0] for path in sources()}
    assert modules == set(FLOOR_OF)
    assert sum(len(floor) for floor in FLOORS) == len(FLOOR_OF), "a module stands on two floors"


def test_imports_go_downward_only():
    """Reads every import statement of the package and compares the floors of both ends."""
    assert not violations(sources())


def test_only_native_imports_the_core():
    """Looks for the compiled modules among all imports: native has it, nobody else."""
    found = [each for path, source in sources().items() for each in imports_of(source, path)]
    importers = {module for module, target, _ in found if target.startswith(CORES)}
    assert importers == {"native"}


def test_a_violation_is_found():
    """The twin: upward, sideways, absolute, hidden and native imports are all found; type checking's are not."""
    wrong = {
        "errors.py": "from .tiers import Tier",
        "tiers.py": "from . import layout",
        "store.py": "def f():\n    from infinity.engine import Engine",
        "unit.py": "import infinity.wrap",
        "shard.py": "from . import _C",
        "plan.py": "import infinity._C",
        "gradients.py": "from . import _cuda",
        "wrap.py": "import infinity",
        "cli/env.py": "from ..__main__ import main",
    }
    found = violations(wrong)
    assert len(found) == len(wrong), found
    right = {
        "tiers.py": "from .errors import ConfigError\nimport errors, torch\nfrom torch import nn",
        "parameter.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .unit import ParamUnit",
        "native.py": "from . import _C",
        "wrap.py": "from . import hooks, native",
        "cli/train.py": "import infinity\nfrom .text import f\nfrom ..errors import UsageError",
    }
    assert not violations(right)
