"""Refuse terms of a user's loss that are made of a rank's parts.

Parts are shards of parameters, their gradients, and outputs of sharded modules. Such a term has the
value, and perhaps the gradient, of this rank's part only. What modules of a
program compute in their forward is seen where the model is traced; all else of a loss is outside.

* `note_forwards` records which nodes of autograd the modules of a program make.
* `check_terms` looks at a loss before its backward, `run_gradients` before `torch.autograd.grad`.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.ir.placement import R
from schedlang.runtime.adapters.torch_tensor import (
    has_tangent,
    in_backward_pass,
    in_transform,
    sequence_number,
)
from schedlang.runtime.forward import layer_of

_SHARD = "_schedlang_part"  # of parameters that are shards of a tensor: the name
_PART = "_schedlang_norm_part"  # of parameters: the name, if other ranks hold other elements
_PARTS = "_schedlang_parts"  # of nodes: output number -> what an output is a rank's part of
# nodes of autograd with which terms of a loss begin; one that begins a layer is none of these
_TERMS = (
    *("Abs", "Add", "Cat", "Div", "Exp", "LinalgVectorNorm", "Log", "Max", "Mean", "Min", "Mul"),
    *("Neg", "Norm", "Pow", "Prod", "Sqrt", "Stack", "Std", "Sub", "Sum", "Var", "View"),
)
# how a term combines what it reads, from the root: by sums of anything, elementwise beneath a sum,
# or otherwise. The gradient of a sum over ranks is, on each rank, that of its own summand.
_ADDS, _SUMS, _ELEMENTWISE, _OTHERWISE = range(4)
_ADDITIVE = (
    *("Add", "Cat", "Neg", "Reshape", "Select", "Squeeze", "Stack", "Sub", "ToCopy", "Unbind"),
    *("Unsqueeze", "View"),
)
_SCALING = ("MulBackward", "DivBackward")
_BY_ELEMENTS = (
    *("Abs", "Add", "Clamp", "Div", "Exp", "Log", "Mul", "Neg", "Pow", "Relu", "Sigmoid", "Sqrt"),
    *("Sub", "Tanh", "ToCopy"),
)
_FORWARDS = 1000  # the forwards that are known; older nodes are taken for parts of one


class _Forwards(threading.local):
    """Numbers of the nodes that the last forwards of programs have made in a thread: first, end.

    torch numbers the nodes of each thread apart. `depth` counts the calls that run.
    """

    def __init__(self) -> None:
        self.ranges: deque[tuple[float, float]] = deque(maxlen=_FORWARDS)
        self.depth = 0

    def begin(self) -> None:
        """Begin a call, of which only the outermost is recorded."""
        if self.depth == 0:
            self.ranges.append((sequence_number(), math.inf))
        self.depth += 1

    def end(self) -> None:
        """End a call."""
        self.depth -= 1
        if self.depth == 0:
            self.ranges[-1] = self.ranges[-1][0], sequence_number()


_forwards = _Forwards()
_shards: WeakSet[nn.Parameter] = WeakSet()


def mark_shard(parameter: nn.Parameter, name: str) -> None:
    """Mark a parameter as a shard of the tensor `name`, of a program that records its forwards."""
    mark_part(parameter, name)
    setattr(parameter, _SHARD, name)


def mark_part(parameter: nn.Parameter, name: str) -> None:
    """Mark a parameter, of any program, as part of what a norm of all gradients would need."""
    if _PART not in vars(parameter):  # a WeakSet compares what is added again
        setattr(parameter, _PART, name)
        _shards.add(parameter)


def shard_name(value: Any) -> str | None:
    """Return the name of the tensor of which a parameter is a shard; None for all else."""
    name: str | None = vars(value).get(_SHARD) if isinstance(value, Tensor) else None
    return name


def shards() -> list[nn.Parameter]:
    """Return the parameters of all programs of this rank that are marked as parts."""
    return [*_shards]


def has_shard_name(value: Tensor) -> bool:
    """Return whether a parameter is a shard; compiled code can ask so."""
    return hasattr(value, _SHARD)


def name_of_gradient(tensors: Iterable[Tensor]) -> str | None:
    """Return the name of the first shard whose gradient is one of some tensors; None if none is."""
    names = {id(parameter.grad): vars(parameter)[_PART] for parameter in _shards}
    names.pop(id(None), None)
    return next((names[id(tensor)] for tensor in tensors if id(tensor) in names), None)


def note_forwards(module: nn.Module) -> None:
    """Record from now on which nodes the forwards of a program's modules make.

    A loop may call a part of the module, which holds shards.
    """

    for name, part in module.named_modules():
        if part is module or any(shard_name(parameter) for parameter in part.parameters()):
            layer = layer_of(part, "sharded")
            splits = layer is not None and any(edge.output_after != R for edge in layer.edges)
            part.register_forward_pre_hook(_begin_call, prepend=True, with_kwargs=True)
            part.register_forward_hook(partial(_end_call, name if splits else ""), always_call=True)


def _begin_call(unused: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        if _forwards.depth == 0:
            _check_transforms((*args, *kwargs.values()))
        _forwards.begin()


def _end_call(split_name: str, unused: nn.Module, _: object, output: Any) -> None:
    """End a call; mark the output of a module that leaves it split over ranks."""
    if torch.compiler.is_compiling() or not _forwards.depth:
        return
    _forwards.end()
    if split_name and isinstance(output, Tensor) and output.grad_fn is not None:
        _mark(output, f"this rank's part of the output of `{split_name}` for all of it")


def _check_transforms(inputs: Iterable[Any]) -> None:
    """Raise Refusal S617 in a transform of torch.func and for forward-mode gradients.

    The collectives of a sharded module have neither.
    """
    transform = "a transform of `torch.func`" if in_transform() else ""
    transform = transform or ("a forward-mode gradient" if any(map(has_tangent, inputs)) else "")
    if transform:
        raise Refusal.of(
            "S617",
            f"{transform} cannot go through the collectives of sharded modules",
            helps=(
                "`torch.autograd.grad`, with `create_graph=True` for a second derivative",
                "or put it around the original, on one rank",
            ),
        ).at(python_span())


def check_terms(roots: Iterable[Any]) -> None:
    """Raise Refusal S622 at a backward from a term that a loop made of shards of parameters."""
    if not _forwards.ranges or in_backward_pass():
        return
    ranges = _Ranges()
    nodes = _nodes_of(roots)
    _check_outside(nodes, ranges, values=True)
    pending: list[Any] = list(nodes)
    visited = {None, *pending}
    while pending:
        node = pending.pop()
        for parent, _ in () if node is None else node.next_functions:
            name = _parameter_name(parent)
            if name and node.name().startswith(_TERMS) and ranges.is_outside(node):
                raise _term_refusal(f"this rank's shard of `{name}` for the parameter", node)
            if parent not in visited:
                visited.add(parent)
                pending.append(parent)


def run_gradients(
    run: Callable[[], Any],
    roots: Sequence[Any],
    inputs: Sequence[Any],
    creates_graph: bool,
    accumulates: bool,
) -> Any:
    """Run a backward; note its nodes if it creates a graph, and which are gradients of shards.

    `torch.autograd.grad` (`accumulates` is false) returns no value: terms that add up are right.
    """
    if not (accumulates or not _forwards.ranges or in_backward_pass()):
        _check_outside(_nodes_of(roots), _Ranges(), values=False)
    if not creates_graph:
        return run()
    _forwards.begin()
    try:
        gradients = run()
    finally:
        _forwards.end()
    if accumulates:
        _mark_gradients((parameter, parameter.grad) for parameter in _shards)
    else:
        _mark_gradients(zip(inputs, gradients))
    return gradients


def _mark_gradients(pairs: Iterable[tuple[Any, Tensor | None]]) -> None:
    for value, gradient in pairs:
        if gradient is not None and gradient.grad_fn is not None:
            name = shard_name(value)
            _mark(
                gradient, f"the gradient of this rank's shard of `{name}` for all" if name else ""
            )


def _mark(tensor: Tensor, part: str) -> None:
    """Mark a tensor, and so its node, as a rank's part of something; "": it is whole."""
    parts = tensor.grad_fn.metadata.setdefault(_PARTS, {})  # type: ignore[union-attr]
    parts[tensor.output_nr] = part


