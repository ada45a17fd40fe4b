"""Tells whether an optimizer treats each element by itself, by trying it on parts and on the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def is_elementwise(optimizer: Callable[[Any], torch.optim.Optimizer]) -> bool:
    """Does a small matrix, updated as a whole, move as its quarters do when updated alone?

    Two steps with unequal gradients, in float64, equal to the last bit.  The function is called with
    made-up names (`probe.0.weight`).
    """
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    grads = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    together = _moved(optimizer, [whole], [[g] for g in grads])[0]
    pieces = [piece for half in whole.chunk(2) for piece in half.chunk(2, 1)]
    cut = [[piece for half in g.chunk(2) for piece in half.chunk(2, 1)] for g in grads]
    alone = _moved(optimizer, pieces, cut)
    joined = torch.cat([torch.cat(alone[:2], 1), torch.cat(alone[2:], 1)])
    return torch.equal(together, joined)


def _moved(
    optimizer: Callable[[Any], torch.optim.Optimizer],
    values: Iterable[torch.Tensor],
    steps: Iterable[list[torch.Tensor]],
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    made = optimizer([(f"probe.{k}.weight", p) for k, p in enumerate(parameters)])
    for grads in steps:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad.clone()
        made.step()
    return [parameter.detach() for parameter in parameters]
