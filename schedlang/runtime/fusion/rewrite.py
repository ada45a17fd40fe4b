"""Match a pattern in a data flow, and replace each match by one compiled call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from schedlang.language.patterns import COMMUTATIVE, Const, Op, Pattern, Term, Var
from schedlang.runtime.adapters.torch_compile import compile_keeping_buffers
from schedlang.runtime.float64 import Float64
from schedlang.runtime.fusion.dataflow import (
    describe_node,
    function_name,
    is_dropout,
    operation_of,
    without_function_modes,
    writes_in_place,
)
from schedlang.runtime.modes import modes_on_stack
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.rowwise_kernels.rowwise_operator import RowwiseRegion, not_rowwise_refusal

# -- inductor for one region -----------------------------------------------------------------------


MAX_SHAPES = 16  # sets of shapes of one region; with more, it is compiled for any shape, or refused


def compile_region(function: Callable[..., Any], count: Callable[[], None], rounding: str) -> Any:
    """Compile a function with inductor; `count` is called for each graph.

    rounding  "eager": intermediate results are rounded to the working dtype as in eager mode;
              "fp32": they stay in float32 until they leave the region
    """

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        import torch._inductor.config as inductor
        from torch._inductor.compile_fx import compile_fx

        count()
        with inductor.patch(emulate_precision_casts=rounding == "eager"), compile_keeping_buffers():
            return compile_fx(graph, inputs)

    return torch.compile(function, fullgraph=True, backend=backend)


# -- matches, along the edges between calls --------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """One match: its calls in the order of the flow, and the value of each pattern variable."""

    nodes: tuple[fx.Node, ...]
    bound: Mapping[str, Any]
    multiple_results: tuple[fx.Node, ...] = ()  # results, where they are more than the last call's

    @property
    def root(self) -> fx.Node:
        """The call whose result is the match's."""
        return self.nodes[-1]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes of the results."""
        return self.multiple_results or (self.root,)


@dataclass
class NearestMiss:
    """The nearest attempt: how many calls matched, and why not more."""

    fitted: int = -1
    reason: str = "none of its calls is in the pattern"
    bias: str = ""  # a projection whose bias would have matched if it were separate

    def note(self, fitted: int, reason: str, bias: str = "") -> None:
        """Record a reason if more calls matched than for the recorded one."""
        if fitted > self.fitted:
            self.fitted, self.reason, self.bias = fitted, reason, bias


@dataclass
class _Try:
    """One attempt at one node; `nodes` and `bound` are restored where a branch fails."""

    root: nn.Module
    miss: NearestMiss
    nodes: list[fx.Node] = field(default_factory=list)
    bound: dict[str, Any] = field(default_factory=dict)

    def fits(self, term: Term, value: Any) -> bool:
        """Return whether a value of the flow matches a term of the pattern."""
        match term:
            case Var(name):
                if name in self.bound and self.bound[name] is not value:
                    return self._fail(f"`{name}` is two different values")
                self.bound[name] = value
                return True
            case Const(const):
                return _equal(const, value) or self._fail(
                    f"the pattern has {const} where the model has {_value_text(value, self.root)}"
                )
            case Op():
                return self._call(term, value)

    def _fail(self, reason: str, bias: str = "") -> bool:
        self.miss.note(len(self.nodes), reason, bias)
        return False

    def _call(self, term: Op, value: Any) -> bool:
        if not isinstance(value, fx.Node):
            return self._fail(f"the pattern has `{term}` where the model has {value!r}")
        operation = operation_of(value, self.root)
        if operation is None or operation[0] != term.name:
            text = describe_node(value, self.root)
            return self._fail(
                f"the pattern has `{term}` where the model has {text}", _bias(term, value)
            )
        if value in self.nodes:
            return self._fail(
                f"{describe_node(value, self.root)} is matched by two calls of the pattern"
            )
        self.nodes.append(value)
        for arguments in _orders(term):
            snapshot = len(self.nodes), dict(self.bound)
            if all(self.fits(inner, operation[1].get(name)) for name, inner in arguments):
                return True
            del self.nodes[snapshot[0] :]
            self.bound = snapshot[1]
        self.nodes.remove(value)
        return False


def _orders(term: Op) -> Iterator[tuple[tuple[str, Term], ...]]:
    yield term.arguments
    if term.name in COMMUTATIVE and len(term.arguments) == 2:
        (a, left), (b, right) = term.arguments
        yield (a, right), (b, left)


def _bias(term: Op, value: fx.Node) -> str:
    """Return the projection where the pattern has a sum: the pattern may mean its bias."""
    return str(value.target) if term.name == "add" and value.op == "call_module" else ""


def _equal(constant: Any, value: Any) -> bool:
    if isinstance(constant, bool) or isinstance(value, bool):
        return constant is value
    if isinstance(value, fx.Node):
        return False
    return bool(str(constant) == str(value) or constant == value)


def _value_text(value: Any, root: nn.Module) -> str:
    return describe_node(value, root) if isinstance(value, fx.Node) else str(value)


def find_matches(
    pattern: Pattern, graph: fx.Graph, root: nn.Module
) -> tuple[list[Match], NearestMiss]:
    """Return all matches of a pattern that share no call, in order, and the nearest miss.

    Later matches have priority.
    """
    miss, taken = NearestMiss(), set[fx.Node]()
    matches: list[Match] = []
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        attempt = _Try(root, miss)
        if node in taken or not attempt.fits(pattern.body, node):
            continue
        nodes = tuple(sorted(attempt.nodes, key=order.__getitem__))
        obstacle = _why_not_one_region(nodes, graph, root)
        if taken & set(nodes):
            obstacle = "two matches share a call"
        if obstacle:
            miss.note(len(nodes), obstacle)
            continue
        taken |= set(nodes)
        matches.append(Match(nodes, attempt.bound))
    return matches[::-1], miss


def _why_not_one_region(nodes: tuple[fx.Node, ...], graph: fx.Graph, root: nn.Module) -> str:
    """Return why these calls cannot run as one region: others use a result, or modify its
    inputs."""
    inside = set(nodes)
    for node in nodes[:-1]:
        outer = next((user for user in node.users if user not in inside), None)
        if outer is not None:
            return f"{describe_node(outer, root)} uses what {describe_node(node, root)} gives, too"
    between = False
    for node in graph.nodes:
        between = between or node is nodes[0]
        if between and node not in inside and writes_in_place(node):
            return f"{describe_node(node, root)} writes in place between its calls"
        if node is nodes[-1]:
            break
    return ""


# -- a whole module as one match -------------------------------------------------------------------


# functions that cannot be computed row by row, by torch's names; unknown functions are reported
# when the kernel is made
NOT_ROWWISE = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d"),
        *("conv3d", "embedding", "scaled_dot_product_attention", "cat", "stack", "cumsum"),
        *("cumprod", "sort", "topk", "argmax", "argsort", "gather", "scatter", "index_select"),
        *("roll", "flip", "outer", "bilinear", "tensordot", "__matmul__", "batch_norm"),
        *("group_norm", "instance_norm"),
    )
)


def match_all(graph: fx.Graph, root: nn.Module) -> Match:
    """Match all calls of a flow as one; refuse (S887) with the name of a call that is not
    row-wise."""
    nodes = []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        obstacle = _why_not_rowwise(node, root)
        if obstacle:
            raise not_rowwise_refusal(obstacle)
        nodes.append(node)
    if not nodes:
        raise not_rowwise_refusal("it computes nothing")
    output = next(iter(reversed(graph.nodes)))
    results = tuple(dict.fromkeys(n for n in output.all_input_nodes if n in nodes))
    last = nodes[-1]
    return Match(tuple(nodes), {}, () if results == (last,) else results)


def _why_not_rowwise(node: fx.Node, root: nn.Module) -> str:
    """Return why a call cannot be part of a row-wise kernel; "" if it can."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return (
            "" if is_dropout(module) else f"{describe_node(node, root)} is not a row-wise operator"
        )
    if writes_in_place(node):
        return f"{describe_node(node, root)} writes in place"
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return f"{describe_node(node, root)} is not a row-wise operator" if name in NOT_ROWWISE else ""


