"""Mutations: leave out one wait, event or record of a module while a program runs."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLS = ("wait_stream", "wait_event", "record_event", "record_stream", "record", "wait")
CALLS += ("synchronize", "block_current_stream")
# functions by which schedlang orders copies, and what replaces the result of one left out
EVENT, FIRST, NOTHING = "a new event", "the first argument", "nothing"
DONE = "yes"  # the answer to "is it done?"
ORDERS = {
    "schedlang.runtime.device": {
        "queue_stream_wait": NOTHING,
        "queue_event_wait": NOTHING,
        "host_wait": NOTHING,
        "synchronize": NOTHING,
        "mark_stream": EVENT,
        "hold_for_stream": FIRST,
    },
    "schedlang.runtime.storage.copies": {
        "wait_all": NOTHING,
        "record_copies": EVENT,
        "wait_copy": FIRST,
    },
}
PACKAGE = "schedlang"
Selector = Callable[[types.ModuleType, ast.Call], bool]


@dataclass(frozen=True)
class Site:
    """A call that can be left out: its place and its text."""

    module: str
    function: str  # the outermost, by its qualified name
    line: int
    number: int  # among all calls of the module
    text: str  # with a number if the text occurs again in one function: "x.wait() (2)"

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.py:{self.line} {self.text}"


@dataclass(frozen=True)
class IgnoredWait:
    """All waits for one kind of collective, in C++ too: they wait for nothing."""

    collective: str
    function = "simccl"

    @property
    def text(self) -> str:
        return f"wait of {self.collective}"

    def __str__(self) -> str:
        return self.text


Mutation = Site | IgnoredWait


def is_order_method(module: types.ModuleType, call: ast.Call) -> bool:
    """Return whether the call orders streams, events or works, of whatever object."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in CALLS


def is_copy_order(module: types.ModuleType, call: ast.Call) -> bool:
    """Return whether the call is of a function in `ORDERS`, whatever name the module gives it."""
    return _result_kind(module, call) is not None


def is_work_wait(module: types.ModuleType, call: ast.Call) -> bool:
    """Return whether it waits for a collective or message, or asks whether that is done."""
    is_wait = isinstance(call.func, ast.Attribute) and call.func.attr in ("wait", "is_completed")
    return is_wait and not call.args and not is_copy_order(module, call)


def call_sites(*modules: str, chosen: Selector = is_order_method) -> list[Site]:
    """Return all calls of some modules that order streams, events or works."""
    result = []
    for name in modules:
        module = importlib.import_module(name)
        tree = ast.parse(inspect.getsource(module))
        owners: dict[ast.AST, str] = {}
        for owner in tree.body:
            for node, qualified in _named_functions(owner):
                owners |= {inner: qualified for inner in ast.walk(node)}
        counts: Counter[tuple[str, str]] = Counter()
        for number, call in enumerate(_calls(tree)):
            if call in owners and chosen(module, call):
                text = ast.unparse(call)
                counts[owners[call], text] += 1
                if (nth := counts[owners[call], text]) > 1:
                    text += f" ({nth})"
                result.append(Site(name, owners[call], call.lineno, number, text))
    return result


def calling_modules() -> list[str]:
    """Return the modules of schedlang whose text could call a function of `ORDERS`."""
    root = Path(inspect.getfile(importlib.import_module(PACKAGE))).parent
    patterns = [
        f"from {source} import|from {package} import .*\\b{name}\\b"
        for source in ORDERS
        for package, _, name in [source.rpartition(".")]
    ]
    mentions = re.compile("|".join(patterns))
    names = [
        ".".join((PACKAGE, *path.relative_to(root).with_suffix("").parts))
        for path in sorted(root.rglob("*.py"))
        if mentions.search(path.read_text()) and "testing" not in path.parts
    ]
    return [name for name in names if name != "schedlang.runtime.device"]


def _result_kind(module: types.ModuleType, call: ast.Call) -> str | None:
    """Return what replaces the result of a function of `ORDERS`; None: it is no such call."""
    match call.func:
        case ast.Name(name):
            function = vars(module).get(name)
        case ast.Attribute(ast.Name(holder), name):
            function = getattr(vars(module).get(holder), name, None)
        case _:
            return None
    if not isinstance(function, types.FunctionType):
        return None
    return ORDERS.get(function.__module__, {}).get(function.__name__)


