"""Tests of recomputed modules whose inputs are kept in fewer bits."""

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
from tests.memory.test_coded import PIPE, ROW, drawn, dropping, tokens
from tests.proofs import planned, proven, sgd
from tests.tiers import thinned
from tests.zoo.scenes import GPT2, LLAMA

AGAIN = "transformer.h.*  checkpoint()\n"
INNER = "transformer.h.*.mlp  checkpoint()\n"
CODED = "model.layers.*  checkpoint()\nmodel.layers.*  compress(activations, {}, block=16)\n"


@pytest.mark.parametrize(
    "model, rows, mesh",
    thinned(
        [
            (dropping, AGAIN + ROW.format("int2") + "zero(stage=3, over=dp)", "dp=2"),
            (dropping, GPT2 + INNER + ROW.format("int4"), "tp=2"),
            (dropping, INNER + ROW.format("int2"), ""),
            (dropping, AGAIN + ROW.format("int4") + PIPE, "pp=2"),
            (lambda: models.llama(2), LLAMA + CODED.format("int2"), "tp=2"),
            (lambda: models.llama(2), CODED.format("int8") + "zero(stage=1, over=dp)", "dp=3"),
        ]
    ),
)
def test_equal_to_one_process_that_runs_again_alike(
    threads: Threads, model: Callable[[], nn.Module], rows: str, mesh: str
) -> None:
    """Outputs, loss, every gradient and training are those of one process whose second runs start
    from the same whole numbers; with dropout; of the coded modules, and of modules in them."""
    report = proven(threads, planned(model(), rows, mesh, "lossy"), tokens())
    assert report.equivalence == "relaxed (lossy)"


def test_a_second_run_from_what_was_exact_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If recomputation started from inputs as they were, gradients would not be those of the one
    process, though the forward is right."""
    from schedlang.runtime import forward

    wrong = ("kernel", "attend", "context", "fuse", "cast", "stream", "code", "checkpoint")
    monkeypatch.setattr(forward, "ORDER", (*wrong, "offload"))
    plan = planned(models.gpt2(1), AGAIN + ROW.format("int2"), "", "lossy")
    report = prove(Case(plan, tuple(tokens()), None, None, 0, "none"), pool=threads)
    kinds = {row.kind for row in report.rows if not row.ok and not row.step}
    assert "gradients" in kinds and "loss" not in kinds


def test_the_gradient_of_a_linear_layer_is_right_in_the_mean() -> None:
    """Over many calls the gradient of a weight that is computed again approaches the exact one;
    that of the input, which needs no input, is exact at once."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 4).double()
    x, given = drawn(8, 16).requires_grad_(), drawn(8, 4, seed=1)
    layer(x).backward(given)
    exact, of_input = layer.weight.grad.clone(), x.grad.clone()
    checkpoint(layer)
    quantize_saved(layer, "it", Quantization(2, 16))
    total, errors = torch.zeros_like(exact), []
    for count in range(1, 401):
        layer.weight.grad = x.grad = None
        layer(x).backward(given)
        total += layer.weight.grad
        errors.append(float((total / count - exact).norm() / exact.norm()))
    assert torch.equal(x.grad, of_input)
    assert errors[0] > 0.05 and errors[-1] < 0.15 * errors[0]


def test_the_plan_knows_the_bytes() -> None:
    """What the inputs of second runs take less at the peak, as the plan has it, is what the
    program's modules have counted; of blocks nothing else is kept."""
    from schedlang.ir.memory import CLASSES
    from schedlang.passes.simulate.simulated_ranks import estimate_memory

    batch, found = models.tokens(rows=4), []
    for rows in (AGAIN, AGAIN + ROW.format("int4")):
        plan = planned(models.gpt2(4), rows, "", "lossy" if rows != AGAIN else "")
        told = estimate_memory(plan, batch, None, prepare(plan, batch))[0]
        place = CLASSES.index("activations")
        found.append(max(moment.end[place] for moment in told.moments))
    program = build(plan, batch, optimizer=sgd)
    program.train_step(batch)
    tallies: list[Any] = []
    for block in range(4):
        layers = layers_of(program.assembly.module.get_submodule(f"transformer.h.{block}"))
        assert layers is not None
        layer: Any = layers.kinds["code"]
        tallies.append(layer.tally)
    assert found[0] - found[1] == pytest.approx(sum(t.before - t.after for t in tallies), rel=0.05)
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
    """A top-k that runs again from rounded inputs could choose otherwise: the row says so, and
    modules beside it may run again."""
    batch = {"x": drawn(4, 8).requires_grad_()}
    model = models.Stack((Routed() for _ in range(2)), "layers").double()
    rows = "layers.*  compress(activations, int8, block=8)\n"
    with pytest.raises(Refusal) as error:
        prepare(planned(model, "layers.*  checkpoint()\n" + rows, "", "lossy"), batch)
    said = error.value.render()
    assert "S857" in said and "`topk` in `layers.0`" in said
    inner = "layers.*.inner  checkpoint()\n" + rows
    prepare(planned(model, inner, "", "lossy"), batch)
