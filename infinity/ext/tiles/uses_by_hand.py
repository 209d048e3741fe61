"""Uses by hand: finds weights that a module's code uses itself, outside of their own layer's call.

by hand   `F.linear(x, self.head.weight)`, or a penalty on it: all of the weight is needed at once,
          so that its layer's tiles do not help

The code of each forward is read, with the methods and functions that it calls. What it does not
show (a weight that is found by a name, a loss outside of the model) is met when it is used.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from torch import nn

# Attributes of a weight that need none of its values.
FORM = frozenset(
    "dtype device shape size ndim dim numel stride requires_grad is_meta element_size nbytes"
    " itemsize layout is_cuda is_contiguous data_ptr __class__".split()
)
LISTS = ("parameters", "children", "modules", "values", "items")
PAIRS = ("enumerate", "zip", "reversed", "list", "tuple")
TESTS = ("isinstance", "hasattr", "type", "id")
DEEPEST = 4  # calls inside calls that are read


def used_by_hand(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Returns the parameters of submodules that the code of a model's own ``modules`` uses."""
    used: set[nn.Parameter] = set()
    for module in modules:
        if next(module.children(), None) is not None and not _is_torchs(type(module)):
            forward = getattr(module.forward, "__func__", None)
            if forward is not None:
                _Code(used, 0).read(forward, [[module]], {})
    return used


def _is_torchs(owner: Any) -> bool:
    return str(owner.__module__).partition(".")[0] == "torch"


@functools.lru_cache(maxsize=512)
def _tree(function: FunctionType) -> ast.FunctionDef | None:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # without a source, or a lambda's
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _listed(owner: Any, name: str) -> list[Any]:
    if isinstance(owner, nn.Module):
        if name in ("parameters", "modules"):
            return list(getattr(owner, name)())
        return [*owner.children(), *owner.parameters(recurse=False)]
    if isinstance(owner, dict):
        return list(owner.values())
    return list(owner) if isinstance(owner, (list, tuple)) else []


class _Code(ast.NodeVisitor):
    """One call of a function. ``names``: the modules and parameters that its names may mean."""

    def __init__(self, found: set[nn.Parameter], depth: int):
        self.found, self.depth = found, depth
        self.names: dict[str, list[Any]] = {}
        self.function: FunctionType | None = None

    def read(
        self, function: Callable, given: list[list[Any]], named: dict[str | None, list[Any]]
    ) -> None:
        """Reads ``function``, called with the objects ``given`` and ``named``."""
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or _is_torchs(function):
            return
        if (tree := _tree(function)) is None:
            return
        self.function = function
        places = [each.arg for each in (*tree.args.posonlyargs, *tree.args.args)]
        self.names = dict(zip(places, given)) | {k: v for k, v in named.items() if k is not None}
        for statement in tree.body:
            self.visit(statement)

    # --- what an expression may mean ---

    def meant(self, node: ast.expr) -> list[Any]:
        """Returns the modules, and lists of them, and parameters that ``node`` may mean."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, [])
        if isinstance(node, ast.Attribute):
            owners = [each for each in self.meant(node.value) if isinstance(each, nn.Module)]
            named = [owner.__dict__ | owner._parameters | owner._modules for owner in owners]
            return [each[node.attr] for each in named if each.get(node.attr) is not None]
        if isinstance(node, ast.Subscript):
            return self.inside(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in PAIRS:
                return [value for each in node.args for value in self.inside(each)]
        return []

    def inside(self, node: ast.expr) -> list[Any]:
        """Returns what an iteration over ``node`` may give."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if (name := node.func.attr.removeprefix("named_")) in LISTS:
                owners = self.meant(node.func.value)
                return [value for owner in owners for value in _listed(owner, name)]
        if isinstance(node, ast.Call):
            return self.meant(node)
        return [value for owner in self.meant(node) for value in _listed(owner, "values")]

    # --- statements ---

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, self.meant(node.value))

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, self.inside(node.iter))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, self.inside(node.iter))
        self.generic_visit(node)

    def _visit_comprehended(self, node: Any) -> None:
        for each in node.generators:  # their names are used before, in the text
            self.visit(each)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehended

    def _bind(self, target: ast.expr, values: list[Any]) -> None:
        for each in ast.walk(target):
            if isinstance(each, ast.Name):
                self.names[each.id] = values

    # --- uses ---

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr not in FORM or not self._note(node.value, only_look=True):
            self._note(node)
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if not all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in TESTS:
            return
        self.generic_visit(node)
        called = self._called(node.func)
        if called is None or self.depth >= DEEPEST:
            return
        function, bound = called
        positional = [*bound, *(self.meant(each) for each in node.args)]
        named = {each.arg: self.meant(each.value) for each in node.keywords}
        if any(positional) or any(named.values()):
            _Code(self.found, self.depth + 1).read(function, positional, named)

    def _called(self, node: ast.expr) -> tuple[Callable, list[list[Any]]] | None:
        """Returns the function that ``node`` means, and what it is bound to: a method of a module,
        or a function of the same file."""
        if isinstance(node, ast.Name) and self.function is not None:
            function = self.function.__globals__.get(node.id)
            return (function, []) if isinstance(function, FunctionType) else None
        if isinstance(node, ast.Attribute):
            for owner in self.meant(node.value):
                method = inspect.getattr_static(type(owner), node.attr, None)
                if isinstance(method, FunctionType) and not _is_torchs(method):
                    return method, [[owner]]
        return None

    def _note(self, node: Any, *, only_look: bool = False) -> bool:
        """Notes the parameters that ``node`` means. Returns whether it means any."""
        params = [each for each in self.meant(node) if isinstance(each, nn.Parameter)]
        if not only_look and isinstance(node.ctx, ast.Load):
            self.found.update(params)
        return bool(params)
