"""What a plan costs: bytes against a hand count, all figures against ranks that really run."""

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


def planned(text: str, **mesh: int) -> Plan:
    return Schedule(gpt2(), parse(Source("x.sched", text)), Settings(mesh=mesh)).plan()


def observed(rank: int, text: str) -> tuple[dict[Any, int], dict[str, int], list[int], int | None]:
    """What one step of the built program really sends and holds on this rank."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from schedlang.passes.lower.build import build
    from schedlang.runtime.comm.collectives import listen_to_collectives

    plan = planned(text)
    program = build(plan, tokens(rows=16), optimizer=lambda n: torch.optim.AdamW(n, lr=1e-3))
    program.train_step(tokens(rows=16))
    heard: Counter[Any] = Counter()
    called: Counter[str] = Counter()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                called[func.name().removeprefix("c10d::")] += 1
            return func(*args, **(kwargs or {}))

    def listen(kind: str, group: Any, size: int) -> None:
        heard[(kind, group.axes, size)] += 1

    with listen_to_collectives(listen), Calls():
        program.train_step(tokens(rows=16))
    held = program.assembly.parameters.values()
    state = program.optimizer.state.values() if program.optimizer else ()
    moments = [v for one in state for name, v in one.items() if name != "step"]
    sizes = [_bytes(held), _bytes(p.grad for p in held if p.grad is not None), _bytes(moments)]
    axis = program.assembly.stage_axis
    place = plan.mesh.index(rank, axis) if axis is not None else None
    return dict(heard), dict(called), sizes, place


def _bytes(tensors: Any) -> int:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


OWN = ("parameters", "grads", "loss and gradient norm")  # sent by torch itself, or by the program
CALLS = {
    "all-reduce": "allreduce_",
    "all-gather": "_allgather_base_",
    "reduce-scatter": "_reduce_scatter_base_",
    "send": "send",
}


def _largest(plan: Plan, rank: int) -> bool:
    """Does the rank hold the first slices, which are the largest, or none?"""
    axes = tuple(axis for one in plan.replicas if one.stage for axis in one.axes)
    return not axes or len(plan.replicas) == 1 or plan.mesh.index(rank, axes) == 0


def _kinds(heard: Mapping[Any, int]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for (kind, axes, _), count in heard.items():
        found[kind, axes] += count
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_ranks_really_do(name: str) -> None:
    """Bytes held, and collectives by kind, axes and bytes, equal those of a step on real ranks."""
    text = SCHEDULES[name]
    plan = planned(text)
    told = account(plan, tokens(rows=16))
    for rank, (heard, called, held, place) in enumerate(run_ranks(plan.mesh.world, observed, text)):
        mine = told.collectives_at(place)
        expected: Counter[Any] = Counter()
        for one in mine:
            if one.kind != "send" and (one.what not in OWN or one.phase == "step" and one.fqn):
                expected[(one.kind, one.axes, one.bytes)] += one.count
        if _largest(plan, rank):
            assert dict(expected) == heard, (rank, name)
        else:  # its slices are smaller where they are uneven; bytes are those of the largest
            assert _kinds(expected) == _kinds(heard), (rank, name)
            assert sum(k[2] * n for k, n in heard.items()) <= sum(
                k[2] * n for k, n in expected.items()
            )
        counts: Counter[str] = Counter()
        for one in mine:
            counts[CALLS[one.kind]] += one.count
        assert dict(counts) == {k: v for k, v in called.items() if k != "recv_"}, (rank, name)
        assert held in [[c.parameters, c.gradients, c.optimizer] for c in _classes(told, place)]


def _classes(told: Account, place: int | None) -> list[Any]:
    return [one for one in told.classes or () if one.place == place]


def test_bytes_by_hand() -> None:
    """One block of GPT-2 on two tensor ranks, float64: every number counted by hand."""
    told = account(planned(SCHEDULES["tensor and recompute"]), tokens(rows=2))
    (one,) = told.classes or ()
    width = 16
    block = 3 * width * (width + 1) // 2 + width * width // 2 + width  # c_attn, c_proj
    block += 4 * width * (width + 1) // 2 + 4 * width * width // 2 + width  # the feed-forward
    block += 4 * width  # two norms
    elements = 64 * width // 2 + 16 * width + 4 * block + 2 * width  # 61 words padded to 64
    assert (one.ranks, one.elements) == (2, elements)
    assert (one.parameters, one.gradients, one.optimizer) == (
        8 * elements,
        8 * elements,
        16 * elements,
    )


def test_uneven_slices_are_classes() -> None:
    """Ranks with fewer rows of a sliced parameter are another kind; together they hold all."""
    told = account(planned(MESH.format("dp=3", "  zero(stage=1, over=dp)\n")), tokens(rows=6))
    classes = told.classes or ()
    assert len(classes) > 1 and sum(one.ranks for one in classes) == 3
    whole = sum(
        fact.numel for fact in planned(MESH.format("dp=1", "")).model.unique_parameters.values()
    )
    assert sum(one.ranks * one.elements for one in classes) == whole


def test_without_a_batch() -> None:
    """Without a batch collectives, and what stages hold, are said to be not counted."""
    told = account(planned(SCHEDULES["tensor and recompute"]))
    assert told.classes and told.collectives is None
    assert any("not counted" in note for note in told.notes)
    told = account(planned(SCHEDULES["pipeline, ZeRO 1"]))
    assert told.classes is None and told.collectives is None
    assert any("not known" in note for note in told.notes)


def test_cost_does_not_grow_with_ranks() -> None:
    """A mesh of thousands of ranks has as many kinds of ranks as its stages and slices make."""
    rows = "  zero(stage=1, over=dp)\n  zero(stage=0, over=r)\n"
    plan = planned(MESH.format("r=1024, dp=2, tp=2", TENSOR + rows))
    assert plan.mesh.world == 4096
    told = account(plan)
    assert sum(one.ranks for one in told.classes or ()) == 4096 and len(told.classes or ()) <= 2


def test_slices_of_two_axes_are_those_of_each_rank() -> None:
    """Runs of equal slices are counted as ranks one by one: how many hold what, and the first."""
    rows = TENSOR + "  zero(stage=1, over=(a, dp))\n"
    plan = planned(MESH.format("a=2, dp=7, tp=2", rows))
    holdings = holdings_of(plan, stages_of(plan, Traced(), {}, None)).values()
    each = [
        sum(math.prod(one.local_shape(plan.mesh, rank)) for one in holdings)
        for rank in range(plan.mesh.world)
    ]
    counted: Counter[int] = Counter()
    for one in account(plan).classes or ():
        counted[one.elements] += one.ranks
        assert each[one.first] == one.elements and one.elements not in each[: one.first]
    assert counted == Counter(each) and len(counted) > 1


def test_what_a_plan_asks_does_not_grow_with_ranks() -> None:
    """With a batch, too: of 1,024 slices fewer places are looked up than there are slices."""

    def asked(ranks: int) -> int:
        rows = TENSOR + "  zero(stage=1, over=dp)\n"
        plan = planned(MESH.format(f"dp={ranks}, tp=2", rows))
        with patch.object(
            Mesh, "coordinates", autospec=True, side_effect=Mesh.coordinates
        ) as calls:
            account(plan, tokens(rows=ranks))
        return calls.call_count

    assert asked(4) < asked(1024) < 1024


def test_rows_are_named() -> None:
    """Every collective inside a microbatch carries the row of the module that asks for it."""
    plan = planned(SCHEDULES["tensor and recompute"])
    asked = [one for one in account(plan, tokens(rows=2)).collectives or () if one.fqn]
    assert asked and not [one for one in asked if one.row is None]
    assert all(one.fqn in plan.actions[one.row].sites for one in asked)
