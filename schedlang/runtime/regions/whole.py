"""A module's whole data flow as one match, where all of it may be row-wise."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from schedlang.runtime.regions.match import Match
from schedlang.runtime.regions.ops import is_dropout, shown, writes
from schedlang.runtime.rowwise.layer import refusal

# functions that no row can be computed with by itself, by torch's names; what is not known here is
# told when the kernel is made
ACROSS = frozenset((
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d",
    "embedding", "scaled_dot_product_attention", "cat", "stack", "cumsum", "cumprod", "sort",
    "topk", "argmax", "argsort", "gather", "scatter", "index_select", "roll", "flip", "outer",
    "bilinear", "tensordot", "__matmul__", "batch_norm", "group_norm", "instance_norm",
))  # fmt: skip


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
    """Why a call cannot be part of a kernel; "" if it may be."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return "" if is_dropout(module) else f"{shown(node, root)} is not a row-wise operator"
    if writes(node):
        return f"{shown(node, root)} writes in place"
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return f"{shown(node, root)} is not a row-wise operator" if name in ACROSS else ""
