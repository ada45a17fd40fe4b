"""Restore state that a model's code keeps in globals and caches, after a run of the model.

Also: the state of a loss, and the states of the generators of Python and numpy; and reads, by a
loss, of what a forward has written into its modules.
"""

from __future__ import annotations

import functools
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedlang.diagnostics.diagnostic import Refusal, quote_names
from schedlang.ir import pytree
from schedlang.runtime.module_state import (
    LIBRARIES,
    LIBRARY_PACKAGES,
    LIBRARY_TOOLS,
    MODULE_ATTRIBUTES,
    StateSnapshot,
)

if TYPE_CHECKING:
    from schedlang.runtime.scope import Scope

CACHED_FUNCTION = type(functools.cache(lambda: None))
_OPENED = (dict, list, CACHED_FUNCTION)
MAX_DEPTH = 3  # nested containers
MAX_ENTRIES = 4096  # entries of a container that is searched: larger ones are tables
MISSING = object()  # value of a name that did not exist before
_NUMBERS = (bool, int, float, str, type(None))  # values that are compared as they are
_closed: set[type] = set()  # classes of values that are no container, cached

Setter = Callable[[Any, Any], None]
UndoList = list[Callable[[], None]]


@contextmanager
def restore_global_state(model: nn.Module, loss: Any = None) -> Iterator[list[str]]:
    """Run a model's code without values, or in another dtype, and restore its outside state
    afterwards.

    Python's and numpy's generators have the same states at the beginning of each run, so that ranks
    record equal runs; the result is not empty if the run has drawn from them.

    Models often make masks and tables of positions once, and store them in a global dict, in a
    variable, in a class or by `functools.lru_cache`: later runs of the model itself would find
    them. A `loss` must not count the calls made here either, nor keep their means.
    """
    module_classes = {type(module) for module in model.modules()}
    classes = {cls for module_class in module_classes for cls in module_class.__mro__}
    user_classes = frozenset(
        cls for cls in classes if cls.__module__.split(".")[0] not in LIBRARY_PACKAGES
    )
    spaces = _spaces(user_classes)
    undo: UndoList = []
    keeps = loss is not None and (not isinstance(loss, FunctionType) or loss.__closure__)
    # a proof comes here a hundred times, and most functions have no attributes
    empty_spaces = [module for module in spaces if not module[0]]
    try:
        for names, put in spaces:
            if names:
                _remember(names, put, undo, 0)
        with restore_loss_state(loss) if keeps else restore_generators():
            drawn, numpy, numbers = list[str](), sys.modules.get("numpy"), list[Any]()
            random.seed("recorded")
            state = random.getstate()
            if numpy is not None:
                numpy.random.seed(0)
                numbers = tree_leaves(numpy.random.get_state(legacy=False))
            yield drawn
            if state != random.getstate():
                drawn.append("Python's `random`")
            if numpy is not None:  # a text of them takes a millisecond to make
                current = tree_leaves(numpy.random.get_state(legacy=False))
                if not all(map(numpy.array_equal, numbers, current)):
                    drawn.append("`numpy.random`")
    finally:
        for names, put in empty_spaces:
            if names:
                _put_back(names, {}, put)
        for restore in undo:
            restore()


@contextmanager
def restore_loss_state(loss: Any) -> Iterator[None]:
    """Restore, after the block, the state of a loss and of random generators."""
    snapshot = StateSnapshot(None, loss)
    try:
        with restore_generators():
            yield
    finally:
        snapshot.restore()


