"""Evaluation of torch's encoder layers by calls, where a row has changed what a call computes.

`nn.TransformerEncoderLayer` evaluates by one operator on the weights of its children, and calls
none of them. A shard of a weight is not the weight, and what a layer around a child's forward does
(an all-reduce, a cast, a weight brought from the host) would be left out.

`nn.TransformerEncoder` evaluates padded rows as nested tensors, without their padding, and fills
the padding with zeros before its last norm. Calls of children, and stages of a pipeline, take no
nested tensors; the zeros are filled in all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.forward import layers_of

# layers that a forward without gradients has no need of
_TRAINING_KINDS = frozenset({"draws", "checkpoint", "code", "offload"})


def evaluate_by_calls(module: nn.Module, in_stages: bool) -> None:
    """Make encoder layers in `module` call their children in evaluation, if one is changed.

    `in_stages`: a pipeline runs the layers of an encoder on several ranks, changed or not.
    Changes attributes of the instances, which nothing else reads. Training always calls them.
    """
    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoderLayer) and _has_changed_child(encoder):
            encoder.activation_relu_or_gelu = 0  # "the fused operator does not know it"
        elif isinstance(encoder, nn.TransformerEncoder) and (
            in_stages or _has_changed_child(encoder)
        ):
            if encoder.use_nested_tensor and len(encoder.layers) > 0:
                encoder.layers[-1].register_forward_hook(_with_zero_padding, with_kwargs=True)
            encoder.use_nested_tensor = False  # only the fused operator takes these


def _with_zero_padding(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor
) -> Tensor:
    """Return the last layer's output with zeros where `nn.TransformerEncoder` would have them.

    It has them where it would have made nested tensors (its `forward`): of rows padded on the right
    without another mask, in evaluation, without gradients.
    """
    padding, source = kwargs.get("src_key_padding_mask"), args[0]
    if layer.training or padding is None or kwargs.get("src_mask") is not None or source.dim() != 3:
        return output
    if torch.is_grad_enabled() and (
        source.requires_grad or any(p.requires_grad for p in layer.parameters())
    ):
        return output
    if torch.is_autocast_enabled() or torch.overrides.has_torch_function((source,)):
        return output
    if not torch.backends.mha.get_fastpath_enabled():
        return output
    if not torch._nested_tensor_from_mask_left_aligned(source, padding.logical_not()):
        return output
    return output.masked_fill(padding.bool()[..., None], 0.0)


def _has_changed_child(module: nn.Module) -> bool:
    children = (child for child in module.modules() if child is not module)
    all_layers: list[Any] = [layers_of(child) for child in children]
    return any(layers and layers.kinds.keys() - _TRAINING_KINDS for layers in all_layers)
