"""Propagation of a sharded model through one traced forward: what it finds and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.placement import R, S
from schedlang.passes.partition.staging import local_skeleton
from schedlang.passes.propagate.original_forward import weight_of
from schedlang.passes.propagate.propagate import Traced, propagate
from schedlang.runtime.comm.collectives import listen_to_collectives
from schedlang.runtime.forward import layer_of
from schedlang.runtime.tracing.meta_runs import MetaMode, meta_batch
from tests import models
from tests.proofs import make_plan, refusal_text
from tests.training.test_build import FUSED, GPT2, LLAMA, LLAMA_ENDS, FusedAttention, word_batch

TOKENS = models.tokens()


def _trace(model: nn.Module, rows: str, mesh: str = "tp=2", batch: Any = None) -> Traced:
    return propagate(make_plan(model, rows, mesh), batch or TOKENS)


def _collectives(
    model: nn.Module, rows: str, mesh: str = "tp=2"
) -> list[tuple[str, str, int, bool]]:
    """The collectives of one forward and backward: kind, whose, bytes, and whether in backward."""
    plan = make_plan(model, rows, mesh)
    local = local_skeleton(plan, propagate(plan, TOKENS))
    local.train()
    collectives: list[tuple[str, str, int, bool]] = []
    in_backward = [False]
    with listen_to_collectives(
        lambda kind, group, size: collectives.append((kind, group.label, size, in_backward[0]))
    ):
        inputs = meta_batch(TOKENS)
        with MetaMode(TOKENS, inputs):
            loss = local(**inputs).loss
        in_backward[0] = True
        loss.backward()
    return collectives


# -- what is found -----------------------------------------------------------------------------


def test_attributes_are_divided_and_nothing_else() -> None:
    """GPT-2's attention counts heads and widths: those two of each block, not the head size."""
    traced = _trace(models.gpt2(2), GPT2)
    by_block = {(fqn, attribute): value for fqn, attribute, value in traced.local_numbers}
    for block in range(2):
        attn = f"transformer.h.{block}.attn"
        assert by_block[attn, "split_size"] == 8
        assert (attn, "head_dim") not in by_block
    assert {fqn for fqn, _ in by_block} == {f"transformer.h.{k}.attn" for k in range(2)}


class Biased(nn.Module):
    """Attention that creates a bias for each head, as T5 without relative positions."""

    def __init__(self, heads: int = 2, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            part(x).view(rows, length, self.heads, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        bias = torch.zeros(1, self.heads, length, length, dtype=x.dtype, device=x.device)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.requires_grad_())
        return self.o(mixed.transpose(1, 2).reshape(rows, length, -1)).square().mean()


@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "tp=2, dp=2", "ep=2, dp=2, tp=2"])
def test_what_a_module_fills_is_split_by_the_axis_that_splits_it(mesh: str) -> None:
    """A bias made for the heads of a rank is split over `tp`, not over another axis as large."""
    rows = "{q,k,v}  shard(col, over=tp)\no  shard(row, over=tp)\nzero(stage=1, over=dp)"
    batch = {"x": torch.randn(4, 5, 8, dtype=torch.float64)}
    traced = _trace(Biased(), rows, mesh, batch)
    assert traced.local_numbers == (("", "heads", 1),)
    assert set(traced.edges) == {"q", "k", "v", "o"}


def test_two_numbers_of_one_call() -> None:
    """Query and key-value heads that are counted in one split are divided together."""
    traced = _trace(FusedAttention(), FUSED, batch=word_batch(1))
    assert {(a, v) for _, a, v in traced.local_numbers} == {("heads", 2), ("groups", 1)}


def test_llama_needs_no_numbers() -> None:
    """A model that reads sizes from tensors needs no divided numbers."""
    rows = """at model.layers.* {
      self_attn.{q,k,v}_proj  shard(col, over=tp)
      self_attn.o_proj        shard(row, over=tp)
    }"""
    traced = _trace(models.llama(2), rows)
    assert traced.local_numbers == () and traced.partial == {}


