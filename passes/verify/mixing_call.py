"""The call of a model at which rows of a batch mix, and the modules whose outputs it gets.

A function mode records each torch call of a forward of the batch, and of forwards of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.passes.verify.compare import RTOL
from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.proof_case import Case, original_subject
from schedlang.runtime.batch import BatchPart
from schedlang.runtime.tracing.meta_runs import name_of, tensors_in
from schedlang.runtime.tracing.model_lines import model_line

MOST_STORED = 1 << 26  # elements stored of one pass; beyond that no line is searched
_MODULES = "_schedlang_modules"  # attribute of a tensor: the modules whose outputs it is made of


@dataclass(frozen=True)
class MixingCall:
    """A call that mixes rows: the function and the model's line, as text, and the outermost modules
    whose outputs its inputs are made of, after them without another module."""

    text: str
    modules: tuple[str, ...]


class RecordedCall(NamedTuple):
    """A call of torch: function, the model's line, result, modules (as in `MixingCall`)."""

    name: str
    line: str
    value: Tensor
    modules: frozenset[str]


def find_mixing_call(
    case: Case, batch: Batch, parts: Sequence[BatchPart], weights: Sequence[float]
) -> MixingCall | None:
    """Return the first call whose result for the whole batch is not made of the parts' results.

    A result with rows should be the concatenation of the parts'; one without rows should be equal
    in all parts, or their mean by `weights`. Returns None if parts take other code paths, and if
    the search fails (on tensors inside `vmap`, say): its error must hide no refusal.
    """
    try:
        return _find_mixing_call(case, batch, parts, weights)
    except Exception:
        return None


def _find_mixing_call(
    case: Case, batch: Batch, parts: Sequence[BatchPart], weights: Sequence[float]
) -> MixingCall | None:
    full_calls = _record_calls(case, batch, [row for part in parts for row in part.rows])
    by_part = [_record_calls(case, part.inputs, part.rows) for part in parts]
    if full_calls is None or any(
        calls is None or len(calls) != len(full_calls) for calls in by_part
    ):
        return None
    for index, full in enumerate(full_calls):
        calls_at = [calls[index] for calls in by_part if calls is not None]
        if any(call.name != full.name for call in calls_at):
            return None
        if full.line and not _is_made_of(full.value, [call.value for call in calls_at], weights):
            return MixingCall(f"`{full.name}`, at {full.line}", tuple(sorted(full.modules)))
    return None


def _record_calls(case: Case, batch: Batch, rows: Sequence[int]) -> list[RecordedCall] | None:
    """Return the original's calls on some rows, in order; None if their results are too large."""
    with original_subject(case) as subject, _CallRecorder() as recorder:
        hooks = [
            module.register_forward_hook(partial(_mark_output, fqn))
            for fqn, module in subject.module.named_modules()
        ]
        try:
            subject.forward_backward(batch, rows)
        finally:
            for hook in hooks:
                hook.remove()
    return recorder.calls if recorder.kept <= MOST_STORED else None


def _mark_output(fqn: str, module: nn.Module, args: Any, output: Any) -> None:
    for tensor in tensors_in(output):  # an outer module marks what it returns last
        tensor.__dict__[_MODULES] = frozenset([fqn])


class _CallRecorder(TorchFunctionMode):
    """Records the calls that return floats, and marks tensors by the modules that they come from.

    kept  number of elements stored
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.kept = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            modules = frozenset[str]().union(
                *(tensor.__dict__.get(_MODULES, ()) for tensor in tensors_in((args, kwargs)))
            )
            for tensor in tensors_in(out):
                tensor.__dict__[_MODULES] = modules
            if isinstance(out, Tensor) and out.is_floating_point() and self.kept <= MOST_STORED:
                self.kept += out.numel()
                value = out.detach().clone()
                self.calls.append(RecordedCall(name_of(func), model_line(), value, modules))
        return out


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
    gap = torch.where(a == b, 0.0, a - b)  # equal infinities of a mask have no gap
    return float(gap.norm()) <= RTOL * float(b[b.isfinite()].norm()) + 1e-12
