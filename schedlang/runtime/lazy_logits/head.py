"""A head whose product waits for the loss: `lm_head` and cross-entropy in chunks, in any model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.kernels.device import autocast_to
from schedlang.kernels.linear_cross_entropy import Case
from schedlang.kernels.probe import (
    TOLERANCE,
    Mismatch,
    bare_copy,
    gradients_apart,
    relative,
    rows_of,
)
from schedlang.runtime.adapters.torch_compile import follow_losses
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.forward import layer_of, the_input
from schedlang.runtime.lazy_logits.lazy import LazyLogits, Part

# -- the head --------------------------------------------------------------------------------------
# In training the head returns LazyLogits, and the model's own forward goes on with them to its own
# loss; without gradients, and in eval mode, it computes logits as ever.


@dataclass(frozen=True)
class Head:
    """A linear layer: [..., width] to [..., classes]; `weight` and `bias` are its parameters.

    `held`: its logits are to be made once and overwritten by their gradient.
    """

    weight: str
    bias: str | None
    width: int
    classes: int
    held: bool = False

    def cases(self) -> list[Any]:
        """Runs of the kernel on as many classes, or fewer where there are very many."""
        shape, classes = (7, min(self.width, 128)), min(self.classes, 512)
        runs = [("float32", 0.0), ("bfloat16", 0.0), ("float32", 0.1)]
        return [
            Case(shape, dtype, classes, self.bias is not None, smoothing, held=self.held)
            for dtype, smoothing in runs
        ]


def probe_held(module: nn.Module) -> Head | Mismatch:
    """Probe as `probe_head`, for logits in place."""
    found = probe_head(module)
    return found if isinstance(found, Mismatch) else replace(found, held=True)


def probe_head(module: nn.Module) -> Head | Mismatch:
    """Match a linear layer against a module, or return the measured reason why it is none."""
    params = dict(module.named_parameters())
    weights = [name for name, p in params.items() if p.ndim == 2]
    others = [name for name in params if name not in weights]
    if len(weights) != 1 or len(others) > 1 or "." in weights[0]:
        some = [f"{name} {tuple(p.shape)}" for name, p in list(params.items())[:3]]
        more = [f"and {len(params) - 3} more"] if len(params) > 3 else []
        shapes = ", ".join(some + more) or "none"
        return Mismatch(f"has the parameters {shapes}: a head has a matrix, and perhaps a bias")
    if "forward" in vars(module):
        return Mismatch("has a replaced forward already")
    classes, width = params[weights[0]].shape
    found = Head(weights[0], others[0] if others else None, width, classes)
    if type(module).forward is nn.Linear.forward:
        return found  # nothing to be found out, and a copy in float64 may be large
    if next(module.buffers(), None) is not None:
        return Mismatch("has buffers: a linear layer has none")
    return _probed(module, found)


def _probed(module: nn.Module, found: Head) -> Head | Mismatch:
    copied = bare_copy(module, torch.float64)
    params = dict(copied.named_parameters())
    weight, bias = params[found.weight], params[found.bias] if found.bias else None
    x = rows_of(found.width).requires_grad_()
    worst = 0.0
    for training in (True, False):
        copied.train(training)
        with torch.random.fork_rng(devices=[]):
            try:
                y, plain = copied(x), F.linear(x, weight, bias)
                apart = gradients_apart(y, plain, [x, *params.values()])
                worst = max(worst, relative(y.detach(), plain.detach()), apart)
            except Exception as raised:  # the module's own code: whatever it raises is a mismatch
                return Mismatch.raised(f"does not run on rows of {found.width} alone", raised)
    return found if worst <= TOLERANCE else Mismatch("differs from a linear layer", worst)


class Waiting:
    """The layer of a head: lazy logits in training, its own product otherwise."""

    def __init__(self, module: nn.Module, head: Head, budget: int = 0) -> None:
        self.module, self.head, self.budget = module, head, budget
        self.kernel = "cross_entropy" if head.held else "linear_cross_entropy"

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wait where there will be a gradient."""
        x = the_input(self.module, args, kwargs)
        return self.lazy(x) if self.waits() else inner(x)

    def waits(self) -> bool:
        """Tell whether logits of this call are for a loss: in training, with gradients."""
        return self.module.training and torch.is_grad_enabled()

    def lazy(self, x: Tensor, group: Group | None = None, classes: int = 0) -> LazyLogits:
        """The logits of `x`, not computed yet; of `classes` that lie over the ranks of a group."""
        if torch.compiler.is_compiling():
            follow_losses()
        weight: Tensor = getattr(self.module, self.head.weight)
        bias: Tensor | None = getattr(self.module, self.head.bias) if self.head.bias else None
        wanted = autocast_to(x)  # as F.linear would
        if wanted is not None:
            x, weight = x.to(wanted), weight.to(wanted)
            bias = None if bias is None else bias.to(wanted)
        width = weight.shape[0]
        part = Part(0, width, width) if group is None else Part.of(group, width, classes)
        return LazyLogits(x, weight, bias, part, self.budget, self.head.held, x.new_empty(0))


def waiting(module: nn.Module) -> Waiting | None:
    """The layer of a head that waits now, if this module has one."""
    found = layer_of(module, "kernel")
    return found if isinstance(found, Waiting) and found.waits() else None
