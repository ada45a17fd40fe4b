"""The model alone, called as its user calls it: whether it shows what runs of our own show."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlang.passes.proving.sides import Case, twin

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.runtime.parts import Part

SEEDS = (0, 1)
RTOL = 1e-9
UNTOLD = float("inf")


def parts_differ(case: Case, parts: Sequence[Part], weights: Sequence[float]) -> float:
    """By how much loss and gradients of the parts, weighed, differ from the whole's, relatively.

    None of our loops, meetings, dtypes and logical draws takes part, so that what they do wrong is
    not said of the model; what it draws it draws by row.  `UNTOLD` where it draws in other ways, or
    does not run without a mode.
    """
    import torch

    from schedlang.runtime.device import undrawn

    module = twin(case).train()
    total = sum(weights)
    every = [row for part in parts for row in part.rows]
    try:
        with undrawn():
            whole, again = (_derived(case, module, case.batches[0], every, s) for s in SEEDS)
            if not _gap(whole, again) <= RTOL:
                return UNTOLD
            added: dict[str, Tensor] = {}
            for part, weight in zip(parts, weights):
                found = _derived(case, module, part.inputs, part.rows) if weight else {}
                for name, value in found.items():
                    added[name] = added.get(name, torch.zeros(())) + value * (weight / total)
    except Exception:  # whatever the model raises where no mode carries it
        return UNTOLD
    return _gap(added, whole)


def _derived(
    case: Case, module: nn.Module, batch: Mapping[str, Any], rows: Sequence[int], seed: int = 0
) -> dict[str, Tensor]:
    """The loss of rows of a batch, under "", and its gradients; the module stays as it is."""
    import torch

    from schedlang.passes.proving.original import loss_of
    from schedlang.runtime.drawing.alone import Alone, ByRow
    from schedlang.runtime.given import called
    from schedlang.runtime.modes import ambient

    torch.manual_seed(seed)
    fresh = copy.deepcopy(module)
    with ambient(Alone(ByRow(rows))):
        loss = (case.loss or loss_of)(called(fresh, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in fresh.named_parameters() if p.grad is not None}
    return {"": loss.detach(), **found}


def _gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """By how much these tensors differ, each by its size; small ones by the size of the largest."""
    if a.keys() != b.keys() or any(a[k].shape != b[k].shape for k in b):
        return UNTOLD
    most = max(float(value.norm()) for value in b.values())
    gaps = [float((a[k] - b[k]).norm()) / (float(b[k].norm()) + 1e-3 * most or 1.0) for k in b]
    return max((gap if gap == gap else UNTOLD for gap in gaps), default=0.0)
