"""Unity: substitutions and layouts chosen jointly, against brute force, and verified."""

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
from tests.planner.test_operators import SlowCompute, least_by_brute, trial_of
from tests.proofs import assert_proven


class StartCosts(SlowCompute):
    """Costs with a start time per operator."""

    def operator_seconds(self, kind: Kind, flops: float, moved_bytes: float) -> float:
        return 50.0 + flops / 8 + moved_bytes


class Norm(nn.Module):
    """A norm of several operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class RMSNorm(Norm):
    """The same norm under a name that the search recognises."""


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
def block_rules() -> tuple[RowTrial, Graph, list[Substitution]]:
    trial = trial_of(Stack(Block() for _ in range(2)).double(), X)
    graph = build_graph(trial)
    return trial, graph, find_substitutions(trial, graph)


def sequences(
    rules: Sequence[Substitution], done: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Yield all sequences of compatible substitutions."""
    yield done
    for k, rule in enumerate(rules):
        if k not in done and not any(rule.clashes(rules[index]) for index in done):
            yield from sequences(rules, (*done, k))


def best_price(graph: Graph, substitutions: Sequence[Substitution], limit: float) -> float:
    """Return the best time of all layouts of the substituted graph, built from scratch."""
    graph_after, best = apply_substitutions(graph, substitutions), math.inf
    for request in axis_requests(LayoutRequest(2, StartCosts(1.0))):
        solution = solve(MeshPlacement((AxisPlacement(graph_after, request),)).problem, limit)
        best = min(best, solution.seconds if solution else math.inf)
    return best


def test_the_language_has_kernels_and_recomputation_as_substitutions() -> None:
    """Substitutions are found for a norm, for gates, and for recomputed blocks."""
    _, _, rules = block_rules()
    assert [str(rule.row) for rule in rules] == [
        "blocks.*.norm  fuse(backend=rowwise)",
        "blocks.*.mlp  replace_kernel(gated)",
        "blocks.*  checkpoint()",
    ]


def test_rotations_and_sums_before_norms_are_one_kernel_each() -> None:
    """In a Llama layer: rotary embeddings, and the residual sum before the second norm."""
    trial = trial_of(models.llama(layers=2), models.tokens(8))
    graph = build_graph(trial)
    rules = {str(item.row): item for item in find_substitutions(trial, graph)}
    for row, names, inside in (
        ("model.layers.*.self_attn  replace_kernel(rope)", "mul cat mul add " * 2, 6),
        ("model.layers.*  replace_kernel(add_norm)", "add LlamaRMSNorm", 1),
    ):
        nodes = sorted(rules[row].nodes)
        assert [graph.nodes[k].step.name for k in nodes] == names.split()
        fused_nodes = [apply_substitutions(graph, [rules[row]]).nodes[k] for k in nodes]
        assert [item.kernels for item in fused_nodes] == [1] + [0] * (len(nodes) - 1)
        results = {graph.result_name(k, 0) for k in nodes}  # of which some are not read from memory
        assert (
            len(results & {name for item in fused_nodes for name in item.inside_kernel}) == inside
        )
    norm_rules = [rules[row] for row in rules if "_layernorm" in row or "add_norm" in row]
    assert (
        sum(item.clashes(other) for item in norm_rules for other in norm_rules if item != other)
        == 2
    )


def test_products_of_one_input_are_merged_where_the_verb_is_known() -> None:
    """Merged products read their input once and start one kernel."""
    with isolated_registry():
        model_file = load_model_file("examples/techniques/merge_products/model.py", None)
        trial = trial_of(model_file.model(), {"x": torch.ones(4, 6, 8), "y": torch.ones(4, 6, 8)})
        graph = build_graph(trial)
        rule = find_substitutions(trial, graph)[0]
        sys.modules.pop("merge_products")
    assert str(rule.row) == "layers.*  merge_products(q, k, v)"
    nodes = [apply_substitutions(graph, [rule]).nodes[k] for k in sorted(rule.nodes)]
    assert [(node.kernels, *node.inside_kernel) for node in nodes] == [(1,), (0, "x"), (0, "x")]


