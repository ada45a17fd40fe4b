"""A data flow with what a pattern matched taken out: each place is one call of a compiled region.

The rest runs as it did, in the module's own place: children are called with their hooks and layers,
parameters are read when they are needed.  Masks of dropout are drawn outside of the region, by the
very calls that drew them, of ones: so they are the same, whoever draws them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from schedlang.runtime.drawing.random import LogicalDropout
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import Ambient
from schedlang.runtime.regions.compile import compiled
from schedlang.runtime.regions.flow import plain_torch
from schedlang.runtime.regions.match import Match
from schedlang.runtime.regions.ops import name_of, operation
from schedlang.runtime.rowwise.layer import Generated

_regions: dict[tuple[str, str, str], Region] = {}


@dataclass(frozen=True)
class How:
    """How regions are compiled: by inductor, or as generated kernels; and what is rounded."""

    rounding: str = "fp32"
    backend: str = "inductor"


@dataclass(eq=False)  # two are equal if they are one
class Region:
    """A function of tensors, compiled once for all places where it is the same text."""

    source: str
    plain: Callable[..., Any]
    rounding: str
    backend: str = "inductor"
    graphs: int = 0
    fast: Callable[..., Any] | None = field(default=None, repr=False)

    @cached_property
    def wide(self) -> Generated:
        """The chain for a proof in float64."""
        return Generated(self.plain, self.source, self.rounding, wide=True)

    __name__ = "region"

    def __call__(self, *given: Any) -> Any:
        """Compiled; as it stands where a mode changes arithmetic."""
        if _watchers:
            _watchers[-1].append((self, given))
        if self.backend == "rowwise" and _float64():
            with plain_torch():
                return self.wide(*given)
        if _widened() or any(t.is_meta for t in given if isinstance(t, Tensor)):
            return self.plain(*given)
        if self.fast is None:
            self.fast = self._made()
        with plain_torch():  # nothing in it is drawn
            return self.fast(*given)

    def _made(self) -> Callable[..., Any]:
        if self.backend == "rowwise":
            return Generated(self.plain, self.source, self.rounding)
        fast: Callable[..., Any] = compiled(self.plain, self._counted, self.rounding)
        return fast

    def _counted(self) -> None:
        self.graphs += 1


_watchers: list[list[tuple[Region, tuple[Any, ...]]]] = []


@contextmanager
def watched() -> Iterator[list[tuple[Region, tuple[Any, ...]]]]:
    """The regions that are called inside, and what they are given."""
    _watchers.append([])
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()


def _widened() -> bool:
    """Does a mode hold that changes more than how masks are drawn?"""
    from torch.overrides import _get_current_function_mode_stack

    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    changing = [m for m in stack if isinstance(m, Ambient) and not m.compiles]
    return any(not isinstance(m, LogicalDropout) for m in changing)


def _float64() -> bool:
    """Does exactly the mode hold under which a program is proven, and real numbers run?"""
    from torch.overrides import _get_current_function_mode_stack

    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    found = [type(m) for m in stack if isinstance(m, Ambient) and not m.compiles]
    return Float64 in found and set(found) <= {Float64, LogicalDropout}


@dataclass(frozen=True)
class Rewritten:
    """What runs instead of a module's forward, and the regions in it."""

    run: Callable[..., Any]
    names: tuple[str, ...]
    regions: tuple[Region, ...]


def rewritten(graph: fx.Graph, found: Sequence[Match], root: nn.Module, how: How) -> Rewritten:
    """The flow with each match as one region; the graph is changed."""
    made = [_taken_out(graph, match, root, how) for match in found]
    graph.lint()
    names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    return Rewritten(_function(graph, "self"), names, tuple(made))


def _function(graph: fx.Graph, owner: str) -> Callable[..., Any]:
    """The graph as a function whose first argument is the module that it reads."""
    code = graph.python_code(owner)
    space = dict(code.globals)
    exec(code.src, space)
    made: Callable[..., Any] = space["forward"]
    return made


