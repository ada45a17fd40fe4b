"""Layouts of operators: found by the solver, equal to brute force, and verified to compute."""

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
from tests.proofs import assert_proven, make_plan


@dataclass(frozen=True)
class SlowCompute:
    """A cost model that makes small models worth splitting: computing is slow, sending is quick."""

    sent: float = 1e-3
    fixed: float = 0.0

    def operator_seconds(self, kind: Kind, flops: float, moved_bytes: float) -> float:
        return flops + moved_bytes

    def collective_seconds(self, op: str, size: float, ranks: int, stride: int) -> float:
        return self.fixed + size * self.sent * (2 if op == "all_reduce" else 1)


def trial_of(model: nn.Module, batch: dict[str, Tensor], loss: Any = None) -> RowTrial:
    model_facts = ModelFacts(model)
    return RowTrial(model_facts, blocks_of(model_facts), batch, loss)


def find_layout_of(
    model: nn.Module, batch: dict[str, Tensor], **more: Any
) -> tuple[RowTrial, AxisLayout]:
    trial = trial_of(model, batch)
    request = LayoutRequest(2, more.pop("costs", SlowCompute()), **more)
    layout = find_axis_layout(trial, build_graph(trial), "tp", request)
    assert layout is not None
    return trial, layout


def calls_by_name(layout: AxisLayout) -> dict[str, str]:
    """Return the text of each row's call by module name."""
    return {name: printer.expr(row.call) for row in layout.rows for name in row.names}


def schedule_text(trial: RowTrial, layout: AxisLayout) -> str:
    """Return the rows of a layout as the text of a schedule."""
    module_rows = [row for row in layout.rows if row.names]
    global_rows = (row.at_paths() for row in layout.rows if not row.names)
    return rows_text((*fold_statements(module_rows, trial.full_blocks), *global_rows))


def rows_text(rows: Sequence[n.Stmt]) -> str:
    """Return statements as text, without a header."""
    return printer.to_text(n.File(n.Header("1", None), tuple(rows))).partition("\n")[2]


def test_megatrons_plan_of_a_gpt2(threads: Threads) -> None:
    """Column then row parallel, split heads and vocabulary; the plan is verified."""
    model = models.gpt2(layers=2)
    trial, layout = find_layout_of(model, models.tokens(8), tokens=False)
    rows = calls_by_name(layout)
    assert rows["transformer.h.*.attn.c_attn"] == "shard(col, blocks=3, over=tp)"
    assert rows["transformer.h.*.attn.c_proj"] == "shard(row, over=tp)"
    assert rows["transformer.h.*.mlp.c_fc"] == "shard(col, over=tp)"
    assert rows["transformer.h.*.mlp.c_proj"] == "shard(row, over=tp)"
    assert rows["transformer.wte"] == rows["lm_head"] == "shard(vocab, over=tp)"
    written = layout_schedule("GPT2LMHeadModel", {"tp": 2}, [layout], trial).text
    assert "pad(vocab, multiple=2)" in written and "at transformer.h.* {" in written
    assert_proven(
        threads, make_plan(model, schedule_text(trial, layout), "tp=2"), [models.tokens(6)]
    )


def test_the_sequence_is_split_between_the_blocks_of_a_llama(threads: Threads) -> None:
    """With expensive messages, norms and residuals are split along the sequence."""
    model = models.llama(layers=2)
    trial, layout = find_layout_of(model, models.tokens(8), costs=SlowCompute(8.0))
    rows = calls_by_name(layout)
    assert rows["model.layers.*.self_attn.q_proj"] == "shard(col, over=tp)"
    assert rows["model.layers.*.self_attn.o_proj"] == "shard(row, output=S(seq), over=tp)"
    assert "input=S(seq)" in rows["model.layers.*.input_layernorm"]
    assert rows["model.layers.0"] == "shard(input=S(seq), over=tp)"
    assert_proven(
        threads, make_plan(model, schedule_text(trial, layout), "tp=2"), [models.tokens(6)]
    )