@pytest.mark.parametrize("share", [math.inf, 1.0, 0.7])
def test_equals_all_sequences_of_substitutions(share: float) -> None:
    """The search equals all sequences, with and without a memory limit, and beats layouts only."""
    _, graph, rules = block_rules()
    layouts_only = solve(
        MeshPlacement((AxisPlacement(graph, LayoutRequest(2, StartCosts(1.0))),)).problem
    )
    assert layouts_only is not None
    limit = share * layouts_only.bytes
    joints = [
        MeshPlacement((AxisPlacement(graph, request),))
        for request in axis_requests(LayoutRequest(2, StartCosts(1.0)))
    ]
    fast = SubstitutionPrice(joints, rules, limit)
    all_prices = [
        best_price(graph, [rules[k] for k in sequence], limit) for sequence in sequences(rules)
    ]
    full_search = search_substitutions(rules, fast, alpha=math.inf)
    assert full_search[0][0] == min(all_prices) and len(full_search) == len(
        {frozenset(s) for s, cost in zip(sequences(rules), all_prices) if cost < math.inf}
    )
    assert (
        search_substitutions(rules, fast)[0][0] == min(all_prices) <= best_price(graph, [], limit)
    )
    for _, state in full_search if math.isinf(share) else ():
        for free, joint, on in zip(fast.unlimited_seconds, joints, fast.problems_after(state)):
            after = solve(on.problem)
            assert after and free - after.seconds <= on.max_saving(joint) * (1 + 1e-9)
    chosen_rows = {str(rules[k].row) for k in full_search[0][1]}
    assert any("fuse" in row for row in chosen_rows)
    assert any("checkpoint" in row for row in chosen_rows) == (share < 1.0)


def test_a_substitution_is_solved_as_exactly_as_a_graph() -> None:
    """With a substitution, layouts are still optimal."""
    _, graph, rules = block_rules()
    graph_after = apply_substitutions(graph, rules[1:])
    for request in axis_requests(LayoutRequest(2, StartCosts(1.0)))[:2]:
        placed = AxisPlacement(graph_after, request)
        solution = solve(placed.problem)
        assert solution is not None and math.isclose(
            solution.seconds, least_by_brute(placed, math.inf)
        )


def test_a_kernel_moves_and_keeps_nothing_inside_and_starts_once() -> None:
    """A fused gate neither writes nor saves its inner activation."""
    _, graph, rules = block_rules()
    costs = LayoutRequest(2, StartCosts(1.0))
    before, after = (
        MeshPlacement((AxisPlacement(graph_variant, costs),))
        for graph_variant in (graph, apply_substitutions(graph, rules[1:2]))
    )
    nodes = sorted(rules[1].nodes)
    unsplit_options = [
        before.options[node].index((before.axes[0].options[node][0],)) for node in nodes
    ]
    times = [
        sum(
            joint.operator_seconds(node, joint.options[node][k])
            for node, k in zip(nodes, unsplit_options)
        )
        for joint in (before, after)
    ]
    inside = graph.bytes(graph.result_name(nodes[0], 0))
    assert times[0] - times[1] == 2 * 50.0 + 3 * 2 * inside  # forward, and twice backward
    saved_bytes = [
        joint.saved_bytes(nodes[0], joint.options[nodes[0]][0]) for joint in (before, after)
    ]
    assert saved_bytes == [2 * inside, 0.0]


def identity_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output


def test_what_is_written_computes_the_same(threads: Threads) -> None:
    """Kernels, recomputed blocks under a memory limit, and layouts are verified on two ranks."""
    trial, graph, _ = block_rules()
    requests = {"tp": LayoutRequest(2, StartCosts(1e-3))}
    free = find_legal_layouts(trial, requests)
    assert free is not None
    layouts = find_legal_layouts(trial, requests, 0.8 * free[0].solution.bytes, substituted=True)
    assert layouts is not None and "checkpoint" in str(layouts[0].first_rows[-1])
    written = layout_schedule("Stack", {"tp": 2}, layouts, trial).text
    plan = Schedule(trial.facts.model, parse(Source("u.sched", written)), Settings()).plan()
    assert_proven(threads, plan, [X], loss=identity_loss)
