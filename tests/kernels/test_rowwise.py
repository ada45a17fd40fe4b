"""Generated row-wise kernels: equal results, accepted operators, gains, refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.check import compare_tensor
from schedlang.passes.simulate.kernel_gains import count_gains
from schedlang.runtime.fusion.fuse import why_unavailable
from schedlang.runtime.fusion.rewrite import compile_region
from schedlang.runtime.kernel_injection.fusion_gain import count_eager, count_scheduled
from schedlang.runtime.kernel_injection.fusion_gain import count_generated as made_of
from schedlang.runtime.rowwise_kernels import launch, rowwise_operator
from schedlang.runtime.rowwise_kernels.chain import NotRowwise
from schedlang.runtime.rowwise_kernels.launch import run_for_device
from schedlang.runtime.rowwise_kernels.rowwise_operator import (
    TensorSignature,
    signatures_of,
    trace_graphs,
)
from tests.chains import CHAINS
from tests.engine import Threads
from tests.kernels.test_regions import BATCHES, TP, plan_of
from tests.proofs import assert_proven

ROWS, SIZE = 24, 72


def random_inputs(
    kinds: tuple[str, ...], dtype: torch.dtype, shape: tuple[int, ...]
) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape if k == "m" else shape[-1:]).to(dtype) for k in kinds]


def run_with_grads(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Return results and gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    result = function(*leaves)
    outs = [result] if isinstance(result, Tensor) else list(result)
    torch.manual_seed(1)
    grads = [torch.randn(t.shape).to(t.dtype) for t in outs]
    return [*(t.detach() for t in outs), *torch.autograd.grad(outs, leaves, grads)]


def rowwise_function(name: str, function: Callable[..., Any], rounding: str, count: int) -> Any:
    rowwise_operator.declare_function(f"{name} {rounding}", function, rounding)
    return lambda *args: rowwise_operator.apply_function(f"{name} {rounding}", args, count)


def run_three_ways(
    name: str, rounding: str, dtype: torch.dtype, shape: tuple[int, ...] = (ROWS, SIZE)
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the results of a generated kernel, of eager torch, and in float64."""
    function, kinds = CHAINS[name]
    inputs = random_inputs(kinds, dtype, shape)
    eager = run_with_grads(function, inputs)
    rowwise = rowwise_function(name, function, rounding, len(eager) - len(inputs))
    return (
        run_with_grads(rowwise, inputs),
        eager,
        run_with_grads(function, [t.double() for t in inputs]),
    )


BITWISE = ("rmsnorm", "add_rmsnorm", "swiglu", "geglu", "softmax")


def test_bit_for_bit_what_eager_computes() -> None:
    """Rounded where eager rounds: results and gradients in bfloat16 are bitwise equal."""
    with run_for_device("cpu"):
        for name in BITWISE:
            for index, (rowwise, eager, _) in enumerate(
                zip(*run_three_ways(name, "eager", torch.bfloat16))
            ):
                assert torch.equal(rowwise, eager), (name, index)


KINDS = ((torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "eager"))


@pytest.mark.parametrize("shape", [(5, 3, 33), pytest.param((1, 300), marks=pytest.mark.deep)])
def test_as_right_as_eager(shape: tuple[int, ...]) -> None:
    """All chains, both roundings and dtypes: errors against float64 keep the rule for kernels."""
    with run_for_device("cpu"):
        for name in CHAINS:
            for dtype, rounding in KINDS[: 2 if name in BITWISE else 3]:
                for rowwise, eager, exact in zip(*run_three_ways(name, rounding, dtype, shape)):
                    comparison = compare_tensor(name, rowwise, eager, exact.double(), times=4.0)
                    assert comparison.ok, (dtype, rounding, comparison)


