"""A residual sum and the norm after it, where a module's data flow shows them: found by a trace.

The module's own forward is followed, its children left whole.  What a norm is told by is what it
computes (kernels/norms.py); a norm to which something else is done (a hook, a layout, a kernel of
its own) is none of those that are found.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from schedlang.diagnostic import Refusal
from schedlang.kernels.add_norm import Case, Form
from schedlang.kernels.norms import Norm, probe_norm
from schedlang.kernels.probe import Mismatch
from schedlang.runtime.regions.flow import Given, Looked, flow, imagined, touched
from schedlang.runtime.regions.ops import name_of, shown, writes
from schedlang.runtime.replacing.judged import seen


@dataclass(frozen=True)
class Sums:
    """Norms of a module's children that stand right after a sum, by the child's name."""

    norms: Mapping[str, Norm]

    def cases(self) -> list[Case]:
        """Runs of the kernel in the forms that were found."""
        return [
            Case((7, min(norm.size, 4096)), dtype, form_of(norm, torch.float32), bool(norm.bias))
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


def form_of(norm: Norm, kind: torch.dtype) -> Form:
    """The norm as the kernel knows it, where it computes in this type."""
    eps = torch.finfo(kind).eps if norm.eps is None else norm.eps
    return Form(norm.kind == "layer_norm", eps, norm.offset, norm.rounding)


def _before(graph: fx.Graph, module: nn.Module, norms: Mapping[str, Norm]) -> str:
    """What stands before each norm, in words."""
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
