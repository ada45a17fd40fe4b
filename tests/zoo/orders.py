"""Bugs of orders: halves of backwards, sums that begin early, copies of stages, microbatches."""

from __future__ import annotations

from typing import Any

from schedlang.runtime.pipeline import executor, step
from schedlang.runtime.pipeline.overlapped_reduction import OverlappedReduction
from schedlang.runtime.pipeline.step import PipelineStep
from tests.zoo.bug import GROUP, REDUCTION, SKIP, Patch, Site, bug
from tests.zoo.heads import without


@bug("P08", "split_backward", SKIP, "halves", credit="pytorch PR#164777")
def weights_not_scaled(patch: Patch, site: Site) -> None:
    """Only gradients of inputs are scaled, not those of weights."""
    plain = PipelineStep.weight_backward

    def weight_backward(self: Any, work: Any) -> None:
        split = self.flights[work].split
        scale = self.scale[work.microbatch]
        split._later = [(e, [g / scale for g in grads], w) for e, grads, w in split._later]
        split.grads = [g / scale for g in split.grads]
        plain(self, work)

    patch.setattr(PipelineStep, "weight_backward", weight_backward)


@bug("P20", "split_backward", SKIP, "halves")
def weights_after_the_step(patch: Patch, site: Site) -> None:
    """The last microbatch's weight gradients come after the step."""
    plain, run = PipelineStep.weight_backward, executor.Pipeline.run
    late: dict[int, list[Any]] = {}

    def weight_backward(self: Any, work: Any) -> None:
        if work.microbatch < len(self.batches) - 1:
            plain(self, work)
            return
        held = [p for p in self.pipe.stages[work.stage].model.parameters() if not p.is_meta]
        before = [p.grad for p in held]
        for parameter in held:
            parameter.grad = None
        plain(self, work)
        late.setdefault(id(self.pipe), []).extend((p, p.grad) for p in held)
        for parameter, grad in zip(held, before):
            parameter.grad = grad

    def later(self: Any, *args: Any, **options: Any) -> Any:
        for parameter, grad in late.pop(id(self), []):
            if grad is not None:
                parameter.grad = grad
        return run(self, *args, **options)

    patch.setattr(PipelineStep, "weight_backward", weight_backward)
    patch.setattr(executor.Pipeline, "run", later)


@bug("P31", "overlap", REDUCTION, "early")
def summed_too_early(patch: Patch, site: Site) -> None:
    """Gradients are summed when the first microbatch has ended, and what comes later is not."""
    plain = OverlappedReduction.prepare
    seen: set[tuple[int, int]] = set()

    def before(self: Any, stage: int, last: bool) -> None:
        if (id(self), stage) not in seen:
            plain(self, stage, True)
            seen.add((id(self), stage))
        plain(self, stage, False)

    patch.setattr(OverlappedReduction, "prepare", before)


@bug("P32", "pipeline", REDUCTION, "two ways", row="pipeline")
def replicas_not_summed(patch: Patch, site: Site) -> None:
    """The two copies of a stage, which see different microbatches, keep gradients of their own."""
    without(patch, "tied", site.covers)


@bug(
    "P33",
    "pipeline",
    GROUP,
    "two ways",
    row="pipeline",
    credit="torch.distributed.pipelining stores losses as they come",
)
def losses_as_they_come(patch: Patch, site: Site) -> None:
    """A microbatch's loss is weighed as that of another, where they run out of order."""
    plain = step.PipelineStep.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        self.scale = self.scale[::-1]

    patch.setattr(step.PipelineStep, "__init__", init)
