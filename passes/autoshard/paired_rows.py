"""Rows of the batch that a loss compares, as contrastive losses do: which modules gather them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from schedlang.ir.model import ModelFacts
from schedlang.ir.plan import Plan
from schedlang.passes.complete.proposed_rows import ProposedRow, make_call, plan_of_proposal
from schedlang.passes.propagate.loss_sums import with_statistics
from schedlang.passes.propagate.sequence_trials import is_on_meta
from schedlang.passes.reduce_model.blocks import blocks_of
from schedlang.passes.verify.probe import rows_to_gather
from schedlang.passes.verify.proof_case import Case

if TYPE_CHECKING:
    from torch import nn

    from schedlang.passes.complete.proposed_rows import RowTrial
    from schedlang.passes.propagate.propagate import Traced


def find_paired_rows(
    trial: RowTrial, traced: Traced, values: Callable[[], nn.Module] | None, notes: list[str]
) -> tuple[str, ...] | None:
    """Return the modules whose rows are gathered for the loss; None if it compares no rows.

    `traced` is the model alone. Shapes show where a loss may compare rows; a trial of the batch in
    two parts shows whether it does, and what helps. Adds a note if no module can gather, or if a
    model without values cannot be tried.
    """
    facts, batch, loss, weight = trial.facts, trial.batch, trial.loss, trial.weight
    line = with_statistics(Plan(facts), traced, batch, loss, weight is not None).paired_rows
    if not line:
        return None
    model = facts.model
    if values is not None and is_on_meta(model):
        model = values()
    what = f"the loss {{}} rows of the batch, at {line}"
    if is_on_meta(model):
        notes.append(f"not tried without values: {what.format('may compare')}: `gather_rows`")
        return None
    blocks = blocks_of(ModelFacts(model))
    halves = ProposedRow((), make_call("zero", stage=0, over="dp"))
    try:
        plan = plan_of_proposal([halves], blocks, {"dp": 2})
        modules = rows_to_gather(Case(plan, (dict(batch),), loss, weight, dtype="none"))
    except Exception as error:  # a model that does not run so is judged by `verify`
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        notes.append(f"not tried: {what.format('may compare')}: {reason}")
        return None
    if modules == ():
        notes.append(
            f"parts of the batch have another loss: {what.format('compares')}, and gathering the"
            " output of no module helps: let a module of its own compute what is compared"
        )
    return modules