# -- the rewritten flow ----------------------------------------------------------------------------
# The rest runs unchanged, in the module: children are called with their hooks and layers,
# parameters are read when they are needed. Masks of dropout are drawn outside of the region, by the
# original calls applied to ones: so they do not depend on the region.


_regions: dict[tuple[str, str, str], FusedRegion] = {}


@dataclass(frozen=True)
class RegionOptions:
    """The options of regions: compiled by inductor or as generated kernels; and the rounding."""

    rounding: str = "fp32"
    backend: str = "inductor"


@dataclass(eq=False)  # compared by identity
class FusedRegion:
    """A function of tensors, compiled once for all places with the same source."""

    source: str
    eager: Callable[..., Any]
    rounding: str
    backend: str = "inductor"
    graphs: int = 0
    compiled: Callable[..., Any] | None = field(default=None, repr=False)

    @cached_property
    def float64_chain(self) -> RowwiseRegion:
        """The chain for a proof in float64."""
        return RowwiseRegion(self.eager, self.source, self.rounding, float64=True)

    __name__ = "region"

    def __call__(self, *args: Any) -> Any:
        """Run the compiled function; run it eagerly where a mode changes arithmetic."""
        if _watchers:
            _watchers[-1].append((self, args))
        if self.backend == "rowwise" and _is_float64_proof():
            with without_function_modes():
                return self.float64_chain(*args)
        if _changes_arithmetic() or any(t.is_meta for t in args if isinstance(t, Tensor)):
            return self.eager(*args)
        if self.compiled is None:
            self.compiled = self._made()
        with without_function_modes():  # it draws nothing
            return self.compiled(*args)

    def _made(self) -> Callable[..., Any]:
        if self.backend == "rowwise":
            return RowwiseRegion(self.eager, self.source, self.rounding)
        fast: Callable[..., Any] = compile_region(self.eager, self._counted, self.rounding)
        return fast

    def _counted(self) -> None:
        self.graphs += 1


