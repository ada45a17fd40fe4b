"""Biases and positions that a model makes of the whole sequence: right on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.autoshard.propose import propose
from schedlang.passes.lower.build import build
from schedlang.passes.simulate.account import account
from schedlang.passes.simulate.traffic import list_collectives
from schedlang.runtime.batch import Batch
from tests import models
from tests.causal import Causal
from tests.context.test_context import batches, same
from tests.engine.threads import Threads
from tests.models import bloom
from tests.proofs import planned, static_holds

BLOOM = "transformer.h.*.self_attention  context_parallel({})"
MPT = "transformer.blocks.*.attn  context_parallel({})"
OPT = "model.decoder.layers.*.self_attn  context_parallel({})"
ROBERTA = "roberta.encoder.layer.*.attention  context_parallel({})"
T5 = "transformer.encoder.block.*.layer.0.SelfAttention  context_parallel({})"
OWN = "blocks.*  context_parallel({})"
RING = "ring, over=cp, layout=zigzag"
SOURCE = Path(__file__).read_text(encoding="utf-8")


def mpt() -> nn.Module:
    """MPT: the last columns of a table of biases; three heads, not a power of two."""
    return models.hf(
        "MptForCausalLM", vocab_size=61, d_model=24, n_layers=2, n_heads=3, max_seq_len=64
    )


def opt() -> nn.Module:
    """OPT: positions are sums over the mask, and an offset."""
    return models.hf(
        "OPTForCausalLM",
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        word_embed_proj_dim=16,
        max_position_embeddings=32,
        dropout=0.0,
    )


def roberta() -> nn.Module:
    """RoBERTa: positions are sums over the words that are not padding, and an offset."""
    return models.hf(
        "RobertaForMaskedLM",
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def t5() -> nn.Module:
    """T5's encoder: a table of biases by distance, which is trained, both ways."""
    return models.hf(
        "T5ForTokenClassification",
        vocab_size=61,
        d_model=16,
        num_layers=2,
        num_heads=2,
        d_kv=8,
        d_ff=24,
        dropout_rate=0.0,
        num_labels=61,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
    )


CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "bloom, gather": (bloom, BLOOM.format("gather, over=cp"), "cp=2"),
    "bloom with dropout, zigzag ring": (lambda: bloom(dropout=0.2), BLOOM.format(RING), "cp=2"),
    "bloom, ulysses": (bloom, BLOOM.format("ulysses, over=cp, layout=striped"), "cp=2"),
    "mpt, gather": (mpt, MPT.format("gather, over=cp"), "cp=2"),
    "mpt, zigzag ring": (mpt, MPT.format(RING), "cp=2"),
    "mpt, ulysses": (mpt, MPT.format("ulysses, over=cp"), "cp=3"),
    "t5, zigzag ring": (t5, T5.format(RING), "cp=2"),
    "t5, ulysses": (t5, T5.format("ulysses, over=cp"), "cp=2"),
    "opt, zigzag ring": (opt, OPT.format(RING), "cp=2"),
    "roberta, ring of three": (roberta, ROBERTA.format("ring, over=cp, layout=striped"), "cp=3"),
}


QUICK = ("bloom with dropout, zigzag ring", "mpt, ulysses", "t5, zigzag ring", "opt, zigzag ring")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.deep) for name in CASES],
)
def test_it_trains_as_alone(name: str, threads: Threads) -> None:
    """Eleven and eight tokens, padded rows: losses, gradients, state are the plain loop's."""
    make, rows, mesh = CASES[name]
    model = make()
    given = batches()
    if "roberta" in name:  # words that are padding have no position of their own
        given = [
            b | {"input_ids": b["input_ids"].masked_fill(b["attention_mask"] == 0, 1)}
            for b in given
        ]
    same(threads, planned(model, rows, mesh), model, given)


TP = """
transformer.h.*.self_attention.query_key_value  shard(col, over=tp)
transformer.h.*.self_attention.dense  shard(row, over=tp)
{}"""


def test_a_bias_of_some_heads(threads: Threads) -> None:
    """A rank that has some of the heads, and some of the tokens, has these heads' biases for the
    keys of all tokens."""
    model = bloom()
    rows = TP.format(BLOOM.format(RING)).strip().replace("\n", "\n  ")
    same(threads, planned(model, rows, "tp=2, cp=2"), model, batches())


@pytest.mark.parametrize("name", ["products", "counted"])
def test_a_model_of_ones_own(name: str, threads: Threads) -> None:
    """Attention by products under a table, and positions summed up: no line of it is changed."""
    own = {
        "products": Causal("products", layers=2),
        "counted": Causal(positions="counted", layers=2),
    }
    model = own[name]
    same(threads, planned(model, OWN.format(RING), "cp=2"), model, batches(mask=False))


@pytest.mark.deep
def test_without_a_mask(threads: Threads) -> None:
    """Bloom counts its keys by shapes where it is given no mask."""
    model = bloom()
    same(threads, planned(model, BLOOM.format(RING), "cp=2"), model, batches(mask=False))