def _named_functions(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node, node.name
    elif isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef):
                yield inner, f"{node.name}.{inner.name}"


def _calls(tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


class _Drop(ast.NodeTransformer):
    def __init__(self, module: types.ModuleType, call: ast.Call) -> None:
        self.module, self.call = module, call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self.call:
            return self.generic_visit(node)
        replacement = _result_kind(self.module, node)
        arguments: list[ast.expr] = []
        if replacement is None:
            assert isinstance(node.func, ast.Attribute)
            replacement = {"record_event": EVENT, "is_completed": DONE}.get(node.func.attr, FIRST)
            # what `x.wait()` gives where it is not left out is x, or what x was to bring
            arguments = [node.func.value] if node.func.attr in ("wait", "record") else []
        elif replacement == FIRST:
            arguments = node.args[:1]
        return ast.Call(
            ast.Name("_left_out", ast.Load()), [ast.Constant(replacement), *arguments], []
        )


class CallCounter:
    """Counts how often the call that is left out would have run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, replacement: str, value: Any = None, *_: Any) -> Any:
        import torch

        from schedlang.runtime.context_parallel.ring import PendingPacket

        self.count += 1
        if isinstance(value, torch._C.Future):
            return value.value()
        if isinstance(value, PendingPacket):
            return value.packet
        if replacement == DONE:
            return True
        return torch.get_device_module("sim").Event() if replacement == EVENT else value


@contextlib.contextmanager
def _ignored_wait(collective: str) -> Iterator[CallCounter]:
    import torch

    from schedlang.testing.accelerator.collectives import Communicator

    counter, begin = CallCounter(), Communicator._collective

    def begun(self: Any, name: str, *args: Any) -> Any:
        work: Any = begin(self, name, *args)
        if name == collective:
            counter.count += 1
            work.wait = lambda: True
            # the work's future is done when this stream is, on which nothing runs
            work.stream = torch.get_device_module("sim").Stream(work.device).stream_id
        return work

    Communicator._collective = begun  # type: ignore[method-assign]
    try:
        yield counter
    finally:
        Communicator._collective = begin  # type: ignore[method-assign]


@contextlib.contextmanager
def without_call(site: Mutation) -> Iterator[CallCounter]:
    """Inside, the program runs without the call."""
    if isinstance(site, IgnoredWait):
        with _ignored_wait(site.collective) as ignored:
            yield ignored
        return
    module = importlib.import_module(site.module)
    source = inspect.getsource(module)
    tree = ast.parse(source)
    changed = _Drop(module, _calls(tree)[site.number]).visit(tree)
    compiled = compile(
        ast.fix_missing_locations(changed), module.__file__ or "?", "exec", dont_inherit=True
    )
    codes = {code.co_firstlineno: code for code in _codes(compiled, site.function)}  # overloads too
    functions = [
        function
        for function in _unwrapped(_lookup(module, site.function))
        if function.__code__.co_qualname == site.function
        and function.__code__.co_firstlineno in codes
    ]
    assert functions, f"{site.function} of {site.module} is no function now"
    before = functions[0].__code__
    counter = CallCounter()
    module.__dict__["_left_out"] = counter
    try:
        for function in functions:
            function.__code__ = codes[before.co_firstlineno]
        yield counter
    finally:
        for function in functions:
            function.__code__ = before
        del module.__dict__["_left_out"]


def _lookup(module: types.ModuleType, qualified: str) -> Any:
    value: Any = module
    for name in qualified.split("."):
        value = vars(value)[name]
    return value


def _unwrapped(value: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    """Yield the functions inside the wrappers of decorators."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if not isinstance(value, types.FunctionType) or depth > 5:
        return
    yield value
    for cell in value.__closure__ or ():
        yield from _unwrapped(cell.cell_contents, depth + 1)


def _codes(compiled: types.CodeType, qualified: str) -> Iterator[types.CodeType]:
    """Yield the code objects with a qualified name, of all its definitions."""
    for constant in compiled.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == qualified:
                yield constant
            elif qualified.startswith(f"{constant.co_qualname}."):
                yield from _codes(constant, qualified)
