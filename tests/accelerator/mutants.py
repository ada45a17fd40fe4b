"""Leaves one wait, event or record of a module out while a program runs: it must be missed."""

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
# of the functions by which schedlang orders copies, what stands for the result of one left out
EVENT, FIRST, NOTHING = "a new event", "the first argument", "nothing"
DONE = "yes"  # of a question whether something is done
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
Chosen = Callable[[types.ModuleType, ast.Call], bool]


@dataclass(frozen=True)
class Site:
    """A call that can be left out: where it is, and how it reads."""

    module: str
    function: str  # the outermost, by its qualified name
    line: int
    number: int  # among all calls of the module
    text: str  # and which, of those that read alike in one function: "x.wait() (2)"

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.py:{self.line} {self.text}"


@dataclass(frozen=True)
class Unheard:
    """All that waits for one kind of collective, in C++ too: it waits for nothing."""

    collective: str
    function = "simccl"

    @property
    def text(self) -> str:
        return f"wait of {self.collective}"

    def __str__(self) -> str:
        return self.text


Mutation = Site | Unheard


def by_name(module: types.ModuleType, call: ast.Call) -> bool:
    """Methods that order streams, events or works, whatever they are of."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in CALLS


def ours(module: types.ModuleType, call: ast.Call) -> bool:
    """The functions of `ORDERS`, by whatever name the module knows them."""
    return _order(module, call) is not None


def works(module: types.ModuleType, call: ast.Call) -> bool:
    """Waits for collectives and messages under way, and questions whether they are done."""
    named = isinstance(call.func, ast.Attribute) and call.func.attr in ("wait", "is_completed")
    return named and not call.args and not ours(module, call)


def sites(*modules: str, chosen: Chosen = by_name) -> list[Site]:
    """All calls of some modules that order streams, events or works."""
    found = []
    for name in modules:
        module = importlib.import_module(name)
        tree = ast.parse(inspect.getsource(module))
        owners: dict[ast.AST, str] = {}
        for owner in tree.body:
            for node, qualified in _functions(owner):
                owners |= {inner: qualified for inner in ast.walk(node)}
        alike: Counter[tuple[str, str]] = Counter()
        for number, call in enumerate(_calls(tree)):
            if call in owners and chosen(module, call):
                text = ast.unparse(call)
                alike[owners[call], text] += 1
                if (nth := alike[owners[call], text]) > 1:
                    text += f" ({nth})"
                found.append(Site(name, owners[call], call.lineno, number, text))
    return found


def users() -> list[str]:
    """The modules of schedlang that could call a function of `ORDERS`, by looking at their text."""
    root = Path(inspect.getfile(importlib.import_module(PACKAGE))).parent
    ways = [
        f"from {one} import|from {home} import .*\\b{name}\\b"
        for one in ORDERS
        for home, _, name in [one.rpartition(".")]
    ]
    mentions = re.compile("|".join(ways))
    found = [
        ".".join((PACKAGE, *path.relative_to(root).with_suffix("").parts))
        for path in sorted(root.rglob("*.py"))
        if mentions.search(path.read_text()) and "testing" not in path.parts
    ]
    return [name for name in found if name != "schedlang.runtime.device"]


def _order(module: types.ModuleType, call: ast.Call) -> str | None:
    """What stands for the result of a function of `ORDERS`; None: the call is of no such."""
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


def _functions(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node, node.name
    elif isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef):
                yield inner, f"{node.name}.{inner.name}"


def _calls(tree: ast.AST) -> list[ast.Call]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


class _Drop(ast.NodeTransformer):
    def __init__(self, module: types.ModuleType, call: ast.Call) -> None:
        self.module, self.call = module, call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self.call:
            return self.generic_visit(node)
        instead = _order(self.module, node)
        kept: list[ast.expr] = []
        if instead is None:
            assert isinstance(node.func, ast.Attribute)
            instead = {"record_event": EVENT, "is_completed": DONE}.get(node.func.attr, FIRST)
            # what `x.wait()` gives where it is not left out is x, or what x was to bring
            kept = [node.func.value] if node.func.attr in ("wait", "record") else []
        elif instead == FIRST:
            kept = node.args[:1]
        return ast.Call(ast.Name("_left_out", ast.Load()), [ast.Constant(instead), *kept], [])


class Watch:
    """How often the call that is left out would have been made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, instead: str, value: Any = None, *_: Any) -> Any:
        import torch

        from schedlang.runtime.context_parallel.ring import PendingPacket

        self.count += 1
        if isinstance(value, torch._C.Future):
            return value.value()
        if isinstance(value, PendingPacket):
            return value.packet
        if instead == DONE:
            return True
        return torch.get_device_module("sim").Event() if instead == EVENT else value


@contextlib.contextmanager
def _unheard(collective: str) -> Iterator[Watch]:
    import torch

    from schedlang.testing.accelerator.collectives import Communicator

    watch, begin = Watch(), Communicator._collective

    def begun(self: Any, name: str, *given: Any) -> Any:
        work: Any = begin(self, name, *given)
        if name == collective:
            watch.count += 1
            work.wait = lambda: True
            # the work's future is done when this stream is, on which nothing runs
            work.stream = torch.get_device_module("sim").Stream(work.device).stream_id
        return work

    Communicator._collective = begun  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        Communicator._collective = begin  # type: ignore[method-assign]


@contextlib.contextmanager
def left_out(site: Mutation) -> Iterator[Watch]:
    """Inside, the program runs without the call."""
    if isinstance(site, Unheard):
        with _unheard(site.collective) as unheard:
            yield unheard
        return
    module = importlib.import_module(site.module)
    source = inspect.getsource(module)
    tree = ast.parse(source)
    changed = _Drop(module, _calls(tree)[site.number]).visit(tree)
    whole = compile(
        ast.fix_missing_locations(changed), module.__file__ or "?", "exec", dont_inherit=True
    )
    codes = {code.co_firstlineno: code for code in _codes(whole, site.function)}  # overloads too
    functions = [
        one
        for one in _inside(_named(module, site.function))
        if one.__code__.co_qualname == site.function and one.__code__.co_firstlineno in codes
    ]
    assert functions, f"{site.function} of {site.module} is no function now"
    before = functions[0].__code__
    watch = Watch()
    module.__dict__["_left_out"] = watch
    try:
        for one in functions:
            one.__code__ = codes[before.co_firstlineno]
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


def _codes(whole: types.CodeType, qualified: str) -> Iterator[types.CodeType]:
    """The code of what has a qualified name, in all its definitions."""
    for constant in whole.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == qualified:
                yield constant
            elif qualified.startswith(f"{constant.co_qualname}."):
                yield from _codes(constant, qualified)
