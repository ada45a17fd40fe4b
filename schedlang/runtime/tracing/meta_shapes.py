"""Shape rules of the meta device that torch lacks, or restricts to some dtypes.

* Grouped matrix products in any float dtype (torch's rule accepts bfloat16 only, so a model of
  experts in another dtype could not run on meta).
* The CTC loss, and `masked_select`.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def install() -> Any:
    """Register the rules with torch, once; they stay while the returned library lives."""
    kind: Any = torch.library.Library
    library = kind("aten", "IMPL", "Meta")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
        library.impl("_grouped_mm", _shape, allow_override=True)
    for name in ("_ctc_loss", "_ctc_loss.Tensor"):
        library.impl(name, _ctc)
    for name in ("_ctc_loss_backward", "_ctc_loss_backward.Tensor"):
        library.impl(name, _ctc_backward)
    library.impl("masked_select", _selected)
    return library


def _selected(values: Tensor, mask: Tensor) -> Tensor:
    """Return the result of a mask without values: all elements, as torch assumes for `nonzero`."""
    broadcast = torch.broadcast_tensors(values, mask)  # type: ignore[no-untyped-call]
    return values.new_empty(broadcast[0].numel())


def _ctc(log_probs: Tensor, targets: Tensor, lengths: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty results of connectionist temporal classification: losses and states.

    The number of states is that of the longest target; without values, of the dim of targets.
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


install()