def test_long_rows_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than a program's limit: the same results, by code that loops over blocks."""
    monkeypatch.setattr(launch, "MAX_ROW", 32)
    monkeypatch.setattr(launch, "_BLOCK", 16)
    with run_for_device("cpu"):
        for name in ("rmsnorm", "softmax", "layernorm"):
            function, kinds = CHAINS[name]
            inputs = random_inputs(kinds, torch.float32, (9, 45))
            count = len(run_with_grads(function, inputs)) - len(inputs)
            rowwise = run_with_grads(
                rowwise_function(f"long {name}", function, "fp32", count), inputs
            )
            pairs = rowwise_operator._regions[f"long {name} fp32"].pairs.values()
            assert all("for start in range" in k.text for pair in pairs for k in pair.kernels)
            exact = run_with_grads(function, [t.double() for t in inputs])
            for actual, reference, eager in zip(rowwise, exact, run_with_grads(function, inputs)):
                assert compare_tensor(name, actual, eager, reference, times=4.0).ok, name


@pytest.mark.parametrize(
    "function, shapes, said",
    [
        (lambda x: x.sum(0), ((4, 8),), ""),
        (lambda x, y: x @ y, ((4, 8), (8, 8)), "`mm` is not a row-wise operator"),
        (lambda x: x.cumsum(-1), ((4, 8),), "`cumsum` is not a row-wise operator"),
        (lambda x: torch.softmax(x, 0), ((4, 8),), "`amax` over dim [0] reduces over rows"),
        (
            lambda x: x - x.mean(1, keepdim=True),
            ((2, 4, 8),),
            "`mean` over dim [1] reduces over rows",
        ),
        (lambda x, m: x + m, ((2, 3, 4, 8), (2, 1, 4, 8)), "is broadcast over some of the leading"),
        (lambda x: x + x.mT, ((8, 8),), "`permute` is not a row-wise operator"),
        (lambda x, y: x + y.unsqueeze(-1), ((8, 8), (8,)), "`add` merges rows with columns"),
        (lambda x: x.reshape(8, 4) * 2, ((4, 8),), "`view` moves elements between rows"),
    ],
)
def test_what_is_no_chain_is_named(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], said: str
) -> None:
    """Operators that reduce over rows, and broadcasts over other dimensions, are named."""
    inputs = [torch.randn(shape) for shape in shapes]
    signatures = signatures_of(inputs, [True] * len(inputs))
    if not said:
        assert rowwise_operator.make_pair(function, signatures, "fp32").forward.chain.sums
        return
    with pytest.raises(NotRowwise) as error:
        rowwise_operator.make_pair(function, signatures, "fp32")
    assert said in str(error.value)


SCHEDULE = """
at layers.* {
  mid.dense  decompose(bias)
  mid        fuse(bias_gelu, backend=rowwise)
}
layers.0.out        fuse(add_norm, backend=rowwise)
layers[1:].out.norm  fuse(backend=rowwise)
"""