@pytest.mark.parametrize(
    "model, column, row",
    [
        (models.bert, "bert.encoder.layer.*.intermediate", "bert.encoder.layer.*.output"),
        (models.bloom, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        (models.qwen3, "self_attn.q_proj", "self_attn.o_proj"),
    ],
)
def test_pairs_of_other_models(model: Any, column: str, row: str) -> None:
    """Projections are split by columns, and the projections that read them by rows."""
    rows = calls_by_name(find_layout_of(model(), models.tokens(8), tokens=False)[1])
    pair_rows = {name: next(r for n, r in rows.items() if name in n) for name in (column, row)}
    assert pair_rows == {column: "shard(col, over=tp)", row: "shard(row, over=tp)"}


def test_rows_of_a_user_are_completed() -> None:
    """With one weight pinned, the others follow, as in GSPMD's completion."""
    pins = {"model.layers.*.mlp.up_proj.weight": 0}
    rows = calls_by_name(
        find_layout_of(models.llama(), models.tokens(8), costs=SlowCompute(fixed=1e6), pins=pins)[1]
    )
    assert rows == {
        "model.layers.*.mlp.gate_proj": "shard(col, over=tp)",
        "model.layers.*.mlp.up_proj": "shard(col, over=tp)",
        "model.layers.*.mlp.down_proj": "shard(row, over=tp)",
    }


LAYER = "model.layers.*"
USER_ROWS = (
    (f"{LAYER}.mlp.up_proj  shard(col, over=tp)", {"gate_proj": "col", "down_proj": "row"}),
    (f"{LAYER}.mlp.up_proj  shard(col, output=R, over=tp)", {}),
    (
        f"{LAYER}.self_attn.q_proj  shard(col, over=tp)",
        {"k_proj": "col", "v_proj": "col", "o_proj": "row"},
    ),
)


@pytest.mark.parametrize("written, more", USER_ROWS)
def test_what_a_schedule_says_is_a_fixed_point(
    threads: Threads, written: str, more: dict[str, str]
) -> None:
    """Given rows stay, dependent rows are added, and nothing else where it does not pay."""
    model = models.llama(layers=2)
    trial = trial_of(model, models.tokens(8))
    fixed_rows = fixed_rows_of(make_plan(model, written, "tp=2"), trial.full_blocks)
    layouts = find_legal_layouts(
        trial, {"tp": LayoutRequest(2, SlowCompute(fixed=1e6))}, given=fixed_rows
    )
    assert layouts is not None
    added = {name.rpartition(".")[2]: row for name, row in calls_by_name(layouts[0]).items()}
    assert added == {name: f"shard({style}, over=tp)" for name, style in more.items()}
    rows = f"{written}\n{schedule_text(trial, layouts[0])}"
    assert_proven(threads, make_plan(model, rows, "tp=2"), [models.tokens(6)])


def test_half_of_a_plan_is_completed_to_the_whole() -> None:
    """Half of a plan is completed to the full plan; of all rows nothing is left to add."""
    model, costs = models.llama(layers=2), SlowCompute(8.0)
    trial, layout = find_layout_of(model, models.tokens(8), costs=costs)
    for keeps in ("mlp", "nothing"):
        half = [row for row in layout.rows if keeps not in row.names[0]]
        fixed_rows = fixed_rows_of(
            make_plan(model, rows_text(fold_statements(half, trial.full_blocks)), "tp=2"),
            trial.full_blocks,
        )
        layouts = find_legal_layouts(trial, {"tp": LayoutRequest(2, costs)}, given=fixed_rows)
        assert layouts and set(layouts[0].rows) == set(layout.rows) - set(half)
        assert layouts[0].seconds == layout.seconds


def test_a_weight_of_two_modules_is_whole_in_both_or_in_none() -> None:
    """A tied weight is split by tokens in both modules or in none: else a gradient is partial."""
    model = models.gpt2(layers=2)
    rows = calls_by_name(find_layout_of(model, models.tokens(8), costs=SlowCompute(1.0))[1])
    assert "input" not in rows.get("lm_head", "") and "input" not in rows.get("transformer.wte", "")
    graph = build_graph(trial_of(model, models.tokens(8)))
    placed = AxisPlacement(graph, LayoutRequest(2, SlowCompute(1.0)))
    edges = [edge for edge in graph.edges if edge.value == "transformer.wte.weight"]
    assert [placed.redistribution_seconds(edge, UNSPLIT, ENTERED) for edge in edges] == [
        math.inf
    ] * 2


def test_an_axis_that_would_be_idle_splits_what_costs_least() -> None:
    """An axis must split something: the module that costs least to split is chosen."""
    trial, layout = find_layout_of(Pair(), X, costs=SlowCompute(fixed=1e9))
    graph, tried = layout.placed.graph, []
    placed = AxisPlacement(graph, LayoutRequest(2, SlowCompute(fixed=1e9)))
    for k, node in enumerate(graph.nodes):
        if node.step.module:
            problem, seconds = placed.problem, list(placed.problem.seconds)
            is_unsplit = [not option.split for option in placed.options[k]]
            seconds[k] = np.where(is_unsplit, np.inf, seconds[k])
            tried.append(solve(replace(problem, seconds=tuple(seconds))))
    assert layout.rows and layout.seconds == min(solution.seconds for solution in tried if solution)


def test_rows_begin_the_first_step_though_it_is_empty() -> None:
    """The written schedule equals the plan, and comments stay in place."""
    trial, layout = find_layout_of(Pair(), X, costs=SlowCompute(fixed=1e9))
    text = 'schedule 1\nmesh(tp=2)  # two\nstep "a" {}\n# the end\n'
    written = insert_rows(Source("x.sched", text), [layout], trial)
    first_step = written.items[1]
    assert isinstance(first_step, n.Step) and first_step.block.body == fold_statements(
        layout.rows, trial.full_blocks
    )
    assert "mesh(tp=2)  # two\n" in written.text and written.text.endswith("}\n# the end\n")
    assert expand(written, trial.facts).plan == expand(parse(written.span.source), trial.facts).plan


def test_parameters_lie_in_slices_where_memory_binds() -> None:
    """Memory falls with the ZeRO stage; a second axis can shard what the first leaves."""
    graph = build_graph(trial_of(models.gpt2(), models.tokens(8)))
    stages = {
        stage: solve(
            AxisPlacement(graph, LayoutRequest(2, SlowCompute(), mode="rows", zero=stage)).problem
        )
        for stage in (0, 1, 3)
    }
    stage_0, stage_1, stage_3 = (stages[stage] for stage in (0, 1, 3))
    assert stage_0 and stage_1 and stage_3
    assert stage_0.bytes > stage_1.bytes > stage_3.bytes
    assert stage_0.seconds > stage_1.seconds < stage_3.seconds  # each rank updates its slice
    request = LayoutRequest(2, SlowCompute(), mode="rows", zero=3, counts_saved=False)
    joint_layout = find_layout(graph, [request])
    assert joint_layout is not None  # a second axis that splits no tensor holds slices of the first
    unsplit_pins = dict.fromkeys(joint_layout.joint.parameters, -1)
    pinned = find_layout(
        graph,
        [replace(request, mode="tensors", pins=unsplit_pins)],
        done=joint_layout.decided_axes(),
    )
    assert pinned is not None and pinned.solution.bytes == joint_layout.solution.bytes


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def mean_square(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output**2).mean()


def test_convolutions_are_split_along_places(threads: Threads) -> None:
    """For large images, sending halos is cheaper than splitting channels."""
    torch.manual_seed(0)
    model, batch = ConvNet(), {"x": torch.randn(4, 2, 32, 32)}
    trial = trial_of(model, batch, mean_square)
    layout = find_axis_layout(trial, build_graph(trial), "sp", LayoutRequest(2, SlowCompute(1.0)))
    assert layout is not None
    assert calls_by_name(layout) == {
        "a": "shard(input=S(2), output=S(2), over=sp)",
        "b": "shard(input=S(2), output=R, over=sp)",
    }
    assert_proven(
        threads, make_plan(model, schedule_text(trial, layout), "sp=2"), [batch], loss=mean_square
    )


def test_experts_lie_on_ranks_that_split_the_rows() -> None:
    """Tokens are sent to their experts; everything else is data parallel."""
    trial = trial_of(small_models.mixtral(2), models.tokens(8))
    layout = find_axis_layout(
        trial, build_graph(trial), "ep", LayoutRequest(2, SlowCompute(), mode="rows", zero=1)
    )
    assert layout is not None
    assert [str(row) for row in layout.rows] == [
        "model.layers.*.mlp.experts  expert_parallel(over=ep)",
        "zero(stage=1, over=ep)",
    ]


def t5() -> nn.Module:
    """Return a T5; only its first blocks have a table of relative positions."""
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 4, "d_kv": 4}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(vocab_size=64, dropout_rate=0.0, **sizes, **ends)
    return transformers.T5ForConditionalGeneration(config).double()


