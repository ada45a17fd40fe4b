"""Expert parallelism: equal to the original model, with the traffic of closed forms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.passes.prove import prove
from schedlang.passes.verify.proof_case import Case
from schedlang.runtime.comm.collectives import listen_to_collectives
from schedlang.runtime.moe.experts import capacity_mask, limit_experts
from schedlang.runtime.moe.probe import Experts, NoExperts, probe_experts
from tests import expert_models as models
from tests.proofs import assert_proven, make_plan, refusal_text, static_holds

ROW = "layers.*.experts  expert_parallel(over={})\n"
DP = "zero(stage={}, over=dp)"
BOTH = "dp=2, tp=2)\nview ep of (dp, tp"
BATCHES = [models.batch(0), models.batch(1, rows=4)]
CASES = {
    "sent": (ROW.format("dp") + DP.format(0), "dp=2", ""),
    "shared out": (ROW.format("tp"), "tp=2", ""),
    "both": (ROW.format("ep, chunks=2") + DP.format(3), BOTH, ""),
    "sliced": (ROW.format("dp, chunks=3") + DP.format(2), "dp=2", ""),
    "fetched": (ROW.format("ep, dispatch=fetch") + DP.format(1), BOTH, ""),
    "shadowed": (ROW.format("ep, shadow=[0, 3]") + DP.format(0), BOTH, ""),
    "dropped": (ROW.format("ep, capacity=0.75") + DP.format(0), BOTH, "routing"),
    "dropped, sent": (
        ROW.format("ep, capacity=0.75, dispatch=all_to_all") + DP.format(0),
        BOTH,
        "routing",
    ),
    "dropped in chunks": (
        ROW.format("ep, capacity=0.75, chunks=2") + DP.format(0),
        BOTH,
        "routing",
    ),
    "dropped, fetched": (
        ROW.format("ep, capacity=0.75, dispatch=fetch") + DP.format(1),
        BOTH,
        "routing",
    ),
    "dropped, shared out": (ROW.format("tp, capacity=0.75"), "tp=2", "routing"),
    "gathered": (
        ROW.format("ep, dispatch=gather") + "zero(stage=1, over=(a, b))",
        "a=2, b=2)\nview ep of (a, b",
        "",
    ),
    "run again": (
        ROW.format("ep, shadow=[1]") + "layers.*  checkpoint()\n" + DP.format(0),
        BOTH,
        "",
    ),
    "made again in stages": (
        ROW.format("dp")
        + "layers  pipeline_split(over=pp)\n"
        + DP.format(0)
        + '\npipeline(order="Varuna", micro=2)',
        "dp=2, pp=2",
        "",
    ),
    "two steps": (
        ROW.format("ep") + "zero(stage=1, over=(a, b))",
        "a=2, b=2)\nview ep of (a, b",
        "",
    ),
    "replicas": (ROW.format("b") + "zero(stage=2, over=(a, b))", "a=2, b=2", ""),
    "fetched in stages": (
        ROW.format("dp, dispatch=fetch")
        + "layers  pipeline_split(over=pp)\n"
        + DP.format(0)
        + '\npipeline(order="GPipe", micro=2)',
        "dp=2, pp=2",
        "",
    ),
    "stages": (
        ROW.format("dp")
        + "layers.*  checkpoint()\nlayers  pipeline_split(over=pp)\n"
        + DP.format(0)
        + '\npipeline(order="1F1B", micro=2)',
        "dp=2, pp=2",
        "",
    ),
}
ALWAYS = ("sent", "both", "dropped")


@pytest.mark.parametrize(
    "name", [c if c in ALWAYS else pytest.param(c, marks=pytest.mark.deep) for c in CASES]
)
def test_every_way_equals_the_original(name: str, threads: Any) -> None:
    """Outputs, losses, gradients and three steps agree in float64; static proofs hold."""
    rows, mesh, relax = CASES[name]
    layers = 2 if "pp" in mesh else 1
    plan = make_plan(models.tiny_model(layers=layers), rows, mesh, relax)
    report = assert_proven(threads, plan, BATCHES)
    assert report.equivalence == ("relaxed (routing)" if relax else "algebraic")
    static_holds(plan, BATCHES[0])


@pytest.mark.parametrize("how", ["", ", dispatch=fetch", ", shadow=[0, 3]"])
def test_experts_that_compute_in_16_bits(how: str, threads: Any) -> None:
    """Under `cast(params=true)` ranks send, fetch and shadow bf16 copies of experts."""
    rows = f"cast(bf16, params=true)\nlayers.*.experts  expert_parallel(over=ep{how})\n"
    plan = make_plan(models.tiny_model(layers=1), rows + DP.format(1), BOTH, "dtype")
    report = prove(Case(plan, tuple(BATCHES), dtype="float32"), pool=threads)
    assert report.ok and any("working dtype" in row.kind for row in report.rows)


class _WithDropout(models.Mixture):
    """Dropout before the router, before the experts and after them."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens through their best experts."""
        drop = nn.functional.dropout
        flat = drop(x, 0.2, self.training).reshape(-1, models.WIDTH)
        weights, index = self.router(flat).softmax(-1).topk(models.CHOICES, -1)
        output = self.experts(drop(flat, 0.3, self.training), index, weights)
        return drop((output + self.common(flat)).reshape(x.shape), 0.4, self.training)