@pytest.mark.parametrize("buffer", [False, True])
def test_a_model_without_values_is_proposed_for(buffer: bool) -> None:
    """Scores are followed where a proposal is counted: there the model is not tried, for it has
    no values; its buffers may have none either."""
    model = bloom().to("meta")
    if buffer:
        model.register_buffer("turns", torch.ones(3, device="meta"), persistent=False)
    text = propose(model, batches(mask=False)[0], {"cp": 2}).text
    assert "transformer.h.*.self_attention  context_parallel(ring, over=cp)" in text


def test_a_model_without_values_takes_the_next_ranks_label() -> None:
    """With a loss function labels are moved, and the head gives one row more for them: where a
    plan is counted without values, too, what is sent and held is what it is with values."""
    given, told = models.tokens(), []
    for model in (models.llama(layers=1), models.llama(layers=1).to("meta")):
        plan = planned(model, "model.layers.*.self_attn  context_parallel(ring, over=cp)", "cp=2")
        found = account(plan, given, lambda output, batch: output.loss, memory=True)
        assert found.memory is not None, found.notes
        told.append((found.collectives, [one.peak for one in found.memory]))
    assert told[0] == told[1]


@pytest.mark.parametrize("make, row", [(bloom, BLOOM), (mpt, MPT)])
def test_biases_send_nothing(make: Callable[[], nn.Module], row: str) -> None:
    """Without ranks: a layer gathers keys and values, and reduces their gradients; no bias moves.

    2 · rows · tokens · width numbers each way (Llama 3, 2024).
    """
    model, given = make(), batches(mask=False)[0]
    plan = planned(model, row.format("gather, over=cp"), "cp=2")
    ready = prepare(plan, given)
    found = list_collectives(plan, ready, given)
    sent = [one for one in found if one.what.startswith("keys and values")]
    rows, length = given["input_ids"].shape
    width = model.config.hidden_size
    padded = 2 * (length - length // 2)  # parts are as large as the largest one
    assert {one.kind for one in sent} == {"all-gather", "reduce-scatter"}
    assert {one.bytes for one in sent} == {2 * rows * padded * width * 8}


def test_the_static_proofs_hold() -> None:
    """Sums, types, weights and messages of Bloom's ring are proven without running a rank."""
    static_holds(planned(bloom(), BLOOM.format(RING), "cp=2"), batches()[0])


class Squared(nn.Module):
    """Attention by products whose scores meet each other."""

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        scores = x @ x.mT
        return x + (scores * scores).softmax(-1) @ x


def test_scores_that_are_not_followed() -> None:
    """What is done to scores and is not known is refused by its name, not left out."""
    model = Causal(layers=1)
    model.blocks[0] = Squared().double()
    with pytest.raises(Refusal) as error:
        prepare(planned(model, OWN.format(RING), "cp=2"), batches(mask=False)[0])
    said = error.value.render()
    assert "S661" in said and "`__mul__` on its scores is not supported" in said, said
    line = next(k for k, one in enumerate(SOURCE.splitlines(), 1) if "scores * scores" in one)
    assert f"at test_context_known.py:{line}" in said, said


class Turning(nn.Module):
    """Attention by products that does with seven rows what nobody saw at build."""

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        scores = x @ x.mT
        if len(x) == 7:
            scores = scores * scores
        return x + scores.softmax(-1) @ x


def _refused_later(plan: Plan, first: Batch, later: Batch) -> str:
    """What a rank says of a batch on which its program does other things than at build."""
    program = build(plan, first)
    program.train_step(first)
    try:
        program.train_step(later)
    except Refusal as refusal:
        return refusal.render()
    return ""


def test_what_ranks_refuse_names_its_row(threads: Threads) -> None:
    """A later batch meets scores that are not followed: the refusal of a rank is at the row."""
    model = Causal(layers=1)
    model.blocks[0] = Turning().double()
    plan = planned(model, "\n" + OWN.format(RING), "cp=2")
    row = next(one for one in plan.actions if one.has_effect).span
    later = models.tokens(7, 8, mask=False)
    for said in threads.run(_refused_later, 2, plan, batches(mask=False)[0], later):
        assert "S661" in said and "`__mul__` on its scores" in said, said
        assert row is not None and f":{row.line}:{row.col}" in said, said


class Biased(nn.Module):
    """Attention by products, with a bias that is made of what the module is given."""

    def __init__(self) -> None:
        super().__init__()
        self.far = nn.Linear(16, 1)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        scores = x @ x.mT
        scores = scores + self.far(x).mT
        return x + scores.softmax(-1) @ x


def test_a_bias_of_activations() -> None:
    """Of numbers for keys that other ranks have, nothing is known: refused at the model's line."""
    model = Causal(layers=1)
    model.blocks[0] = Biased().double()
    with pytest.raises(Refusal) as error:
        prepare(planned(model, OWN.format(RING), "cp=2"), batches(mask=False)[0])
    said = error.value.render()
    line = next(k for k, one in enumerate(SOURCE.splitlines(), 1) if "+ self.far(x)" in one)
    assert "S661" in said and f"at test_context_known.py:{line}" in said, said
    assert "= help: compute it only from positions and integers of the batch" in said, said
