"""Unity: substitutions and layouts chosen together, against all sequences, and proven."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.source import Source
from schedlang.ir.modelfile import load_model_file
from schedlang.ir.primitive import isolated_registry
from schedlang.language.syntax import parse
from schedlang.passes.complete.proposed_rows import RowTrial
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.planner.operators.layout_requests import LayoutRequest
from schedlang.passes.planner.operators.layout_rows import find_legal_layouts, layout_schedule
from schedlang.passes.planner.operators.operator_graph import Graph, build_graph
from schedlang.passes.planner.operators.paper_planners import axis_requests
from schedlang.passes.planner.operators.placements import AxisPlacement, MeshPlacement
from schedlang.passes.planner.operators.solver import solve
from schedlang.passes.planner.operators.unity import (
    Substitution,
    SubstitutionPrice,
    apply_substitutions,
    find_substitutions,
    search_substitutions,
)
from schedlang.passes.planner.values import Kind
from schedlang.schedule import Schedule
from tests import models
from tests.engine import Threads
from tests.models import Stack
from tests.planner.test_operators import Slow, cheapest, trial_of
from tests.proofs import proven


class Starts(Slow):
    """Costs in which an operator takes a start beside its bytes."""

    def operator_seconds(self, kind: Kind, flops: float, moved: float) -> float:
        return 50.0 + flops / 8 + moved


class Norm(nn.Module):
    """A norm of several operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class RMSNorm(Norm):
    """By the name by which norms are known."""


class Gated(nn.Module):
    """Gates between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A norm and gates, with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = RMSNorm(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


X = {"x": torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0))}


@cache
def known() -> tuple[RowTrial, Graph, list[Substitution]]:
    trial = trial_of(Stack(Block() for _ in range(2)).double(), X)
    graph = build_graph(trial)
    return trial, graph, find_substitutions(trial, graph)


def sequences(
    rules: Sequence[Substitution], done: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """All sequences of substitutions, one after the other."""
    yield done
    for k, rule in enumerate(rules):
        if k not in done and not any(rule.clashes(rules[one]) for one in done):
            yield from sequences(rules, (*done, k))


def price(graph: Graph, those: Sequence[Substitution], limit: float) -> float:
    """The best layouts of the graph that substitutions make, built anew."""
    on, best = apply_substitutions(graph, those), math.inf
    for asked in axis_requests(LayoutRequest(2, Starts(1.0))):
        found = solve(MeshPlacement((AxisPlacement(on, asked),)).problem, limit)
        best = min(best, found.seconds if found else math.inf)
    return best


def test_the_language_has_kernels_and_recomputation_as_substitutions() -> None:
    """Found by what modules compute: a norm, gates, and blocks that run again."""
    _, _, rules = known()
    assert [str(one.row) for one in rules] == [
        "blocks.*.norm  fuse(backend=rowwise)",
        "blocks.*.mlp  replace_kernel(gated)",
        "blocks.*  checkpoint()",
    ]


def test_rotations_and_sums_before_norms_are_one_kernel_each() -> None:
    """Of a Llama's layer: what turns queries and keys, and the sum that the second norm reads."""
    trial = trial_of(models.llama(layers=2), models.tokens(8))
    graph = build_graph(trial)
    found = {str(one.row): one for one in find_substitutions(trial, graph)}
    for row, names, inside in (
        ("model.layers.*.self_attn  replace_kernel(rope)", "mul cat mul add " * 2, 6),
        ("model.layers.*  replace_kernel(add_norm)", "add LlamaRMSNorm", 1),
    ):
        nodes = sorted(found[row].nodes)
        assert [graph.nodes[at].step.name for at in nodes] == names.split()
        made = [apply_substitutions(graph, [found[row]]).nodes[at] for at in nodes]
        assert [one.kernels for one in made] == [1] + [0] * (len(nodes) - 1)
        results = {
            graph.result_name(at, 0) for at in nodes
        }  # of which some are not read from memory
        assert len(results & {name for one in made for name in one.inside_kernel}) == inside
    both = [found[row] for row in found if "_layernorm" in row or "add_norm" in row]
    assert sum(one.clashes(other) for one in both for other in both if one != other) == 2


