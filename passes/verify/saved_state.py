"""Compare saved state bit by bit: written by the ranks, loaded by one rank and by all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from schedlang.ir.mesh import Mesh
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.holdings import holdings_of
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.lower.build import build
from schedlang.passes.partition.staging import stages_of
from schedlang.passes.propagate.original_forward import Original
from schedlang.passes.propagate.propagate import Traced
from schedlang.passes.verify.compare import FLOOR, RTOL
from schedlang.passes.verify.observe import Batch, Condition, Observation, flatten_output
from schedlang.passes.verify.original import randomise
from schedlang.passes.verify.proof_case import Case, build_for_condition
from schedlang.report import Gap, Row
from schedlang.runtime.comm import world
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.program import Program

Outputs = Mapping[str, Any]
_ATTRIBUTE_NOTE = (
    ", and parameters, buffers and optimizer are: attributes of modules are in no `state_dict`; "
    "`register_buffer` puts a tensor there"
)
NO_OUTPUTS: tuple[Outputs, Outputs] = ({}, {})
STATISTICS_GAP = Gap(
    "outputs with a loaded state: replicas have statistics of their own, and one is saved",
    "a load that leaves out what the outputs hang on",
)


def saved_condition(conditions: Sequence[Condition]) -> int:
    """Return the index of the condition whose final state is saved: AdamW's, if present."""
    return min(1, len(conditions) - 1)


def load_on_one_rank(case: Case, conditions: Sequence[Condition], folder: str) -> dict[str, Any]:
    """Load the saved state into a program of one rank without rows, and return its state."""
    condition = conditions[saved_condition(conditions)]
    case = condition.case or case
    plain_plan = Plan(case.plan.model, Mesh())
    with enter_modes(Float64()):
        program = build(
            plain_plan,
            case.batches[0],
            loss=case.loss,
            optimizer=condition.optimizer,
            prepared=_prepared_without_rows(case, plain_plan),
        )
        program.load(f"{folder}/state")
        return {
            "state": program.state_dict(),
            "optimizer": program.optimizer_state(),
            "steps": program.step,
        }


def _prepared_without_rows(case: Case, plain_plan: Plan) -> Prepared | None:
    """Return what `prepare` returns for the model of a prepared case without rows, on one rank.

    The case's trace has the forward of the original, so that the model need not run again.
    """
    if case.prepared is None:
        return None
    traced = case.prepared.traced
    original = Traced(**{field.name: getattr(traced, field.name) for field in fields(Original)})
    staged = stages_of(plain_plan, original, case.batches[0], case.loss)
    return Prepared(original, staged, holdings_of(plain_plan, staged), draws=case.prepared.draws)


def load_on_ranks(
    programs: Sequence[Program], case: Case, conditions: Sequence[Condition], folder: str
) -> tuple[Outputs, Outputs]:
    """Return, on a rank, the outputs of the saved program and of a second one that loads its state.

    The second program is the first that was made. Other parameters may be frozen in it, and torch
    then computes in another order: whether `matmul` folds the leading dims of an activation depends
    on the weight's `requires_grad`, in evaluation too. If the outputs differ by roundings only, a
    program with the same frozen parameters is built, and must give equal bits.
    """
    saver = programs[saved_condition(conditions)]
    condition = conditions[saved_condition(conditions)]
    batch = case.batches[0]
    saved, loaded = _load_and_evaluate(saver, programs[0], batch, folder)
    rounded = not _are_close(saved, loaded) and _are_close(saved, loaded, RTOL, FLOOR)
    must_rebuild = condition.case is not None and rounded
    if any(world.all_gather_object(must_rebuild)):  # all ranks must build together
        return _load_and_evaluate(saver, _build_equally_frozen(case, condition), batch, folder)
    return saved, loaded


def _load_and_evaluate(
    program: Program, loaded: Program, batch: Batch, folder: str
) -> tuple[Outputs, Outputs]:
    """Load the state into the second program and return both programs' outputs.

    The second program evaluated last with weights of its own.
    """
    loaded = replace(loaded, optimizer=None)  # may have another class
    loaded.load(f"{folder}/state")
    program.evaluated = loaded.evaluated = (0, 0)  # so that both draw the same
    saved, loaded_out = program.eval_step(batch), loaded.eval_step(batch)
    return dict(flatten_output(saved, set())), dict(flatten_output(loaded_out, set()))


def _build_equally_frozen(case: Case, condition: Condition) -> Program:
    """Build a program of the condition's own case, trained for one step from other weights.

    The frozen weights differ as well, so a load that skips them shows.
    """
    frozen_case = condition.case or case
    frozen_case = frozen_case.with_model(
        randomise(frozen_case.plan.model.base.model, frozen_case.seed + 1)
    )
    program = build_for_condition(case, replace(condition, case=frozen_case))
    program.train_step(frozen_case.batches[0])
    program.eval_step(frozen_case.batches[0])
    return program


def _are_close(saved: Outputs, loaded: Outputs, rtol: float = 0.0, atol: float = 0.0) -> bool:
    return saved.keys() == loaded.keys() and all(
        _is_close(saved[k], loaded[k], rtol, atol) for k in saved
    )


def archive_rows(condition: str, archive: Mapping[str, Any], actual: Observation) -> Iterator[Row]:
    """Compare the state that was saved by all ranks and loaded by one rank, bit by bit."""
    last = max(k.step for k in actual.tensors if k[:2] == (condition, "parameters"))
    all_equal = True  # whether all named tensors are right

    def row(name: str, equal: bool, note: str, shape: tuple[int, ...] | None = None) -> Row:
        error, note = (0.0, "") if equal else (1.0, note)
        return Row(condition, "saved state", name, error, 0.0, equal, last, note, shape)

    for key, value in actual.tensors.items():
        if key.condition != condition or key.step != last or value is None:
            continue
        if key.kind in ("parameters", "other state"):
            archived = archive["state"].get(key.name)
        elif key.kind.startswith("optimizer "):
            archived = (
                archive["optimizer"].get(key.name, {}).get(key.kind.removeprefix("optimizer "))
            )
        else:
            continue
        equal = archived is not None and torch.equal(
            torch.as_tensor(archived).to(value.dtype), value
        )
        note = "lost" if archived is None else "not what was saved"
        all_equal = all_equal and equal
        yield row(key.name, equal, note, tuple(value.shape))
    steps = archive["steps"]
    yield row("number of steps", steps == last + 1, f"{steps} steps")
    expected_outputs, outputs = archive["outputs"]
    note = "not those of before" + _ATTRIBUTE_NOTE * all_equal
    for name, value in expected_outputs.items():
        equal = name in outputs and _is_close(value, outputs[name])
        yield row(f"outputs with it: {name}", equal, note)


def _is_close(a: Tensor | float, b: Tensor | float, rtol: float = 0.0, atol: float = 0.0) -> bool:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