_watchers: list[list[tuple[FusedRegion, tuple[Any, ...]]]] = []


@contextmanager
def record_regions() -> Iterator[list[tuple[FusedRegion, tuple[Any, ...]]]]:
    """Record, within the block, calls of regions and their arguments."""
    _watchers.append([])
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()


def _changes_arithmetic() -> bool:
    """Return whether a mode is active that changes more than the draws of masks."""
    changing = [mode for mode in modes_on_stack() if not mode.compiles]
    return any(not isinstance(m, LogicalDropout) for m in changing)


def _is_float64_proof() -> bool:
    """Return whether exactly the modes of a float64 proof are active."""
    mode_types = [type(mode) for mode in modes_on_stack() if not mode.compiles]
    return Float64 in mode_types and set(mode_types) <= {Float64, LogicalDropout}


@dataclass(frozen=True)
class RewrittenFlow:
    """The function that runs in place of a module's forward, and its regions."""

    run: Callable[..., Any]
    names: tuple[str, ...]
    regions: tuple[FusedRegion, ...]


def rewrite_flow(
    graph: fx.Graph, matches: Sequence[Match], root: nn.Module, options: RegionOptions
) -> RewrittenFlow:
    """Replace each match in the flow by one region; the graph is modified."""
    regions = [_extract_region(graph, match, root, options) for match in matches]
    graph.lint()
    names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    return RewrittenFlow(_function(graph, "self"), names, tuple(regions))


