"""Gradients that forward has made, times what backward brings: in their own place if they may be.

A loss whose gradient is known up to one factor (kernels/linear_cross_entropy.py) saves it for
backward, which then would hold it twice: as it was saved, and multiplied.  A backward that does not
keep the graph is the last one, and nobody asks for what was saved again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def multiplied(saved: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Each of `saved`, which are a backward's own, times the scalar `factor`, in its own type.

    Whoever is asked while the graph is kept (`retain_graph`, `create_graph`), compiled, or on
    DTensors, whose layout the factor may change, gets new tensors.
    """
    return [_times(one, factor) for one in saved]


def _times(one: Tensor, factor: Tensor) -> Tensor:
    if _last() and type(one) is Tensor and type(factor) is Tensor:
        return one.detach().mul_(factor)  # what is unpacked belongs to the graph
    # the factor in its own precision: in that of a gradient it would be rounded once more
    return (one * factor).to(one.dtype)


def _last() -> bool:
    """Whether the backward that runs now frees what it was saved; False outside of one."""
    if torch.compiler.is_compiling():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()
