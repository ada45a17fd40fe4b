"""Which parameters a loss depends on, by the graph that autograd has made of a forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def reached(model: nn.Module, loss: Tensor | None) -> frozenset[str]:
    """First names of the parameters that a backward from this loss would give a gradient.

    What stands inside of reentrant checkpoints is not seen.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: set[str] = set()
    todo: list[Any] = [loss.grad_fn] if loss is not None else []
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        found |= {name} if name is not None else set()
        todo += [following for following, _ in node.next_functions]
    return frozenset(found)