def _function(graph: fx.Graph, owner: str) -> Callable[..., Any]:
    """Return the graph as a function whose first argument is the module that it reads."""
    code = graph.python_code(owner)
    namespace = dict(code.globals)
    exec(code.src, namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def _extract_region(
    graph: fx.Graph, match: Match, root: nn.Module, options: RegionOptions
) -> FusedRegion:
    inside = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outer: list[fx.Node] = []

    def inner(node: fx.Node) -> fx.Node:
        if node not in copies:
            outer.append(node)
            copies[node] = inside.placeholder(f"x{len(outer)}")
        return copies[node]

    for node in match.nodes:
        if function_name(node, root) == "dropout":
            copies[node] = _mask_product(graph, node, match, root, inside, inner, outer)
        else:
            copies[node] = inside.node_copy(node, inner)
            copies[node].meta.clear()
    results = match.results
    inside.output(tuple(copies[n] for n in results) if len(results) > 1 else copies[match.root])
    region = region_of(inside, options)
    with graph.inserting_after(match.nodes[-1]):
        call = graph.call_function(region, tuple(outer))
    _replace_uses(graph, results, call)
    for node in reversed(match.nodes):
        graph.erase_node(node)
    return region


def _replace_uses(graph: fx.Graph, results: tuple[fx.Node, ...], call: fx.Node) -> None:
    """Replace uses of the match's results by those of the region's."""
    if len(results) == 1:
        results[0].replace_all_uses_with(call)
        return
    for index, node in reversed(list(enumerate(results))):
        with graph.inserting_after(call):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (call, index)))


def _mask_product(
    graph: fx.Graph,
    node: fx.Node,
    match: Match,
    root: nn.Module,
    inside: fx.Graph,
    inner: Callable[[fx.Node], fx.Node],
    outer: list[fx.Node],
) -> fx.Node:
    """Return dropout in a region: a product with a mask that is drawn before the region."""
    operation = operation_of(node, root)
    assert operation is not None
    dropped = operation[1]["input"]
    region_input = inner(dropped)
    template: Any = dropped
    with graph.inserting_before(match.root):
        if dropped in match.nodes:  # exists inside the region only: compute its shape
            shape = fx.Graph()
            copied: dict[Any, Any] = {}
            inputs = [n for n in inside.nodes if n.op == "placeholder"]
            for inner_node in inside.nodes:
                copied[inner_node] = shape.node_copy(inner_node, copied.__getitem__)
            shape.output(copied[region_input])
            template = graph.call_function(
                OnesOfShape(_function(shape, "self")), tuple(outer[: len(inputs)])
            )
        else:
            template = graph.call_function(torch.ones_like, (dropped,))
        mask = graph.node_copy(node, lambda n: template if n is dropped else n)
    return inside.call_function(torch.mul, (region_input, inner(mask)))


class OnesOfShape:
    """A function that returns ones of another function's output shape, computed without values."""

    __name__ = "ones"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.known: dict[Any, tuple[torch.Size, torch.dtype]] = {}

    def __call__(self, *args: Any) -> Tensor:
        """Return the ones."""
        first_tensor = next(t for t in args if isinstance(t, Tensor))
        key = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else t for t in args)
        if key not in self.known:
            on_meta = [t.to("meta") if isinstance(t, Tensor) else t for t in args]
            with torch.no_grad():
                output = self.function(None, *on_meta)
            self.known[key] = output.shape, output.dtype
        shape, dtype = self.known[key]
        return torch.ones(shape, dtype=dtype, device=first_tensor.device)


def region_of(graph: fx.Graph, options: RegionOptions) -> FusedRegion:
    """Return the region of a graph; equal graphs share one region."""
    # placeholders may have been made between calls: torch requires them first
    first_node = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for node in list(graph.nodes):
        if node.op == "placeholder" and first_node is not None:
            first_node.prepend(node)
    graph.lint()
    source = graph.python_code("self").src
    key = (source, options.rounding, options.backend)
    if key not in _regions:
        full_function = _function(graph, "self")

        def plain(*args: Any) -> Any:
            return full_function(None, *args)

        _regions[key] = FusedRegion(source, plain, options.rounding, options.backend)
    return _regions[key]
