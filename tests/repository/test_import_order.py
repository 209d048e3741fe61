"""Imports go down only: every floor of infinity/ uses those below it, and csrc/ likewise.

Words used here:

**floor**: the modules beside the folders of infinity/, `files`, `core`, `ranks`, `ext`, `tools`,
and on top the modules that hand out public names.
**import**: any import statement, inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import infinity

PACKAGE = Path(infinity.__file__).parent
BENCH = PACKAGE.parent / "bench"  # of a checkout, in no package
CSRC = PACKAGE.parent / "csrc"

# From the lowest to the highest. Modules that are not named here are on their folder's floor.
FLOORS = ("errors", "files", "core", "ranks", "ext", "tools", "__init__")
MODULES = {
    **dict.fromkeys(
        ("amounts", "choices", "errors", "native", "progress", "torch_private", "untrusted")
        + ("library_versions",),
        "errors",
    ),
    "config": "core",
    **dict.fromkeys(("__init__", "__main__", "data", "integrations", "parallel"), "__init__"),
}
# Imports that still go up, counted. They may become fewer.
MOST_UP = {
    ("core", "ranks"): 34,
    ("files", "core"): 2,
}
CSRC_ROOMS = [
    ["base"],
    ["memory"],
    ["io", "optim"],
    ["update", "bench"],
    ["cuda", "python"],
    ["tests"],
]

CORES = ("_C", "_cuda")  # the compiled modules

Import = tuple[
    str, str, int
]  # the file that imports, the module that it imports from, and the line


parse = functools.cache(ast.parse)


def modules_of(sources: dict[str, str]) -> set[str]:
    return {".".join(Path(path).with_suffix("").parts) for path in sources}


def imports_of(
    source: str, path: str, modules: set[str], *, at_once: bool = False
) -> Iterator[Import]:
    """The imports of infinity's own modules in ``source``, which lies at ``path`` below the
    package. ``at_once``: those that are run when it is imported itself."""
    package, tree = list(Path(path).parts[:-1]), parse(source)
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (parts := alias.name.split("."))[0] == "infinity":
                    yield path, ".".join(parts[1:]) or "__init__", node.lineno
        elif isinstance(node, ast.ImportFrom):
            target = node.module.split(".") if node.module else []
            if node.level:
                target = package[: len(package) - node.level + 1] + target
            elif target[:1] == ["infinity"]:
                target = target[1:]
            else:
                continue
            for alias in node.names:
                full = ".".join([*target, alias.name])
                yield (
                    path,
                    full if full in modules or full in CORES else ".".join(target) or "__init__",
                    node.lineno,
                )


def floor_of(module: str) -> str:
    """The floor of a module. Raises KeyError for a module without one."""
    top, _, below = module.partition(".")
    return top if below and top in FLOORS else MODULES[top]


def upward(sources: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Imports in ``sources`` (path below the package -> text) of a higher floor: the floor that
    imports, the floor that it imports from, and where."""
    modules = modules_of(sources)
    for path, source in sorted(sources.items()):
        floor = floor_of(".".join(Path(path).with_suffix("").parts))
        for _, target, line in imports_of(source, path, modules):
            if target not in CORES:
                there = floor_of(target)
                if (floor, there) == ("tools", "__init__"):
                    continue  # commands use the public names
                if FLOORS.index(there) > FLOORS.index(floor):
                    yield floor, there, f"{path}:{line} imports {target}"


def absent(sources: dict[str, str]) -> list[str]:
    """Lists names that a module imports from another one of ``sources``, which has none such."""
    modules, found, roots = modules_of(sources), [], {Path(path).parts[0] for path in sources}
    names = {
        ".".join(Path(path).with_suffix("").parts): names_of(source)
        for path, source in sources.items()
    }
    for path, source in sorted(sources.items()):
        for node in ast.walk(parse(source)):
            if not isinstance(node, ast.ImportFrom):
                continue
            package = list(Path(path).parts[: -node.level]) if node.level else []
            target = ".".join(package + (node.module.split(".") if node.module else []))
            if not node.level and target.partition(".")[0] not in roots:
                continue  # another library's
            of_target = names.get(target, names.get(f"{target}.__init__".lstrip("."), set()))
            for alias in node.names:
                full = f"{target}.{alias.name}".lstrip(".")
                if (
                    alias.name not in (*of_target, *CORES)
                    and full not in modules
                    and f"{full}.__init__" not in modules
                ):
                    found.append(
                        f"{path}:{node.lineno} imports {alias.name} from {target or 'the package'},"
                        " which has no such name"
                    )
    return found


