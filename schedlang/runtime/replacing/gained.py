"""What fusing a module gains: its kernels and bytes as they are, and fused, for one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.primitive import Count, Gain
from schedlang.runtime import nests as pytree
from schedlang.runtime.regions.layer import Told, fuse_pattern
from schedlang.runtime.regions.rewrite import watched
from schedlang.runtime.replacing.gain import eager, generated, scheduled
from schedlang.runtime.rowwise.graphs import graphs
from schedlang.runtime.rowwise.layer import as_function, pair_for

_NONE = Count(0, 0, 0)


def of_regions(
    module: nn.Module, told: Told, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Gain:
    """Of all regions that one call of a hollow module runs."""
    fuse_pattern(module, told)
    with torch.device("meta"), watched() as called:
        module.train()(*_leaves(args), **_leaves(kwargs))
    before = after = _NONE
    texts: dict[str, None] = {}
    for region, given in called:
        inputs = [_leaf(t, t.requires_grad) if isinstance(t, Tensor) else t for t in given]
        before += eager(region.plain, inputs, [t for t in inputs if isinstance(t, Tensor)])
        if region.backend == "rowwise":
            pair = pair_for(region.plain, inputs, region.rounding)
            after += generated(pair)
            texts |= dict.fromkeys(kernel.text for kernel in pair.kernels)
        else:
            after += scheduled(graphs(*as_function(region.plain, inputs)))
    return Gain(before, after, tuple(texts))


def of_module(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Gain:
    """Of a hollow module that inductor compiles as a whole."""
    module.train()
    names = [name for name, _ in module.named_parameters()]
    given = [_leaves(args), _leaves(kwargs), [p for _, p in module.named_parameters()]]
    flat, form = pytree.tree_flatten(given)

    def call(*values: Any) -> Any:
        own, named, parameters = pytree.tree_unflatten(list(values), form)
        held = dict(zip(names, parameters, strict=True))
        made = torch.func.functional_call(module, held, tuple(own), named)
        return [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]

    with torch.device("meta"):
        before = eager(call, flat, [t for t in flat if isinstance(t, Tensor)])
    return Gain(before, scheduled(graphs(*as_function(call, flat))))


def _leaves(tree: Any) -> Any:
    """The same on the meta device, wanting gradients where they can."""
    return pytree.tree_map_only(Tensor, lambda t: _leaf(t, t.is_floating_point()), tree)


def _leaf(tensor: Tensor, graded: bool) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(graded)
