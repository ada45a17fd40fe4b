"""Does an optimizer treat each element, or each tensor, by itself?  Tried on small ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from schedlang.diagnostic import Diagnostic, Refusal


def is_elementwise(optimizer: Callable[[Any], torch.optim.Optimizer]) -> bool:
    """Does a small matrix, updated as a whole, move as its quarters do when updated alone?

    Two steps with unequal gradients, in float64, equal to the last bit.  The function is called
    with made-up names (`probe.weight`).
    """
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    grads = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    together = _moved(optimizer, whole, grads)
    pieces = [piece for half in whole.chunk(2) for piece in half.chunk(2, 1)]
    cut = [[piece for half in g.chunk(2) for piece in half.chunk(2, 1)] for g in grads]
    alone = [_moved(optimizer, piece, list(own)) for piece, own in zip(pieces, zip(*cut))]
    joined = torch.cat([torch.cat(alone[:2], 1), torch.cat(alone[2:], 1)])
    return torch.equal(together, joined)


def is_tensorwise(optimizer: Callable[[Any], torch.optim.Optimizer]) -> bool:
    """Do two small matrices move in one step as they do in two calls, one for each?

    Two steps in float64, equal to the last bit.  An optimizer that looks at all tensors together,
    or counts its calls, is not.
    """
    generator = torch.Generator().manual_seed(7)
    draws = torch.randn(3, 2, 4, 6, generator=generator, dtype=torch.float64)
    moved = []
    for apart in (False, True):
        held = [nn.Parameter(value.clone()) for value in draws[0]]
        made = optimizer([(f"probe.{k}.weight", p) for k, p in enumerate(held)])
        for grads in draws[1:]:
            for turn in (0, 1) if apart else (None,):
                for place, parameter in enumerate(held):
                    here = turn in (None, place)
                    parameter.grad = grads[place].clone() if here else None
                made.step()
        moved.append(torch.stack([p.detach() for p in held]))
    return torch.equal(*moved)


def _moved(
    optimizer: Callable[[Any], torch.optim.Optimizer],
    value: torch.Tensor,
    grads: Sequence[torch.Tensor],
) -> torch.Tensor:
    parameter = nn.Parameter(value.clone())
    made = optimizer([("probe.weight", parameter)])
    check_closure(made)
    for grad in grads:
        parameter.grad = grad.clone()
        made.step()
    return parameter.detach()


def check_closure(made: torch.optim.Optimizer) -> None:
    """Raises Refusal S622 for an optimizer that would compute the loss again in it."""
    given = inspect.signature(made.step).parameters.get("closure")
    if given is not None and given.default is inspect.Parameter.empty:
        raise Refusal(
            Diagnostic(
                "S622", f"`{type(made).__name__}` computes the loss again within its step",
                notes=("its `step(closure)` runs forward and backward again, which a program cannot"
                       " do",),
                helps=("use an optimizer that needs no closure (SGD, AdamW, Muon)",),
            )
        )  # fmt: skip