class _Ranges:
    """The numbers of the nodes that the modules of programs have made, as they are now."""

    def __init__(self) -> None:
        self.firsts, self.ends = zip(*_forwards.ranges)

    def is_outside(self, node: Any) -> bool:
        """Return whether a node was made after the first known forward, and in none."""
        number = node._sequence_nr()
        index = bisect_right(self.firsts, number) - 1
        return index >= 0 and not number < self.ends[index]


def _check_outside(nodes: Iterable[Any], ranges: _Ranges, values: bool) -> None:
    """Raise Refusal S622 if nodes outside of all forwards read a rank's part.

    values  whether the value of the term counts; else a sum over the elements of parts is right
    """
    pending = [(node, _OTHERWISE if values else _ADDS) for node in nodes]
    visited = set(pending)
    while pending:
        node, way = pending.pop()
        if node is None or not ranges.is_outside(node) or _PARTS in node.metadata:
            continue
        kind = node.name()
        if kind.startswith("CompiledFunction"):
            continue
        parents = [(parent, number) for parent, number in node.next_functions if parent is not None]
        way = _way_beneath(way, kind, len(parents))
        for parent, number in parents:
            part = _part_of(parent, number)
            if part and way == _OTHERWISE:
                raise _term_refusal(part, node)
            if (parent, way) not in visited:
                visited.add((parent, way))
                pending.append((parent, way))


def _way_beneath(way: int, kind: str, operands: int) -> int:
    """Return how a term combines the operands of a node that it combines in a way."""
    if way in (_ADDS, _SUMS):
        if kind.startswith("Sum"):
            return _SUMS
        if kind.startswith(_ADDITIVE) or kind.startswith(_SCALING) and operands == 1:
            return way
        if kind.startswith("Dot"):
            return _ELEMENTWISE
    by_elements = way in (_SUMS, _ELEMENTWISE) and kind.startswith(_BY_ELEMENTS)
    return _ELEMENTWISE if by_elements else _OTHERWISE


def _part_of(node: Any, number: int) -> str:
    """Return the rank's part that an output of a node is; "" for all else."""
    if name := _parameter_name(node):
        return f"this rank's shard of `{name}` for the parameter"
    return str(node.metadata.get(_PARTS, {}).get(number, ""))


def _nodes_of(roots: Iterable[Any]) -> list[Any]:
    return [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]


def _parameter_name(node: Any) -> str | None:
    """Return the name of the shard whose gradient a node accumulates; None for other nodes."""
    return shard_name(node.variable) if hasattr(node, "variable") else None


def _term_refusal(reading: str, node: Any) -> Refusal:
    return Refusal.of(
        "S622",
        f"a term of your own takes {reading}",
        notes=(f"`{node.name()}` reads it, outside of the forward of the program",),
        helps=(
            "`weight_decay=` of the optimizer, for a sum of squares",
            "or compute the term in the model's forward, and build a program of it",
        ),
    ).at(python_span())
