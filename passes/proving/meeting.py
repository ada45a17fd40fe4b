"""Parts of the original that share the statistics of the whole batch, in threads that meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedlang.diagnostic import Diagnostic, Label, Refusal
from schedlang.passes.laying.statistics import ALLOW, shared_sums
from schedlang.passes.proving.original import Sequential
from schedlang.passes.proving.sides import Case, modes_of, twin
from schedlang.source import NOWHERE

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.parts import Part
    from schedlang.runtime.summing.batch_sums import BatchSum


def check_microbatches(case: Case) -> None:
    """Refuse a loss whose statistics no microbatch sees (S668), where parts do not make it."""
    from schedlang.runtime.parts import split

    plan, micro = case.plan, case.plan.micro
    sample = split(case.batches[0], plan.shares, micro)[0][0].inputs
    sums = shared_sums(plan, sample, case.loss, case.weight is not None)
    if micro == 1 or not sums:
        return
    where = f"`{sums[0].fqn}`" if sums[0].fqn else "the model"
    rows = (a.span for a in reversed(plan.actions) if hasattr(a.primitive, "micro") and a.span)
    raise Refusal(
        Diagnostic(
            "S668", f"the loss has statistics of the batch, which {micro} microbatches take apart",
            Label(next(rows, NOWHERE)),
            notes=(f"the forward of {where} takes a {sums[0].name} over all rows, and its backward"
                   " begins before later microbatches are there",),
            helps=("one microbatch: `micro=1`; ranks that share the batch share its statistics",
                   ALLOW),
        )
    )  # fmt: skip


def together(
    case: Case, parts: Sequence[Part], weights: Sequence[float], sums: tuple[BatchSum, ...]
) -> list[dict[str, Tensor | None]]:
    """Weighed losses (under "") and gradients of parts of the original that share their sums.

    Each part runs on a copy of its own in a thread of this process.
    """
    from concurrent.futures import ThreadPoolExecutor

    from schedlang.runtime.modes import ambient
    from schedlang.runtime.no_labels import no_labels
    from schedlang.runtime.summing.statistics import Meeting, gather_statistics

    meeting, total = Meeting(len(parts)), sum(weights)

    def run(place: int) -> dict[str, Tensor | None]:
        part, share = parts[place], weights[place] / total
        try:
            with ambient(*modes_of(case.seed)[0]), no_labels(not share):
                module = twin(case)
                gather_statistics(module, sums, meeting.at(place))
                subject = Sequential(module, loss=case.loss, scale=share)
                return {"": subject.derive(part.inputs, part.rows), **subject.gradients()}
        except BaseException:
            meeting.barrier.abort()  # the others would wait for this one
            raise

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(run, range(len(parts))))
