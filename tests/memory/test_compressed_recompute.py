"""Compressed activations of recomputed modules: their inputs are saved in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.runtime.activation_memory.quantized import Quantization, quantize_saved
from schedlang.runtime.activation_memory.recompute import checkpoint
from schedlang.runtime.forward import layers_of
from tests import models
from tests.engine import Threads
from tests.memory.test_compressed_activations import (
    PIPELINE,
    ROW,
    gpt2_dropout,
    random_tensor,
    token_batches,
)
from tests.proofs import assert_proven, make_plan, sgd
from tests.tiers import thin_out
from tests.zoo.scenes import GPT2, LLAMA

CHECKPOINT = "transformer.h.*  checkpoint()\n"
MLP_CHECKPOINT = "transformer.h.*.mlp  checkpoint()\n"
LLAMA_ROWS = "model.layers.*  checkpoint()\nmodel.layers.*  compress(activations, {}, block=16)\n"


@pytest.mark.parametrize(
    "model, rows, mesh",
    thin_out(
        [
            (gpt2_dropout, CHECKPOINT + ROW.format("int2") + "zero(stage=3, over=dp)", "dp=2"),
            (gpt2_dropout, GPT2 + MLP_CHECKPOINT + ROW.format("int4"), "tp=2"),
            (gpt2_dropout, MLP_CHECKPOINT + ROW.format("int2"), ""),
            (gpt2_dropout, CHECKPOINT + ROW.format("int4") + PIPELINE, "pp=2"),
            (lambda: models.llama(2), LLAMA + LLAMA_ROWS.format("int2"), "tp=2"),
            (lambda: models.llama(2), LLAMA_ROWS.format("int8") + "zero(stage=1, over=dp)", "dp=3"),
        ]
    ),
)
def test_equal_to_one_process_that_runs_again_alike(
    threads: Threads, model: Callable[[], nn.Module], rows: str, mesh: str
) -> None:
    """Outputs, loss, gradients and training equal those of one process that recomputes from the
    same compressed inputs; checkpoints around compressed modules and inside them."""
    report = assert_proven(threads, make_plan(model(), rows, mesh, "lossy"), token_batches())
    assert report.equivalence == "relaxed (lossy)"


def test_a_second_run_from_what_was_exact_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputation from exact inputs fails the proof: gradients differ, the loss does not."""
    from schedlang.runtime import forward

    wrong = ("kernel", "attend", "context", "fuse", "cast", "stream", "code", "checkpoint")
    monkeypatch.setattr(forward, "ORDER", (*wrong, "offload"))
    plan = make_plan(models.gpt2(1), CHECKPOINT + ROW.format("int2"), "", "lossy")
    report = prove(Case(plan, tuple(token_batches()), None, None, 0, "none"), pool=threads)
    kinds = {row.kind for row in report.rows if not row.ok and not row.step}
    assert "gradients" in kinds and "loss" not in kinds


def test_the_gradient_of_a_linear_layer_is_right_in_the_mean() -> None:
    """The mean of a recomputed weight's gradient approaches the exact one; the input's is exact at
    once."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 4).double()
    x, grad_output = random_tensor(8, 16).requires_grad_(), random_tensor(8, 4, seed=1)
    layer(x).backward(grad_output)
    exact, input_grad = layer.weight.grad.clone(), x.grad.clone()
    checkpoint(layer)
    quantize_saved(layer, "it", Quantization(2, 16))
    total, errors = torch.zeros_like(exact), []
    for count in range(1, 401):
        layer.weight.grad = x.grad = None
        layer(x).backward(grad_output)
        total += layer.weight.grad
        errors.append(float((total / count - exact).norm() / exact.norm()))
    assert torch.equal(x.grad, input_grad)
    assert errors[0] > 0.05 and errors[-1] < 0.15 * errors[0]


def test_the_plan_knows_the_bytes() -> None:
    """The plan's saving at the peak equals the modules' own count; blocks save only their
    inputs."""
    from schedlang.ir.memory import CLASSES
    from schedlang.passes.simulate.simulated_ranks import estimate_memory

    batch, peaks = models.tokens(rows=4), []
    for rows in (CHECKPOINT, CHECKPOINT + ROW.format("int4")):
        plan = make_plan(models.gpt2(4), rows, "", "lossy" if rows != CHECKPOINT else "")
        estimate = estimate_memory(plan, batch, None, prepare(plan, batch))[0]
        index = CLASSES.index("activations")
        peaks.append(max(moment.end[index] for moment in estimate.moments))
    program = build(plan, batch, optimizer=sgd)
    program.train_step(batch)
    tallies: list[Any] = []
    for block in range(4):
        layers = layers_of(program.assembly.module.get_submodule(f"transformer.h.{block}"))
        assert layers is not None
        layer: Any = layers.kinds["code"]
        tallies.append(layer.tally)
    assert peaks[0] - peaks[1] == pytest.approx(sum(t.before - t.after for t in tallies), rel=0.05)
    assert all(tally.tensors == 1 for tally in tallies)


class Routed(nn.Module):
    """A layer whose tokens choose one of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))
        self.inner.register_forward_hook(lambda module, args, out: out)
        self.gate, self.weights = nn.Linear(8, 2), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).topk(1).indices[..., 0]
        return self.inner(x) * self.weights[chosen]


def test_what_chooses_is_refused() -> None:
    """A top-k recomputed from rounded inputs could choose differently: refused; other modules may
    be recomputed."""
    batch = {"x": random_tensor(4, 8).requires_grad_()}
    model = models.Stack((Routed() for _ in range(2)), "layers").double()
    rows = "layers.*  compress(activations, int8, block=8)\n"
    with pytest.raises(Refusal) as error:
        prepare(make_plan(model, "layers.*  checkpoint()\n" + rows, "", "lossy"), batch)
    message = error.value.render()
    assert "S857" in message and "`topk` in `layers.0`" in message
    inner = "layers.*.inner  checkpoint()\n" + rows
    prepare(make_plan(model, inner, "", "lossy"), batch)
