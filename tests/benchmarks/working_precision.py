"""Working precision: how close right programs come to their bounds, and which bugs exceed them.

Models under rows that reorder sums, trained in low dtypes on many seeds: the error of each tensor
relative to its bound, and how many exceed it (false alarms).  With `--zoo` each bug of the zoo in
the working dtype only: the largest error relative to its bound, and whether the proof finds it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.prove import Case
from schedlang.passes.verify import conditioning
from schedlang.passes.verify.observe import Observation, standard_conditions
from schedlang.passes.verify.original_checks import check_finite
from schedlang.passes.verify.proof_case import (
    prepare_case,
    randomised_float64,
    run_original,
    working_case,
)
from schedlang.passes.verify.working_dtype import (
    WorkingRun,
    check_cast,
    observe_ranks,
    split_undecided,
)
from schedlang.report import Row
from schedlang.runtime.launch.pool import RankDied
from tests import expert_models, models, small_models
from tests.engine import Threads
from tests.proofs import make_plan
from tests.rows import GPT2, HEADS
from tests.zoo import ZOO
from tests.zoo.bug import mutate
from tests.zoo.pool import Mutated
from tests.zoo.scenes import SCENES

STEPS = 3


@dataclass(frozen=True)
class Subject:
    """A model, rows that reorder its sums, and a batch for each seed."""

    model: Callable[[], nn.Module]
    rows: str
    mesh: str
    batch: Callable[[int], Any]


def mamba() -> nn.Module:
    """Return a Mamba model: scans, convolutions, gates."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False, **models.SIZES
    )
    return transformers.MambaForCausalLM(config).double()


def _ids(seed: int) -> dict[str, torch.Tensor]:
    return models.tokens(rows=8, seed=seed, mask=False)


PARTS = 'zero(stage=2, over=dp)\npipeline(order="GPipe", micro=2)'
DATA = "zero(stage=3, over=dp)"
SUBJECTS = {
    "GPT-2": Subject(
        lambda: models.gpt2(2, 0.1),
        GPT2 + "zero(stage=2, over=dp)",
        "dp=2, tp=2",
        small_models.tokens,
    ),
    "Llama": Subject(lambda: models.llama(2), HEADS[0], HEADS[1], small_models.tokens),
    "BERT": Subject(models.bert, DATA, "dp=2", small_models.tokens),
    "T5": Subject(lambda: small_models.t5(2), DATA, "dp=2", small_models.tokens),
    "ViT": Subject(lambda: small_models.vit(2), DATA, "dp=2", small_models.labelled),
    "U-Net": Subject(lambda: small_models.UNet(2), PARTS, "dp=2", small_models.pictures),
    "MLP": Subject(lambda: small_models.Chain(4), PARTS, "dp=2", small_models.points),
    "experts": Subject(
        expert_models.tiny_model, "zero(stage=0, over=dp)", "dp=2", expert_models.batch
    ),
    "Mamba": Subject(mamba, DATA, "dp=2", _ids),
}
# as the model works, or as rows cast it
DTYPES = {
    "float32": ("float32", ""),
    "bfloat16": ("bfloat16", ""),
    "float16": ("float16", ""),
    "cast bf16": ("float32", "cast(bf16)\n"),
    "cast fp16": ("float32", "cast(fp16)\n"),
}


@dataclass(frozen=True)
class Judgement:
    """The rows of one program in its working dtype, undecided rows, and the runs it took."""

    rows: Sequence[Row]
    drawn: Sequence[Row]  # the same rows, each against the bound of all draws
    unsure: Sequence[str]
    draws: int
    seconds: float  # CPU seconds of the original's runs

    @property
    def worst(self) -> Row:
        """The row with the largest error relative to its bound."""
        return max(
            self.drawn or self.rows, key=lambda row: row.error if row.error == row.error else 0.0
        )


def judge(case: Case, pool: Any, every: bool = False) -> Judgement:
    """Judge a case in its working dtype; with `every` also against bounds from all draws."""
    case = case if case.prepared is not None else prepare_case(case)
    working, float64_case = working_case(case), randomised_float64(case)
    assert working is not None
    check_cast(working)
    conditions = [standard_conditions(float64_case.batches, 1.0)[0]]
    exact, _ = run_original(float64_case, conditions)
    check_finite(float64_case, conditions, exact)
    observed = pool.run(_rank, case.plan.mesh.world, working, conditions)[0]
    draws: list[int] = []

    def counted(self: WorkingRun, k: int) -> Observation:
        draws.append(k)
        return _RUN(self, k)

    def again(other_case: Case) -> Observation:
        observation: Observation = pool.run(_rank, case.plan.mesh.world, other_case, conditions)[0]
        return observation

    start = time.process_time()
    with mock.patch.object(WorkingRun, "_run", counted):
        rows = WorkingRun(float64_case, working, conditions, exact, observed, again).rows()
    seconds = time.process_time() - start
    rows, unsure = split_undecided(rows)
    draw_rows: list[Row] = []
    if every:
        with (
            mock.patch.object(conditioning, "bound_with_freedom", _no_late_bound),
            mock.patch.object(
                conditioning.ErrorBounds, "_with_least_rounding", lambda self, key, one: one
            ),
        ):
            draw_rows = WorkingRun(float64_case, working, conditions, exact, observed, again).rows()
        draw_rows, _ = split_undecided(draw_rows)
    return Judgement(rows, draw_rows, unsure, max(draws), seconds)