def names_of(source: str) -> set[str]:
    """What is bound in a module when it has been run."""
    found = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return found


def cycles(sources: dict[str, str]) -> list[str]:
    """Modules that import each other while they are imported."""
    modules, graph = modules_of(sources), {}
    for path, source in sources.items():
        found_at_once = imports_of(source, path, modules, at_once=True)
        graph[".".join(Path(path).with_suffix("").parts)] = {
            target for _, target, _ in found_at_once
        }
    found, state = [], {}

    def visit(module: str, road: list[str]) -> None:
        state[module] = "open"
        for target in sorted(graph.get(module, ())):
            if state.get(target) == "open":
                found.append(" -> ".join([*road[road.index(target) :], target]))
            elif target not in state:
                visit(target, [*road, target])
        state[module] = "done"

    for module in sorted(graph):
        if module not in state:
            visit(module, [module])
    return found


def types_from_elsewhere(source: str, path: str, modules: set[str]) -> list[str]:
    """Imports of infinity's own modules that ``source`` makes for type checking only. Modules that
    hand names out when they are first used may."""
    if floor_of(".".join(Path(path).with_suffix("").parts)) == "__init__":
        return []
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for _, target, line in imports_of(
                "\n".join(ast.unparse(each) for each in node.body), path, modules
            ):
                found.append(
                    f"{path} imports {target} for its types only ({line} below line {node.lineno})"
                )
    return found


def sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


def of_the_checkout() -> dict[str, str]:
    """The package and the benchmarks of a checkout: path below the root -> text."""
    return {
        str(path.relative_to(PACKAGE.parent)): path.read_text()
        for folder in (PACKAGE, BENCH)
        for path in folder.rglob("*.py")
    }


def csrc_violations(sources: dict[str, str]) -> list[str]:
    """Includes of ``sources`` (path below csrc -> text) that do not go to the left."""
    floor_of = {room: number for number, rooms in enumerate(CSRC_ROOMS) for room in rooms}
    found = []
    for path, source in sorted(sources.items()):
        room = Path(path).parts[0]
        for target in re.findall(r'^#include "([a-z]+)/', source, re.MULTILINE):
            if target != room and floor_of[target] >= floor_of[room]:
                found.append(f"{path} includes {target}/, which does not stand before {room}/")
    return found


def test_every_file_is_on_a_floor():
    """Compares the package's files with the list: a new folder has to be given its floor here."""
    assert {floor_of(module) for module in modules_of(sources())} == set(FLOORS)


def test_few_imports_go_up():
    """Reads every import statement of the package, compares the floors of both ends, and counts
    those that go up."""
    found = collections.Counter((low, high) for low, high, _ in upward(sources()))
    more = {edge: number for edge, number in found.items() if number > MOST_UP.get(edge, 0)}
    assert not more, [where for low, high, where in upward(sources()) if (low, high) in more]


def test_no_modules_import_each_other():
    """Follows the imports at the top of every module."""
    assert not cycles(sources())
    assert cycles(
        {"a.py": "from .b import x", "b.py": "from .c import y", "c.py": "from . import a"}
    ) == ["a -> b -> c -> a"]
    assert not cycles({"a.py": "from .b import x", "b.py": "def f():\n    from .a import y"})


def test_types_come_from_the_left_too():
    """Looks for imports under TYPE_CHECKING: what stands to the right is known by a protocol. Other
    libraries may be imported so."""
    package = sources()
    modules = modules_of(package)
    assert not [
        each
        for path, source in package.items()
        for each in types_from_elsewhere(source, path, modules)
    ]
    hidden = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from .engine"
        " import Engine\n"
    )
    assert len(types_from_elsewhere(hidden, "core/run/passes.py", modules)) == 1
    assert not types_from_elsewhere(hidden, "parallel.py", modules)


