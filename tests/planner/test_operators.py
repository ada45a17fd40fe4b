"""Layouts of operators: found without being told, equal to every choice, and proven to compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.syntax import parse
from schedlang.passes.complete.proposed_rows import RowTrial, fold_statements
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.planner.operators.fixed_rows import fixed_rows_of
from schedlang.passes.planner.operators.layout_requests import (
    ENTERED,
    PARTIAL,
    UNSPLIT,
    LayoutRequest,
)
from schedlang.passes.planner.operators.layout_rows import (
    AxisLayout,
    find_axis_layout,
    find_legal_layouts,
    insert_rows,
    layout_schedule,
)
from schedlang.passes.planner.operators.layout_walk import IncrementalCost, solve_by_walk
from schedlang.passes.planner.operators.operator_graph import build_graph
from schedlang.passes.planner.operators.paper_planners import (
    PLANNERS,
    axis_requests,
    combine_requests,
    find_best_layout,
    find_layout,
    splittable_dims,
)
from schedlang.passes.planner.operators.placements import AxisPlacement, MeshPlacement
from schedlang.passes.planner.operators.solver import solve
from schedlang.passes.planner.values import Kind
from schedlang.passes.reduce_model.blocks import blocks_of
from tests import models, small_models
from tests.engine import Threads
from tests.proofs import planned, proven


@dataclass(frozen=True)
class Slow:
    """Costs by which small models are split: numbers are slow, and what is sent is quick."""

    sent: float = 1e-3
    fixed: float = 0.0

    def operator_seconds(self, kind: Kind, flops: float, moved: float) -> float:
        return flops + moved

    def collective_seconds(self, op: str, size: float, ranks: int, stride: int) -> float:
        return self.fixed + size * self.sent * (2 if op == "all_reduce" else 1)


def trial_of(model: nn.Module, batch: dict[str, Tensor], loss: Any = None) -> RowTrial:
    facts = ModelFacts(model)
    return RowTrial(facts, blocks_of(facts), batch, loss)


def found(model: nn.Module, batch: dict[str, Tensor], **more: Any) -> tuple[RowTrial, AxisLayout]:
    trial = trial_of(model, batch)
    asked = LayoutRequest(2, more.pop("costs", Slow()), **more)
    one = find_axis_layout(trial, build_graph(trial), "tp", asked)
    assert one is not None
    return trial, one


def calls(one: AxisLayout) -> dict[str, str]:
    """The rows by the names of modules."""
    return {name: printer.expr(row.call) for row in one.rows for name in row.names}


def schedule(trial: RowTrial, one: AxisLayout) -> str:
    """The rows as text, as a file would have them."""
    named = [row for row in one.rows if row.names]
    whole = (row.at_paths() for row in one.rows if not row.names)
    return rows_text((*fold_statements(named, trial.full_blocks), *whole))


def rows_text(rows: Sequence[n.Stmt]) -> str:
    """Rows as text, without a header."""
    return printer.to_text(n.File(n.Header("1", None), tuple(rows))).partition("\n")[2]


def test_megatrons_plan_of_a_gpt2(threads: Threads) -> None:
    """Column then row, heads split, the vocabulary padded and split: and it computes the same."""
    model = models.gpt2(layers=2)
    trial, one = found(model, models.tokens(8), tokens=False)
    rows = calls(one)
    assert rows["transformer.h.*.attn.c_attn"] == "shard(col, blocks=3, over=tp)"
    assert rows["transformer.h.*.attn.c_proj"] == "shard(row, over=tp)"
    assert rows["transformer.h.*.mlp.c_fc"] == "shard(col, over=tp)"
    assert rows["transformer.h.*.mlp.c_proj"] == "shard(row, over=tp)"
    assert rows["transformer.wte"] == rows["lm_head"] == "shard(vocab, over=tp)"
    written = layout_schedule("GPT2LMHeadModel", {"tp": 2}, [one], trial).text
    assert "pad(vocab, multiple=2)" in written and "at transformer.h.* {" in written
    proven(threads, planned(model, schedule(trial, one), "tp=2"), [models.tokens(6)])


def test_the_sequence_is_split_between_the_blocks_of_a_llama(threads: Threads) -> None:
    """Where what is sent costs much, norms and residuals are split along the sequence."""
    model = models.llama(layers=2)
    trial, one = found(model, models.tokens(8), costs=Slow(8.0))
    rows = calls(one)
    assert rows["model.layers.*.self_attn.q_proj"] == "shard(col, over=tp)"
    assert rows["model.layers.*.self_attn.o_proj"] == "shard(row, output=S(seq), over=tp)"
    assert "input=S(seq)" in rows["model.layers.*.input_layernorm"]
    assert rows["model.layers.0"] == "shard(input=S(seq), over=tp)"
    proven(threads, planned(model, schedule(trial, one), "tp=2"), [models.tokens(6)])


@pytest.mark.parametrize(
    "model, column, row",
    [
        (models.bert, "bert.encoder.layer.*.intermediate", "bert.encoder.layer.*.output"),
        (models.bloom, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        (models.qwen3, "self_attn.q_proj", "self_attn.o_proj"),
    ],
)
def test_pairs_of_other_models(model: Any, column: str, row: str) -> None:
    """Projections are split by columns, and those that read them by rows."""
    rows = calls(found(model(), models.tokens(8), tokens=False)[1])
    of = {name: next(r for n, r in rows.items() if name in n) for name in (column, row)}
    assert of == {column: "shard(col, over=tp)", row: "shard(row, over=tp)"}


def test_rows_of_a_user_are_completed() -> None:
    """One weight is pinned, and all else follows: GSPMD's completion."""
    pins = {"model.layers.*.mlp.up_proj.weight": 0}
    rows = calls(found(models.llama(), models.tokens(8), costs=Slow(fixed=1e6), pins=pins)[1])
    assert rows == {
        "model.layers.*.mlp.gate_proj": "shard(col, over=tp)",
        "model.layers.*.mlp.up_proj": "shard(col, over=tp)",
        "model.layers.*.mlp.down_proj": "shard(row, over=tp)",
    }