def _no_late_bound(errors: Any, chance: float, n: float, draws: int = 0) -> conditioning.ErrorBound:
    """Return no bound unless all draws are done."""
    return conditioning.ErrorBound(0.0, 0.0) if draws else _LIMITS(errors, chance, n)


_LIMITS = conditioning.bound_with_freedom


_RUN = WorkingRun._run


def _rank(working: Case, conditions: Any) -> Observation:
    return observe_ranks(working, conditions, [])


def print_calibration(
    names: Sequence[str], dtypes: Sequence[str], seeds: int, draw_seeds: int
) -> int:
    """Print the worst errors of each model and dtype, and return the number of false alarms."""
    alarms, rows, undone = 0, 0, 0
    for name in names:
        subject = SUBJECTS[name]
        for dtype in dtypes:
            results: list[Judgement] = []
            try:
                base = prepare_case(_case(subject, dtype))
                for seed in range(seeds):
                    case = replace(base, batches=_batches(subject, seed), seed=seed)
                    results.append(judge(case, Threads(), every=seed < draw_seeds))
            except Refusal as refusal:
                print(f"{name:8} {dtype:10} refused: {refusal.diagnostics[0].title}", flush=True)
            all_rows = [row for j in results for row in j.rows]
            alarm_rows = [row for row in all_rows if not row.ok]
            draw_alarms = [row for j in results for row in j.drawn if not row.ok]
            alarms, rows = alarms + len(alarm_rows), rows + len(all_rows)
            undone += sum(bool(j.unsure) for j in results)
            if all_rows:
                full = [j for j in results if j.drawn] or results
                shares = sorted((j.worst.error for j in full), reverse=True)
                worst = max((j.worst for j in full), key=lambda row: row.error)
                runs = sum(j.draws for j in results) / len(results)
                cost = sum(j.seconds for j in results) / len(results)
                unsure = sum(bool(j.unsure) for j in results)
                print(
                    f"{name:8} {dtype:10} {len(all_rows):6} rows  worst {shares[0]:5.2f} "
                    f"median {shares[len(shares) // 2]:5.2f}  runs {1 + runs:4.1f} {cost:5.2f} s "
                    f"alarms {len(alarm_rows)} (all draws {len(draw_alarms)}) "
                    f"unsure {unsure}  {worst.kind} {worst.name} {worst.step}",
                    flush=True,
                )
                for row in (alarm_rows + draw_alarms)[:4]:
                    print("   ", row.kind, row.name, row.step, f"{row.error:.3g}", row.note)
    print(f"{alarms} false alarms in {rows} rows; {undone} programs with tipped choices")
    return alarms


def _case(subject: Subject, dtype_name: str) -> Case:
    dtype, cast = DTYPES[dtype_name]
    plan = make_plan(
        subject.model().float(), cast + subject.rows, subject.mesh, "dtype" if cast else ""
    )
    return Case(plan, _batches(subject, 0), dtype=dtype)


def _batches(subject: Subject, seed: int) -> tuple[dict[str, torch.Tensor], ...]:
    drawn_batches = [subject.batch(1 + seed * STEPS + step) for step in range(STEPS)]
    return tuple({k: _narrow(v) for k, v in batch.items()} for batch in drawn_batches)


def _narrow(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


@dataclass(frozen=True)
class BugResult:
    """The largest error of a bug over its bound, and whether the proof in that dtype finds it."""

    spec: str
    scene: str
    times: float
    found: bool
    said: str


def hunt_bugs(dtypes: Sequence[str], only: Sequence[str]) -> Iterator[BugResult]:
    """Run each bug in working dtypes only, and yield the results."""
    for bug in ZOO.values():
        if not bug.applies or bug.late or (only and bug.id not in only):
            continue
        for scene in bug.scenes:
            for dtype in dtypes:
                yield _hunt_bug(bug, scene, dtype)


def _hunt_bug(bug: Any, scene: str, dtype: str) -> BugResult:
    case = replace(SCENES[scene].case(), dtype=dtype)
    pool = Mutated(Threads(), bug.id)  # type: ignore[arg-type]
    spec = f"{bug.id} {dtype}"
    try:
        if bug.planning:
            with mutate(bug.id):
                result = judge(case, pool)
        else:
            result = judge(case, pool)
    except (Refusal, RankDied, Exception) as error:
        return BugResult(
            spec, scene, 0.0, True, f"{type(error).__name__}: {error}".split("\n")[0][:90]
        )
    row = result.worst if result.rows else None
    failing = [bad_row for bad_row in result.rows if not bad_row.ok]
    times = max(
        (bad_row.error for bad_row in result.rows if bad_row.error == bad_row.error), default=0.0
    )
    message = f"{row.kind} {row.name}" if row else ""
    return BugResult(spec, scene, times, bool(failing), message + "; ".join(result.unsure[:1]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--drawn", type=int, default=3, help="seeds with every draw")
    parser.add_argument("--zoo", nargs="*", help="bugs of the zoo, all if none is named")
    arguments = parser.parse_args()
    if arguments.zoo is None:
        print_calibration(arguments.models, arguments.dtypes, arguments.seeds, arguments.drawn)
        return
    for bug in hunt_bugs(["float32", "bfloat16"], arguments.zoo):
        print(
            f"{bug.spec:14} {bug.scene:24} {bug.times:9.3g} {bug.found!s:5} {bug.said}", flush=True
        )


if __name__ == "__main__":
    main()