@pytest.mark.parametrize(
    "rows, mesh",
    [
        (f"{TP}layers.*  checkpoint()", "tp=2"),
        pytest.param(
            f"{TP}layers.*  checkpoint()\nzero(stage=3, over=dp)",
            "dp=2, tp=2",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_chains_are_proven_on_several_ranks(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, rows: str, mesh: str
) -> None:
    """With sharding, recomputation and dropout the proof holds, and the chains run in float64."""
    calls: list[Any] = []
    evaluate = launch.evaluate_chain
    monkeypatch.setattr(launch, "evaluate_chain", lambda *args: calls.append(1) or evaluate(*args))
    assert assert_proven(threads, plan_of(f"{SCHEDULE}{rows}", mesh), BATCHES).ok and calls


def test_under_a_compiler() -> None:
    """torch.compile takes the operators in one graph, with their gradients."""
    function, kinds = CHAINS["rmsnorm"]
    inputs = random_inputs(kinds, torch.float32, (4, 16))
    rowwise = rowwise_function("compiled", function, "fp32", 1)
    compiled = torch.compile(lambda x, w: rowwise(x, w)[0] * 2, fullgraph=True, backend="aot_eager")
    actual = run_with_grads(lambda x, w: compiled(x, w), inputs)
    torch.testing.assert_close(actual, run_with_grads(lambda x, w: function(x, w) * 2, inputs))


@pytest.mark.deep
@pytest.mark.skipif(why_unavailable() is not None, reason=f"no compiler: {why_unavailable()}")
def test_inductor_rounds_as_it_is_told() -> None:
    """With `rounding=eager` results in bfloat16 equal eager's bits, with `fp32` they do not."""
    for name in ("add_rmsnorm", "swiglu"):
        function, kinds = CHAINS[name]
        inputs, is_equal = random_inputs(kinds, torch.bfloat16, (ROWS, SIZE)), {}
        for rounding in ("eager", "fp32"):
            torch._dynamo.reset()
            with torch.no_grad():
                result = compile_region(partial(function), lambda: None, rounding)(*inputs)
            pairs = zip(
                *(
                    (value,) if isinstance(value, Tensor) else value
                    for value in (result, function(*inputs))
                )
            )
            is_equal[rounding] = all(torch.equal(a, b) for a, b in pairs)
        assert is_equal == {"eager": True, "fp32": False}, name


@pytest.mark.parametrize(
    "rows, said",
    [
        (
            "layers.*.mid  fuse(backend=rowwise)",
            ("S887", "Linear (`dense`) is not a row-wise operator"),
        ),
        (
            "layers.0.out  fuse(add_norm)\nlayers.0.out.norm  fuse(backend=rowwise)",
            ("S503", "is inside `layers.0.out`", "move this row above"),
        ),
    ],
)
def test_what_is_refused(rows: str, said: tuple[str, ...]) -> None:
    """A module that is more than a chain, and one that an earlier row has fused."""
    with pytest.raises(Refusal) as refusal:
        plan_of(rows)
    for part in said:
        assert part in refusal.value.render(), refusal.value.render()


def test_what_is_gained_is_counted() -> None:
    """Before and after, by row and kind of module; a row without a gain is refused."""
    gains = count_gains(plan_of(SCHEDULE.partition("layers[1:]")[0]), BATCHES[0])
    assert [g.sites for g in gains] == [
        tuple(f"layers.{n}.mid" for n in range(3)),
        ("layers.0.out",),
    ]
    gelu, norm = (g.gain for g in gains)
    # x + b, gelu; backward: gelu's, the sum for b; fused: one kernel, and b's sum of its parts
    assert (gelu.before.forward, gelu.after.forward) == (2, 1)
    assert (gelu.before.backward, gelu.after.backward) == (2, 3)  # and its cast to float64
    assert gelu.after.bytes < gelu.before.bytes
    assert [text.count("def kernel(") for text in gelu.sources] == [1, 1]
    assert (norm.before.forward, norm.after.forward) == (3, 1)
    with pytest.raises(Refusal, match="gains nothing") as refusal:
        count_gains(plan_of("layers.*.mid.act  fuse(backend=rowwise)"), BATCHES[0])
    assert "S888" in refusal.value.render() and "2 kernels" in refusal.value.render()


@pytest.mark.deep
def test_the_page_tells_the_counts() -> None:
    """The table of docs/fuse.md is right."""
    page = (Path(__file__).parents[2] / "docs" / "fuse.md").read_text()
    for name, (function, kinds) in CHAINS.items():
        size = 4096
        signatures = tuple(
            TensorSignature((size, size) if k == "m" else (size,), torch.bfloat16, "cpu", True)
            for k in kinds
        )
        with torch.device("meta"):
            inputs = [torch.empty(s.shape, dtype=s.dtype, requires_grad=True) for s in signatures]
            counts = [count_eager(function, inputs, inputs)]
        counts += [made_of(rowwise_operator.make_pair(function, signatures, "eager"))]
        counts += [count_scheduled(trace_graphs(function, signatures))]
        cells = (f"{c.forward} + {c.backward}, {c.bytes / 1e6:.0f} MB" for c in counts)
        assert f"| {name} | {' | '.join(cells)} |" in page, name
