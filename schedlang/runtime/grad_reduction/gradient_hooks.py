"""Run a user's hooks on gradients once a step, on the gradients of the full batch.

A backward of a step makes parts of gradients: of a microbatch, of this rank's rows, or of a tensor
that fully_shard gathers. A hook that reads them would see a part, and one that is not linear (a
clamp) would change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.runtime.storage.offloaded_gradients import (
    gradient_of,
    runs_in_backward,
    set_gradient,
)

_Hooks = dict[int, Callable[..., Any]]  # by the id of its handle, as torch keeps them
_SLOTS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class GradientHooks:
    """The hooks of a user on gradients, in one step.

    parameters  those of this rank, by name
    hooked      those of them with hooks, of a user or our own
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], hooked: Sequence[nn.Parameter]
    ) -> None:
        self._parameters, self._hooked = parameters, hooked
        self._waiting: list[tuple[nn.Parameter, tuple[_Hooks, ...]]] = []

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let no backward within the block run them; `run` does so afterwards."""
        for parameter in reversed(self._hooked):  # as backward meets them
            users = tuple(_take_hooks(getattr(parameter, slot)) for slot in _SLOTS)
            self._waiting.append((parameter, users))
        try:
            yield
        finally:
            for parameter, users in self._waiting:
                for slot, hooks in zip(_SLOTS, users):
                    if hooks:
                        getattr(parameter, slot).update(hooks)

    def run(self, shards: Container[str]) -> None:
        """Run them on gradients as they are now; one that returns a tensor replaces its gradient.

        Parameters without a gradient are left out, as in a backward. Raises Refusal S622 for a hook
        that makes a gradient from a sum over one of the `shards`: it would need the full tensor.
        """
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for parameter, (before, after) in self._waiting:
            gradient = original = gradient_of(parameter)
            if gradient is None:
                continue
            name = names[id(parameter)]
            for hook in before.values():
                changed = _run_on_shard(hook, gradient, name) if name in shards else hook(gradient)
                gradient = gradient if changed is None else changed
            if gradient is not original:
                set_gradient(parameter, gradient)
            for hook in after.values():
                hook(parameter)


def _run_on_shard(hook: Callable[..., Any], gradient: Tensor, name: str) -> Tensor | None:
    """Return what a hook makes of the gradient of a shard; refuse one that is not elementwise."""
    with _Reductions(gradient.shape) as reductions:
        changed: Tensor | None = hook(gradient)
    if reductions.operator and changed is not None and changed is not gradient:
        raise Refusal.of(
            "S622",
            f"a hook changes the gradient of `{name}` by this rank's shard of it",
            notes=(f"`{reductions.operator}` reads the shard; other ranks have other shards",),
            helps=(
                "`build(optimizer=lambda named: ...)`: an optimizer that reads full tensors gets"
                " them",
                "or change each element by itself, as `lambda grad: grad.clamp(-1, 1)` does",
            ),
        ).at(python_span())
    return changed


class _Reductions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds an operator that makes something smaller of a tensor of a shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.operator = shape, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        smaller = isinstance(output, Tensor) and output.numel() < self.shape.numel()
        if smaller and any(tensor.shape == self.shape for tensor in read):
            self.operator = str(func.overloadpacket).rpartition(".")[2]
        return output


def _take_hooks(hooks: _Hooks | None) -> _Hooks:
    """Remove the hooks that do not run in each backward, and return them."""
    users = {key: hook for key, hook in (hooks or {}).items() if not runs_in_backward(hook)}
    for key in users:
        assert hooks is not None
        del hooks[key]
    return users
