"""Slapo's silent errors (S1 to S22): here each is computed right, or refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.language.patterns import parse_pattern
from schedlang.passes.lower.build import build
from schedlang.runtime.fusion.dataflow import TraceDepth, invented_arguments, trace_flow
from schedlang.runtime.fusion.fuse import FuseRequest, fuse_pattern
from schedlang.runtime.fusion.rewrite import find_matches
from schedlang.schedule import create_schedule
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, refusal_text
from tests.slapo import nets

IDS = [nets.token_batch(seed) for seed in range(2)]
SPLIT = "body.fc1  shard(col, over=tp)\nbody.fc2  shard(row, over=tp)\n"


def count_matches(pattern: str, body: Any) -> int:
    """The number of matches of a pattern in a forward."""
    module = nets.FunctionNet(body)
    graph = trace_flow(module, invented_arguments(module), TraceDepth())
    return len(find_matches(parse_pattern(pattern), graph, module)[0])


def fuse_module(pattern: str, body: Any) -> nn.Module:
    """A module whose pattern runs as one region, not compiled."""
    module = nets.FunctionNet(body).double()
    fuse_pattern(module, FuseRequest(parse_pattern(pattern), TraceDepth()))
    return module


def test_s1_writes_in_place_stay() -> None:
    """An in-place write in a forward is kept when a pattern of the forward is extracted."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.fc(x)
        y.mul_(0)
        return F.relu(y + 1) * x

    module, x = fuse_module("p(a) { relu(a + 1) }", body), torch.randn(3, 8, dtype=torch.double)
    torch.testing.assert_close(module(x), x)


def test_s2_dropout_follows_the_mode() -> None:
    """A region made in training mode applies dropout in training, and none in evaluation."""

    def body(m: Any, x: Tensor) -> Tensor:
        return F.relu(F.dropout(x, 0.5, m.training) + 1)

    module, x = fuse_module("p(a) { relu(dropout(a) + 1) }", body), torch.rand(40, 8).double()
    module.train()
    assert (module(x) == 1).sum() > 50
    module.eval()
    assert torch.equal(module(x), x + 1) and not module.training


@pytest.mark.parametrize(
    ("pattern", "body"),
    [
        ("p(x) { relu(x + 1) }", lambda m, x: F.relu(x + 2)),
        ("p(a) { softmax(a, -1) * 2 }", lambda m, x: F.softmax(x, 0) * 2),
    ],
)
def test_s3_constants_count(pattern: str, body: Any) -> None:
    """A pattern with a literal matches only the same literal in the model."""
    assert count_matches(pattern, body) == 0


def test_s4_data_flow_counts() -> None:
    """Calls match only along the data flow, not because they follow each other in the code."""
    assert (
        count_matches("p(x, y) { relu(x + y) }", lambda m, x: (x + m.fc(x)).sum() + F.relu(x)) == 0
    )


def test_s5_arguments_are_bound_by_name() -> None:
    """An extracted pattern computes the same function, whichever argument is used first."""
    module = fuse_module("p(a, b) { relu(b - a) }", lambda m, x: F.relu(m.fc(x) - x))
    x = torch.randn(3, 8, dtype=torch.double)
    torch.testing.assert_close(module(x), F.relu(module.fc(x) - x))  # type: ignore[operator]


def test_s6_a_name_is_a_name() -> None:
    """The path `fc1` does not match `fc10`; the path `fc1*` matches both."""
    model = nets.Net(nets.Mlp())
    sites = [action.sites for action in make_plan(model, "body.fc1  checkpoint()").actions]
    assert sites == [("body.fc1",)]
    assert len(make_plan(model, "body.fc1*  checkpoint()").actions[0].sites) == 2


def test_s7_arguments_of_recomputed_modules(threads: Threads) -> None:
    """A keyword argument keeps its name in the recomputation."""
    model = nets.Net(nets.KeywordCall())
    assert assert_proven(threads, make_plan(model, "body.inner  checkpoint()"), IDS).ok


def test_s8_hooks_run_once() -> None:
    """A hook that changes the output of a recomputed module is applied once."""
    model = nets.Net(nets.Mlp())
    model.body.register_forward_hook(lambda module, args, out: out * 2)
    expected = model(**IDS[0])["loss"]
    program = build(make_plan(model, "body  checkpoint()"), IDS[0])
    torch.testing.assert_close(program.module(**IDS[0])["loss"], expected)


def test_s9_s10_values_and_ties_stay(threads: Threads) -> None:
    """A program starts with the model's values, and tied parameters stay one tensor."""
    model = nets.TiedHead()
    program = build(make_plan(model, ""), IDS[0])
    assert all(
        torch.equal(value, model.state_dict()[name]) for name, value in program.state_dict().items()
    )
    module: Any = program.module
    assert module.embed.weight is module.head.weight


