"""Check state that one forward leaves for the next, where each pipeline stage has a copy.

A stage does not see what another stage writes, and code between units runs in several stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.module_copies import copy_module
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.partition.staging import Staged, local_skeleton
from schedlang.passes.verify.compare import RTOL
from schedlang.passes.verify.forward_state import is_close
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import count_rows
from schedlang.passes.verify.proof_case import Case, copy_original, proof_modes
from schedlang.runtime.batch import BatchPart, loss_of, run_model, split_batch
from schedlang.runtime.device import generators_restored
from schedlang.runtime.float64 import Float64
from schedlang.runtime.global_state import restore_global_state, restore_loss_state
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.module_state import StateSnapshot
from schedlang.runtime.pipeline.stage import Stage, Stub, signature
from schedlang.runtime.scope import Scope, ScopeContext, enter_scope, named_sites
from schedlang.runtime.tracing.meta_runs import meta_model
from schedlang.runtime.tracing.stage_graph import Token
from schedlang.runtime.tracing.units import CallSwitch
from schedlang.runtime.training_mode import TrainingMode

FORWARDS = 3  # the second forward uses state of the first; the third shows counts


def check_across_stages(case: Case) -> None:
    """Refuse (S708) a model that has other losses stage by stage than in one piece.

    State that one forward leaves for the next causes the difference. Several forwards run in turn,
    in one piece and stage by stage. The refusal names the buffers and attributes that a forward
    changes.
    """
    assert case.prepared is not None
    staged, loss = case.prepared.staged, case.loss
    if (
        staged.axis is None
        or staged.cut.stages == 1
        or case.prepared.traced.missing_loss is not None
    ):
        return
    part = split_batch(case.batches[0], case.plan.share_weights, case.plan.micro)[0][0].inputs
    modes, _ = proof_modes(case)
    with restore_global_state(case.plan.model.model, loss), enter_modes(*modes), torch.no_grad():
        module = _prepare_module(copy_original(case))
        initial = {name: b.detach().clone() for name, b in _state(module).items()}
        snapshot = StateSnapshot(module)
        full_losses = _losses(loss, part, partial(_run_in_one_piece, module, part))
        final = _state(module)
        changed = [name for name, value in initial.items() if not is_close(final[name], value, 0.0)]
        changed = changed or [*snapshot.changed()]
        for homes in staged.homes if changed else ():
            copies = _copies(case, homes)
            stage_losses = _losses(loss, part, _stage_forward(copies, staged, homes, part))
            if not all(is_close(a, b, RTOL) for a, b in zip(stage_losses, full_losses)):
                raise _refusal(changed, "the loss differs from that of the unsplit model")
            _check_buffers(staged, homes, copies, final)


def _prepare_module(module: nn.Module) -> nn.Module:
    TrainingMode(module).train()
    named_sites(module)
    return module


def _state(module: nn.Module) -> Mapping[str, Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _losses(loss: Any, part: Mapping[str, Any], output: Callable[[], Any]) -> list[Tensor]:
    """Return the losses of several forwards in turn; the loss function keeps no state of them."""
    with restore_loss_state(loss):
        loss_values = []
        for _ in range(FORWARDS):
            forward_output = output()
            with _fresh_scope(part):
                loss_values.append(loss_of(forward_output, part, loss))
    return [torch.as_tensor(value).detach() for value in loss_values]


def _fresh_scope(part: Mapping[str, Any]) -> ScopeContext:
    """Enter a fresh scope: after a stage's forward, draws would otherwise count on."""
    return enter_scope(Scope(0, 0, tuple(range(count_rows(part)))))


def _run_in_one_piece(module: nn.Module, part: Mapping[str, Any]) -> Any:
    with _fresh_scope(part):
        return run_model(module, part)


def _copies(case: Case, homes: tuple[int, ...]) -> dict[int, nn.Module]:
    """Return a copy of the original for each place; stages at one place share it."""
    return {position: _prepare_module(copy_original(case)) for position in sorted(set(homes))}


def _check_buffers(
    staged: Staged,
    homes: tuple[int, ...],
    copies: Mapping[int, nn.Module],
    final: Mapping[str, Tensor],
) -> None:
    """Refuse (S708) buffers with another value than in one piece, at the place that saves it."""
    places: dict[str, int] = {}
    for stage, position in enumerate(homes):
        for name in staged.cut.buffers(stage):
            places[name] = min(places.get(name, position), position)
    wrong = [
        name
        for name, position in places.items()
        if not is_close(dict(copies[position].named_buffers())[name], final[name], RTOL)
    ]
    if wrong:
        raise _refusal(sorted(wrong), "the value that is saved differs from the unsplit model's")


def _stage_forward(
    copies: Mapping[int, nn.Module], staged: Staged, homes: tuple[int, ...], part: Mapping[str, Any]
) -> Callable[[], Any]:
    """Return a forward through all stages in order."""
    cut = staged.cut
    switches = {position: CallSwitch(copy, cut.graph.units) for position, copy in copies.items()}
    stub = Stub(meta_model(copies[homes[0]], {}), cut)
    stages = [
        Stage(copies[position], cut, number, switch=switches[position], stub=stub)
        for number, position in enumerate(homes)
    ]

    def forward() -> Any:
        values: dict[Token, Tensor] = {}
        output = None
        for stage in stages:
            needed = (token for tokens in stage.incoming.values() for token in tokens)
            inputs = {t: values[t].clone() if stage.mutated(t) else values[t] for t in needed}
            with _fresh_scope(part):
                result = stage.forward(part, inputs, train=False)
            values.update(result.values)
            output = result.output
        return output

    return forward


def _refusal(names: list[str], difference: str) -> Refusal:
    names_text = ", ".join(f"`{name}`" for name in names[:3])
    return Refusal.of(
        "S708",
        f"a forward leaves different values in {names_text} on different stages",
        notes=(
            f"one forward writes it and a later one reads it: stage by stage {difference}",
            "each stage has a copy, and writes only what its own part of the model writes",
        ),
        helps=(
            "write and read it in one module, or in one stage: cut elsewhere",
            "or leave the pipeline out",
        ),
    )


# -- outputs of earlier stages ---------------------------------------------------------------------
# For a batch of a new shape, a rank of a later stage runs the units of earlier stages on the meta
# device. All ranks of a stage would find the same, so the results are computed once, before ranks
# start, and sent to them.

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
