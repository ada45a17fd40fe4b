"""A module whose saved activations another rank may hold between its forward and its backward.

It puts them into the bag of the forward that runs, which the rows of the timeline carry away and
back (`staging.parking`). Where nothing is carried away they stay, and an outer checkpoint does not
see them either: it counts what it sees, and must see as much again when it runs a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.forward import wrap
from schedlang.runtime.staging.bag import bag_at_hand


class Lodged:
    """The layer around a module's forward."""

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner`; what autograd saves goes into the bag, if there is one."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        bag = bag_at_hand()
        kept = torch.autograd.graph.saved_tensors_hooks(_Kept, _Kept.tensor)
        with kept if bag is None else bag.collecting():
            return inner(*args, **kwargs)


class _Kept:
    """A saved tensor that stays, without its history: autograd would keep that alive with it."""

    def __init__(self, tensor: Tensor) -> None:
        self.saved = tensor.detach()
        self.version = self.saved._version

    def tensor(self) -> Tensor:
        """The tensor, if it is what it was."""
        if self.saved._version != self.version:
            raise RuntimeError("a value that backward needs was written into after it was saved")
        return self.saved


def lodge(module: nn.Module) -> None:
    """Let what `module` saves be carried away with the bag of a forward."""
    wrap(module, "offload", Lodged())