def _taken_out(graph: fx.Graph, match: Match, root: nn.Module, how: How) -> Region:
    inside = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outer: list[fx.Node] = []

    def inner(node: fx.Node) -> fx.Node:
        if node not in copies:
            outer.append(node)
            copies[node] = inside.placeholder(f"x{len(outer)}")
        return copies[node]

    for node in match.nodes:
        if name_of(node, root) == "dropout":
            copies[node] = _masked(graph, node, match, root, inside, inner, outer)
        else:
            copies[node] = inside.node_copy(node, inner)
            copies[node].meta.clear()
    results = match.results
    inside.output(tuple(copies[n] for n in results) if len(results) > 1 else copies[match.root])
    region = region_of(inside, how)
    with graph.inserting_after(match.nodes[-1]):
        call = graph.call_function(region, tuple(outer))
    _used_instead(graph, results, call)
    for node in reversed(match.nodes):
        graph.erase_node(node)
    return region


def _used_instead(graph: fx.Graph, results: tuple[fx.Node, ...], call: fx.Node) -> None:
    """What used a result of the match uses that of the region."""
    if len(results) == 1:
        results[0].replace_all_uses_with(call)
        return
    for place, node in reversed(list(enumerate(results))):
        with graph.inserting_after(call):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (call, place)))


def _masked(
    graph: fx.Graph, node: fx.Node, match: Match, root: nn.Module, inside: fx.Graph,
    inner: Callable[[fx.Node], fx.Node], outer: list[fx.Node],
) -> fx.Node:  # fmt: skip
    """Dropout in a region: a product with a mask that is drawn before it."""
    told = operation(node, root)
    assert told is not None
    dropped = told[1]["input"]
    given = inner(dropped)
    like: Any = dropped
    with graph.inserting_before(match.root):
        if dropped in match.nodes:  # known inside the region only: its shape is worked out
            shape = fx.Graph()
            seen: dict[Any, Any] = {}
            fed = [n for n in inside.nodes if n.op == "placeholder"]
            for one in inside.nodes:
                seen[one] = shape.node_copy(one, seen.__getitem__)
            shape.output(seen[given])
            like = graph.call_function(Shape(_function(shape, "self")), tuple(outer[: len(fed)]))
        else:
            like = graph.call_function(torch.ones_like, (dropped,))
        mask = graph.node_copy(node, lambda n: like if n is dropped else n)
    return inside.call_function(torch.mul, (given, inner(mask)))


class Shape:
    """Ones of the shape that a function of tensors gives, which is worked out without values."""

    __name__ = "ones"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.known: dict[Any, tuple[torch.Size, torch.dtype]] = {}

    def __call__(self, *given: Any) -> Tensor:
        """The ones."""
        first = next(t for t in given if isinstance(t, Tensor))
        key = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else t for t in given)
        if key not in self.known:
            hollow = [t.to("meta") if isinstance(t, Tensor) else t for t in given]
            with torch.no_grad():
                out = self.function(None, *hollow)
            self.known[key] = out.shape, out.dtype
        shape, dtype = self.known[key]
        return torch.ones(shape, dtype=dtype, device=first.device)


def region_of(graph: fx.Graph, how: How) -> Region:
    """The region of a graph of its own; equal ones are one."""
    # placeholders may have been made between calls: torch wants them first
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for node in list(graph.nodes):
        if node.op == "placeholder" and first is not None:
            first.prepend(node)
    graph.lint()
    source = graph.python_code("self").src
    key = (source, how.rounding, how.backend)
    if key not in _regions:
        whole = _function(graph, "self")

        def plain(*given: Any) -> Any:
            return whole(None, *given)

        _regions[key] = Region(source, plain, how.rounding, how.backend)
    return _regions[key]


def bound(names: Mapping[str, Any]) -> str:
    """What the parameters of a pattern are, in words."""
    return ", ".join(f"{name} = {value}" for name, value in names.items())