def test_modules_that_take_one_tensor_share_what_arrives() -> None:
    """q, k and v share one input, and so do gate and up: their block redistributes it once.

    Modules without a shared input have no cache.
    """
    rows = """at model.layers.* {
      self_attn.{q,k,v}_proj  shard(col, over=tp)
      self_attn.o_proj        shard(row, over=tp)
      mlp.{gate,up}_proj      shard(col, over=tp)
      mlp.down_proj           shard(row, over=tp)
    }"""
    traced = _trace(models.llama(2), rows)
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj"]
    assert traced.sharing_modules == {
        f"model.layers.{k}.{item}" for k in range(2) for item in parts
    }
    whose = [item[1] for item in _collectives(models.llama(2), rows) if item[3]]
    assert len([name for name in whose if "self_attn" in name]) == 2  # of each layer one
    local = local_skeleton(make_plan(models.llama(2), rows, "tp=2"), traced)
    with_cache = {name for name, item in local.named_modules() if layer_of(item, "arrivals")}
    assert with_cache == {"model.layers.0", "model.layers.1"}
    gpt2_plan = make_plan(models.gpt2(2), GPT2, "tp=2")
    gpt2_trace = propagate(gpt2_plan, TOKENS)
    assert not gpt2_trace.sharing_modules
    assert not any(
        layer_of(item, "arrivals") for item in local_skeleton(gpt2_plan, gpt2_trace).modules()
    )


def test_a_gather_is_hoisted_to_where_the_tensor_comes_in() -> None:
    """Under sequence parallelism one gather serves q, k and v, at the attention that holds them."""
    traced = _trace(models.llama(2), LLAMA + LLAMA_ENDS)
    hoisted = {fqn for fqn, edges in traced.edges.items() if any(e.hoisted for e in edges)}
    assert {
        f"model.layers.{k}.{part}" for k in range(2) for part in ("self_attn", "mlp")
    } == hoisted
    for fqn in hoisted:
        (edge,) = [e for e in traced.edges[fqn] if e.hoisted]
        assert edge.input_before == S(1) and edge.input_after == R
    collectives = _collectives(models.llama(2), LLAMA + LLAMA_ENDS)
    gathers = [
        collective
        for collective in collectives
        if collective[0] == "all-gather" and not collective[3]
    ]
    assert len([collective for collective in gathers if ".layers." in collective[1]]) == 4


def test_norms_under_sequence_parallelism_have_partial_gradients() -> None:
    """Gradients of weights that each rank uses on its own tokens are summed over the axis."""
    traced = _trace(models.llama(2), LLAMA + LLAMA_ENDS)
    norms = {
        f"model.layers.{k}.{n}_layernorm.weight"
        for k in range(2)
        for n in ("input", "post_attention")
    }
    assert {n: set(a) for n, a in traced.partial.items()} == {
        n: {"tp"} for n in norms | {"model.norm.weight"}
    }


def test_norms_of_queries_and_keys_have_partial_gradients() -> None:
    """Qwen3 has one weight for all heads: each rank has the part of its gradient from its heads."""
    model = models.llama_like("Qwen3ForCausalLM", num_hidden_layers=1, head_dim=4)
    rows = """at model.layers.* {
      self_attn.{q,k,v}_proj  shard(col, over=tp)
      self_attn.o_proj        shard(row, over=tp)
    }"""
    attn = "model.layers.0.self_attn"
    assert set(_trace(model, rows).partial) == {f"{attn}.q_norm.weight", f"{attn}.k_norm.weight"}


def test_dropout_knows_its_window() -> None:
    """Attention dropout is split over heads, residual dropout is not."""
    traced = _trace(models.gpt2(1, 0.1), GPT2)
    assert traced.is_random
    split_sites = {site for (site, _), (_, tags) in traced.mask_layouts.items() if tags}
    unsplit_sites = {site for (site, _), (_, tags) in traced.mask_layouts.items() if not tags}
    assert split_sites == {"transformer.h.0.attn"}  # inside fused attention
    assert {"transformer.drop", "transformer.h.0.mlp.dropout"} <= unsplit_sites
    shape, tags = traced.mask_layouts["transformer.h.0.attn", 0]
    assert shape == (7, 2, 8, 8) and tags["tp"].dim == 1  # rows, heads, tokens


@pytest.mark.parametrize("shifted", [True, False], ids=["GPT-2", "BERT"])
def test_labels_are_counted_as_the_model_reads_them(shifted: bool) -> None:
    """A model that shifts labels counts those after the shift, other models count all."""
    model = models.gpt2(1) if shifted else models.bert()
    batch = dict(TOKENS)
    (rule,) = propagate(make_plan(model, "verify(loss)"), batch).labels
    assert rule.source == "labels"
    labels = batch["labels"][:, 1:] if shifted else batch["labels"]
    assert rule.count(batch) == float((labels != -100).sum())
    part = {"labels": batch["labels"][2:5]}
    assert rule.count(part) == float((labels[2:5] != -100).sum())


