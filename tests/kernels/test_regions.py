"""Fused patterns: matching along the data flow, one region, equal training, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.patterns import parse_pattern
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.runtime.fusion.check_fused import check_fused
from schedlang.runtime.fusion.dataflow import (
    TraceDepth,
    flow_arguments_of,
    invented_arguments,
    trace_flow,
)
from schedlang.runtime.fusion.fuse import FuseRequest, fuse_pattern, why_unavailable
from schedlang.runtime.fusion.rewrite import RegionOptions, find_matches
from schedlang.schedule import Schedule, create_schedule
from tests.engine import Threads
from tests.kernels.kernels_in_use import regions_of
from tests.proofs import assert_proven

CLASSES = 11
BIAS_GELU = "pattern bias_gelu(x, b) { gelu(x + b) }"
ADD_NORM = "pattern add_norm(x, r, w, b) { layer_norm(dropout(x) + r, w, b) }"
needs_compiler = pytest.mark.skipif(
    why_unavailable() is not None, reason=f"no compiler: {why_unavailable()}"
)


class Mid(nn.Module):
    """A projection and an activation, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(8, 16), nn.GELU()

    def forward(self, x: Tensor, scale: float = 1.0, **more: Any) -> Tensor:
        return self.act(self.dense(x)) * scale


class Out(nn.Module):
    """A projection, dropout, a residual connection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.drop = nn.Linear(16, 8), nn.LayerNorm(8), nn.Dropout(0.3)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.norm(before + self.drop(self.dense(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mid, self.out = Mid(), Out()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mid(x), x)


class Net(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(CLASSES, (8, 5), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.roll(1, 1)}


BATCHES = [batch(seed) for seed in range(2)]
ROWS = """
at layers.* {
  mid.dense  decompose(bias)
  mid        fuse(bias_gelu)
  out        fuse(add_norm)
}
"""


def plan_of(rows: str, mesh: str = "", patterns: str = f"{BIAS_GELU}\n{ADD_NORM}") -> Plan:
    head = f"mesh({mesh})\n" if mesh else ""
    text = f'schedule 1\n{head}{patterns}\nstep "all" {{\n{rows}\n}}\n'
    return Schedule(Net().double(), parse(Source("rows.sched", text)), Settings()).plan()


TP = "layers.*.mid.dense  shard(col, over=tp)\nlayers.*.out.dense  shard(row, over=tp)\n"


@pytest.mark.parametrize(
    "rows, mesh",
    [
        (TP + "layers.*  checkpoint()\nzero(stage=3, over=dp)", "dp=2, tp=2"),
        (
            'layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
            "zero(stage=1, over=dp)",
            "dp=2, pp=2",
        ),
    ],
)
def test_it_trains_as_the_model_did(threads: Threads, rows: str, mesh: str) -> None:
    """Split biases and dropout in a region: with tensor parallelism, recomputation, sharding,
    stages."""
    assert assert_proven(threads, plan_of(ROWS + rows, mesh), BATCHES).ok


@needs_compiler
def test_compiled_once_for_equal_layers() -> None:
    """Three layers, one graph for each pattern; dropout and losses are eager torch's; the check
    passes."""
    text = f'schedule 1\n{BIAS_GELU}\n{ADD_NORM}\nstep "all" {{{ROWS}}}\n'
    model = Net()
    plan = Schedule(model, parse(Source("rows.sched", text)), Settings()).plan()
    program = build(
        plan, BATCHES[0], optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    )
    torch.manual_seed(1)
    loss = program.train_step(BATCHES[0])
    torch.manual_seed(1)
    torch.testing.assert_close(loss, model.train()(**BATCHES[0])["loss"].detach().to(loss))
    layers = [program.module.get_submodule(f"layers.{index}") for index in range(3)]
    regions = [
        region for layer in layers for part in (layer.mid, layer.out) for region in regions_of(part)
    ]
    assert len(regions) == 6 and len(set(regions)) == 2
    assert [region.graphs for region in set(regions)] == [1, 1]
    plain_plan = Schedule(model, parse(Source("bare.sched", "schedule 1\n")), Settings()).plan()
    losses = [build(item, BATCHES[0], seed=3).train_step(BATCHES[0]) for item in (plan, plain_plan)]
    torch.testing.assert_close(*losses)  # with seeded masks, as on several ranks
    assert [region.graphs for region in set(regions)] == [1, 1]
    module = model.layers[0].out
    fuse_pattern(module, FuseRequest(parse_pattern(ADD_NORM), TraceDepth()))
    for item in check_fused(module, (torch.randn(3, 16), torch.randn(3, 8))):
        assert item.ok, item


class WithBody(nn.Module):
    """A module whose forward is the given function."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.w, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.body(self, x, y)


