"""Expert parallelism with sharded experts (`inner=`): equal to the original model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.runtime.comm.collectives import listen_to_collectives
from schedlang.runtime.moe.probe import Experts, InnerSplit, probe_experts, probe_inner
from tests import expert_models as models
from tests.experts.test_experts import KINDS
from tests.proofs import assert_proven, make_plan, refusal_text, static_holds

ROW = "layers.*.experts  expert_parallel(over={}, inner=tp{})\n"
DP = "zero(stage={}, over=dp)"
BATCHES = [models.batch(0), models.batch(1, rows=4)]
CASES = {
    "sent": (ROW.format("dp", "") + DP.format(0), "dp=2, tp=2", ""),
    "cut only": (ROW.format("ep", ""), "ep=1, tp=2", ""),
    "beside": (ROW.format("ep", "") + DP.format(1), "dp=2, ep=2, tp=2", ""),
    "fetched": (ROW.format("dp", ", dispatch=fetch") + DP.format(2), "dp=2, tp=2", ""),
    "shadowed": (ROW.format("dp", ", shadow=[1]") + DP.format(0), "dp=2, tp=2", ""),
    "chunks": (ROW.format("dp", ", chunks=2") + DP.format(3), "dp=2, tp=2", ""),
    "dropped": (ROW.format("dp", ", capacity=0.75") + DP.format(0), "dp=2, tp=2", "routing"),
    "uneven share": (ROW.format("dp", "") + DP.format(0), "dp=2, tp=5", ""),
}


@pytest.mark.parametrize(
    "name", [c if c == "sent" else pytest.param(c, marks=pytest.mark.deep) for c in CASES]
)
def test_every_way_equals_the_original(name: str, threads: Any) -> None:
    """Outputs, losses, gradients and three steps agree in float64; static proofs hold."""
    rows, mesh, relax = CASES[name]
    model = models.biased_model() if name == "sent" else models.tiny_model(layers=1)
    plan = make_plan(model, rows, mesh, relax)
    if name != "uneven share":  # ten ranks are more than `verify` starts
        assert_proven(threads, plan, BATCHES)
    static_holds(plan, BATCHES[0])


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers(kind: str, threads: Any) -> None:
    """Gate and up in one weight, side by side or interleaved, with and without biases."""
    model, batch = models.transformers_model(kind, **KINDS[kind])
    rows = "model.layers.{}.mlp.experts  expert_parallel(over=dp, inner=tp)\nzero(stage=0, over=dp)"
    rows = rows.format("1" if kind == "DeepseekV3" else "*")
    assert_proven(threads, make_plan(model, rows, "dp=2, tp=2"), [batch])


# -- how they are cut --------------------------------------------------------------------------


def _inner_split(module: nn.Module) -> InnerSplit | None:
    experts = probe_experts(module)
    assert isinstance(experts, Experts)
    return probe_inner(module, experts)


def test_gate_and_up_lie_side_by_side() -> None:
    """Packed gate and up are cut in two blocks, down in one."""
    inner_split = _inner_split(models.Experts())
    assert inner_split is not None
    assert inner_split.cuts == (("up", 1, 2), ("up_bias", 1, 2), ("down", 2, 1))


def test_gate_and_up_that_alternate() -> None:
    """Interleaved gate and up are cut in one block; the output bias is not cut."""
    model, _ = models.transformers_model("GptOss", **KINDS["GptOss"])
    inner_split = _inner_split(model.get_submodule("model.layers.0.mlp.experts"))
    assert inner_split is not None
    assert dict((name, blocks) for name, _, blocks in inner_split.cuts) == {
        "gate_up_proj": 1,
        "gate_up_proj_bias": 1,
        "down_proj": 1,
    }
    assert inner_split.whole == ("down_proj_bias",)
    assert inner_split.numbers == ("intermediate_size",)


class _WithSoftmax(models.Experts):
    """Experts with a softmax over their inner dim."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The sum over each token's experts, by weight."""
        output = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            inner = nn.functional.linear(x[token], self.up[expert], self.up_bias[expert])
            gate, up = nn.functional.softmax(inner, -1).chunk(2, -1)
            y = nn.functional.linear(gate * up, self.down[expert])
            output = output.index_add(0, token, y * weights[token, slot, None])
        return output


def test_what_cannot_be_cut() -> None:
    """Experts that cannot be cut are refused: their computation, sizes, or used axes."""
    model = models.tiny_model(layers=1)
    model.layers[0].experts.__class__ = _WithSoftmax  # type: ignore[union-attr, index]
    message = refusal_text(model, ROW.format("dp", "") + DP.format(0), "dp=2, tp=2")
    assert (
        "S428" in message
        and "cannot be sharded inside" in message
        and "leave out `inner=`" in message
    )
    message = refusal_text(models.tiny_model(), ROW.format("dp", "") + DP.format(0), "dp=2, tp=3")
    assert (
        "S428" in message
        and "an inner dim of 10" in message
        and "`tp` may be 1, 2, 5, 10" in message
    )
    message = refusal_text(models.tiny_model(), ROW.format("tp", ""), "tp=2")
    assert "S428" in message and "`tp` cannot both distribute and shard the experts" in message
    rows = ROW.format("dp", "") + "zero(stage=0, over=(dp, tp))"
    with pytest.raises(Refusal, match="`tp` cannot shard both the batch and each expert") as caught:
        prepare(make_plan(models.tiny_model(), rows, "dp=2, tp=2"), BATCHES[0])
    assert caught.value.diagnostic.code == "S428"


def _tp_bytes(plan: Any, batch: Any) -> dict[str, int]:
    """On this rank: bytes along `tp` in one step."""
    from schedlang.passes.lower.build import build

    program = build(plan, batch)
    bytes_by_kind: Counter[str] = Counter()

    def listen(kind: str, group: Any, size: int) -> None:
        if group.label and group.axes == ("tp",):
            bytes_by_kind[kind] += size

    with listen_to_collectives(listen):
        program.train_step(batch)
    return dict(bytes_by_kind)


@pytest.mark.deep
def test_bytes_of_cut_experts(threads: Any) -> None:
    """Along `tp` one sum of the tokens, and backward one of tokens and weights, as Megatron."""
    plan = make_plan(models.tiny_model(), ROW.format("dp", "") + DP.format(0), "dp=2, tp=2")
    tokens, layers = 4 * 4 // 2, 2
    counts = threads.run(_tp_bytes, 4, plan, models.batch(0, rows=4))
    assert counts == [{"all-reduce": layers * 8 * tokens * (2 * models.WIDTH + models.CHOICES)}] * 4
