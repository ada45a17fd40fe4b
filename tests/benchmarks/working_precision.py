"""Working precision: how near right programs come to their bounds, and which bugs are above them.

Models under rows that reorder their sums, trained in low dtypes on many seeds: of each tensor the
share of its bound that the error takes, and how many are above it (false alarms).  With `--zoo`
each bug of the zoo in the working dtype alone: how many times its bound the tensor moves that moves
most, beside the same program without the bug, and whether the proof finds it.
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
from tests.proofs import planned
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
    """A state-space model: scans, convolutions, gates."""
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
    "experts": Subject(expert_models.tiny, "zero(stage=0, over=dp)", "dp=2", expert_models.batch),
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
class Judged:
    """The rows of one program in its working dtype, what is undecided, and the runs it took."""

    rows: Sequence[Row]
    drawn: Sequence[Row]  # the same, each against the bound of all draws
    unsure: Sequence[str]
    draws: int
    seconds: float  # of the processor, for the runs of the original

    @property
    def worst(self) -> Row:
        """The row that is farthest from the original, for its bound."""
        return max(
            self.drawn or self.rows, key=lambda row: row.error if row.error == row.error else 0.0
        )


def judged(case: Case, pool: Any, every: bool = False) -> Judged:
    """The case's program in its working dtype against its bounds, if asked also from every draw."""
    case = case if case.prepared is not None else prepare_case(case)
    working, wide = working_case(case), randomised_float64(case)
    assert working is not None
    check_cast(working)
    told = [standard_conditions(wide.batches, 1.0)[0]]
    exact, _ = run_original(wide, told)
    check_finite(wide, told, exact)
    ran = pool.run(_rank, case.plan.mesh.world, working, told)[0]
    draws: list[int] = []

    def counted(self: WorkingRun, draw: int) -> Observation:
        draws.append(draw)
        return _RUN(self, draw)

    def again(other: Case) -> Observation:
        found: Observation = pool.run(_rank, case.plan.mesh.world, other, told)[0]
        return found

    start = time.process_time()
    with mock.patch.object(WorkingRun, "_run", counted):
        rows = WorkingRun(wide, working, told, exact, ran, again).rows()
    seconds = time.process_time() - start
    rows, unsure = split_undecided(rows)
    drawn: list[Row] = []
    if every:
        with (
            mock.patch.object(conditioning, "bound_with_freedom", _late),
            mock.patch.object(
                conditioning.ErrorBounds, "_with_least_rounding", lambda self, key, one: one
            ),
        ):
            drawn = WorkingRun(wide, working, told, exact, ran, again).rows()
        drawn, _ = split_undecided(drawn)
    return Judged(rows, drawn, unsure, max(draws), seconds)


def _late(errors: Any, chance: float, n: float, draws: int = 0) -> conditioning.ErrorBound:
    """No bound from some of the draws."""
    return conditioning.ErrorBound(0.0, 0.0) if draws else _LIMITS(errors, chance, n)


_LIMITS = conditioning.bound_with_freedom


_RUN = WorkingRun._run


def _rank(working: Case, told: Any) -> Observation:
    return observe_ranks(working, told, [])


def calibrate(names: Sequence[str], dtypes: Sequence[str], seeds: int, drawn: int) -> int:
    """Print the worst shares of each model and dtype; the number of false alarms."""
    alarms, rows, undone = 0, 0, 0
    for name in names:
        one = SUBJECTS[name]
        for word in dtypes:
            found: list[Judged] = []
            try:
                base = prepare_case(_case(one, word))
                for seed in range(seeds):
                    case = replace(base, batches=_batches(one, seed), seed=seed)
                    found.append(judged(case, Threads(), every=seed < drawn))
            except Refusal as refusal:
                print(f"{name:8} {word:10} refused: {refusal.diagnostics[0].title}", flush=True)
            every = [row for j in found for row in j.rows]
            bad = [row for row in every if not row.ok]
            late = [row for j in found for row in j.drawn if not row.ok]
            alarms, rows = alarms + len(bad), rows + len(every)
            undone += sum(bool(j.unsure) for j in found)
            if every:
                full = [j for j in found if j.drawn] or found
                shares = sorted((j.worst.error for j in full), reverse=True)
                worst = max((j.worst for j in full), key=lambda row: row.error)
                runs = sum(j.draws for j in found) / len(found)
                cost = sum(j.seconds for j in found) / len(found)
                unsure = sum(bool(j.unsure) for j in found)
                print(
                    f"{name:8} {word:10} {len(every):6} rows  worst {shares[0]:5.2f} "
                    f"median {shares[len(shares) // 2]:5.2f}  runs {1 + runs:4.1f} {cost:5.2f} s "
                    f"alarms {len(bad)} (all draws {len(late)}) "
                    f"unsure {unsure}  {worst.kind} {worst.name} {worst.step}",
                    flush=True,
                )
                for row in (bad + late)[:4]:
                    print("   ", row.kind, row.name, row.step, f"{row.error:.3g}", row.note)
    print(f"{alarms} false alarms in {rows} rows; {undone} programs with tipped choices")
    return alarms


def _case(one: Subject, word: str) -> Case:
    dtype, cast = DTYPES[word]
    plan = planned(one.model().float(), cast + one.rows, one.mesh, "dtype" if cast else "")
    return Case(plan, _batches(one, 0), dtype=dtype)


def _batches(one: Subject, seed: int) -> tuple[dict[str, torch.Tensor], ...]:
    given = [one.batch(1 + seed * STEPS + step) for step in range(STEPS)]
    return tuple({k: _narrow(v) for k, v in batch.items()} for batch in given)


def _narrow(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


@dataclass(frozen=True)
class Hunted:
    """What a bug moves, in multiples of bounds, and whether the proof in that dtype alone fails."""

    spec: str
    scene: str
    times: float
    found: bool
    said: str


def hunted(dtypes: Sequence[str], only: Sequence[str]) -> Iterator[Hunted]:
    """Hunt each bug in working dtypes alone."""
    for bug in ZOO.values():
        if not bug.applies or bug.late or (only and bug.id not in only):
            continue
        for scene in bug.scenes:
            for dtype in dtypes:
                yield _hunted(bug, scene, dtype)


def _hunted(bug: Any, scene: str, dtype: str) -> Hunted:
    case = replace(SCENES[scene].case(), dtype=dtype)
    pool = Mutated(Threads(), bug.id)  # type: ignore[arg-type]
    spec = f"{bug.id} {dtype}"
    try:
        if bug.planning:
            with mutate(bug.id):
                done = judged(case, pool)
        else:
            done = judged(case, pool)
    except (Refusal, RankDied, Exception) as error:
        return Hunted(
            spec, scene, 0.0, True, f"{type(error).__name__}: {error}".split("\n")[0][:90]
        )
    row = done.worst if done.rows else None
    failing = [one for one in done.rows if not one.ok]
    times = max((one.error for one in done.rows if one.error == one.error), default=0.0)
    said = f"{row.kind} {row.name}" if row else ""
    return Hunted(spec, scene, times, bool(failing), said + "; ".join(done.unsure[:1]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--drawn", type=int, default=3, help="seeds with every draw")
    parser.add_argument("--zoo", nargs="*", help="bugs of the zoo, all if none is named")
    given = parser.parse_args()
    if given.zoo is None:
        calibrate(given.models, given.dtypes, given.seeds, given.drawn)
        return
    for one in hunted(["float32", "bfloat16"], given.zoo):
        print(
            f"{one.spec:14} {one.scene:24} {one.times:9.3g} {one.found!s:5} {one.said}", flush=True
        )


if __name__ == "__main__":
    main()