def count_matches(pattern: str, body: Any) -> tuple[int, str]:
    """Return the number of matches of a pattern, and the reason of the nearest miss."""
    module = WithBody(body)
    graph = trace_flow(module, invented_arguments(module), TraceDepth())
    matches, miss = find_matches(parse_pattern(pattern), graph, module)
    return len(matches), miss.reason


@pytest.mark.parametrize(
    "pattern, body, number",
    [
        ("p(x, b) { gelu(x + b) }", lambda m, x, y: F.gelu(m.b + x), 1),
        (
            "p(x, b) { gelu(x + b) }",
            lambda m, x, y: F.gelu(torch.add(x, m.b), approximate="tanh"),
            1,
        ),
        (
            "p(x, b) { gelu(x + b, approximate=none) }",
            lambda m, x, y: F.gelu(x + m.b, approximate="tanh"),
            0,
        ),
        ("p(x) { relu(x + 1) }", lambda m, x, y: (x + 1).relu(), 1),
        ("p(x) { relu(x + 1) }", lambda m, x, y: (x + 2).relu(), 0),
        ("p(a, b) { softmax(a - b, -1) }", lambda m, x, y: torch.softmax(x - y, dim=-1), 1),
        ("p(a, b) { softmax(a - b, -1) }", lambda m, x, y: torch.softmax(x - y, 0), 0),
        ("p(a) { a * sigmoid(a) }", lambda m, x, y: torch.sigmoid(x) * x, 1),
        ("p(a) { a * sigmoid(a) }", lambda m, x, y: torch.sigmoid(x) * y, 0),
        ("p(a, b) { relu(a + b) }", lambda m, x, y: (x + y, F.relu(x - y)), 0),
        ("p(a, b) { relu(a + b) }", lambda m, x, y: F.relu(F.relu(x + y) + m.b), 2),
        ("p(a, b) { relu(a * b) }", lambda m, x, y: [F.relu(s := x * y), s], 0),
        (
            "p(x, w) { w * (x * rsqrt(mean(pow(x, 2), -1) + 0.5)) }",
            lambda m, x, y: m.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.5)),
            1,
        ),
        ("p(a, b) { relu(a + b) }", lambda m, x, y: F.relu(x + y, inplace=True), 0),
        (
            "p(a, b) { relu(relu(a) + b) }",
            lambda m, x, y: F.relu(F.relu(x) + m.seen.add_(1) * y),
            0,
        ),
    ],
)
def test_what_matches(pattern: str, body: Any, number: int) -> None:
    """Along the data flow, with literals and keyword arguments, sums and products in either
    order."""
    assert count_matches(pattern, body)[0] == number


@pytest.mark.parametrize(
    "pattern, body, said",
    [
        ("p(x) { relu(x + 1) }", lambda m, x, y: F.relu(x + 2), "the pattern has 1 where"),
        ("p(a) { a * sigmoid(a) }", lambda m, x, y: torch.sigmoid(x) * y, "`a` is two different"),
        (
            "p(a, b) { relu(a * b) }",
            lambda m, x, y: [F.relu(s := x * y), s],
            "uses what `mul` gives",
        ),
        (
            "p(a, b) { relu(tanh(a) + b) }",
            lambda m, x, y: F.relu(x.exp() + y),
            "`tanh(a)` where the model has `exp`",
        ),
        (
            "p(a, b) { relu(relu(a) + b) }",
            lambda m, x, y: F.relu(F.relu(x) + m.seen.add_(1) * y),
            "`add_` writes in place between",
        ),
    ],
)
def test_the_nearest_miss_is_told(pattern: str, body: Any, said: str) -> None:
    """The attempt in which most calls matched says where it ended."""
    assert said in count_matches(pattern, body)[1]


