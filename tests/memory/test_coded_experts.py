"""Tests of activations in fewer bits in layers whose experts ranks share out."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.prove import Case, prove
from schedlang.runtime.activation_memory.quantized import (
    Quantization,
    QuantizationCounts,
    quantize_saved,
)
from schedlang.runtime.storage.saved_tensors_slot import without_quantization, wrap_modules
from tests import expert_models as models
from tests.engine import Threads
from tests.memory.test_coded import drawn
from tests.proofs import planned, proven

ROW = "layers.*.experts  expert_parallel(over={})\n"
CODED = "layers.*  compress(activations, {}, block=8)\n"
AGAIN = "layers.*.experts  checkpoint()\n"
PIPE = 'layers  pipeline_split(over=pp)\nzero(stage=0, over=dp)\npipeline(order="1F1B", micro=2)'
BOTH = "dp=2, tp=2)\nview ep of (dp, tp"
BATCHES = [models.batch(0), models.batch(1, rows=4)]


@pytest.mark.parametrize(
    "rows, mesh",
    [
        (ROW.format("dp") + AGAIN + CODED.format("int2") + "zero(stage=0, over=dp)", "dp=2"),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in [
                (ROW.format("tp") + CODED.format("adaptive, bits=4"), "tp=2"),
                (ROW.format("dp") + CODED.format("int4") + "zero(stage=3, over=dp)", "dp=2"),
                (
                    ROW.format("dp")
                    + AGAIN
                    + CODED.format("adaptive, bits=3")
                    + "zero(stage=1, over=dp)",
                    "dp=2",
                ),
                (
                    ROW.format("ep, chunks=2") + CODED.format("int2") + "zero(stage=3, over=dp)",
                    BOTH,
                ),
                (
                    ROW.format("ep, dispatch=fetch")
                    + AGAIN
                    + CODED.format("int2")
                    + "zero(stage=2, over=dp)",
                    BOTH,
                ),
                (ROW.format("dp, shadow=[0, 3]") + CODED.format("int8") + PIPE, "dp=2, pp=2"),
            ]
        ),
    ],
)
def test_equal_to_one_process_that_rounds_around_experts(
    threads: Threads, rows: str, mesh: str
) -> None:
    """Outputs, loss, every gradient and training: what experts save is kept as it is, what enters
    those that run again, and all around them, in fewer bits."""
    report = proven(threads, planned(models.tiny(), rows, mesh, "lossy"), BATCHES)
    assert report.equivalence == "relaxed (lossy)"


def test_experts_that_are_rounded_are_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a rank rounded rows as they come to its experts, gradients would not be those of the one
    process."""
    from schedlang.runtime.sharding import sharded_layer

    monkeypatch.setattr(sharded_layer, "without_quantization", nullcontext)
    monkeypatch.setattr("schedlang.passes.prove.suspected", lambda report, *_: report)
    plan = planned(models.tiny(layers=1), ROW.format("tp") + CODED.format("int2"), "tp=2", "lossy")
    report = prove(Case(plan, tuple(BATCHES), None, None, 0, "none"), pool=threads)
    assert "gradients" in {row.kind for row in report.rows if not row.ok and not row.step}


@pytest.mark.parametrize("apart", [False, True])
def test_all_around_the_experts_is_rounded(apart: bool) -> None:
    """Of a layer of experts what they save is not counted where ranks share them out; what the rest
    of it saves is."""
    layer, tally, seen = models.Mixture(models.EXPERTS).double(), QuantizationCounts(), []
    quantize_saved(layer, "it", Quantization(4, 8), tally)
    if apart:
        wrap_modules(without_quantization, layer, ["experts"])
    spread = layer.experts.forward

    def noted(*given: Tensor) -> Tensor:
        before, out = tally.tensors, spread(*given)
        seen.append(tally.tensors - before)
        return out

    layer.experts.forward = noted
    layer(drawn(4, 6, models.WIDTH).requires_grad_())
    assert (seen[0] == 0) == apart and tally.tensors - seen[0] >= 3


def test_dropped_tokens_are_refused() -> None:
    """A limit counts tokens of the whole batch, which one process takes in parts."""
    rows = ROW.format("dp, capacity=0.75") + CODED.format("int8") + "zero(stage=0, over=dp)"
    with pytest.raises(Refusal) as error:
        prepare(planned(models.tiny(), rows, "dp=2", "routing, lossy"), BATCHES[0])
    assert "S858" in error.value.render() and "has a `capacity`" in error.value.render()