@pytest.mark.parametrize("over", ["dp", pytest.param("ep", marks=pytest.mark.deep)])
def test_dropout_around_experts(over: str, threads: Any) -> None:
    """Dropout masks are those of the original, on any rank."""
    model = models.tiny_model(layers=1)
    model.layers[0].__class__ = _WithDropout  # type: ignore[union-attr, index, assignment]
    mesh = "dp=2" if over == "dp" else BOTH
    report = assert_proven(
        threads, make_plan(model, ROW.format(over) + DP.format(0), mesh), BATCHES
    )
    assert any(row.kind == "dropout draws" for row in report.rows)


KINDS = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "Olmoe": {"num_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


@pytest.mark.parametrize(
    "kind", [k if k == "Mixtral" else pytest.param(k, marks=pytest.mark.deep) for k in KINDS]
)
def test_models_of_transformers(kind: str, threads: Any) -> None:
    """Experts of transformers models in their default form, over two axes."""
    model, batch = models.transformers_model(kind, **KINDS[kind])
    rows = "model.layers.**.mlp.experts  expert_parallel(over=ep)\nzero(stage=0, over=dp)"
    if kind == "DeepseekV3":
        rows = rows.replace("layers.**", "layers.1")
    assert_proven(threads, make_plan(model, rows.replace("**", "*"), BOTH), [batch])


# -- what is sent ------------------------------------------------------------------------------


def _bytes_of_step(plan: Plan, batch: Any) -> dict[str, int]:
    """On this rank: bytes of one step by kind, without gradient reductions."""
    program = build(
        plan, batch, optimizer=lambda parameters: torch.optim.SGD([p for _, p in parameters])
    )
    bytes_by_kind: Counter[str] = Counter()

    def listen(kind: str, group: Any, size: int) -> None:
        if group.label:
            bytes_by_kind[kind] += size

    with listen_to_collectives(listen):
        program.train_step(batch)
    return dict(bytes_by_kind)


TOKENS = 4 * 4 // 2  # tokens of one of two ranks
TABLE = models.EXPERTS * 8  # a number for each expert


@pytest.mark.parametrize("over", ["dp", "tp"])
def test_bytes_of_tokens(over: str, threads: Any) -> None:
    """Over a data axis each choice of a token, and its gradient, is sent and returned once; over
    a tensor axis only sums of outputs and gradients are sent."""
    rows = ROW.format(over) + (DP.format(0) if over == "dp" else "")
    plan = make_plan(models.tiny_model(), rows, f"{over}=2")
    counts = threads.run(_bytes_of_step, 2, plan, models.batch(0, rows=4))
    layers, size = 2, models.WIDTH * 8
    if over == "dp":
        total = sum(rank_counts["all-to-all"] for rank_counts in counts)
        # to the experts and back, in forward and backward, every choice once
        assert total == layers * 2 * 4 * TOKENS * models.CHOICES * size
        assert all(
            rank_counts["all-gather"] == layers * 2 * TABLE for rank_counts in counts
        )  # the counts
        assert all("all-reduce" not in rank_counts for rank_counts in counts)
        return
    tokens = 2 * TOKENS
    output, routed_bytes = tokens * size, tokens * (size + models.CHOICES * 8)
    assert counts == [{"all-reduce": layers * (output + routed_bytes)}] * 2


def test_bytes_of_fetched_experts(threads: Any) -> None:
    """With `dispatch=fetch` experts are gathered and gradients reduced once; no token moves."""
    plan = make_plan(models.tiny_model(), ROW.format("dp, dispatch=fetch") + DP.format(0), "dp=2")
    expert_bytes = sum(
        p.numel() * 8 for n, p in models.tiny_model().named_parameters() if ".experts." in n
    )
    counts = threads.run(_bytes_of_step, 2, plan, models.batch(0, rows=4))
    assert counts == [{"all-gather": expert_bytes, "reduce-scatter": expert_bytes}] * 2


def test_the_plan_shows_even_routes() -> None:
    """Without values a plan counts traffic as if all experts were chosen equally often."""
    from schedlang.passes.simulate.account import account

    plan = make_plan(models.tiny_model(), ROW.format("dp") + DP.format(0), "dp=2")
    costs = account(plan, models.batch(0, rows=4))
    tokens = [collective for collective in costs.collectives if collective.kind == "all-to-all"]
    assert {collective.what for collective in tokens} == {"tokens", "token grads"}
    rows = TOKENS * models.CHOICES * models.WIDTH * 8
    forward = sum(collective.total for collective in tokens if collective.phase == "forward")
    assert forward == 2 * 2 * rows
    assert (
        sum(collective.total for collective in tokens if collective.phase == "backward")
        == 2 * 2 * rows
    )
    assert any("equally often" in note for note in costs.notes)


# -- what is recognised ------------------------------------------------------------------------


class _Squared(models.Experts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights**2)


class _Centred(models.Experts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x - x.mean(0), index, weights)


class _Noisy(models.Experts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training), index, weights)


