"""Which optimizers step on parts, and which on parameters that are put together for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal

if TYPE_CHECKING:
    import torch

    from schedlang.passes.partition.staging import Staged
    from schedlang.runtime.assembly import Assembly
    from schedlang.runtime.optim.whole_step import WholeStep


def whole_step(
    a: Assembly, staged: Staged, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> WholeStep | None:
    """How to step where parameters lie in parts and the optimizer looks at whole ones; else None.

    Refuses, alike on all ranks, an optimizer that looks at all parameters together, and one that
    would have to wait for other stages where each updates by itself (S622).
    """
    from schedlang.pipeline.timeline.versions import is_stale
    from schedlang.runtime.optim.whole_step import WholeStep, is_elementwise, is_tensorwise

    holdings = a.holdings.values()
    split = next((h for h in holdings if h.layout.splits or h.sliced), None)
    if optimizer is None or split is None or is_elementwise(optimizer):
        return None
    if is_stale(staged.timeline):
        _refuse(
            "this order updates each stage separately, and cannot gather parameters for a step",
            f"this optimizer needs full tensors, and `{split.name}` is sharded",
            "use a synchronous order, or an elementwise optimizer (SGD, Adam, AdamW, ...)",
        )
    if is_tensorwise(optimizer):
        return WholeStep(a.parameters, a.holdings, a.ranks)
    _refuse(
        "this optimizer does not update each parameter separately",
        f"`{split.name}` is sharded: it would be gathered for the step, a few parameters at a time,"
        " and the others would be updated differently",
        "use one that updates one parameter at a time (Muon, Adafactor, LAMB) or one element"
        " (SGD, Adam, AdamW, Adagrad, RMSprop, ...)",
    )


def _refuse(title: str, note: str, help_: str) -> NoReturn:
    raise Refusal(Diagnostic("S622", title, notes=(note,), helps=(help_,)))
