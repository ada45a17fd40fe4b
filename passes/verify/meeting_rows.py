"""The line of a model at which rows of a batch meet: parts first compute something else there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from schedlang.passes.verify.sides import Case, modes_of, twin

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.batch import Part

MOST = 1 << 26  # numbers that are kept of one pass; of more nothing is told
RTOL = 1e-9


def line_where_rows_meet(case: Case, parts: Sequence[Part], weights: Sequence[float]) -> str:
    """The first call whose result for the whole batch is not made of those of the parts.

    A result with rows should be that of the parts, one after the other; one without should be alike
    in all, or their mean by weight.  "" where no line can be told: parts take other ways.
    """
    rows = [row for part in parts for row in part.rows]
    whole = _calls(case, case.batches[0], rows)
    each = [_calls(case, part.inputs, part.rows) for part in parts]
    if whole is None or any(one is None or len(one) != len(whole) for one in each):
        return ""
    for place, (name, line, value) in enumerate(whole):
        found = [one[place] for one in each if one is not None]
        if any(other[0] != name for other in found):
            return ""
        if line and not _made_of(value, [other[2] for other in found], weights):
            return f"`{name}`, at {line}"
    return ""


Call = tuple[str, str, Any]  # the function, the model's line, what it gave


def _calls(case: Case, batch: Any, rows: Sequence[int]) -> list[Call] | None:
    """The calls of the original on some rows, in order; None where they give too much."""
    from torch import Tensor
    from torch._C import DisableTorchFunction
    from torch.overrides import TorchFunctionMode

    from schedlang.passes.verify.original import Sequential
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.tracing.torch_calls import model_line, name_of

    calls: list[Call] = []

    class Noting(TorchFunctionMode):
        """Keeps the floats that calls give."""

        kept = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.is_floating_point() and self.kept <= MOST:
                with DisableTorchFunction():
                    self.kept += out.numel()
                    calls.append((name_of(func), model_line(), out.detach().clone()))
            return out

    modes, _ = modes_of(case)
    noting = Noting()
    with ambient(*modes):
        subject = Sequential(twin(case), loss=case.loss)
        with noting:
            subject.derive(batch, rows)
    return calls if noting.kept <= MOST else None


def _made_of(whole: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> bool:
    import torch

    if all(part.shape == whole.shape for part in parts):
        mean = sum(part * weight for part, weight in zip(parts, weights)) / sum(weights)
        return all(_near(part, whole) for part in parts) or _near(torch.as_tensor(mean), whole)
    ndims = {part.ndim for part in parts}
    if ndims != {whole.ndim}:
        return False
    dims = [d for d in range(whole.ndim) if any(p.shape[d] != whole.shape[d] for p in parts)]
    if len(dims) != 1 or sum(part.shape[dims[0]] for part in parts) != whole.shape[dims[0]]:
        return False
    (dim,) = dims
    if _near(torch.cat(list(parts), dim), whole):
        return True
    rows = [part.shape[dim] for part in parts]  # or rows are counted first: [tokens, rows]
    for inner in {n for n in range(2, min(rows) + 1) if all(size % n == 0 for size in rows)}:
        split = [torch.unflatten(part, dim, (inner, -1)) for part in parts]
        if _near(torch.cat(split, dim + 1).flatten(dim, dim + 1), whole):
            return True
    return False


def _near(a: Tensor, b: Tensor) -> bool:
    gap, size = float((a - b).norm()), float(b.norm())
    return gap <= RTOL * size + 1e-12
