"""Injected bugs of pipeline schedules: split backward, early sums, stage copies, microbatches."""

from __future__ import annotations

from typing import Any

from schedlang.runtime.pipeline import executor, step
from schedlang.runtime.pipeline.overlapped_reduction import OverlappedReduction
from schedlang.runtime.pipeline.step import PipelineStep
from tests.zoo.bug import GROUP, REDUCTION, SKIP, Patch, Site, bug
from tests.zoo.heads import drop_from_sums


@bug("P08", "split_backward", SKIP, "halves", credit="pytorch PR#164777")
def weights_not_scaled(patch: Patch, site: Site) -> None:
    """Only gradients of inputs are scaled, not those of weights."""
    original = PipelineStep.weight_backward

    def weight_backward(self: Any, operation: Any) -> None:
        split = self.flights[operation].split
        scale = self.scale[operation.microbatch]
        split._later = [(e, [g / scale for g in grads], w) for e, grads, w in split._later]
        split.grads = [g / scale for g in split.grads]
        original(self, operation)

    patch.setattr(PipelineStep, "weight_backward", weight_backward)


@bug("P20", "split_backward", SKIP, "halves")
def weights_after_the_step(patch: Patch, site: Site) -> None:
    """The weight gradients of the last microbatch are computed after the optimizer step."""
    original, run = PipelineStep.weight_backward, executor.Pipeline.run
    late_grads: dict[int, list[Any]] = {}

    def weight_backward(self: Any, operation: Any) -> None:
        if operation.microbatch < len(self.batches) - 1:
            original(self, operation)
            return
        parameters = [
            p for p in self.pipe.stages[operation.stage].model.parameters() if not p.is_meta
        ]
        old_grads = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        original(self, operation)
        late_grads.setdefault(id(self.pipe), []).extend((p, p.grad) for p in parameters)
        for parameter, grad in zip(parameters, old_grads):
            parameter.grad = grad

    def later(self: Any, *args: Any, **options: Any) -> Any:
        for parameter, grad in late_grads.pop(id(self), []):
            if grad is not None:
                parameter.grad = grad
        return run(self, *args, **options)

    patch.setattr(PipelineStep, "weight_backward", weight_backward)
    patch.setattr(executor.Pipeline, "run", later)


@bug("P31", "overlap", REDUCTION, "early")
def summed_too_early(patch: Patch, site: Site) -> None:
    """Gradients are summed after the first microbatch; later gradients are not summed."""
    original = OverlappedReduction.prepare
    started: set[tuple[int, int]] = set()

    def before(self: Any, stage: int, last: bool) -> None:
        if (id(self), stage) not in started:
            original(self, stage, True)
            started.add((id(self), stage))
        original(self, stage, False)

    patch.setattr(OverlappedReduction, "prepare", before)


@bug("P32", "pipeline", REDUCTION, "two ways", row="pipeline")
def replicas_not_summed(patch: Patch, site: Site) -> None:
    """The two copies of a stage, which run different microbatches, do not sum their gradients."""
    drop_from_sums(patch, "tied", site.covers)


@bug(
    "P33",
    "pipeline",
    GROUP,
    "two ways",
    row="pipeline",
    credit="torch.distributed.pipelining stores losses as they come",
)
def losses_as_they_come(patch: Patch, site: Site) -> None:
    """A microbatch's loss gets the weight of another one when they run out of order."""
    original = step.PipelineStep.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.scale = self.scale[::-1]

    patch.setattr(step.PipelineStep, "__init__", init)