MODELS = (models.bert, models.bloom, models.qwen3, models.bart, models.phi3, models.gemma2, t5)


@pytest.mark.deep
@pytest.mark.parametrize("tokens, sent", [(False, 1e-3), (True, 8.0)])
@pytest.mark.parametrize("make", MODELS)
def test_layouts_of_many_models_compute_the_same(
    threads: Threads, make: Any, tokens: bool, sent: float
) -> None:
    """Plans of many models are verified, with sequence-split activations and without."""
    model = make()
    trial, layout = find_layout_of(model, models.tokens(8), tokens=tokens, costs=SlowCompute(sent))
    assert_proven(
        threads, make_plan(model, schedule_text(trial, layout), "tp=2"), [models.tokens(6)]
    )


@pytest.mark.deep
def test_two_axes_of_a_gpt2(threads: Threads) -> None:
    """Data parallel over one axis, tensor parallel over the other; the schedule is verified."""
    model = models.gpt2(layers=2)
    request = LayoutRequest(2, SlowCompute())
    trial = trial_of(model, models.tokens(8))
    layouts = find_legal_layouts(trial, {"dp": request, "tp": request})
    assert layouts is not None
    inner = sorted(layouts, key=lambda layout: layout.placed.asked.mode, reverse=True)
    assert [layout.placed.asked.mode for layout in inner] == ["tensors", "rows"]
    rows = "\n".join(schedule_text(trial, layout) for layout in inner)
    assert_proven(threads, make_plan(model, rows, "dp=2, tp=2"), [models.tokens(6)])