class _Normed(models.Experts):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.WIDTH)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(self.norm(x), index, weights)


def test_parameters_of_all_experts_are_refused() -> None:
    """A parameter that all experts share is refused."""
    result = probe_experts(_Normed())
    assert isinstance(result, NoExperts) and "`norm.weight` has no dim of experts" in result.reason


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (_Squared, "not linear in the routing weights"),
        (_Centred, "not linear in the routing weights|depends on other tokens"),
        (_Noisy, "draws random numbers"),
    ],
)
def test_what_is_no_module_of_experts(kind: Any, said: str) -> None:
    """A module that does not compute as experts do is refused with its error."""
    import re

    result = probe_experts(kind())
    assert isinstance(result, NoExperts)
    assert re.search(said, result.reason) and result.error is not None and result.error > 1e-3


def test_large_experts_are_tried_small() -> None:
    """The number of experts is found without values for very large modules."""
    with torch.device("meta"):
        module = models.Experts(4)
        module.up = nn.Parameter(torch.empty(4, 2 * 14336, 4096))
        module.up_bias = nn.Parameter(torch.empty(4, 2 * 14336))
        module.down = nn.Parameter(torch.empty(4, 4096, 14336))
    result = probe_experts(module)
    assert result == Experts(4, ("up", "up_bias", "down"), ("num_experts",))


