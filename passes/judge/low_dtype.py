"""Compare a program in a low dtype, with gates from how far roundings move the original.

For FP8, the original's matrix products take operands rounded to eight bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.discrete_choices import (
    ChoiceRecorder,
    ChoiceReplay,
    drop_ambiguous_rows,
)
from schedlang.passes.judge.low_dtype_errors import CachedRuns
from schedlang.passes.judge.low_dtype_steps import compare_own_steps
from schedlang.passes.judge.program_rows import align_observations
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.simulated_step import original_loop
from schedlang.passes.judge.trial import Trial
from schedlang.passes.verify.conditioning import IN_DTYPE, ErrorBounds
from schedlang.passes.verify.observe import HIDDEN_BUFFERS, Condition, Observation
from schedlang.passes.verify.proof_case import Case, working_case
from schedlang.passes.verify.working_dtype import error_bounds, split_undecided
from schedlang.report import Row

FORMATS = ("float8_e4m3fn", "float8_e5m2")
FP8_MODEL_DTYPE = "bfloat16"  # dtype of all other operators
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}


class FP8Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Round the operands of matrix products to FP8, with one scale for each tensor.

    One scale for each tensor is the coarsest scaling that programs choose: scales for rows or
    blocks round less. Inside `PerturbedRounding` each cast is off by one more rounding, in eight
    bits.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype: torch.dtype = getattr(torch, dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places = _PRODUCTS.get(func._overloadpacket.__name__, ())
        operands = [self._to_fp8(a) if k in places else a for k, a in enumerate(args)]
        return func(*operands, **(kwargs or {}))

    def _to_fp8(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or not value.numel():
            return value
        value32 = value.float()
        scale = value32.abs().amax() / torch.finfo(self._dtype).max
        scale = torch.where(scale > 0, scale, 1.0)
        return ((value32 / scale).to(self._dtype).float() * scale).to(value.dtype)


LOW_DTYPES = ("float32", "bfloat16", "float16")
_BEFORE_STEP = ("loss", "gradients", "loss" + IN_DTYPE, "gradients" + IN_DTYPE)
COPY_ROUNDINGS = 4.0  # roundings by which copies of one tensor on different ranks may differ


@dataclass(frozen=True)
class Comparison:
    """Rows of a comparison, the two observations, and what is undecided.

    own_choices  the original in float64 with its own choices
    bounds       the error bounds, in a low dtype
    chosen       the final choices of the original's float64 run, in a low dtype
    """

    rows: Sequence[Row]
    own_choices: Observation
    expected: Observation
    actual: Observation
    bounds: ErrorBounds | None = None
    chosen: ChoiceRecorder | None = None
    undecided: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()


def cast_case(
    dtype: str, case: Case, conditions: Sequence[Condition]
) -> tuple[Case, list[Condition]]:
    """Return the original and the conditions of a float64 judgement in another dtype.

    `case` holds the original in its own dtype. A `dtype` of eight bits applies to operands of
    products; the model is then stored in bfloat16. Refuses (S704) an unsupported dtype.
    """
    if dtype not in (*LOW_DTYPES, *FORMATS):
        message = f"`{dtype}` is not a dtype that programs are judged in"
        helps = (f"choose one of {', '.join((*LOW_DTYPES, *FORMATS))}, or none: float64",)
        raise Refusal.of("S704", message, helps=helps)
    batches = tuple({id(batch): batch for run in conditions for batch in run.batches}.values())
    working = working_case(replace(case, batches=batches, dtype=model_dtype(dtype)))
    assert working is not None, "a judge in float64 is another"
    cast = {id(original): lowered for original, lowered in zip(batches, working.batches)}
    return working, [
        replace(run, batches=tuple(cast[id(b)] for b in run.batches)) for run in conditions
    ]


def model_dtype(dtype: str) -> str:
    """Return the dtype in which a model is stored: bfloat16 if products are in eight bits."""
    return FP8_MODEL_DTYPE if dtype in FORMATS else dtype


def compare_low_dtype(
    dtype: str, trial: Trial, conditions: Sequence[Condition], seen: Observation, record: RunRecord
) -> Comparison:
    """Compare what ranks computed in a dtype with the original's runs in that dtype.

    If rows fail where roundings change choices, compare once more with the ranks' choices.
    """

    def against(
        choosing: Callable[[int | None], ChoiceRecorder],
    ) -> tuple[Observation, ErrorBounds]:
        bounds = error_bounds(
            trial.case.plan.model.model,
            conditions,
            trial.case.loss,
            modes=trial.modes,
            ranks=trial.world,
            choosing=choosing,
            rounding=rounding_mode(dtype),
            loop=original_loop(record),
        )
        expected, actual = align_observations(bounds.exact, seen, record)
        run = CachedRuns(bounds.run)
        return actual, replace(bounds, exact=expected, run=run, state=True)

    replay = ChoiceReplay(record.choices)
    actual, bounds = against(replay.mode)
    own_choices, facts = bounds.exact, list[tuple[str, str]]()
    rows, undecided = split_undecided(bounds.rows(actual))
    rank_replay = replay.with_rank_choices() if any(not row.ok for row in rows) else None
    if rank_replay is not None:
        actual, bounds = against(rank_replay.mode)
        rows, undecided = split_undecided(bounds.rows(actual))
        if rank_replay.alternatives and any(not row.ok for row in rows):
            _, alternatives = against(rank_replay.alternative_mode)
            rows, dropped = drop_ambiguous_rows(rows, bounds.rows(alternatives.exact))
            undecided += dropped
        facts = rank_replay.facts()
    rows += [*_compare_counts(bounds.exact, actual), *_compare_copies(actual, dtype)]
    if not any(row.step == 0 and row.kind in _BEFORE_STEP for row in rows if not row.ok):
        rows += compare_own_steps(trial, conditions, actual, record)
    chosen = (rank_replay or replay).exact
    return Comparison(rows, own_choices, bounds.exact, actual, bounds, chosen, undecided, facts)


def rounding_mode(dtype: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return the mode that rounds a run of the original besides its dtype."""
    return partial(FP8Products, dtype) if dtype in FORMATS else contextlib.nullcontext


def _compare_counts(expected: Observation, actual: Observation) -> Iterator[Row]:
    """Yield rows for integers that no rounding changes: counted steps and batches."""
    for key, want in expected.tensors.items():
        counted = key.kind == "optimizer step" or key.kind in ("other state", HIDDEN_BUFFERS)
        if want is None or not counted or key.kind in actual.missing:
            continue
        if want.is_floating_point() and (want.dim() or key.kind != "optimizer step"):
            continue  # compared with its bound
        got = actual.tensors.get(key)
        ok = got is not None and torch.equal(got.double(), want.double())
        error = 0.0 if ok else math.inf
        yield Row(key.condition, key.kind, key.name, error, 0.0, ok, key.step)


def _compare_copies(observed: Observation, dtype: str) -> list[Row]:
    """Compare copies on different ranks: they may differ by a few roundings."""
    gate = COPY_ROUNDINGS * torch.finfo(getattr(torch, model_dtype(dtype))).eps
    return [
        Row(key.condition, key.kind, key.name, error, gate, error <= gate, key.step)
        for key, error in observed.replicas.items()
    ]
