"""A residual sum and the norm after it as one kernel, where a module's data flow shows them.

The module's own forward is followed, its children left whole; wherever the result of a sum goes
into a child that is a norm, both are computed at once.  The rest runs as it did.  A norm to which
something else is done (a hook, a layout, a kernel of its own) is called as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from schedlang.diagnostic import Refusal
from schedlang.kernels.add_norm import LONGEST, Case, Form, add_norm, fits
from schedlang.kernels.device import wide
from schedlang.kernels.norms import Norm, probe_norm
from schedlang.kernels.probe import Mismatch
from schedlang.runtime.regions.flow import Given, Looked, flow, imagined, touched
from schedlang.runtime.regions.ops import name_of, shown, writes
from schedlang.runtime.replacing.judged import seen
from schedlang.runtime.replacing.left import leave
from schedlang.runtime.replacing.rebound import decorated

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Sums:
    """Norms of a module's children that stand right after a sum, by the child's name."""

    norms: Mapping[str, Norm]

    def cases(self) -> list[Case]:
        """Runs of the kernel in the forms that were found."""
        return [
            Case((7, min(norm.size, 4096)), dtype, _form(norm, torch.float32), bool(norm.bias))
            for norm in self.norms.values()
            for dtype in ("float32", "bfloat16")
        ]


def probe_sums(module: nn.Module) -> Sums | Mismatch:
    """The norms after sums in a module's forward, or what was found instead."""
    if "forward" in vars(module):
        return Mismatch("had its forward replaced already")
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
        graph = _flow(module, imagined(module))
    except Refusal as refusal:
        return Mismatch(": ".join((refusal.diagnostic.title, *refusal.diagnostic.notes)))
    found = {str(place.norm.target) for place in places(graph, module, norms)}
    if found:
        return Sums({name: norm for name, norm in norms.items() if name in found})
    return Mismatch(f"has no sum right before a norm: {_before(graph, module, norms)}")


def _before(graph: fx.Graph, module: nn.Module, norms: Mapping[str, Norm]) -> str:
    """What stands before each norm, in words."""
    said = []
    for node in graph.nodes:
        if node.op == "call_module" and node.target in norms:
            given = node.all_input_nodes
            what = shown(given[0], module) if given else "nothing that can be followed"
            said.append(f"before `{node.target}` stands {what}")
    return "; ".join(said) or "its forward calls no norm"


# -- the flow --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A sum and the norm of it, in a flow."""

    total: fx.Node
    norm: fx.Node


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    """The arguments of a call; whatever is no plain number, flag or text is part of the flow."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    named = dict(list(bound.arguments.items())[1:])
    plain = {n: v for n, v in named.items() if isinstance(v, _PLAIN) or _empty(v)}
    return Given({n: v for n, v in named.items() if n not in plain}, plain)


def _empty(value: Any) -> bool:
    return isinstance(value, tuple | dict) and not value


def _flow(module: nn.Module, given: Given) -> fx.Graph:
    whole = frozenset(name for name, _ in module.named_modules() if name)
    return flow(module, given, Looked(whole=whole, bare=True))


def places(graph: fx.Graph, module: nn.Module, norms: Mapping[str, Norm]) -> list[Place]:
    """Where a norm is called on a sum of two tensors, and nothing is written in between."""
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
    return name_of(node, module) == "add" and len(both) == 2 and all(
        isinstance(each, fx.Node) for each in both
    ) and not writes(node)  # fmt: skip


def _rewritten(
    graph: fx.Graph, found: list[Place], norms: Mapping[str, Norm], module: nn.Module
) -> Callable[..., Any]:
    """The flow with each place as one call, as a function of the module and its arguments."""
    taken: set[fx.Node] = set()
    for place in found:
        if place.total in taken:
            continue  # a second norm of the same sum
        taken.add(place.total)
        name = str(place.norm.target)
        with graph.inserting_before(place.total):
            owner = graph.get_attr(name)
            both = graph.call_function(Adding(norms[name], module), (owner, *place.total.args))
            parts = [graph.call_function(_part, (both, index)) for index in (0, 1)]
        for old, new in zip((place.norm, place.total), parts[::-1]):
            old.replace_all_uses_with(new)
            graph.erase_node(old)
    graph.lint()
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(code.src, space)
    made: Callable[..., Any] = space["forward"]
    return made


def _part(both: tuple[Tensor, Tensor], index: int) -> Tensor:
    return both[index]


# -- using it --------------------------------------------------------------------------------------


class Adding:
    """One call of the kernel in a module, with the parameters that a norm has then."""

    __name__ = "add_norm"

    def __init__(self, norm: Norm, module: nn.Module) -> None:
        self.norm, self.module = norm, module

    def __call__(self, owner: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, norm); apart where the two are not of one shape."""
        if not fits(a, b):
            leave(self.module, "add_norm", "it adds two tensors of one shape", a=a, b=b)
            total = a + b
            return total, owner(total)
        if a.shape[-1] > LONGEST:
            leave(self.module, "add_norm", f"its rows have at most {LONGEST} numbers", a=a)
        norm = self.norm
        weight = a.new_ones(a.shape[-1]) if norm.weight is None else getattr(owner, norm.weight)
        bias = getattr(owner, norm.bias) if norm.bias is not None else None
        return add_norm(a, b, weight, bias, _form(norm, wide(a, weight)))


def _form(norm: Norm, kind: torch.dtype) -> Form:
    eps = torch.finfo(kind).eps if norm.eps is None else norm.eps
    return Form(norm.kind == "layer_norm", eps, norm.offset, norm.rounding)


class Made(NamedTuple):
    """A rewritten forward, the names of its arguments, and why norms are left out of it."""

    run: Callable[..., Any]
    names: tuple[str, ...]
    left: tuple[str, ...]


class Summing:
    """The layer that runs a module's rewritten forward; one for each set of constants."""

    kernel = "add_norm"

    def __init__(self, module: nn.Module, found: Sums) -> None:
        self.module, self.found = module, found
        self.made: dict[Any, Made] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies look anew: what is done to their children may differ."""
        return self.__dict__ | {"made": {}}

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The rewritten forward in its class's decorators; `inner` is not called."""
        whole = decorated(type(self.module).forward, lambda _: self._run)
        return whole(self.module, *args, **kwargs)

    def _run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = _given(module, args, kwargs)
        key = given.key, tuple(m.training for m in self.module.modules())
        if key not in self.made:
            self.made[key] = self._make(given)
        made = self.made[key]
        for why in made.left:
            leave(module, "add_norm", why)
        return made.run(module, *(given.tensors[name] for name in made.names))

    def _make(self, given: Given) -> Made:
        graph = _flow(self.module, given)
        names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
        found = places(graph, self.module, self.found.norms)
        fused = {str(place.norm.target) for place in found}
        called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        apart = [name for name in self.found.norms if name in called - fused]
        left = tuple(_apart(name, self.module.get_submodule(name)) for name in apart)
        return Made(_rewritten(graph, found, self.found.norms, self.module), names, left)


def _apart(name: str, norm: nn.Module) -> str:
    """Why a norm that was found right after a sum is called apart from it."""
    if touched(norm):
        return f"`{name}` has hooks, a layout, a row or a unit of its own, and is called by itself"
    return f"in this call no sum stands right before `{name}`"
