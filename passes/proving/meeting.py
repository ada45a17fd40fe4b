"""Parts of the original that share the statistics of the whole batch, in threads that meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedlang.passes.proving.original import Sequential
from schedlang.passes.proving.sides import Case, modes_of, twin

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.parts import Part
    from schedlang.runtime.summing.batch_sums import BatchSum


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
            with ambient(*modes_of(case.seed)[0]), no_labels(share):
                module = twin(case)
                gather_statistics(module, sums, meeting.at(place))
                subject = Sequential(module, loss=case.loss, scale=share)
                return {"": subject.derive(part.inputs, part.rows), **subject.gradients()}
        except BaseException:
            meeting.barrier.abort()  # the others would wait for this one
            raise

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(run, range(len(parts))))