@contextmanager
def restore_generators() -> Iterator[None]:
    """Restore, after the block, the states of Python's and numpy's generators."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def host_generator_states() -> dict[str, object]:
    """Return the states of the generators of Python and numpy, by name."""
    states: dict[str, object] = {"Python's `random`": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        states["`numpy.random`"] = (keys.tobytes(), *rest)
    return states


def seed_host_generators(*words: object) -> None:
    """Seed the generators of Python and numpy by words."""
    text, numpy = " ".join(map(str, words)), sys.modules.get("numpy")
    random.seed(text)
    if numpy is not None:
        numpy.random.seed(zlib.crc32(text.encode()))


@dataclass(frozen=True)
class HostDraws:
    """Draws of a model from Python's and numpy's generators: equal on all ranks.

    Each operation of a microbatch begins with states that depend on `seed` and the step, as the
    original draws once for all rows; `by_rows`: also on the first row, so that parts of a batch
    draw apart.  Afterwards the process has its own states again.
    """

    seed: int
    by_rows: bool = False

    @contextmanager
    def enter(self, scope: Scope) -> Iterator[None]:
        """Return a context for one operation in a scope."""
        with restore_generators():
            first = scope.samples[0] if self.by_rows and scope.samples else 0
            seed_host_generators(self.seed, scope.moment, first)
            yield


@functools.lru_cache(maxsize=16)  # one model is run many times
def _spaces(classes: frozenset[type]) -> list[tuple[Any, Setter]]:
    """List namespaces of modules, classes and functions, and cells, each with its setter."""
    modules_searched = {name for cls in classes if (name := cls.__module__) in sys.modules}
    # the modules that are values of a module's globals, or define such values
    neighbors = set[str]()
    for value in [value for name in modules_searched for value in vars(sys.modules[name]).values()]:
        module_name = getattr(
            value, "__name__" if isinstance(value, ModuleType) else "__module__", ""
        )
        if isinstance(module_name, str):
            neighbors.add(module_name)
    # of large libraries only the modules that define the classes are searched
    packages_left_out = LIBRARIES | LIBRARY_TOOLS
    modules_searched |= {
        n for n in neighbors if n in sys.modules and n.split(".")[0] not in packages_left_out
    }
    modules: list[Any] = [vars(sys.modules[name]) for name in sorted(modules_searched)]
    functions = {
        f for s in (*modules, *map(vars, classes)) for f in _functions(s, modules_searched)
    }
    spaces: list[tuple[Any, Setter]] = [
        (space, partial(_set_item, space))
        for space in (*modules, *(function.__dict__ for function in functions))
    ]
    spaces += [(vars(cls), partial(_set_attribute, cls)) for cls in classes]
    cells = tuple(cell for function in functions for cell in function.__closure__ or ())
    return [*spaces, (cells, partial(_set_cell, cells))]


def _set_item(space: Any, key: Any, value: Any) -> None:
    if value is MISSING:
        space.pop(key, None)
    else:
        space[key] = value


def _set_attribute(cls: type, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(cls, name)
    else:
        setattr(cls, name, value)


def _set_cell(cells: tuple[CellType, ...], index: int, value: Any) -> None:
    if value is not MISSING:  # it was not bound
        cells[index].cell_contents = value


def _functions(space: Any, module_names: Iterable[str]) -> Iterator[FunctionType]:
    for value in tuple(space.values()):
        if isinstance(value, ModuleType):  # it may import what is asked for
            continue
        for candidate in (value, getattr(value, "__wrapped__", value)):  # for a decorator
            if isinstance(candidate, FunctionType) and candidate.__module__ in module_names:
                yield candidate


def _remember(space: Any, put: Setter | None, undo: UndoList, depth: int) -> None:
    """Append to `undo` what restores the names of a space, and containers and caches under them."""
    before = _contents(space)
    undo.append(partial(_put_back, space, before, put))
    if _closed.issuperset(map(type, before.values())):  # nearly always: no look at each value
        return
    for key, value in before.items():
        if type(value) in _closed:
            continue
        if not isinstance(value, _OPENED):
            _closed.add(type(value))
        elif isinstance(value, CACHED_FUNCTION):
            undo.append(partial(_forget, value, value.cache_info().misses))
        elif depth < MAX_DEPTH and len(value) <= MAX_ENTRIES and key != "__builtins__":
            inner = partial(_set_item, value) if isinstance(value, dict) else None
            _remember(value, inner, undo, depth + 1)


def _contents(space: Any) -> dict[Any, Any]:
    """Return names and values; for a list or cells, indices and values."""
    if isinstance(space, list):
        return dict(enumerate(space))
    if isinstance(space, tuple):
        return dict(enumerate(map(_content, space)))
    if type(space) is dict:  # nearly always: without a pair for each name
        return space.copy()
    # some make a value when it is looked up, such as transformers' table of activations
    return dict(dict.items(space)) if isinstance(space, dict) else dict(space)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return MISSING


def _forget(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:
        cache.cache_clear()


def _put_back(space: Any, before: dict[Any, Any], put: Setter | None) -> None:
    current = _contents(space)
    if len(current) == len(before) and all(map(is_, current.values(), before.values())):
        return
    changed = [k for k, v in current.items() if k not in before or before[k] is not v]
    restored = [k for k in changed if _holds(current[k]) or _holds(before.get(k))]
    if put is not None:
        for key in restored:
            put(key, before.get(key, MISSING))
    elif restored:  # a list has the same indices as before
        space[:] = before.values()


def _holds(value: Any) -> bool:
    if isinstance(value, (Tensor, tuple, list, dict)):
        return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
    return False


class WrittenAttributes:
    """Attributes and buffers of a copy before its forward; the `originals` have them, too.

    A program runs a copy of the model. A loss that reads `model.layers[0].aux` of the user's own
    model (by a closure, a global, or as its method) would read what no forward of the program
    writes.
    """

    def __init__(self, copied: nn.Module, originals: Iterable[nn.Module]) -> None:
        self._copied, self._originals = copied, list({id(m): m for m in originals}.values())
        self._before: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {}
        for name, module in copied.named_modules():
            state = {**vars(module), **module._buffers}  # is held: marks have ids of its values
            self._before[name] = state, _marks(state)

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Refuse (S615) reads, in the block, of what the forward has written, of an original."""
        reads: list[str] = []
        names: dict[int, tuple[str, frozenset[str]]] = {}
        classes: dict[type, None] = {}
        for fqn, module in self._copied.named_modules():
            before, current = self._before[fqn][1], _marks({**vars(module), **module._buffers})
            written = frozenset(k for k, mark in current.items() if before.get(k) != mark)
            for original in self._originals if written else ():
                of_user = original.get_submodule(fqn)
                names[id(of_user)] = fqn, written
                classes[type(of_user)] = None
        try:
            with ExitStack() as undo:
                for cls in classes:
                    undo.callback(_observe(cls, names, reads))
                yield
        finally:
            if reads:
                raise Refusal.of(
                    "S615",
                    f"the loss reads {quote_names(reads)} of the model, which no program writes",
                    notes=(
                        "the forward writes it, and what a program runs is a copy of the model",
                    ),
                    helps=("let the model's forward compute this part, and return it",),
                )


