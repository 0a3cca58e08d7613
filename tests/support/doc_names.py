"""Reads code without running it: which names, attributes and arguments it uses that do not exist."""

import ast
import builtins
import importlib
import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Instance:
    """Some object of a class."""

    of: type


@dataclass(frozen=True, slots=True)
class _Method:
    function: Any


_UNKNOWN = object()


def problems(code: str, given: Mapping[str, type | None]) -> list[str]:
    """What is wrong with code that may also use the `given` names: objects of these classes, or of any if None."""
    reader = _Reader({name: _UNKNOWN if cls is None else Instance(cls) for name, cls in given.items()})
    reader.visit(ast.parse(code))
    return reader.problems


class _Reader(ast.NodeVisitor):
    """Visits statements in order. Visiting an expression returns what is known of its value."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names, self.problems = names, list[str]()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            module = importlib.import_module(alias.name)
            root = alias.name.partition(".")[0]
            self.names[alias.asname or root] = module if alias.asname else importlib.import_module(root)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = importlib.import_module(node.module or "")
        for alias in node.names:
            self.names[alias.asname or alias.name] = self._member(module, alias.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = value
            else:
                self.visit(target)

    def visit_Name(self, node: ast.Name) -> Any:
        if isinstance(node.ctx, ast.Store):
            self.names[node.id] = _UNKNOWN
        elif node.id not in self.names and not hasattr(builtins, node.id):
            self.problems.append(f"nothing is called {node.id}")
        return self.names.get(node.id, getattr(builtins, node.id, _UNKNOWN))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return self._member(self._value(node.value), node.attr)

    def visit_Call(self, node: ast.Call) -> Any:
        function = self._value(node.func)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)
        if function is _UNKNOWN or isinstance(function, Instance):
            return _UNKNOWN
        called, first = (function.function, [None]) if isinstance(function, _Method) else (function, [])
        try:
            signature = inspect.signature(called)
        except (TypeError, ValueError):  # of builtins
            return _UNKNOWN
        if not any(isinstance(argument, ast.Starred) for argument in node.args):
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
            bind = signature.bind if len(keywords) == len(node.keywords) else signature.bind_partial
            try:
                bind(*first, *node.args, **keywords)
            except TypeError as error:
                self.problems.append(f"{ast.unparse(node.func)}: {error}")
        return Instance(called) if isinstance(called, type) else _returned(called)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        self.visit(node.target)
        for condition in node.ifs:
            self.visit(condition)

    def _comprehension(self, node: Any) -> Any:
        for generator in node.generators:  # they bind names, and stand behind what uses them
            self.visit(generator)
        for field in ("key", "value", "elt"):
            if hasattr(node, field):
                self.visit(getattr(node, field))
        return _UNKNOWN

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        self.names |= {argument.arg: _UNKNOWN for argument in node.args.args}
        self.visit(node.body)
        return _UNKNOWN

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names |= dict.fromkeys([node.name, *(argument.arg for argument in node.args.args)], _UNKNOWN)
        for statement in node.body:
            self.visit(statement)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.names |= {node.name: _UNKNOWN} if node.name else {}
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.visit(node.target)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def _value(self, node: ast.expr) -> Any:
        value = self.visit(node)
        return _UNKNOWN if value is None else value

    def _member(self, owner: Any, name: str) -> Any:
        if owner is _UNKNOWN:
            return _UNKNOWN
        if not isinstance(owner, Instance):
            if not hasattr(owner, name):
                self.problems.append(f"{getattr(owner, '__name__', owner)} has no {name}")
            return getattr(owner, name, _UNKNOWN)
        member = getattr(owner.of, name, _UNKNOWN)
        if isinstance(member, property):
            return _returned(member.fget)
        if member is not _UNKNOWN:
            return _Method(member) if inspect.isfunction(member) else _UNKNOWN
        if not any(re.search(rf"\bself\.{name}\b|^    {name}:", _source(cls), re.M) for cls in owner.of.__mro__):
            self.problems.append(f"a {owner.of.__name__} has no {name}")
        return _UNKNOWN


def _returned(function: Any) -> Any:
    """An instance of the class that a function says it returns."""
    try:
        returned = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):
        return _UNKNOWN
    return Instance(returned) if isinstance(returned, type) else _UNKNOWN


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