# -- every choice -------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=bias), nn.Linear(8, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) + x).sum()


class EmbeddingNet(nn.Module):
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
SMALL = [(Pair(), X), (Pair(False), X), (EmbeddingNet(), IDS), (Gated(), X)]


def least_by_brute(placed: AxisPlacement | MeshPlacement, limit: float) -> float:
    """Return the least seconds over all choices of nodes and parameters within the byte limit."""
    problem, nodes = placed.problem, len(placed.graph.nodes)
    choice_count = nodes + len(placed.parameters)
    seconds, size = np.zeros(1), np.zeros(1)

    def along(table: np.ndarray, *variables: int) -> np.ndarray:
        """Reshape a table to one dim per variable, plus one that is minimised out."""
        shape = [1] * (choice_count + 1)
        for variable, length in zip(variables, table.shape):
            shape[min(variable, choice_count)] = length
        return table.reshape(shape)

    for v in range(choice_count):
        seconds = seconds + along(problem.seconds[v], v)
        size = size + along(problem.bytes[v], v)
    for (i, j), costs in problem.pairs.items():
        seconds = seconds + along(costs, i, j) if j < choice_count else seconds
    for value in range(choice_count, len(problem.seconds)):
        value_costs = along(problem.seconds[value], value)
        for (i, j), costs in problem.pairs.items():
            value_costs = value_costs + along(costs, i, j) if j == value else value_costs
        seconds = seconds + value_costs.min(axis=-1, keepdims=True)
    return float(np.where(size <= limit, seconds, np.inf).min())


