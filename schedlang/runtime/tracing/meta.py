"""A copy of a model, or of a batch, that has shapes but no values (the meta device)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir import pytree

# ---- Shapes on the meta device that torch lacks: of grouped matrix products in any float type
# (torch's own rule knows bfloat16 alone, so that no model of experts in another type could be
# looked at without values), and of the loss of recognised speech.


@cache
def install() -> Any:
    """Put the rule in place of torch's, once; the result keeps it there."""
    kind: Any = torch.library.Library
    library = kind("aten", "IMPL", "Meta")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
        library.impl("_grouped_mm", _shape, allow_override=True)
    for name in ("_ctc_loss", "_ctc_loss.Tensor"):
        library.impl(name, _ctc)
    for name in ("_ctc_loss_backward", "_ctc_loss_backward.Tensor"):
        library.impl(name, _ctc_backward)
    return library


def _ctc(log_probs: Tensor, targets: Tensor, lengths: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty results of connectionist temporal classification: losses, and its states.

    There are as many states as the longest target has, which without values is as long as any.
    """
    tokens, rows = log_probs.shape[:2] if log_probs.ndim == 3 else (len(log_probs), 1)
    states = 2 * targets.shape[-1] + 1
    return log_probs.new_empty(rows), log_probs.new_empty((rows, tokens, states))


def _ctc_backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _shape(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    rows, columns = a.shape[-2], b.shape[-1]
    if a.ndim == b.ndim:
        groups = a.shape[0] if a.ndim == 3 else offs.shape[0] if offs is not None else 1
        return a.new_empty((groups, rows, columns), dtype=out_dtype)
    return a.new_empty((rows, columns), dtype=out_dtype)


# ---- A copy of a model, or of a batch, that has shapes but no values (the meta device).


install()


def copy_with(
    model: nn.Module,
    parameter: Callable[[str, nn.Parameter], nn.Parameter],
    other: Callable[[Tensor], Tensor],
    kept: Mapping[str, Sequence[str]] | None = None,
) -> nn.Module:
    """A deep copy of a model in which tensors are made by the given functions, never copied.

    parameter: first name and parameter to its stand-in; ties stay ties.
    other: buffers and tensors kept as plain attributes.
    kept: of these lists of modules only these children are copied, and numbered anew.
    """
    memo: dict[int, Any] = {}
    for name, tensor in model.named_parameters():
        memo[id(tensor)] = parameter(name, tensor)
    for module in model.modules():
        plain = (value for value in vars(module).values() if isinstance(value, Tensor))
        for value in (*module._buffers.values(), *plain):
            if value is not None and id(value) not in memo:
                memo[id(value)] = other(value)
    for fqn in sorted(kept or {}, key=lambda name: -name.count(".")):  # the inner lists first
        found = model.get_submodule(fqn)
        memo[id(found)] = _shorter(found, (kept or {})[fqn], memo)
    return copy.deepcopy(model, memo)


def _shorter(found: nn.Module, kept: Sequence[str], memo: dict[int, Any]) -> nn.Module:
    """A copy of a list of modules with fewer of them."""
    made = copy.copy(found)
    children = (copy.deepcopy(found._modules[name], memo) for name in kept)
    made.__dict__["_modules"] = {str(k): child for k, child in enumerate(children)}
    return made


def hollow_parameter(tensor: nn.Parameter, shape: tuple[int, ...] | None = None) -> nn.Parameter:
    """A parameter on the meta device, of the same or the given shape."""
    empty = torch.empty(shape or tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad)


def hollow_model(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    kept: Mapping[str, Sequence[str]] | None = None,
) -> nn.Module:
    """The model on the meta device, with other shapes for some parameters (by first name).

    With `kept`, lists of modules that hold fewer.
    """
    return copy_with(
        model,
        lambda name, tensor: hollow_parameter(tensor, shapes.get(name)),
        lambda tensor: tensor.to("meta"),
        kept,
    )


def hollow_batch(batch: Any) -> Any:
    """The batch with every tensor on the meta device."""
    to_meta = lambda value: value.to("meta") if isinstance(value, Tensor) else value  # noqa: E731
    return pytree.tree_map(to_meta, batch)