def test_other_values_that_do_not_count() -> None:
    """The rule takes over `ignore_index` from the model's own loss."""
    (rule,) = propagate(make_plan(FusedAttention(), "verify(loss)"), word_batch(1)).labels
    assert (rule.source, rule.ignore_index) == ("target", -1)
    assert rule.count(word_batch(1)) == float((word_batch(1)["target"] != -1).sum())


def test_collectives_are_counted() -> None:
    """Megatron's count: two all-reduces forward and two backward for each block."""
    rows = GPT2[GPT2.index("at ") : GPT2.index("lm_head")]
    collectives = _collectives(models.gpt2(3), rows)
    for backward in (False, True):
        in_phase = [
            (kind, size) for kind, _, size, in_backward in collectives if in_backward == backward
        ]
        assert in_phase == [("all-reduce", 7 * 8 * 16 * 8)] * 6


def test_axes_of_size_one_shard_nothing() -> None:
    """The rows stay in the plan, and the trace has no edges."""
    traced = _trace(models.gpt2(1), GPT2, "tp=1")
    assert not traced.edges and not traced.local_numbers


# -- what is refused ---------------------------------------------------------------------------


class Pair(nn.Module):
    """Two projections with a chosen computation between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.between = nn.Linear(4, 8), nn.Linear(8, 4), between
        self.side = nn.Linear(4, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, self.up(x), x)).square().mean()


BOTH = "up shard(col, over=tp)\ndown shard(row, over=tp)"
X = {"x": torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}


def _pair_refusal(between: Any, rows: str = BOTH) -> str:
    return refusal_text(Pair(between), rows, "tp=2", X)


@pytest.mark.parametrize("given", ["", "heads=2, ", "blocks=3, "])
def test_a_row_that_says_nothing(given: str) -> None:
    """A `shard` without style, parameters or activations would do nothing: in text and Python."""
    message = _pair_refusal(lambda m, y, x: y, f"up shard({given}over=tp)")
    assert "S305" in message and "`shard(col, over=tp)` shards outputs" in message
    sch = schedlang.create_schedule(Pair(lambda m, y, x: y))
    sch.mesh(tp=2)
    with pytest.raises(Refusal, match="S305"):
        sch["up"].shard(over="tp")


def test_a_column_without_its_row() -> None:
    """A column split without a matching row split is refused, with a help to gather the output."""
    message = _pair_refusal(lambda m, y, x: y, "up shard(col, over=tp)")
    assert "S405" in message and "up  shard" not in message.splitlines()[0]
    message = refusal_text(
        nn.Sequential(nn.Linear(4, 8)).double(), "0 shard(col, over=tp)", "tp=2", {"input": X["x"]}
    )
    assert (
        "the model returns a tensor that is sharded over `tp`" in message and "output=R" in message
    )


def test_softmax_along_a_split_dim() -> None:
    """A softmax over a split dim is refused by name."""
    message = _pair_refusal(lambda m, y, x: y.softmax(-1))
    assert (
        "`softmax` computes along a dim that is sharded over `tp`" in message
        and "output=R" in message
    )


def test_reducing_a_split_dim() -> None:
    """A mean over split features is refused."""
    assert "`mean` reduces over a dim that is sharded over `tp`" in _pair_refusal(
        lambda m, y, x: y * 0 + y.mean(-1, keepdim=True)
    )


def test_a_pending_sum_is_not_handed_on() -> None:
    """A partial sum that is never reduced is refused."""
    message = _pair_refusal(lambda m, y, x: y, BOTH.replace("(row,", "(row, output=P(sum),"))
    assert "`down` returns a partial sum" in message and "output=R" in message


def test_a_whole_tensor_among_split_ones() -> None:
    """Mixing a replicated activation with a split one is refused: its gradient would be lost."""
    message = _pair_refusal(lambda m, y, x: y * m.side(x))
    assert "mixes a tensor sharded over `tp` with a replicated one" in message
    assert "shard the module that computes it" in message


def test_parameters_among_split_tensors_are_summed_later() -> None:
    """A value computed from parameters may meet split tensors: its gradient is partial."""
    model = Pair(lambda m, y, x: y * m.side.weight.exp().sum())
    assert {n: set(a) for n, a in _trace(model, BOTH, batch=X).partial.items()} == {
        "side.weight": {"tp"}
    }


def test_missing_blocks() -> None:
    """Fused q, k and v split as one are refused with the blocks to write."""
    message = refusal_text(models.gpt2(1), GPT2.replace("blocks=3, ", ""), "tp=2", TOKENS)
    assert "blocks=3" in message and "attn.c_attn" in message


def test_heads_below_the_axis() -> None:
    """Two heads over four ranks: how many there are, where, and what is legal."""
    message = refusal_text(models.gpt2(1), GPT2, "tp=4", TOKENS)
    assert "2 heads of `transformer.h.0.attn` cannot be split over tp=4" in message
    assert "`tp` may be one of 1, 2" in message


def test_a_split_sequence_into_whole_attention() -> None:
    """A split sequence into an unsharded attention is refused: it would see few tokens."""
    rows = LLAMA_ENDS
    message = refusal_text(models.llama(1), rows, "tp=2", TOKENS)
    assert "S405" in message and "self_attn" in message


def test_a_half_sharded_tie() -> None:
    """A tied weight that only one of its modules shards is refused (S506)."""
    message = refusal_text(
        models.gpt2(1),
        "transformer.wte shard(vocab, over=tp)".replace(
            "transformer.wte shard", "transformer.wte pad(vocab, multiple=2)\ntransformer.wte shard"
        ),
        "tp=2",
        TOKENS,
    )
    assert "S506" in message and "`lm_head` shares a sharded weight" in message
    assert "lm_head shard(vocab, over=tp)" in message


@pytest.mark.parametrize("style", ["row", "col"])
def test_a_half_sharded_tie_of_layers(style: str) -> None:
    """The offered row shards a tied layer as the layer that shares its weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    message = refusal_text(model, f"0 shard({style}, over=tp)", "tp=2", {"input": torch.ones(2, 4)})
    assert "S506" in message and f"`2 shard({style}, over=tp)`" in message


