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
    first = case.batches[:1]  # evaluated with the saved state
    exact: list[CaseBatches] = []
    for condition in conditions:
        run, given = condition.case or case, condition.batches
        trains: BatchList = () if condition.evaluate else given
        evaluates: BatchList = given if condition.evaluate else given[:1]
        exact.append((run, trains, (*evaluates, *first)))
    rounded = [] if working is None else [(working, working.batches, working.batches[:1])]
    made: dict[int, Prepared] = {}
    for runs, modes in ((exact, (Float64(),)), (rounded, ())):
        for run, trains, evaluates in runs:
            assert run.prepared is not None
            known = made.setdefault(id(run.prepared), run.prepared)
            if not _is_shared(run):
                continue
            with suppress(Exception), enter_modes(*modes):  # ranks raise the model's error again
                found = _stub_outputs(run, trains, evaluates)
                made[id(run.prepared)] = replace(known, outputs={**known.outputs, **found})

    def knowing(one: Case) -> Case:
        return replace(one, prepared=made.get(id(one.prepared), one.prepared))

    return (
        knowing(case),
        working and knowing(working),
        tuple(replace(one, case=one.case and knowing(one.case)) for one in conditions),
    )


def _is_shared(run: Case) -> bool:
    """Return whether several ranks need the same outputs, so that precomputing pays.

    That excludes slices of sequences, splits of tokens, and casts. Under autocast a unit returns
    another dtype for the same arguments, and a cast of the full model surrounds the ranks' own
    modules.
    """
    plan, prepared = run.plan, run.prepared
    if prepared is None or prepared.staged.axis is None or plan.casts:
        return False
    alike = prepared.tokens is None and prepared.slicing is None
    return alike and plan.mesh.world > plan.mesh.size(prepared.staged.axis)


def _stub_outputs(run: Case, trains: Sequence[Batch], evaluates: Sequence[Batch]) -> Any:
    """Return the outputs of stage stand-ins in a forward of one part of each shape."""
    assert run.prepared is not None
    plan, cut = run.plan, run.prepared.staged.cut
    model = copy_module(plan.model.model)
    stub = Stub(local_skeleton(plan, run.prepared.traced), cut)
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
