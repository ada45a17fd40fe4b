"""Leaves one wait, event or record of a module out while a program runs: it must be missed."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CALLS = ("wait_stream", "wait_event", "record_event", "record_stream", "record", "wait")
CALLS += ("synchronize", "block_current_stream")


@dataclass(frozen=True)
class Site:
    """A call that can be left out: where it is, and how it reads."""

    module: str
    function: str  # the outermost, by its qualified name
    line: int
    number: int  # among the calls of the module
    text: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.py:{self.line} {self.text}"


def sites(*modules: str, calls: Sequence[str] = CALLS) -> list[Site]:
    """All calls of some modules that order streams, events or works."""
    found = []
    for name in modules:
        tree = ast.parse(inspect.getsource(importlib.import_module(name)))
        owners: dict[ast.AST, str] = {}
        for owner in tree.body:
            for node, qualified in _functions(owner):
                owners |= {inner: qualified for inner in ast.walk(node)}
        for number, call in enumerate(_ordering(tree, calls)):
            if call in owners:
                text = ast.unparse(call)
                found.append(Site(name, owners[call], call.lineno, number, text))
    return found


def _functions(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node, node.name
    elif isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef):
                yield inner, f"{node.name}.{inner.name}"


def _ordering(tree: ast.AST, calls: Sequence[str]) -> list[ast.Call]:
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in calls
    ]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


class _Drop(ast.NodeTransformer):
    def __init__(self, call: ast.Call) -> None:
        self.call = call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self.call:
            return self.generic_visit(node)
        assert isinstance(node.func, ast.Attribute)
        # what `x.wait()` gives where it is not left out is x, and of a stream a new event
        kept = [node.func.value] if node.func.attr in ("wait", "record", "record_event") else []
        name = ast.Constant(node.func.attr)
        return ast.Call(ast.Name("_left_out", ast.Load()), [name, *kept], [])


class Watch:
    """How often the call that is left out would have been made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, name: str, value: Any = None) -> Any:
        import torch

        self.count += 1
        return torch.get_device_module("sim").Event() if name == "record_event" else value


@contextlib.contextmanager
def left_out(site: Site, calls: Sequence[str] = CALLS) -> Iterator[Watch]:
    """Inside, the program runs without the call."""
    module = importlib.import_module(site.module)
    source = inspect.getsource(module)
    tree = ast.parse(source)
    changed = _Drop(_ordering(tree, calls)[site.number]).visit(tree)
    whole = compile(ast.fix_missing_locations(changed), module.__file__ or "?", "exec",
                    dont_inherit=True)  # fmt: skip
    code = _code(whole, site.function)
    functions = [
        one
        for one in _inside(_named(module, site.function))
        if one.__code__.co_qualname == site.function
        and one.__code__.co_firstlineno == code.co_firstlineno
    ]
    assert functions, f"{site.function} of {site.module} is no function now"
    before = functions[0].__code__
    watch = Watch()
    module.__dict__["_left_out"] = watch
    try:
        for one in functions:
            one.__code__ = code
        yield watch
    finally:
        for one in functions:
            one.__code__ = before
        del module.__dict__["_left_out"]


def _named(module: types.ModuleType, qualified: str) -> Any:
    found: Any = module
    for name in qualified.split("."):
        found = vars(found)[name]
    return found


def _inside(found: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    """The functions in what decorators made of one."""
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    if not isinstance(found, types.FunctionType) or depth > 5:
        return
    yield found
    for cell in found.__closure__ or ():
        yield from _inside(cell.cell_contents, depth + 1)


def _code(whole: types.CodeType, qualified: str) -> types.CodeType:
    """The code of a function by its qualified name."""
    for constant in whole.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == qualified:
                return constant
            if qualified.startswith(f"{constant.co_qualname}."):
                return _code(constant, qualified)
    raise LookupError(qualified)
