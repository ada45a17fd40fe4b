"""Which function of torch a node of a data flow computes, whatever it was written as."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from schedlang.patterns import FUNCTIONS

# torch's own order of arguments, where it is not that of a pattern
ORDER: Mapping[str, tuple[str, ...]] = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "dropout": ("input", "p", "training", "inplace"),
    "mean": ("input", "dim", "keepdim"),
    "sum": ("input", "dim", "keepdim"),
    "to": ("input", "dtype"),
    "elu": ("input", "alpha", "inplace"),
    "leaky_relu": ("input", "negative_slope", "inplace"),
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"approximate": "none"},
    "layer_norm": {"eps": 1e-5},
    "dropout": {"p": 0.5},
    "elu": {"alpha": 1.0},
    "leaky_relu": {"negative_slope": 0.01},
    "mean": {"keepdim": False},
    "sum": {"keepdim": False},
}
METHODS: Mapping[str, str] = {
    **{name: name for name in FUNCTIONS if hasattr(torch.Tensor, name)},
    "float": "to", "type_as": "to", "half": "to", "bfloat16": "to", "double": "to",
    "__add__": "add", "__mul__": "mul", "__matmul__": "matmul", "divide": "div",
    "multiply": "mul", "subtract": "sub", "true_divide": "div", "mm": "matmul", "bmm": "matmul",
}  # fmt: skip
VIEWS = frozenset(
    ("view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten", "t",
     "unflatten", "chunk", "split", "unbind", "narrow", "select", "size", "dim", "getitem",
     "getattr", "view_as", "expand_as", "detach", "movedim", "swapaxes", "contiguous", "dropout")
)  # fmt: skip


def _functions() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for name in FUNCTIONS:
        for place in (torch, F, torch.special, torch._C._nn):
            made = getattr(place, name, None)
            if callable(made):
                found[made] = name
    for name in ("add", "sub", "mul", "matmul", "neg", "abs", "pow"):
        found[getattr(operator, name)] = name
    found[operator.truediv] = "div"
    found[torch.bmm] = found[torch.mm] = "matmul"
    return found


CALLS = _functions()


def operation(node: fx.Node, root: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """The name of what a node computes and its arguments by name; None for what has no name."""
    name = name_of(node, root)
    if name is None or node.kwargs.get("inplace"):
        return None
    order = ORDER.get(name, FUNCTIONS[name])
    if len(node.args) > len(order):
        order = (*order, *(f"more {place}" for place in range(len(node.args))))
    given = {**dict(zip(order, node.args)), **node.kwargs}
    if given.get("inplace") or "input" not in given:
        return None
    if node.op == "call_module":
        given["p"] = _module(node, root).p
    return name, {**DEFAULTS.get(name, {}), **given}


def name_of(node: fx.Node, root: nn.Module) -> str | None:
    """The name of a node's function, if a pattern may speak of it."""
    if node.op == "call_function":
        return CALLS.get(node.target)
    if node.op == "call_method":
        return METHODS.get(str(node.target))
    if node.op == "call_module" and is_dropout(_module(node, root)):
        return "dropout"
    return None


def is_dropout(module: nn.Module) -> bool:
    """Does a module drop single elements, and nothing else?"""
    return type(module) is nn.Dropout


def _module(node: fx.Node, root: nn.Module) -> Any:
    return root.get_submodule(str(node.target))


def shown(node: fx.Node, root: nn.Module) -> str:
    """What a node computes, in words for a message."""
    if node.op == "call_module":
        return f"{type(_module(node, root)).__name__} (`{node.target}`)"
    if node.op == "get_attr":
        return f"the parameter `{node.target}`"
    if node.op == "placeholder":
        return f"the argument `{node.target}`"
    target: Any = node.target
    said = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return f"`{said}`"


def writes(node: fx.Node) -> bool:
    """Does a node change a tensor in place?"""
    target: Callable[..., Any] | str = node.target
    said = target if isinstance(target, str) else getattr(target, "__name__", "")
    if node.op not in ("call_function", "call_method"):
        return False
    changed = said in ("setitem", "__setitem__") or said in _IN_PLACE
    return changed or (said.endswith("_") and not said.endswith("__")) or bool(
        node.kwargs.get("inplace"))  # fmt: skip


_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ipow", "__iadd__", "__imul__", "__isub__")


def kernels(graph: fx.Graph, root: nn.Module) -> int:
    """How many kernels a data flow is at least, run as it stands; a module left whole is many."""
    count = 0
    for node in graph.nodes:
        if node.op == "call_module":
            count += 0 if is_dropout(_module(node, root)) else 2
        elif node.op in ("call_function", "call_method"):
            target: Any = node.target
            said = target if isinstance(target, str) else getattr(target, "__name__", "")
            count += said not in VIEWS
    return count