LAYER = "model.layers.*"
WRITTEN = (
    (f"{LAYER}.mlp.up_proj  shard(col, over=tp)", {"gate_proj": "col", "down_proj": "row"}),
    (f"{LAYER}.mlp.up_proj  shard(col, output=R, over=tp)", {}),
    (
        f"{LAYER}.self_attn.q_proj  shard(col, over=tp)",
        {"k_proj": "col", "v_proj": "col", "o_proj": "row"},
    ),
)


@pytest.mark.parametrize("written, more", WRITTEN)
def test_what_a_schedule_says_is_a_fixed_point(
    threads: Threads, written: str, more: dict[str, str]
) -> None:
    """Rows stay as they are, what they ask for follows, and nothing else where it does not pay."""
    model = models.llama(layers=2)
    trial = trial_of(model, models.tokens(8))
    given = fixed_rows_of(planned(model, written, "tp=2"), trial.full_blocks)
    made = find_legal_layouts(trial, {"tp": LayoutRequest(2, Slow(fixed=1e6))}, given=given)
    assert made is not None
    found = {name.rpartition(".")[2]: one for name, one in calls(made[0]).items()}
    assert found == {name: f"shard({style}, over=tp)" for name, style in more.items()}
    rows = f"{written}\n{schedule(trial, made[0])}"
    proven(threads, planned(model, rows, "tp=2"), [models.tokens(6)])


def test_half_of_a_plan_is_completed_to_the_whole() -> None:
    """Rows that say how activations lie as well; of all rows nothing is left to add."""
    model, costs = models.llama(layers=2), Slow(8.0)
    trial, one = found(model, models.tokens(8), costs=costs)
    for keeps in ("mlp", "nothing"):
        half = [row for row in one.rows if keeps not in row.names[0]]
        given = fixed_rows_of(
            planned(model, rows_text(fold_statements(half, trial.full_blocks)), "tp=2"),
            trial.full_blocks,
        )
        made = find_legal_layouts(trial, {"tp": LayoutRequest(2, costs)}, given=given)
        assert made and set(made[0].rows) == set(one.rows) - set(half)
        assert made[0].seconds == one.seconds


def test_a_weight_of_two_modules_is_whole_in_both_or_in_none() -> None:
    """No module alone computes from a part of the tokens: one gradient would be a part of a sum."""
    model = models.gpt2(layers=2)
    rows = calls(found(model, models.tokens(8), costs=Slow(1.0))[1])
    assert "input" not in rows.get("lm_head", "") and "input" not in rows.get("transformer.wte", "")
    graph = build_graph(trial_of(model, models.tokens(8)))
    placed = AxisPlacement(graph, LayoutRequest(2, Slow(1.0)))
    edges = [edge for edge in graph.edges if edge.value == "transformer.wte.weight"]
    assert [placed.redistribution_seconds(edge, UNSPLIT, ENTERED) for edge in edges] == [
        math.inf
    ] * 2


