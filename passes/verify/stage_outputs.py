"""Precompute outputs of earlier pipeline stages for all batch shapes, before ranks start.

For a batch of a new shape, a rank of a later stage runs the units of earlier stages on the meta
device. All ranks of a stage would find the same, so the results are computed once and sent to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from schedlang.ir.module_copies import copy_module
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.partition.staging import local_skeleton
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.proof_case import Case
from schedlang.runtime.batch import BatchPart, split_batch
from schedlang.runtime.device import generators_restored
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.pipeline.stage import Stub, signature
from schedlang.runtime.scope import Scope, enter_scope
from schedlang.runtime.tracing.units import CallSwitch
from schedlang.runtime.training_mode import TrainingMode

BatchList = Sequence[Batch]
CaseBatches = tuple[Case, BatchList, BatchList]  # the case, training batches, evaluation batches


def add_stage_outputs(
    case: Case, working: Case | None, conditions: Sequence[Condition]
) -> tuple[Case, Case | None, tuple[Condition, ...]]:
    """Return the cases and conditions with the stage outputs that their ranks will need.

    What cannot be computed here is left to the ranks, which report the error.
    """
    first_batch = case.batches[:1]  # evaluated with the saved state
    float64_cases: list[CaseBatches] = []
    for condition in conditions:
        run_case, run_batches = condition.case or case, condition.batches
        trains: BatchList = () if condition.evaluate else run_batches
        evaluates: BatchList = run_batches if condition.evaluate else run_batches[:1]
        float64_cases.append((run_case, trains, (*evaluates, *first_batch)))
    working_cases = [] if working is None else [(working, working.batches, working.batches[:1])]
    by_id: dict[int, Prepared] = {}
    for runs, modes in ((float64_cases, (Float64(),)), (working_cases, ())):
        for run_case, trains, evaluates in runs:
            assert run_case.prepared is not None
            ready = by_id.setdefault(id(run_case.prepared), run_case.prepared)
            if not _is_shared(run_case):
                continue
            with suppress(Exception), enter_modes(*modes):  # ranks raise the model's error again
                outputs = _stub_outputs(run_case, trains, evaluates)
                by_id[id(run_case.prepared)] = replace(ready, outputs={**ready.outputs, **outputs})

    def knowing(known_case: Case) -> Case:
        return replace(known_case, prepared=by_id.get(id(known_case.prepared), known_case.prepared))

    return (
        knowing(case),
        working and knowing(working),
        tuple(replace(one, case=one.case and knowing(one.case)) for one in conditions),
    )


def _is_shared(run_case: Case) -> bool:
    """Return whether several ranks need the same outputs, so that precomputing pays.

    That excludes slices of sequences, splits of tokens, and casts. Under autocast a unit returns
    another dtype for the same arguments, and a cast of the full model surrounds the ranks' own
    modules.
    """
    plan, prepared = run_case.plan, run_case.prepared
    if prepared is None or prepared.staged.axis is None or plan.casts:
        return False
    is_plain = prepared.tokens is None and prepared.slicing is None
    return is_plain and plan.mesh.world > plan.mesh.size(prepared.staged.axis)


def _stub_outputs(run_case: Case, trains: Sequence[Batch], evaluates: Sequence[Batch]) -> Any:
    """Return the outputs of stage stand-ins in a forward of one part of each shape."""
    assert run_case.prepared is not None
    plan, cut = run_case.plan, run_case.prepared.staged.cut
    model = copy_module(plan.model.model)
    stub = Stub(local_skeleton(plan, run_case.prepared.traced), cut)
    training = TrainingMode(model)
    switch, last = CallSwitch(model, cut.graph.units), cut.units(cut.stages - 1).start

    def parts(batches: Iterable[Batch]) -> Iterator[BatchPart]:
        """Return one part of each shape."""
        shares = chain(*(split_batch(batch, plan.share_weights, plan.micro) for batch in batches))
        yield from {signature(part.inputs): part for part in chain(*shares)}.values()

    with ExitStack() as stack:
        for context in (torch.no_grad(), generators_restored()):
            stack.enter_context(context)
        for switched, batches in ((training.train, trains), (training.evaluate, evaluates)):
            switched()
            for part in parts(batches):
                with enter_scope(Scope(0, 0, part.rows)):
                    stub.find_outputs(switch, model, part.inputs, last)
    return stub.portable_outputs