def test_a_batch_that_the_model_rejects() -> None:
    """The model's own words are in the message, and what a batch should be."""
    message = refusal_text(models.gpt2(1), "verify(loss)", "", {"nonsense": TOKENS["input_ids"]})
    assert "S604" in message and "You have to specify either input_ids" in message
    assert "keyword arguments of the model's forward" in message


def test_the_loss_stays_split() -> None:
    """With a vocabulary-parallel head no collective sends full logits."""
    full_bytes = 7 * 8 * models.VOCAB * 8
    assert max(size for _, _, size, _ in _collectives(models.gpt2(1), GPT2)) < full_bytes


class Wide(nn.Module):
    """Reads its width from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return F.relu(self.down(y / y.shape[-1])).sum()


def test_plain_numbers_read_from_a_split_tensor_are_refused() -> None:
    """A width read from a split tensor is a smaller number: shapes agree, the numbers do not."""
    message = refusal_text(Wide(), BOTH, "tp=2", X)
    assert "`div` takes 4 where the original takes 8" in message


class Late(nn.Module):
    """The model's own code computes along a dim that its last module has split."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).relu()
        return self.three(self.two(hidden).relu()).softmax(-1).sum() + hidden.sum()


def test_a_refusal_between_modules_stands_at_the_row_that_split() -> None:
    """The refusal points at the row of the module that made the split tensor."""
    rows = "one shard(col, over=tp)\ntwo shard(row, over=tp)\nthree shard(col, over=tp)"
    message = refusal_text(Late(), rows, "tp=2", {"x": torch.randn(4, 8)})
    assert (
        "softmax" in message
        and "| three shard(col, over=tp)" in message
        and "one shard" not in message
    )


def test_a_model_is_recorded_once_and_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials that find gathers and divided numbers run only once for a plan; the weights of
    microbatches need no further forward."""
    forwards: list[str] = []
    inner = MetaMode.__enter__

    def enter(mode: MetaMode) -> MetaMode:
        forwards.append("forward")
        inner(mode)
        return mode

    monkeypatch.setattr(MetaMode, "__enter__", enter)
    plan = make_plan(models.llama(1), LLAMA + LLAMA_ENDS, "tp=2")
    first_trace = propagate(plan, TOKENS)
    assert len(forwards) > 2 and first_trace.edges
    forwards.clear()
    second_trace = propagate(plan, TOKENS)
    assert (second_trace.edges, second_trace.local_numbers, second_trace.partial) == (
        first_trace.edges,
        first_trace.local_numbers,
        first_trace.partial,
    )
    assert len(forwards) == 2
    weigh = weight_of(first_trace, 2)
    assert len(forwards) == 2 and weigh(TOKENS) == first_trace.labels[0].count(TOKENS)
