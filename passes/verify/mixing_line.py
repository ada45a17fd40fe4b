"""The model's line at which rows of a batch mix.

A function mode records each torch call of a forward of the batch, and of forwards of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from schedlang.passes.verify.compare import RTOL
from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.proof_case import Case, original_subject
from schedlang.runtime.batch import BatchPart
from schedlang.runtime.tracing.meta_runs import name_of
from schedlang.runtime.tracing.model_lines import model_line

MOST_STORED = 1 << 26  # elements stored of one pass; beyond that no line is searched
RecordedCall = tuple[str, str, Tensor]  # function, the model's line, result


def find_mixing_line(
    case: Case, batch: Batch, parts: Sequence[BatchPart], weights: Sequence[float]
) -> str:
    """Return the first call whose result for the whole batch is not made of the parts' results.

    A result with rows should be the concatenation of the parts'; one without rows should be equal
    in all parts, or their mean by `weights`. Returns "" if parts take other code paths, and if the
    search fails (on tensors inside `vmap`, say): its error must hide no refusal.
    """
    try:
        return _find_mixing_line(case, batch, parts, weights)
    except Exception:
        return ""


def _find_mixing_line(
    case: Case, batch: Batch, parts: Sequence[BatchPart], weights: Sequence[float]
) -> str:
    full_calls = _record_calls(case, batch, [row for part in parts for row in part.rows])
    by_part = [_record_calls(case, part.inputs, part.rows) for part in parts]
    if full_calls is None or any(
        calls is None or len(calls) != len(full_calls) for calls in by_part
    ):
        return ""
    for index, (name, line, value) in enumerate(full_calls):
        calls_at = [calls[index] for calls in by_part if calls is not None]
        if any(part_call[0] != name for part_call in calls_at):
            return ""
        if line and not _is_made_of(value, [part_call[2] for part_call in calls_at], weights):
            return f"`{name}`, at {line}"
    return ""


def _record_calls(case: Case, batch: Batch, rows: Sequence[int]) -> list[RecordedCall] | None:
    """Return the original's calls on some rows, in order; None if their results are too large."""
    calls: list[RecordedCall] = []

    class Noting(TorchFunctionMode):
        """Keeps the floats that calls give."""

        kept = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.is_floating_point() and self.kept <= MOST_STORED:
                with torch._C.DisableTorchFunction():
                    self.kept += out.numel()
                    calls.append((name_of(func), model_line(), out.detach().clone()))
            return out

    with original_subject(case) as subject, Noting() as noting:
        subject.forward_backward(batch, rows)
    return calls if noting.kept <= MOST_STORED else None


def _is_made_of(full: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> bool:
    if all(part.shape == full.shape for part in parts):
        mean = sum(part * weight for part, weight in zip(parts, weights)) / sum(weights)
        return all(_is_close(part, full) for part in parts) or _is_close(
            torch.as_tensor(mean), full
        )
    ndims = {part.ndim for part in parts}
    if ndims != {full.ndim}:
        return False
    dims = [d for d in range(full.ndim) if any(p.shape[d] != full.shape[d] for p in parts)]
    if len(dims) != 1 or sum(part.shape[dims[0]] for part in parts) != full.shape[dims[0]]:
        return False
    (dim,) = dims
    if _is_close(torch.cat(list(parts), dim), full):
        return True
    rows = [part.shape[dim] for part in parts]  # the dim may merge [tokens, rows]
    for inner in {n for n in range(2, min(rows) + 1) if all(size % n == 0 for size in rows)}:
        split = [torch.unflatten(part, dim, (inner, -1)) for part in parts]
        if _is_close(torch.cat(split, dim + 1).flatten(dim, dim + 1), full):
            return True
    return False


def _is_close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm()) <= RTOL * float(b.norm()) + 1e-12
