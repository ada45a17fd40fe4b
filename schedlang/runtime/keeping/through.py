"""Tensors as the saved-tensor hooks around give them back: what runs again begins with those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.staging.arguments import take


def through(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as the innermost hooks give them back, detached; each asks for its gradient."""
    if not tensors:
        return []
    begin = torch.zeros((), device=tensors[0].device).requires_grad_()  # without it none is saved
    made: Any = _Keep.apply(begin, *tensors)  # type: ignore[no-untyped-call]
    kept = made.grad_fn.saved_tensors
    return [new.detach().requires_grad_(old.requires_grad) for old, new in zip(tensors, kept)]


class _Keep(torch.autograd.Function):
    """Saves its inputs, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return begin.clone()


def watch_again(model: nn.Module, modules: Iterable[str]) -> None:
    """Let some modules of a throwaway copy save what they are given, and nothing else.

    Wrap them before what they save is watched (`following/saved.py`): it is theirs.
    """
    for fqn in modules:
        module = model.get_submodule(fqn)
        module.forward = partial(_again, module.forward)


def _again(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensors: list[Tensor] = []
    take((args, kwargs), tensors)
    with torch._C.DisableTorchFunction():
        through(tensors)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return inner(*args, **kwargs)
