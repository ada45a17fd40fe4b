"""Compressed activations in layers with expert parallelism."""

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
from tests.memory.test_compressed_activations import random_tensor
from tests.proofs import assert_proven, make_plan

ROW = "layers.*.experts  expert_parallel(over={})\n"
COMPRESS = "layers.*  compress(activations, {}, block=8)\n"
EXPERT_CHECKPOINT = "layers.*.experts  checkpoint()\n"
PIPELINE = (
    'layers  pipeline_split(over=pp)\nzero(stage=0, over=dp)\npipeline(order="1F1B", micro=2)'
)
DP_TP_MESH = "dp=2, tp=2)\nview ep of (dp, tp"
BATCHES = [models.batch(0), models.batch(1, rows=4)]


@pytest.mark.parametrize(
    "rows, mesh",
    [
        (
            ROW.format("dp")
            + EXPERT_CHECKPOINT
            + COMPRESS.format("int2")
            + "zero(stage=0, over=dp)",
            "dp=2",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in [
                (ROW.format("tp") + COMPRESS.format("adaptive, bits=4"), "tp=2"),
                (ROW.format("dp") + COMPRESS.format("int4") + "zero(stage=3, over=dp)", "dp=2"),
                (
                    ROW.format("dp")
                    + EXPERT_CHECKPOINT
                    + COMPRESS.format("adaptive, bits=3")
                    + "zero(stage=1, over=dp)",
                    "dp=2",
                ),
                (
                    ROW.format("ep, chunks=2") + COMPRESS.format("int2") + "zero(stage=3, over=dp)",
                    DP_TP_MESH,
                ),
                (
                    ROW.format("ep, dispatch=fetch")
                    + EXPERT_CHECKPOINT
                    + COMPRESS.format("int2")
                    + "zero(stage=2, over=dp)",
                    DP_TP_MESH,
                ),
                (
                    ROW.format("dp, shadow=[0, 3]") + COMPRESS.format("int8") + PIPELINE,
                    "dp=2, pp=2",
                ),
            ]
        ),
    ],
)
def test_equal_to_one_process_that_rounds_around_experts(
    threads: Threads, rows: str, mesh: str
) -> None:
    """Outputs, loss, gradients and training are equal: experts' own saved tensors stay exact,
    inputs of recomputed experts and the rest of the layer are compressed."""
    report = assert_proven(threads, make_plan(models.tiny_model(), rows, mesh, "lossy"), BATCHES)
    assert report.equivalence == "relaxed (lossy)"


def test_experts_that_are_rounded_are_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressing tokens as they arrive at the experts fails the proof."""
    from schedlang.runtime.sharding import sharded_layer

    monkeypatch.setattr(sharded_layer, "without_quantization", nullcontext)
    monkeypatch.setattr("schedlang.passes.prove.add_suspects", lambda report, *_: report)
    plan = make_plan(
        models.tiny_model(layers=1), ROW.format("tp") + COMPRESS.format("int2"), "tp=2", "lossy"
    )
    report = prove(Case(plan, tuple(BATCHES), None, None, 0, "none"), pool=threads)
    assert "gradients" in {row.kind for row in report.rows if not row.ok and not row.step}


@pytest.mark.parametrize("apart", [False, True])
def test_all_around_the_experts_is_rounded(apart: bool) -> None:
    """With expert parallelism, saved tensors of the experts are not compressed, the rest of the
    layer's are."""
    layer, counts, inside_counts = models.Mixture(models.EXPERTS).double(), QuantizationCounts(), []
    quantize_saved(layer, "it", Quantization(4, 8), counts)
    if apart:
        wrap_modules(without_quantization, layer, ["experts"])
    experts_forward = layer.experts.forward

    def noted(*inputs: Tensor) -> Tensor:
        count_before, out = counts.tensors, experts_forward(*inputs)
        inside_counts.append(counts.tensors - count_before)
        return out

    layer.experts.forward = noted
    layer(random_tensor(4, 6, models.WIDTH).requires_grad_())
    assert (inside_counts[0] == 0) == apart and counts.tensors - inside_counts[0] >= 3


def test_dropped_tokens_are_refused() -> None:
    """A capacity counts tokens of the complete batch, which one process takes in parts."""
    rows = ROW.format("dp, capacity=0.75") + COMPRESS.format("int8") + "zero(stage=0, over=dp)"
    with pytest.raises(Refusal) as error:
        prepare(make_plan(models.tiny_model(), rows, "dp=2", "routing, lossy"), BATCHES[0])
    assert "S858" in error.value.render() and "has a `capacity`" in error.value.render()