def test_s11_every_id_of_a_split_table(threads: Threads) -> None:
    """Each id of a sharded embedding has its own row and gradient, also a shard's first id."""
    rows = "embed  shard(vocab, over=tp)"
    assert assert_proven(threads, make_plan(nets.Net(nets.Mlp()), rows, "tp=4"), IDS).ok


def test_s12_a_second_split_is_refused() -> None:
    """A second split of a tensor over one axis is refused; the message names both rows."""
    message = refusal_text(nets.Net(nets.Mlp()), SPLIT + "body.fc1  shard(col, over=tp)", "tp=2")
    assert message.count("body.fc1") >= 2 and "error[S" in message


def test_s13_dims_count_from_the_end_too() -> None:
    """`S(-2)` of a matrix is `S(0)`: the same shards and the same edges."""
    edges = "bias=S(0), input=R, output=S(-1), over=tp)\nbody.fc2  shard(row, over=tp)"
    model = nets.Net(nets.Mlp())
    first = make_plan(model, f"body.fc1  shard(weight=S(0), {edges}", "tp=2")
    second = make_plan(model, f"body.fc1  shard(weight=S(-2), {edges}", "tp=2")
    assert first.layouts == second.layouts


def test_s14_s15_gathered_outputs(threads: Threads) -> None:
    """An output gathered along its last dim, before unsharded layers, counts no gradient twice."""
    rows = "body.fc1  shard(col, output=R, over=tp)"
    assert assert_proven(threads, make_plan(nets.Net(nets.Mlp()), rows, "tp=2"), IDS).ok


def test_s16_the_bias_of_a_sum(threads: Threads) -> None:
    """A convolution that is sharded by input channels adds its bias once."""
    rows = (
        "first  shard(weight=S(0), bias=S(0), input=R, output=S(1), over=tp)\n"
        "second  shard(weight=S(1), bias=R, input=S(1), output=R, over=tp)"
    )
    batches = [nets.image_batch(seed) for seed in range(2)]
    assert assert_proven(threads, make_plan(nets.ConvNet(), rows, "tp=2"), batches).ok


def test_s17_a_sum_is_not_written_over_what_autograd_keeps(threads: Threads) -> None:
    """An all-reduce does not overwrite a result that autograd saved for backward."""
    assert assert_proven(threads, make_plan(nets.Net(nets.Mlp()), SPLIT, "tp=2"), IDS).ok


def test_s18_a_tied_pair_is_split_alike() -> None:
    """A row that shards one of two tied weights is refused; the message offers the other row."""
    message = refusal_text(nets.TiedHead(), "embed  shard(vocab, over=tp)", "tp=2", IDS[0])
    assert "S506" in message and "head shard(vocab, over=tp)" in message


class GatedNet(nn.Module):
    """A gated MLP with a given activation."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.three(self.act(self.one(x)) * self.two(x))
        return out


def test_s19_kernels_compute_what_the_module_does() -> None:
    """A kernel distinguishes tanh and erf GELU in a gate, and rejects a gate with dropout."""
    from schedlang.runtime.kernel_injection.gated_mlp import probe_gated

    erf, tanh, drops = (
        probe_gated(GatedNet(act))
        for act in (
            F.gelu,
            lambda x: F.gelu(x, approximate="tanh"),
            lambda x: F.dropout(F.gelu(x), 0.5),
        )
    )
    assert (erf.act, tanh.act) == ("gelu", "gelu_tanh")
    assert "differ" in drops.reason


def test_s20_a_missing_sum_is_refused() -> None:
    """A missing all-reduce of partial sums is refused before anything runs."""
    message = refusal_text(nets.Net(nets.Mlp()), "body.fc1  shard(col, over=tp)", "tp=2", IDS[0])
    assert "S4" in message and "body.fc2" in message


def test_s21_nothing_is_left_to_hooks_of_the_user(threads: Threads) -> None:
    """The row alone makes a sharded layer's input replicated and all-reduces its gradient."""
    rows = "body.fc1  shard(col, output=R, over=tp)"
    plan = make_plan(nets.Net(nets.Mlp()), rows, "tp=2")
    program = build(make_plan(nets.Net(nets.Mlp()), rows, "tp=1"), IDS[0])
    assert not any(module._forward_pre_hooks for module in program.module.modules())
    assert assert_proven(threads, plan, IDS).ok


def test_s22_a_failed_proof_leaves_nothing(threads: Threads) -> None:
    """A failed proof or a refusal leaves no tracer, mode or hook behind."""
    model, trace_function = nets.Net(nets.Mlp()), sys.gettrace()
    with pytest.raises(Refusal):
        create_schedule(model)["body.fc1"].shard("col", over="nothing")
    assert sys.gettrace() is trace_function
    assert not any(module._forward_hooks for module in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()
