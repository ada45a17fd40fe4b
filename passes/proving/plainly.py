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


def parts_make_the_whole(case: Case, parts: Sequence[Part], weights: Sequence[float]) -> bool:
    """Whether the model alone gives, weighed over the parts, loss and gradients of the whole.

    None of our modes, loops and meetings takes part, so that what they do wrong is not said of the
    model. False where it cannot be told: the model draws, or does not run without a mode.
    """
    import torch

    from schedlang.runtime.device import undrawn

    module = twin(case).train()
    total = sum(weights)
    try:
        with undrawn():
            first, again = (_derived(case, module, case.batches[0], seed) for seed in SEEDS)
            if not _near(first, again):
                return False
            added: dict[str, Tensor] = {}
            for part, weight in zip(parts, weights):
                for name, value in _derived(case, module, part.inputs).items() if weight else ():
                    added[name] = added.get(name, torch.zeros(())) + value * (weight / total)
    except Exception:  # whatever the model raises where no mode carries it
        return False
    return _near(added, first)


def _derived(
    case: Case, module: nn.Module, batch: Mapping[str, Any], seed: int = 0
) -> dict[str, Tensor]:
    """The loss of a batch, under "", and its gradients; the module stays as it is."""
    import torch

    from schedlang.passes.proving.original import loss_of
    from schedlang.runtime.given import called

    torch.manual_seed(seed)
    fresh = copy.deepcopy(module)
    loss = (case.loss or loss_of)(called(fresh, batch), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in fresh.named_parameters() if p.grad is not None}
    return {"": loss.detach(), **found}


def _near(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Each of these tensors as near as float64 is, by the size of the largest."""
    if a.keys() != b.keys() or any(a[k].shape != b[k].shape for k in b):
        return False
    most = max(float(value.norm()) for value in b.values())
    return all(float((a[k] - b[k]).norm()) <= RTOL * (float(b[k].norm()) + 1e-3 * most) for k in b)
