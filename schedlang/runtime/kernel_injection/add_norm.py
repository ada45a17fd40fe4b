"""Fuse a residual addition and the norm after it (`replace_kernel(add_norm)`): probe and layer."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.norm import MAX_ROW_WITH_EXTRAS, Case, add_norm, can_add
from schedlang.kernels.norm_probes import NormForm, probe_norm
from schedlang.kernels.probe import Mismatch, module_key
from schedlang.runtime.declined_calls import note_declined
from schedlang.runtime.forward import change_innermost
from schedlang.runtime.fusion.call_arguments import arguments_of
from schedlang.runtime.fusion.dataflow import (
    FlowArguments,
    TraceDepth,
    describe_node,
    function_name,
    has_changed_call,
    invented_arguments,
    structure_of,
    trace_flow,
    value_with_structure,
    writes_in_place,
)

# -- the probe -------------------------------------------------------------------------------------
# Find additions with a norm: the module's own forward is traced, its children stay calls. A norm is
# recognised by what it computes (kernels/norm_probes.py); a norm with a hook, a layout or a kernel
# of its own is excluded.


@dataclass(frozen=True)
class AddNorms:
    """Norms among a module's children that directly follow an addition, by the child's name."""

    norms: Mapping[str, NormForm]

    def cases(self) -> list[Case]:
        """Return test cases of the kernel for these norms."""
        return [
            Case((7, min(norm.size, 4096)), dtype, norm.form, bool(norm.bias), add=True)
            for norm in self.norms.values()
            for dtype in ("float32", "bfloat16")
        ]


def probe_add_norms(module: nn.Module) -> AddNorms | Mismatch:
    """Return the norms after additions in a module's forward, or why there are none."""
    if "forward" in vars(module):
        return Mismatch("has a replaced forward already")
    norms: dict[str, NormForm] = {}
    reasons: dict[str, str] = {}
    probed: dict[Hashable, NormForm | Mismatch] = {}
    for name, child in module.named_children():
        fingerprint = module_key(child)
        probe_result = probed[fingerprint] = probed.get(fingerprint) or probe_norm(child)
        if isinstance(probe_result, NormForm):
            norms[name] = probe_result
        elif "norm" in type(child).__name__.lower():
            reasons[name] = probe_result.reason
    if not norms:
        reason_text = "; ".join(f"`{name}` {reason}" for name, reason in reasons.items())
        return Mismatch(f"has no child that is a norm{reason_text and ': '}{reason_text}")
    try:
        graph = flow_of(module, invented_arguments(module))
    except Refusal as refusal:
        return Mismatch(": ".join((refusal.diagnostic.title, *refusal.diagnostic.notes)))
    fused_names = {str(place.norm.target) for place in find_places(graph, module, norms)}
    if fused_names:
        return AddNorms({name: norm for name, norm in norms.items() if name in fused_names})
    return Mismatch(
        f"has no addition right before a norm: {_describe_before_norms(graph, module, norms)}"
    )


def _describe_before_norms(
    graph: fx.Graph, module: nn.Module, norms: Mapping[str, NormForm]
) -> str:
    """Describe the node before each norm."""
    descriptions = []
    for node in graph.nodes:
        if node.op == "call_module" and node.target in norms:
            inputs = node.all_input_nodes
            source = describe_node(inputs[0], module) if inputs else "nothing that can be traced"
            descriptions.append(f"before `{node.target}` is {source}")
    return "; ".join(descriptions) or "its forward calls no norm"


# -- the data flow ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddNormPlace:
    """An addition and the norm of its result, in a data flow."""

    total: fx.Node
    norm: fx.Node


def flow_of(module: nn.Module, arguments: FlowArguments) -> fx.Graph:
    """Return the data flow of one call, without the forward's decorators, with children as
    calls."""
    child_names = frozenset(name for name, _ in module.named_modules() if name)
    return trace_flow(module, arguments, TraceDepth(calls=child_names, undecorated=True))


