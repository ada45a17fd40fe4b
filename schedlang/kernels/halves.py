"""Tell which gradients the backward that runs now has to compute: halves come one by one."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def asked(ctx: Any, count: int) -> tuple[bool, ...]:
    """Return of each of the first `count` inputs, all of them tensors or None, whether the backward
    that runs now computes its gradient.

    Halves of a backward (`split_backward`) come one after the other: for what a module is given,
    then for its weights.  `ctx.needs_input_grad` says in both that both are needed.
    """
    found: tuple[bool, ...] = ctx.needs_input_grad[:count]
    if torch.compiler.is_compiling():
        return found
    nodes = [node for node, _ in ctx.next_functions[:count]]  # of the tensors among the inputs
    return tuple(
        need and (node is None or _runs(node)) for need, node in itertools.zip_longest(found, nodes)
    )


def _runs(node: Any) -> bool:
    """Tell whether the backward that runs now reaches a node, or returns what comes to it."""
    try:
        reached: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that `torch.autograd.grad` was asked for
        return True
    return reached