MAX_CHOICES = 3 << 20  # choices that are tried


@pytest.mark.parametrize("sent, fixed", [(1e-3, 0.0), (1.0, 5.0), (30.0, 0.0)])
@pytest.mark.parametrize("model, batch", SMALL, ids=["pair", "unbiased", "looked", "gated"])
def test_equals_every_choice_on_recorded_graphs(
    model: nn.Module, batch: dict[str, Tensor], sent: float, fixed: float
) -> None:
    """The solver and the walk equal brute force, without and with a byte limit."""
    graph = build_graph(trial_of(model, batch))
    assert len(graph.nodes) <= 8
    for mode in ("tensors", "rows"):
        placed = AxisPlacement(graph, LayoutRequest(2, SlowCompute(sent, fixed), mode=mode))
        free = solve(placed.problem)
        assert free is not None and math.isclose(free.seconds, least_by_brute(placed, math.inf))
        limit = free.bytes * 0.8
        tight, least_limited = solve(placed.problem, limit), least_by_brute(placed, limit)
        assert math.isclose(tight.seconds if tight else math.inf, least_limited)
        for max_bytes, best_ in ((math.inf, free), (limit, tight)):
            walk = solve_by_walk(placed.problem, max_bytes)
            assert (walk and walk.seconds) == (best_ and best_.seconds)


def test_an_axis_sends_what_the_others_leave_of_a_value() -> None:
    """An axis sends half as much of a value that another axis splits; the smaller goes first."""
    graph = build_graph(trial_of(Pair(), X))
    sent, ranks = SlowCompute(1.0), 2
    requests = LayoutRequest(ranks, sent, mode="rows"), LayoutRequest(ranks, sent)
    joint = MeshPlacement(tuple(AxisPlacement(graph, request) for request in requests))
    edge = next(e for e in graph.edges if e.source[0] >= 0 and graph.nodes[e.source[0]].step.module)
    summed = joint.axes[1].redistribution_seconds(edge, PARTIAL, UNSPLIT)
    assert (
        summed > 0
        and joint.redistribution_seconds(edge, (UNSPLIT, PARTIAL), (UNSPLIT, UNSPLIT)) == summed
    )
    assert joint.redistribution_seconds(edge, (0, PARTIAL), (0, UNSPLIT)) == summed / ranks
    twice_tensors = MeshPlacement(
        tuple(AxisPlacement(graph, LayoutRequest(ranks, sent)) for _ in requests)
    )
    full_seconds = twice_tensors.axes[0].redistribution_seconds(edge, 2, UNSPLIT)
    assert (
        twice_tensors.redistribution_seconds(edge, (2, 2), (UNSPLIT, UNSPLIT))
        == full_seconds / ranks + full_seconds
    )


def test_a_layer_costs_once_however_often_it_is_repeated() -> None:
    """The graph size does not depend on the number of layers, and each layer adds the same time."""
    few, many = (build_graph(trial_of(models.llama(layers=n), models.tokens(8))) for n in (4, 12))
    assert len(few.nodes) == len(many.nodes) and len(few.edges) == len(many.edges)
    assert {edge.count for edge in few.edges} == {1, 3, 4}  # between blocks one less
    assert {edge.count for edge in many.edges} == {1, 11, 12}
    costs = [
        solve(AxisPlacement(graph, LayoutRequest(2, SlowCompute())).problem)
        for graph in (few, many)
    ]
    longer = build_graph(trial_of(models.llama(layers=20), models.tokens(8)))
    third = solve(AxisPlacement(longer, LayoutRequest(2, SlowCompute())).problem)
    assert costs[0] and costs[1] and third
    step = costs[1].seconds - costs[0].seconds
    assert math.isclose(third.seconds, costs[1].seconds + step, rel_tol=1e-9)


