"""A residual sum and the norm after it as one kernel: where a data flow shows them, and at work."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.norm import LONGEST_OF_MORE, Case, add_norm, fits
from schedlang.kernels.norm_probes import Norm, probe_norm
from schedlang.kernels.probe import Mismatch, seen
from schedlang.runtime.forward import decorated
from schedlang.runtime.fusion.dataflow import (
    Given,
    Looked,
    arguments_of,
    flow,
    imagined,
    inside_of,
    like,
    name_of,
    shown,
    touched,
    writes,
)
from schedlang.runtime.left import leave

# -- the probe -------------------------------------------------------------------------------------
# Find sums with a norm: the module's own forward is followed, its children left whole.  What a
# norm is told by is what it computes (kernels/norm_probes.py); a norm to which something else is
# done (a hook, a layout, a kernel of its own) is none of those that are found.


@dataclass(frozen=True)
class Sums:
    """Norms of a module's children that stand right after a sum, by the child's name."""

    norms: Mapping[str, Norm]

    def cases(self) -> list[Case]:
        """Runs of the kernel in the forms that were found."""
        return [
            Case((7, min(norm.size, 4096)), dtype, norm.form, bool(norm.bias), add=True)
            for norm in self.norms.values()
            for dtype in ("float32", "bfloat16")
        ]


def probe_sums(module: nn.Module) -> Sums | Mismatch:
    """The norms after sums in a module's forward, or what was found instead."""
    if "forward" in vars(module):
        return Mismatch("has a replaced forward already")
    norms: dict[str, Norm] = {}
    reasons: dict[str, str] = {}
    told: dict[Hashable, Norm | Mismatch] = {}
    for name, child in module.named_children():
        alike = seen(child)
        judged = told[alike] = told.get(alike) or probe_norm(child)
        if isinstance(judged, Norm):
            norms[name] = judged
        elif "norm" in type(child).__name__.lower():
            reasons[name] = judged.reason
    if not norms:
        said = "; ".join(f"`{name}` {reason}" for name, reason in reasons.items())
        return Mismatch(f"has no child that is a norm{said and ': '}{said}")
    try:
        graph = flow_of(module, imagined(module))
    except Refusal as refusal:
        return Mismatch(": ".join((refusal.diagnostic.title, *refusal.diagnostic.notes)))
    found = {str(place.norm.target) for place in places(graph, module, norms)}
    if found:
        return Sums({name: norm for name, norm in norms.items() if name in found})
    return Mismatch(f"has no addition right before a norm: {_before(graph, module, norms)}")


def _before(graph: fx.Graph, module: nn.Module, norms: Mapping[str, Norm]) -> str:
    """Describe the node before each norm."""
    said = []
    for node in graph.nodes:
        if node.op == "call_module" and node.target in norms:
            given = node.all_input_nodes
            what = shown(given[0], module) if given else "nothing that can be traced"
            said.append(f"before `{node.target}` is {what}")
    return "; ".join(said) or "its forward calls no norm"


# -- the flow --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A sum and the norm of it, in a flow."""

    total: fx.Node
    norm: fx.Node


def flow_of(module: nn.Module, given: Given) -> fx.Graph:
    """The flow of one call, the module's decorators and all its children left out of it."""
    whole = frozenset(name for name, _ in module.named_modules() if name)
    return flow(module, given, Looked(whole=whole, bare=True))


def places(graph: fx.Graph, module: nn.Module, norms: Mapping[str, Norm]) -> list[Place]:
    """Find norms that are called on a sum of two tensors, with no write in between."""
    found, order = [], list(graph.nodes)
    for norm in order:
        if norm.op != "call_module" or norm.target not in norms or norm.kwargs:
            continue
        total = norm.args[0] if len(norm.args) == 1 else None
        if not isinstance(total, fx.Node) or not _is_sum(total, module):
            continue
        between = order[order.index(total) + 1 : order.index(norm)]
        if touched(module.get_submodule(str(norm.target))) or any(map(writes, between)):
            continue
        found.append(Place(total, norm))
    return found


def _is_sum(node: fx.Node, module: nn.Module) -> bool:
    both = node.args if len(node.args) == 2 and not node.kwargs else ()
    return (
        name_of(node, module) == "add"
        and len(both) == 2
        and all(isinstance(each, fx.Node) for each in both)
        and not writes(node)
    )


# -- the layer -------------------------------------------------------------------------------------
# The module's forward is rewritten once for each set of constants that it is called with: wherever
# the result of a sum goes into a child that is a norm, both are computed at once.  The rest runs
# as it did.
#
# torch.compile follows a call through all of this but the rewriting, which happens while it
# traces. It takes one graph for equal modules where the functions that they run are the same ones:
# so equal texts are one function, what differs by module is handed to it, and at the first trace
# the forwards of all modules of a class are rewritten.  A module whose forward came later would be
# compiled anew.


Inside = tuple[tuple[str, Any], ...]  # of each argument of the flow what a trace may ask of it
Constants = tuple[tuple[str, Any], ...]

_PLAIN = (bool, int, float, str, type(None))
_alive: dict[type, weakref.WeakSet[FusedAddNorm]] = {}  # by the class of their modules
_functions: dict[tuple[Any, ...], Callable[..., Any]] = {}


class Made(NamedTuple):
    """A rewritten forward, the names of its arguments, and why norms are left out of it."""

    run: Callable[..., Any]
    names: tuple[str, ...]
    left: tuple[str, ...]


