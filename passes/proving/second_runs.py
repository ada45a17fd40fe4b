"""The original whose modules run again in backward from inputs that are kept in fewer bits.

Written apart from what programs run (torch's `checkpoint`): here the second run comes first, and
backward is handed what it saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from schedlang.passes.laying.kept_parts import recomputed
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor, nn


def with_second_runs(plan: Plan, module: nn.Module) -> None:
    """Let those modules of a copy of the original run again that are kept in fewer bits."""
    for fqn in recomputed(plan):
        part: Any = module.get_submodule(fqn)
        part.forward = partial(_forward, part.forward)


def _forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output for the arguments as they are; its backward is that of a run from those kept."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from schedlang.runtime.keeping.through import through
    from schedlang.runtime.staging.arguments import put, take

    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    tensors: list[Tensor] = []
    template, kept = take((args, kwargs), tensors), through(tensors)
    again: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        again.append(tensor.detach())
        return tensor

    with _apart(), saved_tensors_hooks(note, lambda tensor: tensor):
        some, named = put(template, kept)
        inner(*some, **named)
    places = iter(range(len(again)))
    with saved_tensors_hooks(lambda tensor: next(places), lambda place: again[place]):
        return inner(*args, **kwargs)


@contextmanager
def _apart() -> Iterator[None]:
    """What is drawn and counted inside is drawn and counted anew behind it."""
    import torch

    from schedlang.runtime.scope import capture

    with capture()(), torch.random.fork_rng(devices=[]):
        yield
