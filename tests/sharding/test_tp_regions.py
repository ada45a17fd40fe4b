"""Around split projections: adapters, frozen weights, split sequences, embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.holdings import holdings_of, reductions
from schedlang.passes.partition.staging import stages_of
from schedlang.passes.propagate.propagate import propagate
from schedlang.runtime.sharding.embedding import LocalRows
from tests import models
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, refusal_text

BATCHES = [models.tokens(3), models.tokens(2, 6)]


class Adapted(nn.Module):
    """A frozen projection beside a trained one of low rank (LoRA, Hu et al. 2021)."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base.requires_grad_(False)
        self.A = nn.Linear(base.in_features, rank, bias=False).double()
        self.B = nn.Linear(rank, base.out_features, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.base(x) + self.B(self.A(x)) * 0.5


ADAPTED = """at model.layers.* {
  self_attn.{q,v}_proj.{base,B}  shard(col, over=tp)
  self_attn.k_proj               shard(col, over=tp)
  self_attn.o_proj.{base,A}      shard(row, over=tp)
  mlp.gate_proj                  shard(col, over=tp)
  mlp.up_proj.{base,B}           shard(col, over=tp)
  mlp.down_proj.{base,A}         shard(row, over=tp)
}"""
GPT2 = """at transformer {
  wte              shard(vocab, over=tp, uneven=pad)
  drop             shard(input=S(seq), over=tp)
  h.*.attn.c_attn  shard(col, blocks=3, over=tp)
  h.*.attn.c_proj  shard(row, over=tp, output=S(seq))
  h.*.mlp.c_fc     shard(col, over=tp)
  h.*.mlp.c_proj   shard(row, over=tp, output=S(seq))
  ln_f             shard(output=R, over=tp)
}
lm_head  shard(vocab, over=tp, uneven=pad)"""
BERT = """at bert.encoder.layer.* {
  attention.self                    shard(input=R, over=tp)
  attention.self.{query,key,value}  shard(col, over=tp)
  attention.output.dense            shard(row, over=tp, output=S(seq))
  intermediate.dense                shard(col, over=tp)
  output.dense                      shard(row, over=tp, output=S(seq))
}
bert.encoder  shard(input=S(seq), output=R, over=tp)"""


def adapted() -> nn.Module:
    """Llama, all frozen but the adapters of most projections."""
    model = models.llama(2).requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        for holder, names in ((layer.self_attn, "qvo"), (layer.mlp, ("up", "down"))):  # type: ignore[union-attr]
            for name in names:
                setattr(holder, f"{name}_proj", Adapted(getattr(holder, f"{name}_proj")))  # type: ignore[arg-type]
    return model


def test_adapters_on_frozen_projections(threads: Threads) -> None:
    """A and B are split as the base, or replicated; only adapters are trained."""
    assert_proven(threads, make_plan(adapted(), ADAPTED, "tp=2"), BATCHES)


def test_frozen_parameters_are_never_summed() -> None:
    """Gradients are summed over the ranks only where something is trained."""
    model = models.gpt2(1)
    model.transformer.h[0].ln_1.requires_grad_(False)  # type: ignore[union-attr]
    plan = make_plan(model, GPT2, "tp=2")
    traced = propagate(plan, BATCHES[0])
    assert "transformer.h.0.ln_2.weight" in traced.partial
    holdings = holdings_of(plan, stages_of(plan, traced, BATCHES[0], None))
    summed = {name for reduction in reductions(plan, traced, holdings) for name in reduction.names}
    assert "transformer.h.0.ln_2.weight" in summed and "transformer.h.0.ln_1.weight" not in summed


@pytest.mark.deep
def test_split_sequences_of_gpt2(threads: Threads) -> None:
    """Dropout, layer norms and residuals on a part of the tokens; their gradients are summed."""
    assert_proven(threads, make_plan(models.gpt2(2, dropout=0.1), GPT2, "tp=2"), BATCHES)


def test_split_sequences_of_bert(threads: Threads) -> None:
    """The residual around attention is split where attention itself gathers."""
    assert_proven(threads, make_plan(models.bert(2, 4), BERT, "tp=2"), BATCHES)


def test_a_length_that_the_ranks_do_not_divide() -> None:
    """Seven tokens over two ranks are refused (S420), with legal sizes."""
    message = refusal_text(models.gpt2(1), GPT2, "tp=2", models.tokens(3, 7))
    assert "S420" in message and "a dim of 7 cannot be split evenly over `tp`=2" in message
    assert "`tp` may be one of 1, 7" in message and "pad the batch to a multiple of 2" in message
    assert "`S(1)` or `S(seq)` in a row" in message  # as the row writes it, too


def test_embeddings_split_along_what_rows_hold(threads: Threads) -> None:
    """`weight=S(hidden)` gathers the parts of each row; an uneven one is padded."""
    rows = "model.embed_tokens  shard(weight=S(hidden), output=R, over=tp, uneven=pad)"
    assert_proven(threads, make_plan(models.llama(1), rows, "tp=3"), BATCHES)


def test_dims_by_name_are_the_split_by_style(threads: Threads) -> None:
    """Dims named in rows give the same shards as the styles `col` and `row`."""
    pair = "at model.layers.*.mlp {{\n  {{gate,up}}_proj  shard({}, over=tp)\n"
    pair += "  down_proj  shard({}, over=tp)\n}}"
    by_dims = ("weight=S(out), input=R, output=S(-1)", "weight=S(in), input=S(-1), output=R")
    plans = [
        make_plan(models.llama(1), pair.format(*styles), "tp=2")
        for styles in (by_dims, ("col", "row"))
    ]
    by_name, by_style = (
        holdings_of(plan, stages_of(plan, propagate(plan, BATCHES[0]), BATCHES[0], None))
        for plan in plans
    )
    assert by_name == by_style
    assert_proven(threads, plans[0], BATCHES)


def test_a_part_of_a_table_keeps_the_numbers_alone() -> None:
    """Lookups in shards add up to the full lookup, with equal first and second gradients; only the
    ids are saved for backward."""
    torch.manual_seed(0)
    ids, saved = torch.tensor([[5, 0, 3], [1, 5, 2]]), list[Tensor]()
    table = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    expected = nn.functional.embedding(ids, table, 5)
    parts = [part.detach().requires_grad_() for part in table.split(3)]

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        rows = torch.stack(
            [LocalRows.apply(ids, p, 3 * k, (None, 2)[k]) for k, p in enumerate(parts)]
        ).sum(0)
    assert [t.data_ptr() for t in saved] == [ids.data_ptr()] * 2
    assert torch.equal(rows, expected)
    (grad,) = torch.autograd.grad(expected.pow(3).sum(), table)
    local_grad = torch.cat(torch.autograd.grad(rows.pow(3).sum(), parts, create_graph=True))
    assert torch.equal(local_grad, grad) and not grad[5].any() and grad[3].any()
    (second,) = torch.autograd.grad(local_grad.sum(), parts[0])
    assert torch.equal(second[1], 6 * table[1].detach())


def test_embeddings_that_scale(threads: Threads) -> None:
    """Gemma multiplies each row, and bounds its logits; the tied table is split by words."""
    rows = """model.embed_tokens  shard(vocab, over=tp, uneven=pad)
    lm_head             shard(vocab, over=tp, uneven=pad)"""
    assert_proven(threads, make_plan(models.gemma2(), rows, "tp=2"), BATCHES)


def test_embeddings_that_change_their_rows_are_refused() -> None:
    """`max_norm` writes into the weight while it looks up (S404)."""
    model = nn.ModuleDict({"table": nn.Embedding(8, 4, max_norm=1.0)})
    with pytest.raises(Refusal) as caught:
        make_plan(model, "table  shard(vocab, over=tp)", "tp=2")
    assert "S404" in caught.value.render() and "(`max_norm`)" in caught.value.render()