class FusedAddNorm:
    """The layer that runs a module's rewritten forward."""

    kernel = "add_norm"

    def __init__(self, module: nn.Module, found: Sums) -> None:
        self.__setstate__({"module": module, "found": found})

    def __getstate__(self) -> dict[str, Any]:
        """Copies look anew: what is done to their children may differ."""
        return {"module": self.module, "found": self.found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self.found = state["module"], state["found"]
        self.made: Mapping[Any, Made] = {}  # never written into: a graph may have looked at it
        forward = type(self.module).forward
        self.named = arguments_of(forward)
        self.forward = decorated(forward, lambda _: self._run)
        _alive.setdefault(type(self.module), weakref.WeakSet()).add(self)

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The rewritten forward in its class's decorators; `inner` is not called."""
        return self.forward(self.module, *args, **kwargs)

    def _run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = self.named(module, *args, **kwargs)
        constants = tuple((n, _constant(v)) for n, v in named.items() if _is_constant(v))
        inside = tuple((n, inside_of(v)) for n, v in named.items() if not _is_constant(v))
        key = inside, tuple((n, repr(v)) for n, v in constants), self.training()
        if torch.compiler.is_compiling():
            _rewrite_all(type(module), inside, constants)
        elif key not in self.made:
            self.rewrite(inside, constants)
        made = self.made[key]
        for why in made.left:
            leave(module, "add_norm", why)
        return made.run(module, self, *(named[name] for name in made.names))

    def training(self) -> tuple[bool, ...]:
        """The mode of the module, and of all inside of it."""
        return tuple(m.training for m in self.module.modules())

    def rewrite(self, inside: Inside, constants: Constants) -> None:
        """Rewrite the forward for calls like this one, if that was not done; S883 if it cannot."""
        key = inside, tuple((n, repr(v)) for n, v in constants), self.training()
        if key not in self.made:
            made = self._made(Given({n: like(v) for n, v in inside}, dict(constants)))
            self.made = {**self.made, key: made}

    def _made(self, given: Given) -> Made:
        graph = flow_of(self.module, given)
        names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
        found = places(graph, self.module, self.found.norms)
        fused = {str(place.norm.target) for place in found}
        called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        apart = [name for name in self.found.norms if name in called - fused]
        left = tuple(_apart(name, self.module.get_submodule(name)) for name in apart)
        return Made(_rewritten(graph, found), names, left)

    def both(self, owner: nn.Module, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, its norm by the child `name`); apart where the two are not of one shape."""
        if not fits(a, b):
            leave(self.module, "add_norm", "it adds two tensors of the same shape", a=a, b=b)
            total = a + b
            return total, owner(total)
        if a.shape[-1] > LONGEST_OF_MORE:
            said = f"its rows have at most {LONGEST_OF_MORE} elements"
            leave(self.module, "add_norm", said, a=a)
        norm = self.found.norms[name]
        weight, bias = norm.vectors(owner, a)
        return add_norm(a, b, weight, bias, norm.form)


def _rewrite_all(kind: type, inside: Inside, constants: Constants) -> bool:
    """Rewrite the forwards of all modules of a class: run while torch.compile traces one of them.

    S883 where none of them can be rewritten; whether any was.
    """
    refusals = []
    layers = list(_alive.get(kind, ()))
    for layer in layers:
        try:
            layer.rewrite(inside, constants)
        except Refusal as refusal:
            refusals.append(refusal)
    if refusals and len(refusals) == len(layers):
        raise refusals[0]
    return bool(layers)


# torch.compiler.assume_constant_result, which would import all of the compiler
_rewrite_all._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- arguments -------------------------------------------------------------------------------------


def _is_constant(value: Any) -> bool:
    """Return whether a value is a plain number, flag or text, or empty; all else is part of the
    flow."""
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, dict)) and len(value) == 0)


def _constant(value: Any) -> Any:
    """A number that torch.compile took for a size that may change is this number from now on."""
    return operator.index(value) if type(value) is int else value


# -- the rewritten forward -------------------------------------------------------------------------


def _rewritten(graph: fx.Graph, found: list[Place]) -> Callable[..., Any]:
    """The flow with each place as one call: a function of the module, its layer, its arguments."""
    with graph.inserting_before(next(iter(graph.nodes))):
        layer = graph.placeholder("layer")
    taken: set[fx.Node] = set()
    for place in found:
        if place.total in taken:
            continue  # a second norm of the same sum
        taken.add(place.total)
        name = str(place.norm.target)
        with graph.inserting_before(place.total):
            owner = graph.get_attr(name)
            both = graph.call_function(_both, (layer, owner, name, *place.total.args))
            parts = [graph.call_function(_part, (both, index)) for index in (0, 1)]
        for old, new in zip((place.norm, place.total), parts[::-1]):
            old.replace_all_uses_with(new)
            graph.erase_node(old)
    graph.lint()
    return _function(graph)


def _both(
    layer: FusedAddNorm, owner: nn.Module, name: str, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    return layer.both(owner, name, a, b)


def _part(both: tuple[Tensor, Tensor], index: int) -> Tensor:
    return both[index]


def _function(graph: fx.Graph) -> Callable[..., Any]:
    """A graph as a function; equal graphs, with the same things under their names, are one."""
    code = graph.python_code("self")
    key = code.src, *sorted((name, id(value)) for name, value in code.globals.items())
    if key not in _functions:
        space = dict(code.globals)
        exec(code.src, space)
        _functions[key] = space["forward"]  # which keeps what was found under the names alive
    return _functions[key]


def _apart(name: str, norm: nn.Module) -> str:
    """Say why a norm that was found right after a sum is called apart from it."""
    if touched(norm):
        return f"`{name}` has hooks, a placement or its own row, and is called separately"
    return f"in this call there is no addition right before `{name}`"
