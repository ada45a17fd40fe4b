"""Matches of a pattern in a data flow, and the flow with each match taken out as one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from schedlang.language.patterns import COMMUTES, Const, Op, Pattern, Term, Var
from schedlang.runtime.adapters.torch_compile import keeping
from schedlang.runtime.float64 import Float64
from schedlang.runtime.fusion.dataflow import (
    is_dropout,
    name_of,
    operation,
    plain_torch,
    shown,
    writes,
)
from schedlang.runtime.modes import on_stack
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.rowwise_kernels.operator import Generated, refusal

# -- inductor for one region -----------------------------------------------------------------------


LIMIT = 16  # sets of shapes of one region; those beyond are compiled for any shape, or refused


def compiled(plain: Callable[..., Any], count: Callable[[], None], rounding: str) -> Any:
    """The function compiled; `count` is called for each graph.

    rounding "eager": intermediate results are rounded to the working type as they are eagerly;
    "fp32": they stay in float32 until they leave the region.
    """

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        import torch._inductor.config as inductor
        from torch._inductor.compile_fx import compile_fx

        count()
        with inductor.patch(emulate_precision_casts=rounding == "eager"), keeping():
            return compile_fx(graph, inputs)

    return torch.compile(plain, fullgraph=True, backend=backend)


# -- matches, along the edges between calls --------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """One place: its calls in the order of the flow, and what each parameter is."""

    nodes: tuple[fx.Node, ...]
    bound: Mapping[str, Any]
    several: tuple[fx.Node, ...] = ()  # results, where they are more than the last call's

    @property
    def root(self) -> fx.Node:
        """The call that gives the result."""
        return self.nodes[-1]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes of the results."""
        return self.several or (self.root,)


@dataclass
class Miss:
    """The attempt that came furthest: how many calls fitted, and why no more did."""

    fitted: int = -1
    reason: str = "none of its calls is in the pattern"
    bias: str = ""  # a projection whose bias would have fitted, if it stood apart

    def note(self, fitted: int, reason: str, bias: str = "") -> None:
        """Remember a reason if it comes later than the one known."""
        if fitted > self.fitted:
            self.fitted, self.reason, self.bias = fitted, reason, bias


@dataclass
class _Try:
    """One attempt at one place; `nodes` and `bound` are taken back where a branch fails."""

    root: nn.Module
    miss: Miss
    nodes: list[fx.Node] = field(default_factory=list)
    bound: dict[str, Any] = field(default_factory=dict)

    def fits(self, term: Term, value: Any) -> bool:
        """Tell whether a value of the flow matches a piece of the pattern."""
        match term:
            case Var(name):
                if name in self.bound and self.bound[name] is not value:
                    return self._no(f"`{name}` is two different values")
                self.bound[name] = value
                return True
            case Const(wanted):
                return _equal(wanted, value) or self._no(
                    f"the pattern has {wanted} where the model has {_said(value, self.root)}"
                )
            case Op():
                return self._call(term, value)

    def _no(self, reason: str, bias: str = "") -> bool:
        self.miss.note(len(self.nodes), reason, bias)
        return False

    def _call(self, term: Op, value: Any) -> bool:
        if not isinstance(value, fx.Node):
            return self._no(f"the pattern has `{term}` where the model has {value!r}")
        found = operation(value, self.root)
        if found is None or found[0] != term.name:
            said = shown(value, self.root)
            return self._no(
                f"the pattern has `{term}` where the model has {said}", _bias(term, value)
            )
        if value in self.nodes:
            return self._no(f"{shown(value, self.root)} is matched by two calls of the pattern")
        self.nodes.append(value)
        for given in _orders(term):
            before = len(self.nodes), dict(self.bound)
            if all(self.fits(inner, found[1].get(name)) for name, inner in given):
                return True
            del self.nodes[before[0] :]
            self.bound = before[1]
        self.nodes.remove(value)
        return False


def _orders(term: Op) -> Iterator[tuple[tuple[str, Term], ...]]:
    yield term.given
    if term.name in COMMUTES and len(term.given) == 2:
        (a, left), (b, right) = term.given
        yield (a, right), (b, left)


def _bias(term: Op, value: fx.Node) -> str:
    """The projection that stands where the pattern has a sum: its bias may be meant."""
    return str(value.target) if term.name == "add" and value.op == "call_module" else ""