def test_planners_of_the_literature_are_settings() -> None:
    """One dim name for all operators is never better than free choice; Tofu adds axis by axis."""
    graph = build_graph(trial_of(models.gpt2(), models.tokens(8)))
    request = LayoutRequest(2, SlowCompute())
    planners = (PLANNERS[name] for name in ("Alpa", "Mesh-TensorFlow"))
    alpa, mesh_tf = (item.search(graph, [request], math.inf) for item in planners)
    assert alpa and mesh_tf and alpa.seconds <= mesh_tf.seconds
    tried = [
        find_layout(graph, [replace(request, name=n)])
        for n in splittable_dims(graph)
        if n not in graph.row_dims
    ]
    tried.append(find_layout(graph, [replace(request, mode="rows")]))
    assert mesh_tf.seconds == min(item.seconds for item in tried if item)
    two = PLANNERS["Tofu"].search(graph, [request, request], math.inf)
    assert two and two.joint.axes[0].options == alpa.decided_axes()[0].options
    walk = PLANNERS["FlexFlow"].search(graph, [request], math.inf)
    assert walk and walk.seconds == alpa.seconds  # rows are split
    solved, walk = (find_layout(graph, [request], solver=item) for item in (solve, solve_by_walk))
    begun = IncrementalCost(solved.problem, [0] * len(solved.problem.seconds)) if solved else None
    assert walk and solved and begun and walk.seconds == solved.seconds < 0.6 * begun.seconds


@pytest.mark.parametrize("sent, fixed", [(1e-3, 0.0), (1.0, 5.0)])
@pytest.mark.parametrize("model, batch", SMALL, ids=["pair", "unbiased", "looked", "gated"])
def test_two_axes_equal_every_choice_and_one_after_the_other_is_not_better(
    model: nn.Module, batch: dict[str, Tensor], sent: float, fixed: float
) -> None:
    """Joint and sequential solutions of two axes equal brute force, with and without a limit."""
    graph = build_graph(trial_of(model, batch))
    axes = [
        LayoutRequest(2, SlowCompute(sent, fixed)),
        LayoutRequest(2, SlowCompute(2 * sent, fixed), stride=2),
    ]
    best_layout, tofu = (
        find_best_layout(graph, axes),
        PLANNERS["Tofu"].search(graph, axes, math.inf),
    )
    assert best_layout is not None and tofu is not None and best_layout.seconds <= tofu.seconds
    for requests in combine_requests([axis_requests(request) for request in axes]):
        joint = MeshPlacement(tuple(AxisPlacement(graph, request) for request in requests))
        nodes = len(graph.nodes) + len(joint.parameters)
        if math.prod(map(len, joint.problem.seconds[:nodes])) > MAX_CHOICES:
            continue
        for limit in (math.inf, best_layout.solution.bytes * 0.8):
            solution, expected = solve(joint.problem, limit), least_by_brute(joint, limit)
            assert math.isclose(solution.seconds if solution else math.inf, expected)
    first_axis = tofu.joint.axes[:1]
    rows = first_axis[0].asked.mode == "rows"
    second_requests = axis_requests(axes[1])[: 1 if rows else None]
    least_seconds = min(
        least_by_brute(MeshPlacement((*first_axis, AxisPlacement(graph, request))), math.inf)
        for request in second_requests
    )
    assert math.isclose(tofu.seconds, least_seconds)
