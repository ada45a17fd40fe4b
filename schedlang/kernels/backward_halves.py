"""Find which gradients the running backward must compute, when a backward runs in two halves."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def needed_gradients(ctx: Any, count: int) -> tuple[bool, ...]:
    """Return for each of the first `count` inputs whether the running backward computes its
    gradient.

    All of these inputs are tensors or None. The halves of a backward (`split_backward`) run one
    after the other: first for the inputs of a module, then for its weights. `ctx.needs_input_grad`
    is true for both in both halves.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad[:count]
    if torch.compiler.is_compiling():
        return needed
    nodes = [node for node, _ in ctx.next_functions[:count]]  # of the tensors among the inputs
    return tuple(
        is_needed and (node is None or _is_reached(node))
        for is_needed, node in itertools.zip_longest(needed, nodes)
    )


def _is_reached(node: Any) -> bool:
    """Return whether the running backward executes a node, or returns its gradient."""
    try:
        reached: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf for which `torch.autograd.grad` was called
        return True
    return reached
