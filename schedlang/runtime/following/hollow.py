"""A stand-in for a computation that cannot run without values: shapes and what depends on what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

ROUTED = ("experts",)  # kinds whose own forward cannot run without values


def hollow(rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Something of the shape of `rows` on the meta device, computed from them and parameters.

    A product with each, as experts multiply their rows: linear in the parameters' parts, so that
    types and gradients are those of the real computation.
    """
    assert rows.is_meta
    out = rows
    for parameter in parameters:
        out = out * parameter.flatten()[:1]
    return out


def hollow_out(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Give modules that cannot run without values a forward that needs none, in a hollow model."""
    for fqn, kind in kinds.items():
        if kind in ROUTED:
            module = model.get_submodule(fqn)
            module.forward = _without_values(list(module.parameters()))


def _without_values(parameters: Sequence[Tensor]) -> Any:
    def forward(rows: Tensor, *_: Any, **__: Any) -> Tensor:
        return hollow(rows, parameters)

    return forward