def _equal(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(value, bool):
        return wanted is value
    if isinstance(value, fx.Node):
        return False
    return bool(str(wanted) == str(value) or wanted == value)


def _said(value: Any, root: nn.Module) -> str:
    return shown(value, root) if isinstance(value, fx.Node) else str(value)


def matches(pattern: Pattern, graph: fx.Graph, root: nn.Module) -> tuple[list[Match], Miss]:
    """All places of a pattern that share no call, the last first found; and the nearest miss."""
    miss, taken = Miss(), set[fx.Node]()
    found: list[Match] = []
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        attempt = _Try(root, miss)
        if node in taken or not attempt.fits(pattern.body, node):
            continue
        nodes = tuple(sorted(attempt.nodes, key=order.__getitem__))
        wrong = _apart(nodes, graph, root)
        if taken & set(nodes):
            wrong = "two matches share a call"
        if wrong:
            miss.note(len(nodes), wrong)
            continue
        taken |= set(nodes)
        found.append(Match(nodes, attempt.bound))
    return found[::-1], miss


def _apart(nodes: tuple[fx.Node, ...], graph: fx.Graph, root: nn.Module) -> str:
    """Say why these calls cannot run as one region: others read inside it, or write its inputs."""
    inside = set(nodes)
    for node in nodes[:-1]:
        other = next((user for user in node.users if user not in inside), None)
        if other is not None:
            return f"{shown(other, root)} uses what {shown(node, root)} gives, too"
    between = False
    for node in graph.nodes:
        between = between or node is nodes[0]
        if between and node not in inside and writes(node):
            return f"{shown(node, root)} writes in place between its calls"
        if node is nodes[-1]:
            break
    return ""


# -- a whole module as one match -------------------------------------------------------------------


# functions that no row can be computed with by itself, by torch's names; what is not known here is
# told when the kernel is made
ACROSS = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d"),
        *("conv3d", "embedding", "scaled_dot_product_attention", "cat", "stack", "cumsum"),
        *("cumprod", "sort", "topk", "argmax", "argsort", "gather", "scatter", "index_select"),
        *("roll", "flip", "outer", "bilinear", "tensordot", "__matmul__", "batch_norm"),
        *("group_norm", "instance_norm"),
    )
)


def whole(graph: fx.Graph, root: nn.Module) -> Match:
    """All calls of a flow as one; S887 with the name of the one that is not row-wise."""
    nodes = []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        wrong = _wrong(node, root)
        if wrong:
            raise refusal(wrong)
        nodes.append(node)
    if not nodes:
        raise refusal("it computes nothing")
    output = next(iter(reversed(graph.nodes)))
    results = tuple(dict.fromkeys(n for n in output.all_input_nodes if n in nodes))
    last = nodes[-1]
    return Match(tuple(nodes), {}, () if results == (last,) else results)


def _wrong(node: fx.Node, root: nn.Module) -> str:
    """Say why a call cannot be part of a kernel; "" if it can."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return "" if is_dropout(module) else f"{shown(node, root)} is not a row-wise operator"
    if writes(node):
        return f"{shown(node, root)} writes in place"
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return f"{shown(node, root)} is not a row-wise operator" if name in ACROSS else ""


# -- the rewritten flow ----------------------------------------------------------------------------
# The rest runs as it did, in the module's own place: children are called with their hooks and
# layers, parameters are read when they are needed.  Masks of dropout are drawn outside of the
# region, by the very calls that drew them, of ones: so they are the same, whoever draws them.


_regions: dict[tuple[str, str, str], Region] = {}


@dataclass(frozen=True)
class How:
    """The way to compile regions: by inductor or as generated kernels; and the rounding."""

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
    """Tell whether a mode is active that changes more than how masks are drawn."""
    changing = [mode for mode in on_stack() if not mode.compiles]
    return any(not isinstance(m, LogicalDropout) for m in changing)


def _float64() -> bool:
    """Tell whether exactly the mode of proofs is active, with real numbers."""
    found = [type(mode) for mode in on_stack() if not mode.compiles]
    return Float64 in found and set(found) <= {Float64, LogicalDropout}


@dataclass(frozen=True)
class Rewritten:
    """The function that runs in place of a module's forward, and its regions."""

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
    """Let users of the match's results use those of the region."""
    if len(results) == 1:
        results[0].replace_all_uses_with(call)
        return
    for place, node in reversed(list(enumerate(results))):
        with graph.inserting_after(call):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (call, place)))


def _masked(
    graph: fx.Graph,
    node: fx.Node,
    match: Match,
    root: nn.Module,
    inside: fx.Graph,
    inner: Callable[[fx.Node], fx.Node],
    outer: list[fx.Node],
) -> fx.Node:
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
            on_meta = [t.to("meta") if isinstance(t, Tensor) else t for t in given]
            with torch.no_grad():
                out = self.function(None, *on_meta)
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
