"""Costs of a plan: bytes against a manual count, all figures against ranks that really run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest

from schedlang.diagnostics.source import Source
from schedlang.ir.mesh import Mesh
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.analyze.holdings import holdings_of
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.partition.staging import stages_of
from schedlang.passes.propagate.propagate import Traced
from schedlang.passes.simulate.account import Account, account
from schedlang.schedule import Schedule
from tests.models import gpt2, tokens
from tests.ranks import run_ranks
from tests.rows import GPT2 as TENSOR

MESH = 'schedule 1 for GPT2LMHeadModel\nmesh({})\nstep "all" {{\n{}}}\n'
PIPE = '  transformer.h  pipeline_split(over=pp)\n  {}\n  pipeline(order="1F1B", micro=4)\n'
CHUNKS = (
    '  transformer.h  pipeline_split(over=pp)\n  pipeline(order="{}", micro=4, chunks=2)\n  {}\n'
)
CHECKPOINT = "  transformer.h.*  checkpoint()\n"
SCHEDULES = {
    "tensor and recompute": MESH.format("tp=2", TENSOR + CHECKPOINT),
    "pipeline, ZeRO 1": MESH.format("dp=2, pp=2", PIPE.format("zero(stage=1, over=dp)")),
    "ZeRO 2 within, replicas across": MESH.format(
        "a=2, b=2",
        '  zero(stage=2, over=b)\n  zero(stage=0, over=a)\n  pipeline(order="GPipe", micro=2)\n',
    ),
    "recompute, ZeRO 3 in a pipeline": MESH.format(
        "dp=2, pp=2", CHECKPOINT + PIPE.format("zero(stage=3, over=dp)")
    ),
    "breadth-first, ZeRO 3 once a run": MESH.format(
        "dp=2, pp=2", CHUNKS.format("BFS", "zero(stage=3, over=dp)")
    ),
    "interleaved, ZeRO 3": MESH.format(
        "dp=2, pp=2", CHUNKS.format("Interleaved1F1B", "zero(stage=3, over=dp)")
    ),
}


def make_plan(text: str, **mesh: int) -> Plan:
    return Schedule(gpt2(), parse(Source("x.sched", text)), Settings(mesh=mesh)).plan()


def observe_rank(
    rank: int, text: str
) -> tuple[dict[Any, int], dict[str, int], list[int], int | None]:
    """Run one step on this rank; returns collectives, calls, held bytes and stage."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from schedlang.passes.lower.build import build
    from schedlang.runtime.comm.collectives import listen_to_collectives

    plan = make_plan(text)
    program = build(plan, tokens(rows=16), optimizer=lambda n: torch.optim.AdamW(n, lr=1e-3))
    program.train_step(tokens(rows=16))
    collectives: Counter[Any] = Counter()
    called: Counter[str] = Counter()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                called[func.name().removeprefix("c10d::")] += 1
            return func(*args, **(kwargs or {}))

    def listen(kind: str, group: Any, size: int) -> None:
        collectives[(kind, group.axes, size)] += 1

    with listen_to_collectives(listen), Calls():
        program.train_step(tokens(rows=16))
    parameters = program.assembly.parameters.values()
    state = program.optimizer.state.values() if program.optimizer else ()
    moments = [v for slot_values in state for name, v in slot_values.items() if name != "step"]
    sizes = [
        _total_bytes(parameters),
        _total_bytes(p.grad for p in parameters if p.grad is not None),
        _total_bytes(moments),
    ]
    axis = program.assembly.stage_axis
    stage = plan.mesh.index(rank, axis) if axis is not None else None
    return dict(collectives), dict(called), sizes, stage


def _total_bytes(tensors: Any) -> int:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


OWN_MESSAGES = ("parameters", "grads", "loss and gradient norm")  # sent by torch or by the program
CALLS = {
    "all-reduce": "allreduce_",
    "all-gather": "_allgather_base_",
    "reduce-scatter": "_reduce_scatter_base_",
    "send": "send",
}


def _has_largest_slices(plan: Plan, rank: int) -> bool:
    """Return whether the rank holds the first slices, which are the largest, or full parameters."""
    axes = tuple(
        axis
        for replica_group in plan.replicas
        if replica_group.stage
        for axis in replica_group.axes
    )
    return not axes or len(plan.replicas) == 1 or plan.mesh.index(rank, axes) == 0


def _count_kinds(collectives: Mapping[Any, int]) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for (kind, axes, _), count in collectives.items():
        counts[kind, axes] += count
    return counts


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_ranks_really_do(name: str) -> None:
    """Held bytes, and collectives by kind, axes and bytes, equal those of real ranks."""
    text = SCHEDULES[name]
    plan = make_plan(text)
    costs = account(plan, tokens(rows=16))
    for rank, (collectives, called, held_bytes, stage) in enumerate(
        run_ranks(plan.mesh.world, observe_rank, text)
    ):
        planned_collectives = costs.collectives_at(stage)
        expected: Counter[Any] = Counter()
        for collective in planned_collectives:
            if collective.kind != "send" and (
                collective.what not in OWN_MESSAGES or collective.phase == "step" and collective.fqn
            ):
                expected[(collective.kind, collective.axes, collective.bytes)] += collective.count
        if _has_largest_slices(plan, rank):
            assert dict(expected) == collectives, (rank, name)
        else:  # uneven slices are smaller here; the plan counts the largest
            assert _count_kinds(expected) == _count_kinds(collectives), (rank, name)
            assert sum(k[2] * n for k, n in collectives.items()) <= sum(
                k[2] * n for k, n in expected.items()
            )
        counts: Counter[str] = Counter()
        for collective in planned_collectives:
            counts[CALLS[collective.kind]] += collective.count
        assert dict(counts) == {k: v for k, v in called.items() if k != "recv_"}, (rank, name)
        assert held_bytes in [
            [c.parameters, c.gradients, c.optimizer] for c in _classes_at(costs, stage)
        ]


