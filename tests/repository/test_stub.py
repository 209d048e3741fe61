"""infinity/_C.pyi tells type checkers what the native core has: all of it, and nothing else.

It is written by hand: pybind11-stubgen takes `Ticket | None` for `Ticket`, every int for
`SupportsInt`, and knows nothing of buffers.
"""

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
    return found | {
        target.id for node in body if isinstance(node, ast.Assign) for target in node.targets
    }


def differences(source: str, module: object) -> list[str]:
    """Names that only one of stub and module has, inside classes too. Of what Python gives every
    class, none counts."""
    tree, found = ast.parse(source), []

    def compare(where: str, declared: set[str], there: object) -> None:
        own = {name for name in vars(there) if not name.startswith("_")}
        found.extend(f"{where}{name} is not declared" for name in own - declared)
        found.extend(
            f"{where}{name} is not there"
            for name in declared
            if not hasattr(there, name) and name != "__buffer__"
        )

    compare("", names_of(tree.body), module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and hasattr(module, node.name):
            ours = getattr(module, node.name)
            compare(
                f"{node.name}.",
                names_of(node.body)
                | ({"name", "value"} if hasattr(ours, "__members__") else set()),
                ours,
            )
    return found


Parameters = list[tuple[str, bool]]  # names, and whether there is a default


def bound_parameters(function: object) -> Parameters | None:
    """The parameters of a bound function, from the signature in its docstring. None where they have
    no names."""
    signature, depth, parts = (getattr(function, "__doc__", None) or "").splitlines()[0], 0, [""]
    for letter in signature[
        signature.index("(") + 1 : signature.rindex(")")
        if " -> " not in signature
        else signature.rindex(") -> ")
    ]:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    found = [(part.partition(":")[0].strip(), " = " in part) for part in parts]
    found = [each for each in found if each[0] not in ("self", "", "*", "/")]
    return (
        None if any(name.startswith("arg") and name[3:].isdigit() for name, _ in found) else found
    )


def declared_parameters(function: ast.FunctionDef) -> Parameters:
    """The parameters of a function of a stub."""
    arguments = function.args
    names = [each.arg for each in [*arguments.posonlyargs, *arguments.args]]
    first = len(names) - len(arguments.defaults)
    found = [(name, index >= first) for index, name in enumerate(names)]
    found += [
        (each.arg, default is not None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults)
    ]
    return [each for each in found if each[0] != "self"]


def other_parameters(source: str, module: object) -> list[str]:
    """Functions whose parameters the stub declares otherwise than the core binds them."""
    found = []

    def compare(where: str, body: list[ast.stmt], there: object) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and hasattr(there, node.name):
                compare(f"{node.name}.", node.body, getattr(there, node.name))
            if (
                not isinstance(node, ast.FunctionDef)
                or node.decorator_list
                and where
                and not _is_static(node)
            ):
                continue
            bound = vars(there).get(node.name)
            bound = getattr(bound, "__func__", bound)
            if (
                "(" not in (getattr(bound, "__doc__", None) or "").split("\n")[0]
                or (parameters := bound_parameters(bound)) is None
            ):
                continue
            if parameters != declared_parameters(node):
                found.append(
                    f"{where}{node.name}: {parameters} is bound, {declared_parameters(node)} is"
                    " declared"
                )

    compare("", ast.parse(source).body, module)
    return found


def _is_static(node: ast.FunctionDef) -> bool:
    return any(
        isinstance(each, ast.Name) and each.id == "staticmethod" for each in node.decorator_list
    )


def test_the_stub_has_the_parameters_of_every_function():
    """Compares names, order and defaults with the signatures that pybind11 writes; then with one
    default less, and a name changed."""
    source = STUB.read_text()
    assert not other_parameters(source, native._C)
    less = source.replace(
        "def drop_file(self, file: int, behind: bool = True)",
        "def drop_file(self, file: int, behind: bool)",
    )
    assert [each.partition(":")[0] for each in other_parameters(less, native._C)] == [
        "IoEngine.drop_file"
    ]
    other = source.replace("def trim_heap() ->", "def trim_heap(much: bool) ->").replace(
        "def try_lease(self, nbytes", "def try_lease(self, bytes"
    )
    assert [each.partition(":")[0] for each in other_parameters(other, native._C)] == [
        "trim_heap",
        "PinnedPool.try_lease",
    ]


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