def test_an_axis_that_would_be_idle_splits_what_costs_least() -> None:
    """Of all modules the one that is the best to split, since a mesh has its ranks."""
    trial, one = found(Pair(), X, costs=Slow(fixed=1e9))
    graph, tried = one.placed.graph, []
    placed = AxisPlacement(graph, LayoutRequest(2, Slow(fixed=1e9)))
    for at, node in enumerate(graph.nodes):
        if node.step.module:
            problem, seconds = placed.problem, list(placed.problem.seconds)
            whole = [not option.split for option in placed.options[at]]
            seconds[at] = np.where(whole, np.inf, seconds[at])
            tried.append(solve(replace(problem, seconds=tuple(seconds))))
    assert one.rows and one.seconds == min(each.seconds for each in tried if each)


def test_rows_begin_the_first_step_though_it_is_empty() -> None:
    """What is written is what is planned, and comments stay where they were."""
    trial, one = found(Pair(), X, costs=Slow(fixed=1e9))
    begun = 'schedule 1\nmesh(tp=2)  # two\nstep "a" {}\n# the end\n'
    made = insert_rows(Source("x.sched", begun), [one], trial)
    first = made.items[1]
    assert isinstance(first, n.Step) and first.block.body == fold_statements(
        one.rows, trial.full_blocks
    )
    assert "mesh(tp=2)  # two\n" in made.text and made.text.endswith("}\n# the end\n")
    assert expand(made, trial.facts).plan == expand(parse(made.span.source), trial.facts).plan


def test_parameters_lie_in_slices_where_memory_binds() -> None:
    """Split by rows, ZeRO's third stage fits where the first does not."""
    graph = build_graph(trial_of(models.gpt2(), models.tokens(8)))
    stages = {
        stage: solve(
            AxisPlacement(graph, LayoutRequest(2, Slow(), mode="rows", zero=stage)).problem
        )
        for stage in (0, 1, 3)
    }
    whole, first, third = (stages[stage] for stage in (0, 1, 3))
    assert whole and first and third
    assert whole.bytes > first.bytes > third.bytes
    assert whole.seconds > first.seconds < third.seconds  # each updates its slice
    asked = LayoutRequest(2, Slow(), mode="rows", zero=3, counts_saved=False)
    over = find_layout(graph, [asked])
    assert over is not None  # a second axis that splits nothing holds the slices of the first
    whole_ones = dict.fromkeys(over.joint.parameters, -1)
    again = find_layout(
        graph, [replace(asked, mode="tensors", pins=whole_ones)], done=over.decided_axes()
    )
    assert again is not None and again.solution.bytes == over.solution.bytes


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def square(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out**2).mean()


def test_convolutions_are_split_along_places(threads: Threads) -> None:
    """Edges of large pictures are cheaper to send than channels."""
    torch.manual_seed(0)
    model, batch = Pictures(), {"x": torch.randn(4, 2, 32, 32)}
    trial = trial_of(model, batch, square)
    one = find_axis_layout(trial, build_graph(trial), "sp", LayoutRequest(2, Slow(1.0)))
    assert one is not None
    assert calls(one) == {
        "a": "shard(input=S(2), output=S(2), over=sp)",
        "b": "shard(input=S(2), output=R, over=sp)",
    }
    proven(threads, planned(model, schedule(trial, one), "sp=2"), [batch], loss=square)


def test_experts_lie_on_ranks_that_split_the_rows() -> None:
    """Rows are sent to their experts, and all else is as data parallelism has it."""
    trial = trial_of(small_models.mixtral(2), models.tokens(8))
    one = find_axis_layout(
        trial, build_graph(trial), "ep", LayoutRequest(2, Slow(), mode="rows", zero=1)
    )
    assert one is not None
    assert [str(row) for row in one.rows] == [
        "model.layers.*.mlp.experts  expert_parallel(over=ep)",
        "zero(stage=1, over=ep)",
    ]


def t5() -> nn.Module:
    """T5, whose first blocks alone have a table of positions."""
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 4, "d_kv": 4}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(vocab_size=64, dropout_rate=0.0, **sizes, **ends)
    return transformers.T5ForConditionalGeneration(config).double()


MANY = (models.bert, models.bloom, models.qwen3, models.bart, models.phi3, models.gemma2, t5)


@pytest.mark.deep
@pytest.mark.parametrize("tokens, sent", [(False, 1e-3), (True, 8.0)])
@pytest.mark.parametrize("make", MANY)
def test_layouts_of_many_models_compute_the_same(
    threads: Threads, make: Any, tokens: bool, sent: float
) -> None:
    """With activations split along the sequence where that is quicker, and without."""
    model = make()
    trial, one = found(model, models.tokens(8), tokens=tokens, costs=Slow(sent))
    proven(threads, planned(model, schedule(trial, one), "tp=2"), [models.tokens(6)])