def find_places(
    graph: fx.Graph, module: nn.Module, norms: Mapping[str, NormForm]
) -> list[AddNormPlace]:
    """Find norms that are called on the sum of two tensors, with no in-place write in between."""
    places, order = [], list(graph.nodes)
    for norm in order:
        if norm.op != "call_module" or norm.target not in norms or norm.kwargs:
            continue
        total = norm.args[0] if len(norm.args) == 1 else None
        if not isinstance(total, fx.Node) or not _is_sum(total, module):
            continue
        between = order[order.index(total) + 1 : order.index(norm)]
        if has_changed_call(module.get_submodule(str(norm.target))) or any(
            map(writes_in_place, between)
        ):
            continue
        places.append(AddNormPlace(total, norm))
    return places


def _is_sum(node: fx.Node, module: nn.Module) -> bool:
    operands = node.args if len(node.args) == 2 and not node.kwargs else ()
    return (
        function_name(node, module) == "add"
        and len(operands) == 2
        and all(isinstance(operand, fx.Node) for operand in operands)
        and not writes_in_place(node)
    )


# -- the layer -------------------------------------------------------------------------------------
# The module's forward is rewritten once for each set of constants that it is called with: where the
# result of an addition goes into a child that is a norm, one kernel computes both. The rest runs
# unchanged. torch.compile traces all of this except the rewriting, which happens during tracing. It
# shares one graph between equal modules if they run the same functions: so equal source is one
# function, what differs by module is an argument, and the first trace rewrites the forwards of all
# modules of a class. A module rewritten later would be compiled anew.


# for each argument of the flow, the structure that a trace may ask for
ArgumentStructures = tuple[tuple[str, Any], ...]
Constants = tuple[tuple[str, Any], ...]

_CONSTANT_TYPES = (bool, int, float, str, type(None))
_layers_by_class: dict[type, weakref.WeakSet[FusedAddNorm]] = {}  # by the class of their modules
_functions: dict[tuple[Any, ...], Callable[..., Any]] = {}


class RewrittenForward(NamedTuple):
    """A rewritten forward, the names of its arguments, and why norms are excluded from it."""

    run: Callable[..., Any]
    names: tuple[str, ...]
    unfused: tuple[str, ...]