def _marks(state: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what changes with a value: other tensors, writes into them, other objects, numbers.

    Attributes that every module has are left out: hooks, submodules, parameters.
    """
    marks: dict[str, list[Any]] = {}
    for key, value in state.items():
        if key in MODULE_ATTRIBUTES:
            continue
        is_open = isinstance(value, (list, dict, tuple)) and len(value) <= MAX_ENTRIES
        marks[key] = [
            (id(leaf), leaf._version)
            if isinstance(leaf, Tensor)
            else leaf
            if isinstance(leaf, _NUMBERS)
            else id(leaf)
            for leaf in (tree_leaves(value) if is_open else [value])
        ]
    return marks


def _observe(
    cls: Any, names: dict[int, tuple[str, frozenset[str]]], reads: list[str]
) -> Callable[[], None]:
    """Let a class report reads of attributes; return the function that ends it."""
    own, inner = vars(cls).get("__getattribute__"), cls.__getattribute__

    def read(self: Any, key: str) -> Any:
        fqn, written = names.get(id(self), ("", frozenset()))
        if key in written and (name := f"{fqn}.{key}".lstrip(".")) not in reads:
            reads.append(name)
        return inner(self, key)

    def end() -> None:
        if own is None:
            del cls.__getattribute__
        else:
            cls.__getattribute__ = own

    cls.__getattribute__ = read
    return end