@pytest.mark.parametrize(
    "rows, said",
    [
        (
            "layers.*.mid  fuse(bias_gelu)",
            (
                "S882",
                "1 of its 2 calls fit",
                "Linear (`dense`)",
                "`layers.0.mid.dense  decompose(bias)`",
            ),
        ),
        ("layers.*.mid  fuse(bias_gelo)", ("S885", "did you mean `bias_gelu`?")),
        ("layers.*.mid  fuse(one)", ("S884", "one kernel already")),
        ("layers.*.mid.act  fuse()", ("S884", "one kernel already", "select a module around it")),
        ("layers.*.out  decompose(bias)", ("S886", "is not a linear layer", "it is a Out")),
        ("fuse(bias_gelu)", ("S408",)),
        ("layers.*.mid  fuse(bias_gelu, backend=cuda)", ("S303", "inductor")),
    ],
)
def test_what_is_refused(rows: str, said: tuple[str, ...]) -> None:
    """The refusal gives the nearest miss, its reason, and what would help."""
    with pytest.raises(Refusal) as refusal:
        plan_of(rows, patterns=f"{BIAS_GELU}\npattern one(x) {{ gelu(x) }}")
    for part in said:
        assert part in refusal.value.render(), refusal.value.render()


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("pattern p(x) { x }", "a function of its parameters"),
        ("pattern p(x, y) { gelu(x) }", "does not use `y`"),
        ("pattern p(x) { gelo(x) }", "did you mean `gelu`?"),
        ("pattern p(x) { gelu(x, tanh) }", "takes no such argument"),
        ("pattern p(x) { gelu(x % 2) }", "`%` is not allowed in a pattern"),
        ("pattern p(x: int) { gelu(x) }", "write `x`"),
        ("pattern p(x) { gelu(approximate=tanh) }", "needs an argument"),
        ("pattern p(x) { gelu(x) }\npattern p(x) { relu(x) }", "declared twice"),
    ],
)
def test_what_is_no_pattern(pattern: str, said: str) -> None:
    """Names, functions and arguments are checked at the pattern's declaration."""
    with pytest.raises(Refusal) as refusal:
        plan_of("layers.*.mid  fuse(p)", patterns=pattern)
    assert said in refusal.value.render(), refusal.value.render()


def test_a_flow_that_depends_on_values_is_refused() -> None:
    """The refusal gives the model's line."""
    module = WithBody(lambda m, x, y: x if x.sum() > 0 else y)
    with pytest.raises(Refusal, match="cannot be followed") as refusal:
        trace_flow(module, invented_arguments(module), TraceDepth())
    assert "test_regions.py" in refusal.value.render()