@pytest.mark.deep
def test_two_axes_of_a_gpt2(threads: Threads) -> None:
    """Rows over one axis, tensors over the other: as one schedule it computes the same."""
    model = models.gpt2(layers=2)
    asked = LayoutRequest(2, Slow())
    trial = trial_of(model, models.tokens(8))
    found = find_legal_layouts(trial, {"dp": asked, "tp": asked})
    assert found is not None
    inner = sorted(found, key=lambda one: one.placed.asked.mode, reverse=True)
    assert [one.placed.asked.mode for one in inner] == ["tensors", "rows"]
    rows = "\n".join(schedule(trial, one) for one in inner)
    proven(threads, planned(model, rows, "dp=2, tp=2"), [models.tokens(6)])


# -- every choice -------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=bias), nn.Linear(8, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) + x).sum()


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 6)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.table(ids)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.sigmoid(self.a(x)) * self.b(x)).sum()


X = {"x": torch.ones(2, 4, 4)}
IDS = {"ids": torch.zeros(2, 4, dtype=torch.long)}
SMALL = [(Pair(), X), (Pair(False), X), (Looked(), IDS), (Gated(), X)]


def cheapest(placed: AxisPlacement | MeshPlacement, limit: float) -> float:
    """The least seconds of all choices of nodes and parameters that fit; values by their best."""
    problem, nodes = placed.problem, len(placed.graph.nodes)
    own = nodes + len(placed.parameters)
    seconds, size = np.zeros(1), np.zeros(1)

    def along(table: np.ndarray, *variables: int) -> np.ndarray:
        """A table with one dim for each variable, and one for what is at its best."""
        shape = [1] * (own + 1)
        for variable, length in zip(variables, table.shape):
            shape[min(variable, own)] = length
        return table.reshape(shape)

    for v in range(own):
        seconds = seconds + along(problem.seconds[v], v)
        size = size + along(problem.bytes[v], v)
    for (i, j), costs in problem.pairs.items():
        seconds = seconds + along(costs, i, j) if j < own else seconds
    for value in range(own, len(problem.seconds)):
        told = along(problem.seconds[value], value)
        for (i, j), costs in problem.pairs.items():
            told = told + along(costs, i, j) if j == value else told
        seconds = seconds + told.min(axis=-1, keepdims=True)
    return float(np.where(size <= limit, seconds, np.inf).min())


MOST = 3 << 20  # choices that are tried


@pytest.mark.parametrize("sent, fixed", [(1e-3, 0.0), (1.0, 5.0), (30.0, 0.0)])
@pytest.mark.parametrize("model, batch", SMALL, ids=["pair", "unbiased", "looked", "gated"])
def test_equals_every_choice_on_recorded_graphs(
    model: nn.Module, batch: dict[str, Tensor], sent: float, fixed: float
) -> None:
    """Freely, and under a limit of bytes, of tensors and of rows."""
    graph = build_graph(trial_of(model, batch))
    assert len(graph.nodes) <= 8
    for mode in ("tensors", "rows"):
        placed = AxisPlacement(graph, LayoutRequest(2, Slow(sent, fixed), mode=mode))
        free = solve(placed.problem)
        assert free is not None and math.isclose(free.seconds, cheapest(placed, math.inf))
        limit = free.bytes * 0.8
        tight, known = solve(placed.problem, limit), cheapest(placed, limit)
        assert math.isclose(tight.seconds if tight else math.inf, known)
        for most, best_ in ((math.inf, free), (limit, tight)):
            walk = solve_by_walk(placed.problem, most)
            assert (walk and walk.seconds) == (best_ and best_.seconds)


def test_an_axis_sends_what_the_others_leave_of_a_value() -> None:
    """Half as much where another axis splits it; where both move, the smaller is sent first."""
    graph = build_graph(trial_of(Pair(), X))
    sent, ranks = Slow(1.0), 2
    several = LayoutRequest(ranks, sent, mode="rows"), LayoutRequest(ranks, sent)
    joint = MeshPlacement(tuple(AxisPlacement(graph, one) for one in several))
    edge = next(e for e in graph.edges if e.source[0] >= 0 and graph.nodes[e.source[0]].step.module)
    summed = joint.axes[1].redistribution_seconds(edge, PARTIAL, UNSPLIT)
    assert (
        summed > 0
        and joint.redistribution_seconds(edge, (UNSPLIT, PARTIAL), (UNSPLIT, UNSPLIT)) == summed
    )
    assert joint.redistribution_seconds(edge, (0, PARTIAL), (0, UNSPLIT)) == summed / ranks
    both = MeshPlacement(tuple(AxisPlacement(graph, LayoutRequest(ranks, sent)) for _ in several))
    whole = both.axes[0].redistribution_seconds(edge, 2, UNSPLIT)
    assert both.redistribution_seconds(edge, (2, 2), (UNSPLIT, UNSPLIT)) == whole / ranks + whole


