"""Sliced weights in pipeline orders: gathered once a run; results equal those of the original."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch

from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.lower.build import build
from schedlang.passes.simulate.account import account
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.proof import check_timeline
from schedlang.pipeline.timeline.proof import with_transfers as transferred
from schedlang.pipeline.timeline.sharded_weights import with_gathers
from schedlang.pipeline.timeline.table import Kind, Timeline, TimelineError, split_backwards
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from tests import models
from tests.engine import Threads
from tests.models import tokens
from tests.proofs import (
    adamw,
    assert_near,
    make_plan,
    run_prepared,
    train_on_ranks,
    train_sequential,
)
from tests.tiers import thin_out

ROWS = """
  {more}
  transformer.h pipeline_split(over=pp)
  {also}
  zero(stage=3, over=dp)
  pipeline(order="{order}", micro=4, chunks={chunks})
"""
BATCHES = [tokens(rows=9, seed=seed) for seed in (1, 2, 3)]
GATHER_KINDS = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)


def sliced_plan(
    name: str = "BFS", more: str = "", frozen: tuple[str, ...] = (), mesh: str = "dp=2, pp=2"
) -> Plan:
    model = models.gpt2(4, tied=False)
    for name_of, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name_of.startswith(frozen)))
    chunks = 1 if name == "1F1B" else 2
    also = "zero(stage=0, over=r)" if mesh.startswith("r=") else ""
    rows = ROWS.format(more=more, also=also, order=name, chunks=chunks)
    return make_plan(model, rows, mesh)


@pytest.mark.parametrize("moved", [False, True], ids=["alone", "with transfers"])
def test_breadth_first_gathers_once_a_run(moved: bool) -> None:
    """BFS: per stage one UNSHARD for all forwards, one for all backwards, one REDUCE; checked."""
    order = make_order("BFS", 2, 4, 2)
    t = with_gathers(transferred(order) if moved else order)
    check_timeline(t)
    for stage in range(4):
        kinds = Counter(Kind(k).name for k in t.kind[(t.stage == stage)].tolist())
        assert (kinds["UNSHARD"], kinds["RESHARD"], kinds["REDUCE"]) == (2, 2, 1)
        row = [
            Kind(k).name for k in t.kind[t.stage == stage] if k in (*GATHER_KINDS, Kind.F, Kind.B)
        ]
        assert row == ["UNSHARD", *"FFFF", "RESHARD", "UNSHARD", *"BBBB", "REDUCE", "RESHARD"]
    computed = t.pick(~np.isin(t.kind, GATHER_KINDS))
    assert computed == (transferred(order) if moved else order)


def test_one_stage_at_a_time() -> None:
    """No rank ever has two stages gathered."""
    t = with_gathers(make_order("BFS", 2, 4, 3))
    for rank in range(2):
        gathered: set[int] = set()
        for op in t.rows(rank):
            if op.kind is Kind.UNSHARD:
                gathered.add(op.stage)
            elif op.kind is Kind.RESHARD:
                gathered.remove(op.stage)
            assert len(gathered) <= 1
        assert not gathered


def test_a_missing_gather_is_found() -> None:
    """A timeline without its last UNSHARD, or with a REDUCE too early, is refused."""
    t = with_gathers(make_order("BFS", 2, 4, 2))
    rows = np.arange(len(t)) != np.flatnonzero(t.kind == Kind.UNSHARD)[-1]
    with pytest.raises(TimelineError, match="waits for an UNSHARD"):
        check_timeline(t.pick(rows))
    rows = np.arange(len(t))
    (reduce_row,) = np.flatnonzero((t.kind == Kind.REDUCE) & (t.stage == 0))
    rows[[reduce_row - 1, reduce_row]] = rows[[reduce_row, reduce_row - 1]]
    with pytest.raises(TimelineError, match="has no REDUCE after it"):
        check_timeline(t.pick(rows))


@pytest.mark.parametrize(
    "plain",
    [
        make_order("1F1B", 4, 8),
        make_order("GPipe", 4, 8),
        make_order("Interleaved1F1B", 2, 4, 2),
        make_order("BFS", 2, 1, 2),
        make_order("ZB-V", 2, 8),
        split_backwards(make_order("BFS", 2, 4, 2)),
    ],
    ids=["1F1B", "GPipe", "interleaved", "one microbatch", "V", "halves"],
)
def test_the_others_stay_as_they_are(plain: Timeline) -> None:
    """Nothing is added if runs have one operation, a rank has one stage, or backward halves are
    apart."""
    assert with_gathers(plain) == plain


@pytest.mark.parametrize(
    ("name", "more", "frozen"),
    thin_out(
        [
            ("BFS", "", ()),
            ("BFS", "transformer.h.* checkpoint()", ()),
            ("BFS", "transformer.h.0 offload(activations, to=cpu)", ()),
            (
                "BFS",
                "",
                ("transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1"),
            ),
            ("1F1B", "", ()),
            ("Interleaved1F1B", "", ()),
        ]
    ),
    ids=["plain", "checkpoint", "offload", "frozen", "1F1B", "interleaved"],
)
def test_trained(threads: Threads, name: str, more: str, frozen: tuple[str, ...]) -> None:
    """Losses, clipped gradients and state of three steps equal those of the plain loop."""
    plan = sliced_plan(name, more, frozen)
    results = train_on_ranks(threads, plan, BATCHES, adamw, clip=0.5)
    assert_near(results, train_sequential(plan.model.model, BATCHES, adamw, clip=0.5))


@pytest.mark.deep
def test_replicas_of_slices(threads: Threads) -> None:
    """The same with replicas of slices, whose gradients are summed once a run."""
    plan = sliced_plan(mesh="r=2, dp=2, pp=2")
    batches = [tokens(rows=17, seed=seed) for seed in (1, 2)]
    results = train_on_ranks(threads, plan, batches, adamw)
    assert_near(results, train_sequential(plan.model.model, batches, adamw))


def evaluate_and_train(
    plan: Plan, prepared: Prepared
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    with enter_modes(Float64()):
        program = build(plan, BATCHES[0], optimizer=adamw, prepared=prepared)
        results = []
        for batch in BATCHES:
            for _ in range(2):
                results.append((program.eval_step(batch)["loss"], program.state_dict()))
                program.train_step(batch)
        return results


def test_evaluated_between_steps(threads: Threads) -> None:
    """An evaluation uses the current weights, before and after each step."""
    plan = sliced_plan()
    (results, *_) = run_prepared(threads, evaluate_and_train, plan, BATCHES[0])
    model = copy.deepcopy(plan.model.model).eval()
    losses = set()
    for k, (loss, state) in enumerate(results):
        with enter_modes(Float64()), torch.no_grad():
            model.load_state_dict(state)
            expected = model(**BATCHES[k // 2])["loss"]
        torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-9, atol=0)
        losses.add(float(loss))
    assert len(losses) == len(results)


def test_as_often_as_runs() -> None:
    """The plan has one forward and one backward gather of each unit, and one reduction."""
    gathers: Counter[tuple[str, str, str]] = Counter()
    for collective in account(sliced_plan(), tokens(rows=16)).collectives or ():
        if collective.what in ("parameters", "grads") and collective.kind != "all-reduce":
            gathers[collective.kind, collective.phase, collective.fqn] += collective.count
    assert len(gathers) >= 3 * 5 and set(gathers.values()) == {1}