def _classes_at(costs: Account, stage: int | None) -> list[Any]:
    return [rank_class for rank_class in costs.classes or () if rank_class.place == stage]


def test_bytes_by_hand() -> None:
    """GPT-2 on two tensor-parallel ranks in float64: every number counted by hand."""
    costs = account(make_plan(SCHEDULES["tensor and recompute"]), tokens(rows=2))
    (rank_class,) = costs.classes or ()
    width = 16
    block = 3 * width * (width + 1) // 2 + width * width // 2 + width  # c_attn, c_proj
    block += 4 * width * (width + 1) // 2 + 4 * width * width // 2 + width  # the feed-forward
    block += 4 * width  # two norms
    elements = 64 * width // 2 + 16 * width + 4 * block + 2 * width  # 61 words padded to 64
    assert (rank_class.ranks, rank_class.elements) == (2, elements)
    assert (rank_class.parameters, rank_class.gradients, rank_class.optimizer) == (
        8 * elements,
        8 * elements,
        16 * elements,
    )


def test_uneven_slices_are_classes() -> None:
    """Ranks with fewer rows of a sliced parameter are a separate class; together they hold all."""
    costs = account(make_plan(MESH.format("dp=3", "  zero(stage=1, over=dp)\n")), tokens(rows=6))
    classes = costs.classes or ()
    assert len(classes) > 1 and sum(rank_class.ranks for rank_class in classes) == 3
    total = sum(
        parameter.numel
        for parameter in make_plan(MESH.format("dp=1", "")).model.unique_parameters.values()
    )
    assert sum(rank_class.ranks * rank_class.elements for rank_class in classes) == total


def test_without_a_batch() -> None:
    """Without a batch, collectives and memory of stages are reported as not counted."""
    costs = account(make_plan(SCHEDULES["tensor and recompute"]))
    assert costs.classes and costs.collectives is None
    assert any("not counted" in note for note in costs.notes)
    costs = account(make_plan(SCHEDULES["pipeline, ZeRO 1"]))
    assert costs.classes is None and costs.collectives is None
    assert any("not known" in note for note in costs.notes)


def test_cost_does_not_grow_with_ranks() -> None:
    """The number of classes depends on stages and slices, not on the number of ranks."""
    rows = "  zero(stage=1, over=dp)\n  zero(stage=0, over=r)\n"
    plan = make_plan(MESH.format("r=1024, dp=2, tp=2", TENSOR + rows))
    assert plan.mesh.world == 4096
    costs = account(plan)
    assert (
        sum(rank_class.ranks for rank_class in costs.classes or ()) == 4096
        and len(costs.classes or ()) <= 2
    )


def test_slices_of_two_axes_are_those_of_each_rank() -> None:
    """Classes of equal slices agree with a count rank by rank, including the first rank of each."""
    rows = TENSOR + "  zero(stage=1, over=(a, dp))\n"
    plan = make_plan(MESH.format("a=2, dp=7, tp=2", rows))
    holdings = holdings_of(plan, stages_of(plan, Traced(), {}, None)).values()
    elements_by_rank = [
        sum(math.prod(entry.local_shape(plan.mesh, rank)) for entry in holdings)
        for rank in range(plan.mesh.world)
    ]
    counted: Counter[int] = Counter()
    for entry in account(plan).classes or ():
        counted[entry.elements] += entry.ranks
        assert (
            elements_by_rank[entry.first] == entry.elements
            and entry.elements not in elements_by_rank[: entry.first]
        )
    assert counted == Counter(elements_by_rank) and len(counted) > 1


def test_what_a_plan_asks_does_not_grow_with_ranks() -> None:
    """With a batch, too: fewer coordinates are looked up than there are ranks."""

    def asked(ranks: int) -> int:
        rows = TENSOR + "  zero(stage=1, over=dp)\n"
        plan = make_plan(MESH.format(f"dp={ranks}, tp=2", rows))
        with patch.object(
            Mesh, "coordinates", autospec=True, side_effect=Mesh.coordinates
        ) as calls:
            account(plan, tokens(rows=ranks))
        return calls.call_count

    assert asked(4) < asked(1024) < 1024


def test_rows_are_named() -> None:
    """Every collective inside a microbatch names the row of the module that needs it."""
    plan = make_plan(SCHEDULES["tensor and recompute"])
    collectives = [
        collective
        for collective in account(plan, tokens(rows=2)).collectives or ()
        if collective.fqn
    ]
    assert collectives and not [collective for collective in collectives if collective.row is None]
    assert all(collective.fqn in plan.actions[collective.row].sites for collective in collectives)