class FusedAddNorm:
    """The layer that runs a module's rewritten forward."""

    kernel = "add_norm"

    def __init__(self, module: nn.Module, add_norms: AddNorms) -> None:
        self.__setstate__({"module": module, "found": add_norms})

    def __getstate__(self) -> dict[str, Any]:
        """Drop the rewritten forwards: in a copy, children may have other hooks or rows."""
        return {"module": self.module, "found": self.found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self.found = state["module"], state["found"]
        # replaced, never modified: a graph of torch.compile may guard on it
        self.made: Mapping[Any, RewrittenForward] = {}
        forward = type(self.module).forward
        self.named = arguments_of(forward)
        self.forward = change_innermost(forward, lambda _: self._run)
        _layers_by_class.setdefault(type(self.module), weakref.WeakSet()).add(self)

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten forward in its class's decorators; `inner` is not called."""
        return self.forward(self.module, *args, **kwargs)

    def _run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = self.named(module, *args, **kwargs)
        constants = tuple((n, _fix_constant(v)) for n, v in arguments.items() if _is_constant(v))
        inside = tuple((n, structure_of(v)) for n, v in arguments.items() if not _is_constant(v))
        key = inside, tuple((n, repr(v)) for n, v in constants), self.training_flags()
        if torch.compiler.is_compiling():
            _rewrite_all(type(module), inside, constants)
        elif key not in self.made:
            self.rewrite(inside, constants)
        rewritten = self.made[key]
        for reason in rewritten.unfused:
            note_declined(module, "add_norm", reason)
        return rewritten.run(module, self, *(arguments[name] for name in rewritten.names))

    def training_flags(self) -> tuple[bool, ...]:
        """Return the training flags of the module and all inside, and whether gradients are on."""
        return *(m.training for m in self.module.modules()), torch.is_grad_enabled()

    def rewrite(self, inside: ArgumentStructures, constants: Constants) -> None:
        """Rewrite the forward for such calls, if not done yet; raises Refusal S883 if
        impossible."""
        key = inside, tuple((n, repr(v)) for n, v in constants), self.training_flags()
        if key not in self.made:
            rewritten = self._made(
                FlowArguments({n: value_with_structure(v) for n, v in inside}, dict(constants))
            )
            self.made = {**self.made, key: rewritten}

    def _made(self, arguments: FlowArguments) -> RewrittenForward:
        graph = flow_of(self.module, arguments)
        names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
        places = find_places(graph, self.module, self.found.norms)
        fused = {str(place.norm.target) for place in places}
        called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        unfused = [name for name in self.found.norms if name in called - fused]
        reasons = tuple(_why_unfused(name, self.module.get_submodule(name)) for name in unfused)
        return RewrittenForward(_fuse_places(graph, places), names, reasons)

    def add_and_norm(
        self, owner: nn.Module, name: str, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (a + b, the norm of it by the child `name`); unfused if the shapes differ."""
        if not can_add(a, b):
            note_declined(
                self.module, "add_norm", "it adds two tensors of the same shape", a=a, b=b
            )
            total = a + b
            return total, owner(total)
        if a.shape[-1] > MAX_ROW_WITH_EXTRAS:
            reason = f"its rows have at most {MAX_ROW_WITH_EXTRAS} elements"
            note_declined(self.module, "add_norm", reason, a=a)
        norm = self.found.norms[name]
        weight, bias = norm.vectors(owner, a)
        return add_norm(a, b, weight, bias, norm.form)


def _rewrite_all(kind: type, inside: ArgumentStructures, constants: Constants) -> bool:
    """Rewrite the forwards of all modules of a class, while torch.compile traces one of them.

    Returns whether there are any; raises Refusal S883 if none of them can be rewritten.
    """
    refusals = []
    layers = list(_layers_by_class.get(kind, ()))
    for layer in layers:
        try:
            layer.rewrite(inside, constants)
        except Refusal as refusal:
            refusals.append(refusal)
    if refusals and len(refusals) == len(layers):
        raise refusals[0]
    return bool(layers)


# as torch.compiler.assume_constant_result does, which would import all of the compiler
_rewrite_all._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- arguments -------------------------------------------------------------------------------------


def _is_constant(value: Any) -> bool:
    """Return whether a value is a number, flag or text, or empty; others are part of the flow."""
    return isinstance(value, _CONSTANT_TYPES) or (
        isinstance(value, (tuple, dict)) and len(value) == 0
    )


def _fix_constant(value: Any) -> Any:
    """Fix a number that torch.compile treats as a dynamic size."""
    return operator.index(value) if type(value) is int else value


# -- the rewritten forward -------------------------------------------------------------------------


def _fuse_places(graph: fx.Graph, places: list[AddNormPlace]) -> Callable[..., Any]:
    """Replace each place in the flow by one call; return a function of module, layer and
    arguments."""
    with graph.inserting_before(next(iter(graph.nodes))):
        layer = graph.placeholder("layer")
    fused: set[fx.Node] = set()
    for place in places:
        if place.total in fused:
            continue  # a second norm of the same sum
        fused.add(place.total)
        name = str(place.norm.target)
        with graph.inserting_before(place.total):
            owner = graph.get_attr(name)
            pair = graph.call_function(_call_both, (layer, owner, name, *place.total.args))
            parts = [graph.call_function(_item, (pair, index)) for index in (0, 1)]
        for node, replacement in zip((place.norm, place.total), parts[::-1]):
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
    graph.lint()
    return _function(graph)


def _call_both(
    layer: FusedAddNorm, owner: nn.Module, name: str, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    return layer.add_and_norm(owner, name, a, b)


def _item(pair: tuple[Tensor, Tensor], index: int) -> Tensor:
    return pair[index]


def _function(graph: fx.Graph) -> Callable[..., Any]:
    """Return a graph as a function; equal graphs with the same globals share one function."""
    code = graph.python_code("self")
    key = code.src, *sorted((name, id(value)) for name, value in code.globals.items())
    if key not in _functions:
        space = dict(code.globals)
        exec(code.src, space)
        _functions[key] = space["forward"]  # this keeps the globals alive
    return _functions[key]


def _why_unfused(name: str, norm: nn.Module) -> str:
    """Return why a norm that the probe found after an addition is called by itself."""
    if has_changed_call(norm):
        return f"`{name}` has hooks, a placement or its own row, and is called separately"
    return f"in this call there is no addition right before `{name}`"
