"""Calls of modules in a step: what each gives, or takes, and the gradients that come back to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.passes.judge.layouts import local
from schedlang.runtime.inside import hooked
from schedlang.runtime.isolated import Frame, parts_of

At = tuple[Frame, int]  # a call of a module, and which of the tensors that it gives


@dataclass
class Seen:
    """Outputs of a call of a module, and the gradient that comes back to it; by float tensor."""

    outputs: list[Tensor]
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Run:
    """The calls of a step, in the order in which they return, and that of their gradients."""

    calls: dict[Frame, Seen] = field(default_factory=dict)
    back: list[At] = field(default_factory=list)
    live: dict[At, Tensor] = field(default_factory=dict)  # themselves, if asked for
    parameters: dict[str, Tensor] = field(default_factory=dict)  # likewise

    def of(self, at: At, back: bool = False) -> Tensor:
        """An output, or the gradient that comes back to it."""
        seen = self.calls[at[0]]
        return seen.gradients[at[1]] if back else seen.outputs[at[1]]


def followed(
    modules: Mapping[str, nn.Module],
    step: Callable[[], Any],
    *,
    live: bool = False,
    taken: bool = False,
) -> Run:
    """Run a step, and note what modules, each by its name, give and get back.

    live   the tensors themselves, too
    taken  what they take in the place of what they give: of a DTensor this rank's part, as floats
    """
    run, turns = Run(), dict.fromkeys(modules, 0)

    def hook(name: str) -> Any:
        def after(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() >= 0:
                return  # computed again
            frame = name, turns[name]
            turns[name] += 1
            if taken:
                tensors = parts_of((args, kwargs))[0]
                numbers = [
                    t for t in tensors if t.dim() and t.dtype != torch.bool and not t.is_complex()
                ]
                run.calls[frame] = Seen([local(t.detach()).clone().double() for t in numbers])
                return
            floats = [t for t in parts_of(output)[0] if t.is_floating_point() and t.dim()]
            with torch.no_grad():
                run.calls[frame] = Seen([_whole(t) for t in floats])
            for k, tensor in enumerate(floats):
                if live:
                    run.live[frame, k] = tensor
                if tensor.requires_grad:
                    tensor.register_hook(_noting(run, frame, k))  # type: ignore[no-untyped-call]

        return after

    with hooked(m.register_forward_hook(hook(n), with_kwargs=True) for n, m in modules.items()):
        step()
    return run


def settled(modules: Mapping[str, nn.Module], step: Callable[[], Any]) -> Run:
    """Run a step, and again; the first unless it calls modules that the second does not.

    A first step may try modules on numbers that nobody made, to learn shapes, as pipelines do.
    """
    first, second = (followed(modules, step) for _ in range(2))
    return first if first.calls.keys() == second.calls.keys() else second


def _noting(run: Run, frame: Frame, k: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        with torch.no_grad():
            run.calls[frame].gradients[k] = _whole(gradient)
        run.back.append((frame, k))

    return note


def _whole(tensor: Tensor) -> Tensor:
    """A copy, of a DTensor all of it."""
    value = tensor.detach()
    full = getattr(value, "full_tensor", None)
    return (full() if full is not None else value).clone()
