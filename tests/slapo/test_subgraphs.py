"""Slapo's tests of subgraph matching, replacement and fusion, as patterns and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.language.patterns import parse_pattern
from schedlang.runtime.fusion.dataflow import TraceDepth, invented_arguments, trace_flow
from schedlang.runtime.fusion.rewrite import find_matches
from schedlang.schedule import create_schedule
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan
from tests.slapo import nets

IDS = [nets.token_batch(seed) for seed in range(2)]


class PartsNet(nn.Module):
    """Modules of several kinds, with a given function as forward."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.conv, self.relu, self.bn = nn.Conv2d(3, 3, 1), nn.ReLU(), nn.BatchNorm2d(3)
        self.fc, self.fc1, self.fc2 = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(self, x)
        return out


def match_sizes(pattern: str, body: Any) -> list[int]:
    """The number of calls in each match of a pattern."""
    module = PartsNet(body)
    graph = trace_flow(module, invented_arguments(module), TraceDepth(products="linear" in pattern))
    return [len(match.nodes) for match in find_matches(parse_pattern(pattern), graph, module)[0]]


LINEAR_RELU = "p(x, w, b) { relu(linear(x, w, b)) }"


@pytest.mark.parametrize(
    ("pattern", "body", "calls"),
    [
        ("p(y, x) { relu(y) + x }", lambda m, x: F.relu(m.conv(x)) + x, [2]),
        ("p(y, x) { relu(y) + x }", lambda m, x: m.relu(m.conv(x)) + x, [2]),
        (LINEAR_RELU, lambda m, x: F.relu(m.fc1(F.relu(m.fc(x)))), [2, 2]),
        (LINEAR_RELU, lambda m, x: m.relu(m.fc1(m.relu(m.fc(x)))), [2, 2]),
        ("p(a, b) { relu(a + b) }", lambda m, x: F.relu(m.fc(x) + m.fc2(x)), [2]),
        (
            "p(x, y, z) { (x + y) * (y - z) }",
            lambda m, x: (x + (y := x.exp())) * (y - x.sin()),
            [3],
        ),
    ],
)
def test_found(pattern: str, body: Any, calls: list[int]) -> None:
    """Patterns match by data flow; a module matches the function that it computes."""
    assert match_sizes(pattern, body) == calls


def test_statistics_are_no_region() -> None:
    """A batch norm that updates its statistics cannot be in a pattern, and is refused (S883)."""
    with pytest.raises(Refusal) as refusal:
        match_sizes("p(x) { relu(x) }", lambda m, x: F.relu(m.bn(x)))
    assert refusal.value.diagnostic.code == "S883"


class NestedNet(nn.Module):
    """Activations at several depths, in lists too."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.mod = nn.ModuleList([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)])
        self.seq = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.mod:
            x = layer(x)
        out: Tensor = self.act(self.seq(x))
        return out


class Gelu(nn.GELU):
    """A replacement for another activation."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()


class WithActivation(nn.Module):
    """A linear layer followed by an activation; the old layer is its child."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.mod, self.act = linear, nn.ReLU()

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.act(self.mod(input))
        return out


def replace_modules(path: str, make: Any) -> nn.Module:
    """The model of a plan in which the modules at a path are replaced."""
    sch = create_schedule(nets.Net(NestedNet()))
    sch[path].replace(make)
    model_facts = sch.plan().model
    assert model_facts is not None
    return model_facts.model


def test_replaced_everywhere() -> None:
    """All modules of a class are replaced, at any depth, and no others."""
    model = replace_modules("body.**:ReLU", Gelu)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert {name for name, kind in kinds.items() if kind == "Gelu"} == {
        "body.act",
        "body.mod.1",
        "body.seq.1",
    }
    assert "ReLU" not in kinds.values()


def test_what_replaces_is_not_replaced_again() -> None:
    """A replacement that contains a module of the same class is not replaced by its own row."""
    sch = create_schedule(nets.Net(NestedNet()))
    names = {"mod.weight": "weight", "mod.bias": "bias"}
    sch["body.**:Linear"].replace(lambda old: (WithActivation(old), names))
    assert sch.plan().actions[0].sites == ("body.mod.0", "body.mod.2", "body.seq.0")


def test_a_replacement_that_takes_other_arguments_is_refused() -> None:
    """A replacement with two inputs is refused where the model gives one."""

    class Two(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    with pytest.raises(Refusal) as refusal:
        replace_modules("body.act", Two)
    assert refusal.value.diagnostic.code == "S881"


def test_fused_chains_train_as_the_model(threads: Threads) -> None:
    """A projection with its bias fused into the activation trains equally; parameter names stay."""
    model = nets.Net(nets.Mlp(F.gelu))
    sch = create_schedule(model)
    sch.pattern("bias_gelu(x, b) { gelu(x + b) }")
    sch["body.fc1"].decompose("bias")
    sch["body"].fuse("bias_gelu")
    assert assert_proven(threads, sch.plan(), IDS).ok


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}])
def test_bias_dropout_residual_norm(threads: Threads, mesh: dict[str, int]) -> None:
    """Bias, dropout, residual and norm in one region draw the model's masks, under tensor
    parallelism too."""

    class Out(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.2), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(self.drop(self.fc(x)) + x)
            return out

    sch = create_schedule(nets.Net(Out()))
    if mesh:
        sch.mesh(**mesh)
    sch.pattern("tail(x, c, r, w, b) { layer_norm(dropout(x + c) + r, w, b) }")
    sch["body.fc"].decompose("bias")
    sch["body"].fuse("tail")
    if mesh:
        sch["body.fc"].shard("row", over="tp")
    assert assert_proven(threads, sch.plan(), IDS).ok


def test_hooks_outlive_rows(threads: Threads) -> None:
    """A module's hooks run once each, also if the module is checkpointed."""
    model, order = nets.Net(nets.Mlp(F.gelu)), []
    model.body.register_forward_pre_hook(lambda module, args: order.append("before"))
    model.body.register_forward_hook(lambda module, args, out: order.append("after"))
    from schedlang.passes.lower.build import build

    sch = create_schedule(model)
    sch["body"].checkpoint()
    program = build(sch.plan(), IDS[0])
    order.clear()
    with torch.no_grad():
        program.module(**IDS[0])
    assert order == ["before", "after"]


def test_names_of_modules_stay() -> None:
    """After every row the model's own paths name its modules (Slapo renames children)."""
    model = nets.Net(nets.Mlp(F.gelu))
    rows = "body.fc1  decompose(bias)\nbody  checkpoint()\nbody.fc2  offload(activations)"
    sites = [action.sites for action in make_plan(model, rows).actions]
    assert sites == [("body.fc1",), ("body",), ("body.fc2",)]