def test_refusals() -> None:
    """Illegal options are refused with legal ones."""
    tiny = models.tiny_model
    assert "S421" in refusal_text(tiny(), "layers.*.router  expert_parallel(over=tp)", "tp=2")
    message = refusal_text(tiny(), ROW.format("tp"), "tp=3")
    assert "S402" in message and "`tp` may be 1, 2, 4" in message
    assert "relax(routing)" in refusal_text(tiny(), ROW.format("tp, capacity=1.0"), "tp=2")
    assert "no expert 4" in refusal_text(tiny(), ROW.format("tp, shadow=[4]"), "tp=2")
    chunked = refusal_text(tiny(), ROW.format("tp, chunks=2, dispatch=fetch"), "tp=2")
    assert "S422" in chunked and "leave out" in chunked
    assert "S422" in refusal_text(tiny(), ROW.format("tp, chunks=0"), "tp=2")


class _ExpertList(nn.Module):
    """Experts in a list, as models wrote them before their weights were stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(models.WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(4))


def test_experts_in_a_list_are_refused() -> None:
    """Experts in a ModuleList are refused with their number and what to do."""
    for name in ("", ".experts"):
        message = refusal_text(
            nn.ModuleList([_ExpertList()]), f"*{name}  expert_parallel(over=tp)", "tp=2"
        )
        assert (
            "S421" in message and "4 modules of their own, which are called one by one" in message
        )
        assert "stack their weights" in message and "`zero(stage=3, over=...)`" in message


def test_tied_experts_are_split_once(threads: Any) -> None:
    """Tied experts are split once; splits over different axes are refused."""
    tied = "layers.* tie()\n"
    rows = tied + ROW.format("dp") + DP.format(1)
    assert_proven(threads, make_plan(models.tiny_model(), rows, "dp=2", "model"), BATCHES)
    separate_rows = tied + "".join(
        f"layers.{k}.experts  expert_parallel(over={'ab'[k]})\n" for k in (0, 1)
    )
    with pytest.raises(Refusal, match="tied experts must be sharded over the same axes") as caught:
        make_plan(models.tiny_model(), separate_rows, "a=2, b=2", "model")
    assert caught.value.diagnostic.code == "S504"


def test_a_capacity_counts_the_whole_batch() -> None:
    """A capacity is refused where it would count only a part of the batch."""
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.passes.analyze.prepare import prepare

    separate_rows = ROW.format("b, capacity=1.0") + "zero(stage=0, over=(a, b))"
    micro = ROW.format("dp, capacity=1.0") + "layers  pipeline_split(over=pp)\n" + DP.format(0)
    micro += '\npipeline(order="GPipe", micro=2)'
    for rows, mesh, help_ in (
        (separate_rows, "a=2, b=2", "view ep of (a, b)"),
        (micro, "dp=2, pp=2", "micro=1"),
    ):
        with pytest.raises(Refusal) as caught:
            prepare(make_plan(models.tiny_model(), rows, mesh, "routing"), BATCHES[0])
        assert caught.value.diagnostic.code == "S422"
        assert help_ in caught.value.render()


# -- the rule of capacities --------------------------------------------------------------------


def test_the_first_tokens_of_an_expert_are_kept() -> None:
    """Six choices of two experts at capacity 1.0: the first three of each are kept."""
    index = torch.tensor([[0], [0], [1], [0], [0], [1]])
    assert capacity_mask(index, 2, 1.0).flatten().tolist() == [True, True, True, True, False, True]
    assert capacity_mask(index, 2, 0.3).flatten().tolist() == [
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    assert capacity_mask(index, 2, 2.0).all()


def test_the_oracle_drops_what_the_rule_says() -> None:
    """Dropped choices add nothing; without a limit the model is unchanged."""
    plain_model, free_model, limited_model = (
        models.tiny_model(),
        models.tiny_model(),
        models.tiny_model(),
    )
    limit_experts(free_model, {"layers.0.experts": (models.EXPERTS, 1e9)})
    limit_experts(limited_model, {"layers.0.experts": (models.EXPERTS, 0.5)})
    plain_logits, free_logits, limited_logits = (
        m(**BATCHES[0])["logits"] for m in (plain_model, free_model, limited_model)
    )
    assert torch.equal(plain_logits, free_logits)
    assert not torch.allclose(plain_logits, limited_logits)