def test_products_of_one_input_are_merged_where_the_verb_is_known() -> None:
    """What they read is read once, and one product starts."""
    with isolated_registry():
        found = load_model_file("examples/techniques/merge_products/model.py", None)
        trial = trial_of(found.model(), {"x": torch.ones(4, 6, 8), "y": torch.ones(4, 6, 8)})
        graph = build_graph(trial)
        rule = find_substitutions(trial, graph)[0]
        sys.modules.pop("merge_products")
    assert str(rule.row) == "layers.*  merge_products(q, k, v)"
    nodes = [apply_substitutions(graph, [rule]).nodes[at] for at in sorted(rule.nodes)]
    assert [(one.kernels, *one.inside_kernel) for one in nodes] == [(1,), (0, "x"), (0, "x")]


@pytest.mark.parametrize("share", [math.inf, 1.0, 0.7])
def test_equals_all_sequences_of_substitutions(share: float) -> None:
    """Freely, and where memory binds; never worse than layouts alone."""
    _, graph, rules = known()
    alone = solve(MeshPlacement((AxisPlacement(graph, LayoutRequest(2, Starts(1.0))),)).problem)
    assert alone is not None
    limit = share * alone.bytes
    joints = [
        MeshPlacement((AxisPlacement(graph, asked),))
        for asked in axis_requests(LayoutRequest(2, Starts(1.0)))
    ]
    fast = SubstitutionPrice(joints, rules, limit)
    every = [price(graph, [rules[k] for k in those], limit) for those in sequences(rules)]
    whole = search_substitutions(rules, fast, alpha=math.inf)
    assert whole[0][0] == min(every) and len(whole) == len(
        {frozenset(s) for s, cost in zip(sequences(rules), every) if cost < math.inf}
    )
    assert search_substitutions(rules, fast)[0][0] == min(every) <= price(graph, [], limit)
    for _, state in whole if math.isinf(share) else ():
        for free, joint, on in zip(fast.unlimited_seconds, joints, fast.problems_after(state)):
            after = solve(on.problem)
            assert after and free - after.seconds <= on.max_saving(joint) * (1 + 1e-9)
    chosen = {str(rules[k].row) for k in whole[0][1]}
    assert any("fuse" in row for row in chosen)
    assert any("checkpoint" in row for row in chosen) == (share < 1.0)


def test_a_substitution_is_solved_as_exactly_as_a_graph() -> None:
    """The layouts beside one are the best of all choices."""
    _, graph, rules = known()
    on = apply_substitutions(graph, rules[1:])
    for asked in axis_requests(LayoutRequest(2, Starts(1.0)))[:2]:
        placed = AxisPlacement(on, asked)
        found = solve(placed.problem)
        assert found is not None and math.isclose(found.seconds, cheapest(placed, math.inf))


def test_a_kernel_moves_and_keeps_nothing_inside_and_starts_once() -> None:
    """Gates: the activation between them is neither written nor kept."""
    _, graph, rules = known()
    costs = LayoutRequest(2, Starts(1.0))
    before, after = (
        MeshPlacement((AxisPlacement(one, costs),))
        for one in (graph, apply_substitutions(graph, rules[1:2]))
    )
    nodes = sorted(rules[1].nodes)
    whole = [before.options[at].index((before.axes[0].options[at][0],)) for at in nodes]
    took = [
        sum(joint.operator_seconds(at, joint.options[at][k]) for at, k in zip(nodes, whole))
        for joint in (before, after)
    ]
    inside = graph.bytes(graph.result_name(nodes[0], 0))
    assert took[0] - took[1] == 2 * 50.0 + 3 * 2 * inside  # forward, and twice backward
    kept = [joint.saved_bytes(nodes[0], joint.options[nodes[0]][0]) for joint in (before, after)]
    assert kept == [2 * inside, 0.0]


def itself(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return out


def test_what_is_written_computes_the_same(threads: Threads) -> None:
    """Kernels, then blocks that run again where memory binds, then layouts: on two ranks."""
    trial, graph, _ = known()
    asked = {"tp": LayoutRequest(2, Starts(1e-3))}
    free = find_legal_layouts(trial, asked)
    assert free is not None
    found = find_legal_layouts(trial, asked, 0.8 * free[0].solution.bytes, substituted=True)
    assert found is not None and "checkpoint" in str(found[0].first_rows[-1])
    written = layout_schedule("Stack", {"tp": 2}, found, trial).text
    plan = Schedule(trial.facts.model, parse(Source("u.sched", written)), Settings()).plan()
    proven(threads, plan, [X], loss=itself)
