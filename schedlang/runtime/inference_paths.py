"""Evaluation of torch's encoder layers by calls, where a row has changed what a call computes.

`nn.TransformerEncoderLayer` evaluates by one operator on the weights of its children, and calls
none of them. A shard of a weight is not the weight, and what a layer around a child's forward does
(an all-reduce, a cast, a weight brought from the host) would be left out.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from schedlang.runtime.forward import layers_of

# layers that a forward without gradients has no need of
_TRAINING_KINDS = frozenset({"draws", "checkpoint", "code", "offload"})


def evaluate_by_calls(module: nn.Module) -> None:
    """Make encoder layers in `module` call their children in evaluation, if one is changed.

    Changes attributes of the instances, which nothing else reads. Training always calls them.
    """
    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoderLayer) and _has_changed_child(encoder):
            encoder.activation_relu_or_gelu = 0  # "the fused operator does not know it"
        elif isinstance(encoder, nn.TransformerEncoder) and _has_changed_child(encoder):
            encoder.use_nested_tensor = False  # only the fused operator takes these


def _has_changed_child(module: nn.Module) -> bool:
    children = (child for child in module.modules() if child is not module)
    all_layers: list[Any] = [layers_of(child) for child in children]
    return any(layers and layers.kinds.keys() - _TRAINING_KINDS for layers in all_layers)