class Maybe(nn.Module):
    """A child that returns a second value, or None instead."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None


def _add_optional(x: Tensor, other: Tensor | None) -> Tensor:
    return x if other is None else x + other


def _by_itself(module: Any, x: Tensor) -> Tensor:
    y, other = module.maybe(x)
    if other is not None:
        y = y + 1
    return y


def _in_a_helper(module: Any, x: Tensor) -> Tensor:
    y, other = module.maybe(x)
    return _add_optional(y, other)


def _of_a_part(module: Any, x: Tensor) -> tuple[Tensor, bool]:
    outputs = module.maybe(x)
    return outputs[0], outputs[1] is None


def _passed_on(module: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
    y, other = module.maybe(x)
    return (y if mask is None else y * mask), other


def _beside_another(module: Any, x: Tensor) -> tuple[Tensor, bool]:
    y, other = module.maybe(x)
    return y, other is None  # from Python 3.13 on one instruction loads both


def _as_it_is_named(module: Any, x: Tensor) -> tuple[Tensor, bool]:
    y, other = module.maybe(x)
    return y, (last := other) is None and last is None


@pytest.mark.parametrize(
    "asks", [_by_itself, _in_a_helper, _of_a_part, _beside_another, _as_it_is_named]
)
def test_what_a_child_may_leave_out_is_not_asked(asks: Any) -> None:
    """A traced value is never None: a test for None would take the wrong branch, so it is
    refused."""
    module = _AsksMaybe(asks)
    with pytest.raises(Refusal, match="cannot be followed") as refusal:
        trace_flow(module, invented_arguments(module), TraceDepth(calls=frozenset({"maybe"})))
    assert "returned by `maybe`, is None" in refusal.value.render()


def _of_one_place(pair: Any) -> Tensor:
    result: Tensor = pair[0] * 3 if pair[1] is None else pair[0]
    return result


def _of_a_name(pair: Any) -> Tensor:
    x, other = pair
    if other is not None:
        return x  # type: ignore[no-any-return]
    return x * 3  # type: ignore[no-any-return]


def _of_a_key(pair: Any) -> Tensor:
    result: Tensor = pair["x"] * 3 if pair["other"] is None else pair["x"]
    return result


def _of_the_whole(pair: Any) -> Tensor:
    result: Tensor = pair[0] * 3 if pair is None else pair[0]
    return result


class _Pair(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, pair: Any) -> Any:
        """Apply the function to the argument."""
        return self.run(pair)


X = torch.ones(2)


@pytest.mark.parametrize(
    "asks, none, some",
    [
        (_of_one_place, (X, None), (X, X)),
        (_of_a_name, [X, None], [X, X]),
        (_of_a_key, {"x": X, "other": None}, {"x": X, "other": X}),
    ],
)
def test_what_an_argument_holds_may_be_asked_unless_it_is_none(
    asks: Any, none: Any, some: Any
) -> None:
    """A pair with a None has another data flow than one without; a test for that None is
    refused."""
    module = _Pair(asks)
    none_flow, full_flow = (flow_arguments_of(module, (argument,), {}) for argument in (none, some))
    assert none_flow.key != full_flow.key
    with pytest.raises(Refusal, match="cannot be followed") as refusal:
        trace_flow(module, none_flow, TraceDepth())
    assert "is None, as it is here" in refusal.value.render()
    assert not [
        n for n in trace_flow(module, full_flow, TraceDepth()).nodes if "mul" in str(n.target)
    ]
    pair_module = _Pair(_of_the_whole)
    assert (
        trace_flow(pair_module, flow_arguments_of(pair_module, ((X, None),), {}), TraceDepth())
        is not None
    )


def test_what_a_child_may_leave_out_is_handed_on() -> None:
    """A value that may be None is passed on if nothing tests it."""
    module = _AsksMaybe(_passed_on)
    graph = trace_flow(module, invented_arguments(module), TraceDepth(calls=frozenset({"maybe"})))
    assert sum(node.op == "call_module" for node in graph.nodes) == 1


class _AsksMaybe(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.maybe, self.run = Maybe(), run

    def forward(self, x: Tensor) -> Any:
        """Apply the function to the module and x."""
        return self.run(self, x)


def test_in_python_and_from_a_library(tmp_path: Any) -> None:
    """A pattern is declared by a call, or comes from a library with its prefix."""
    sch = create_schedule(Net())
    sch.pattern("bias_gelu(x, b) { gelu(x + b) }")
    sch["layers.*.mid.dense"].decompose("bias")
    sch["layers.*.mid"].fuse("bias_gelu", rounding="fp32")
    assert BIAS_GELU in sch.to_sched() and "fuse(bias_gelu, rounding=fp32)" in sch.to_sched()
    (tmp_path / "lib.sched").write_text(f"schedule 1\n{BIAS_GELU}\n")
    rows = "  layers.*.mid.dense  decompose(bias)\n  layers.*.mid  fuse(lib.bias_gelu)\n"
    text = f'schedule 1\nuse "lib.sched" as lib\nstep "a" {{\n{rows}}}\n'
    (tmp_path / "a.sched").write_text(text)
    plan = create_schedule(Net(), tmp_path / "a.sched").plan()
    assert plan.actions[-1].primitive == sch.plan().actions[-1].primitive.__class__(BIAS_GELU)


class Partly(Mid):
    """The same, of which a part runs without gradients, or sets an attribute; `calls` a list."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, [0]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.how == "no gradients":
            with torch.no_grad():
                x = x.tanh()
        elif self.how == "another autocast":
            with torch.autocast("cpu"):
                x = x @ x.mT @ x
        elif self.how == "an attribute":
            self.scale = x.detach()
        elif self.how == "an entry":
            self.calls.append(1)
        with torch.set_grad_enabled(self.training):
            return self.act(self.dense(x))


@pytest.mark.parametrize("how", ["no gradients", "another autocast", "an attribute", "an entry"])
def test_what_a_data_flow_does_not_hold_is_refused(how: str) -> None:
    """A region of a forward under a context manager, and what a forward leaves behind (S883)."""
    module = Partly(how)
    arguments = flow_arguments_of(module, (torch.randn(2, 8, 8),), {})
    before = {**vars(module), "calls": [0]}
    with pytest.raises(Refusal) as refusal:
        trace_flow(module, arguments, TraceDepth())
    text = refusal.value.render()
    assert refusal.value.diagnostic.code == "S883"
    assert "changes the attribute" in text or "runs without gradients" in text, text
    assert vars(module) == before


def test_a_flow_is_traced_anew_with_gradients() -> None:
    """Gradients that are on in training only: evaluated first, the trained module has them."""
    fused, module = Partly(""), Partly("")
    fused.load_state_dict(module.state_dict())
    pattern = parse_pattern(BIAS_GELU)
    depth = TraceDepth(decomposed=frozenset({"dense"}))
    fuse_pattern(fused, FuseRequest(pattern, depth, RegionOptions(backend="rowwise")))
    x = torch.randn(2, 8, 8)
    for training in (False, True):
        fused.train(training), module.train(training)
        with torch.set_grad_enabled(training):
            out, expected = fused(x), module(x)
        torch.testing.assert_close(out, expected)
        assert out.requires_grad == expected.requires_grad