def test_a_layer_costs_once_however_often_it_is_repeated() -> None:
    """The graph is as large, and every further layer takes as many seconds."""
    few, many = (build_graph(trial_of(models.llama(layers=n), models.tokens(8))) for n in (4, 12))
    assert len(few.nodes) == len(many.nodes) and len(few.edges) == len(many.edges)
    assert {edge.count for edge in few.edges} == {1, 3, 4}  # between blocks one time less
    assert {edge.count for edge in many.edges} == {1, 11, 12}
    costs = [solve(AxisPlacement(graph, LayoutRequest(2, Slow())).problem) for graph in (few, many)]
    longer = build_graph(trial_of(models.llama(layers=20), models.tokens(8)))
    third = solve(AxisPlacement(longer, LayoutRequest(2, Slow())).problem)
    assert costs[0] and costs[1] and third
    step = costs[1].seconds - costs[0].seconds
    assert math.isclose(third.seconds, costs[1].seconds + step, rel_tol=1e-9)


def test_planners_of_the_literature_are_settings() -> None:
    """One name of dims is never better than every operator by itself; two axes go on from one."""
    graph = build_graph(trial_of(models.gpt2(), models.tokens(8)))
    asked = LayoutRequest(2, Slow())
    both = (PLANNERS[name] for name in ("Alpa", "Mesh-TensorFlow"))
    mine, named = (one.search(graph, [asked], math.inf) for one in both)
    assert mine and named and mine.seconds <= named.seconds
    tried = [
        find_layout(graph, [replace(asked, name=n)])
        for n in splittable_dims(graph)
        if n not in graph.row_dims
    ]
    tried.append(find_layout(graph, [replace(asked, mode="rows")]))
    assert named.seconds == min(one.seconds for one in tried if one)
    two = PLANNERS["Tofu"].search(graph, [asked, asked], math.inf)
    assert two and two.joint.axes[0].options == mine.decided_axes()[0].options
    walk = PLANNERS["FlexFlow"].search(graph, [asked], math.inf)
    assert walk and walk.seconds == mine.seconds  # rows are split
    solved, walk = (find_layout(graph, [asked], solver=one) for one in (solve, solve_by_walk))
    begun = IncrementalCost(solved.problem, [0] * len(solved.problem.seconds)) if solved else None
    assert walk and solved and begun and walk.seconds == solved.seconds < 0.6 * begun.seconds


@pytest.mark.parametrize("sent, fixed", [(1e-3, 0.0), (1.0, 5.0)])
@pytest.mark.parametrize("model, batch", SMALL, ids=["pair", "unbiased", "looked", "gated"])
def test_two_axes_equal_every_choice_and_one_after_the_other_is_not_better(
    model: nn.Module, batch: dict[str, Tensor], sent: float, fixed: float
) -> None:
    """At once, and the second for what the first has left; with a limit of bytes and without."""
    graph = build_graph(trial_of(model, batch))
    axes = [LayoutRequest(2, Slow(sent, fixed)), LayoutRequest(2, Slow(2 * sent, fixed), stride=2)]
    both, tofu = find_best_layout(graph, axes), PLANNERS["Tofu"].search(graph, axes, math.inf)
    assert both is not None and tofu is not None and both.seconds <= tofu.seconds
    for several in combine_requests([axis_requests(one) for one in axes]):
        joint = MeshPlacement(tuple(AxisPlacement(graph, one) for one in several))
        nodes = len(graph.nodes) + len(joint.parameters)
        if math.prod(map(len, joint.problem.seconds[:nodes])) > MOST:
            continue
        for limit in (math.inf, both.solution.bytes * 0.8):
            found, known = solve(joint.problem, limit), cheapest(joint, limit)
            assert math.isclose(found.seconds if found else math.inf, known)
    first = tofu.joint.axes[:1]
    rows = first[0].asked.mode == "rows"
    left = axis_requests(axes[1])[: 1 if rows else None]
    least = min(
        cheapest(MeshPlacement((*first, AxisPlacement(graph, one))), math.inf) for one in left
    )
    assert math.isclose(tofu.seconds, least)
