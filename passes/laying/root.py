"""Where the backward of a model on the meta device can start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.passes.laying.dryrun import Loss


def backward_root(model: Any, inputs: Mapping[str, Any], loss: Loss | None) -> Any:
    """Something to go backward from: the loss, else the sum of what the model gives."""
    import torch

    from schedlang.runtime.given import called

    with torch.device("meta"):  # a forward that makes tensors of its own makes them there
        output = called(model, inputs)
        return root_of(output, loss(output, inputs) if loss is not None else None)


def root_of(output: Any, loss: Tensor | None) -> Tensor | None:
    """Where a backward can start: the loss, the model's own, else the sum of what it gives."""
    import torch

    from schedlang.runtime.recording.record import loss_of
    from schedlang.runtime.recording.torch_calls import tensors_in

    root = loss if loss is not None else loss_of(output, {}, None)
    if root is None:
        floats = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
        root = torch.stack([t.sum() for t in floats]).sum() if floats else None
    return root if root is not None and root.requires_grad else None