def test_includes_go_to_the_left_only():
    """Reads every include of the native core."""
    found = {
        str(path.relative_to(CSRC)): path.read_text()
        for path in CSRC.rglob("*")
        if path.suffix in (".h", ".cpp", ".cu")
    }
    assert not csrc_violations(found)
    assert csrc_violations(
        {"base/check.h": '#include "memory/pool.h"', "io/engine.h": '#include "optim/kernel.h"'}
    )


def test_only_native_imports_the_core():
    """Looks for the compiled modules among all imports: native has it, nobody else."""
    package = sources()
    modules = modules_of(package)
    found = [each for path, source in package.items() for each in imports_of(source, path, modules)]
    assert {path for path, target, _ in found if target in CORES} == {"native.py"}


def test_an_import_upward_is_found():
    """The twin: absolute, hidden, of a package and of a module beside the folders are all found;
    others are not."""
    wrong = {
        "errors.py": "from .core.machine import tiers",
        "files/boxes.py": "from ..ranks.collectives import Collectives",
        "core/homes/store.py": "def f():\n    from infinity.ext.packed.packed import Packed",
        "core/units/unit.py": "import infinity.tools.watch.stats",
        "core/wrap/wrap.py": "import infinity",
        "config.py": "from .ext.migrate import deepspeed",
        "ext/tiles/tiles.py": "from ...tools.watch import stats",
        "ext/park/park.py": "from ...__main__ import main",
    }
    assert len(list(upward(wrong))) == len(wrong)
    right = {
        "core/machine/tiers.py": "from ...errors import ConfigError\nimport errors, torch",
        "core/params/parameter.py": "from ..units.unit import ParamUnit",
        "native.py": "from . import _C",
        "ranks/bulk.py": "from ..core.machine import tiers\nfrom .. import native",
        "ext/tiles/tiles.py": "from ...core.run.engine import Engine",
        "tools/train/train.py": "from ..cli import values\nfrom ...ext.data.order import Order",
        "tools/cli/env.py": "from ... import __version__",
        "parallel.py": "from .ext.pipeline.pipelines import pipeline",
    }
    assert not list(upward(right))


def test_no_submodule_takes_the_place_of_a_public_name():
    """A package that makes its names when they are asked for has the submodule in their place once
    anybody has imported that. Modules that are public names themselves are the same object."""
    lazy = [path for path in PACKAGE.rglob("__init__.py") if "def __getattr__" in path.read_text()]
    assert lazy
    for path in lazy:
        package = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).parent.parts))
        taken = set(package.__all__) & {other.stem for other in path.parent.glob("*.py")}
        assert all(isinstance(getattr(package, name), ModuleType) for name in taken), taken


def test_what_modules_import_from_each_other_is_there():
    """Reads imports inside functions too. The twins misspell one each."""
    found_here = of_the_checkout()
    assert absent(found_here) == []
    found_here["bench/meetings.py"] += "\n\ndef later():\n    from .launch import launch_ranks\n"
    found_here["bench/loops.py"] += (
        "\n\ndef later():\n    from infinity.tools.bench.io import Rawest\n"
    )
    found = "\n".join(absent(found_here))
    assert len(found.splitlines()) == 2, found
    assert (
        "imports launch_ranks from bench.launch" in found
        and "imports Rawest from infinity.tools.bench.io" in found
    )


def uses_the_checkout(source: str) -> bool:
    """Whether ``source`` imports `bench`, which is in a checkout only."""
    names = [
        alias.name
        for node in ast.walk(parse(source))
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [
        node.module or ""
        for node in ast.walk(parse(source))
        if isinstance(node, ast.ImportFrom) and not node.level
    ]
    return any(name.partition(".")[0] == "bench" for name in names)


def test_the_package_imports_nothing_of_a_checkout():
    """Looks for imports of `bench`, which no package has. The twins are such, and one that may
    be."""
    assert not [path for path, source in sources().items() if uses_the_checkout(source)]
    assert uses_the_checkout("def f():\n    from bench.io import measure") and uses_the_checkout(
        "import bench.io"
    )
    assert not uses_the_checkout("from .bench import io\nfrom infinity.tools.bench import io")
