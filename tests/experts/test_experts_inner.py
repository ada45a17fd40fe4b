"""Experts spread over some ranks and cut over others: exact against the whole model."""

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
from tests.proofs import planned, proven, refused, static_holds

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
    model = models.biased() if name == "sent" else models.tiny(layers=1)
    plan = planned(model, rows, mesh, relax)
    if name != "uneven share":  # ten ranks are more than `verify` starts
        proven(threads, plan, BATCHES)
    static_holds(plan, BATCHES[0])


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers(kind: str, threads: Any) -> None:
    """Gate and up in one weight, side by side or interleaved, with and without biases."""
    model, batch = models.transformers_model(kind, **KINDS[kind])
    rows = "model.layers.{}.mlp.experts  expert_parallel(over=dp, inner=tp)\nzero(stage=0, over=dp)"
    rows = rows.format("1" if kind == "DeepseekV3" else "*")
    proven(threads, planned(model, rows, "dp=2, tp=2"), [batch])


# -- how they are cut --------------------------------------------------------------------------


def _inner(module: nn.Module) -> InnerSplit | None:
    found = probe_experts(module)
    assert isinstance(found, Experts)
    return probe_inner(module, found)


def test_gate_and_up_lie_side_by_side() -> None:
    """What is chunked in the forward is cut in two blocks, what it makes in one."""
    found = _inner(models.Experts())
    assert found is not None
    assert found.cuts == (("up", 1, 2), ("up_bias", 1, 2), ("down", 2, 1))


def test_gate_and_up_that_alternate() -> None:
    """What takes turns is cut in one block, and a bias behind the sum is shared out."""
    model, _ = models.transformers_model("GptOss", **KINDS["GptOss"])
    found = _inner(model.get_submodule("model.layers.0.mlp.experts"))
    assert found is not None
    assert dict((name, blocks) for name, _, blocks in found.cuts) == {
        "gate_up_proj": 1,
        "gate_up_proj_bias": 1,
        "down_proj": 1,
    }
    assert found.whole == ("down_proj_bias",)
    assert found.numbers == ("intermediate_size",)


class _Normed(models.Experts):
    """Experts that norm what lies inside of them."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The sum over each token's experts, by weight."""
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            inner = nn.functional.linear(x[token], self.up[expert], self.up_bias[expert])
            gate, up = nn.functional.softmax(inner, -1).chunk(2, -1)
            y = nn.functional.linear(gate * up, self.down[expert])
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out


def test_what_cannot_be_cut() -> None:
    """Refused with the reason: another computation, sizes, axes that have work already."""
    model = models.tiny(layers=1)
    model.layers[0].experts.__class__ = _Normed  # type: ignore[union-attr, index]
    said = refused(model, ROW.format("dp", "") + DP.format(0), "dp=2, tp=2")
    assert "S428" in said and "cannot be sharded inside" in said and "leave out `inner=`" in said
    said = refused(models.tiny(), ROW.format("dp", "") + DP.format(0), "dp=2, tp=3")
    assert "S428" in said and "an inner dim of 10" in said and "`tp` may be 1, 2, 5, 10" in said
    said = refused(models.tiny(), ROW.format("tp", ""), "tp=2")
    assert "S428" in said and "`tp` cannot both distribute and shard the experts" in said
    both = ROW.format("dp", "") + "zero(stage=0, over=(dp, tp))"
    with pytest.raises(Refusal, match="`tp` cannot shard both the batch and each expert") as caught:
        prepare(planned(models.tiny(), both, "dp=2, tp=2"), BATCHES[0])
    assert caught.value.diagnostic.code == "S428"


def _sent(plan: Any, batch: Any) -> dict[str, int]:
    """On this rank: bytes along `tp` in one step."""
    from schedlang.passes.lower.build import build

    program = build(plan, batch)
    sent: Counter[str] = Counter()

    def listen(kind: str, group: Any, size: int) -> None:
        if group.label and group.axes == ("tp",):
            sent[kind] += size

    with listen_to_collectives(listen):
        program.train_step(batch)
    return dict(sent)


@pytest.mark.deep
def test_bytes_of_cut_experts(threads: Any) -> None:
    """Along `tp` one sum of the tokens, and backward one of tokens and weights, as Megatron."""
    plan = planned(models.tiny(), ROW.format("dp", "") + DP.format(0), "dp=2, tp=2")
    tokens, layers = 4 * 4 // 2, 2
    found = threads.run(_sent, 4, plan, models.batch(0, rows=4))
    assert found == [{"all-reduce": layers * 8 * tokens * (2 * models.WIDTH + models.CHOICES)}] * 4
