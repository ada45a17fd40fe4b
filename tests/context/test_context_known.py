"""Context parallelism of models that compute biases and positions of the full sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.causal import WIDTH, Causal
from tests.context.test_context import assert_same_training, batches
from tests.engine.threads import Threads
from tests.models import bloom
from tests.proofs import make_plan, static_holds

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


def checkpointing_opt() -> nn.Module:
    """OPT that recomputes its layers itself, by torch's checkpoint."""
    model = opt()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


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
    "opt that recomputes, ring": (checkpointing_opt, OPT.format(RING), "cp=2"),
    "roberta, ring of three": (roberta, ROBERTA.format("ring, over=cp, layout=striped"), "cp=3"),
}


QUICK = (
    *("bloom with dropout, zigzag ring", "mpt, ulysses", "t5, zigzag ring", "opt, zigzag ring"),
    "opt that recomputes, ring",
)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.deep) for name in CASES],
)
def test_it_trains_as_alone(name: str, threads: Threads) -> None:
    """Eleven and eight tokens, padded rows: training equals the plain loop."""
    make, rows, mesh = CASES[name]
    model = make()
    batches_given = batches()
    if "roberta" in name:  # words that are padding have no position of their own
        batches_given = [
            b | {"input_ids": b["input_ids"].masked_fill(b["attention_mask"] == 0, 1)}
            for b in batches_given
        ]
    assert_same_training(threads, make_plan(model, rows, mesh), model, batches_given)


def test_reentrant_checkpoints() -> None:
    """A model that recomputes by torch's reentrant checkpoint is refused with what is legal."""
    model: Any = opt()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(Refusal, match="reentrant checkpoints") as caught:
        prepare(make_plan(model, OPT.format(RING), "cp=2"), batches()[0])
    assert caught.value.diagnostic.code == "S659"
    assert "use_reentrant=False" in caught.value.diagnostic.helps[0]


TP = """
transformer.h.*.self_attention.query_key_value  shard(col, over=tp)
transformer.h.*.self_attention.dense  shard(row, over=tp)
{}"""


def test_a_bias_of_some_heads(threads: Threads) -> None:
    """A rank that has some of the heads, and some of the tokens, has these heads' biases for the
    keys of all tokens."""
    model = bloom()
    rows = TP.format(BLOOM.format(RING)).strip().replace("\n", "\n  ")
    assert_same_training(threads, make_plan(model, rows, "tp=2, cp=2"), model, batches())


@pytest.mark.parametrize("name", ["products", "counted"])
def test_a_model_of_ones_own(name: str, threads: Threads) -> None:
    """A user's model with attention by products, and one with positions by a cumulative sum."""
    models_by_name = {
        "products": Causal("products", layers=2),
        "counted": Causal(positions="counted", layers=2),
    }
    model = models_by_name[name]
    assert_same_training(
        threads, make_plan(model, OWN.format(RING), "cp=2"), model, batches(mask=False)
    )


@pytest.mark.deep
def test_without_a_mask(threads: Threads) -> None:
    """Bloom counts its keys by shapes where it is given no mask."""
    model = bloom()
    assert_same_training(
        threads, make_plan(model, BLOOM.format(RING), "cp=2"), model, batches(mask=False)
    )


@pytest.mark.parametrize("buffer", [False, True])
def test_a_model_without_values_is_proposed_for(buffer: bool) -> None:
    """`propose` follows the scores of a model without values (on meta), with or without buffers."""
    model = bloom().to("meta")
    if buffer:
        model.register_buffer("turns", torch.ones(3, device="meta"), persistent=False)
    text = propose(model, batches(mask=False)[0], {"cp": 2}).text
    assert "transformer.h.*.self_attention  context_parallel(ring, over=cp)" in text


def test_a_model_without_values_takes_the_next_ranks_label() -> None:
    """With a loss function labels are shifted across ranks: a plan without values counts the same
    messages and memory as one with values."""
    token_batch, results = models.tokens(), []
    for model in (models.llama(layers=1), models.llama(layers=1).to("meta")):
        plan = make_plan(model, "model.layers.*.self_attn  context_parallel(ring, over=cp)", "cp=2")
        costs = account(plan, token_batch, lambda output, batch: output.loss, memory=True)
        assert costs.memory is not None, costs.notes
        results.append((costs.collectives, [rank_memory.peak for rank_memory in costs.memory]))
    assert results[0] == results[1]


def test_a_stand_in_that_lacks_blocks() -> None:
    """A model without values that takes its modules by number is tried with all of them."""

    class Numbered(Causal):
        """Calls three equal modules by number."""

        def __init__(self) -> None:
            super().__init__()
            self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Add to the loss what the modules make of the words."""
            more = sum(self.more[index](self.words.weight).mean() for index in range(3))
            return super().forward(*args, **kwargs) + more

    plan = make_plan(Numbered().double().to("meta"), OWN.format("ring, over=cp"), "cp=2")
    assert account(plan, batches(mask=False)[0]).collectives


@pytest.mark.parametrize("make, row", [(bloom, BLOOM), (mpt, MPT)])
def test_biases_send_nothing(make: Callable[[], nn.Module], row: str) -> None:
    """Without ranks: a layer gathers keys and values, and reduces their gradients; no bias moves.

    2 · rows · tokens · width numbers each way (Llama 3, 2024).
    """
    model, batch = make(), batches(mask=False)[0]
    plan = make_plan(model, row.format("gather, over=cp"), "cp=2")
    ready = prepare(plan, batch)
    collectives = list_collectives(plan, ready, batch)
    key_messages = [
        collective for collective in collectives if collective.what.startswith("keys and values")
    ]
    rows, length = batch["input_ids"].shape
    width = model.config.hidden_size
    padded = 2 * (length - length // 2)  # parts are as large as the largest one
    assert {collective.kind for collective in key_messages} == {"all-gather", "reduce-scatter"}
    assert {collective.bytes for collective in key_messages} == {2 * rows * padded * width * 8}


def test_the_static_proofs_hold() -> None:
    """Sums, types, weights and messages of Bloom's ring are proven without running a rank."""
    static_holds(make_plan(bloom(), BLOOM.format(RING), "cp=2"), batches()[0])


class Squared(nn.Module):
    """Attention by products whose scores meet each other."""

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        scores = x @ x.mT
        return x + (scores * scores).softmax(-1) @ x


def test_scores_that_are_not_followed() -> None:
    """An unknown operation on scores is refused by its name."""
    model = Causal(layers=1)
    model.blocks[0] = Squared().double()
    with pytest.raises(Refusal) as error:
        prepare(make_plan(model, OWN.format(RING), "cp=2"), batches(mask=False)[0])
    message = error.value.render()
    assert "S661" in message and "`__mul__` on its scores is not supported" in message, message
    line = next(
        k for k, line_text in enumerate(SOURCE.splitlines(), 1) if "scores * scores" in line_text
    )
    assert f"at test_context_known.py:{line}" in message, message


class Turning(nn.Module):
    """Attention by products that does with seven rows what nobody saw at build."""

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        scores = x @ x.mT
        if len(x) == 7:
            scores = scores * scores
        return x + scores.softmax(-1) @ x


def _later_refusal(plan: Plan, build_batch: Batch, later_batch: Batch) -> str:
    """On a rank: the refusal of a batch for which the model behaves differently than at build."""
    program = build(plan, build_batch)
    program.train_step(build_batch)
    try:
        program.train_step(later_batch)
    except Refusal as refusal:
        return refusal.render()
    return ""


def test_what_ranks_refuse_names_its_row(threads: Threads) -> None:
    """A refusal of a later batch on a rank points at the row."""
    model = Causal(layers=1)
    model.blocks[0] = Turning().double()
    plan = make_plan(model, "\n" + OWN.format(RING), "cp=2")
    row = next(action for action in plan.actions if action.has_effect).span
    later = models.tokens(7, 8, mask=False)
    for message in threads.run(_later_refusal, 2, plan, batches(mask=False)[0], later):
        assert "S661" in message and "`__mul__` on its scores" in message, message
        assert row is not None and f":{row.line}:{row.col}" in message, message


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
    """A bias computed from activations is refused at the model's line."""
    model = Causal(layers=1)
    model.blocks[0] = Biased().double()
    with pytest.raises(Refusal) as error:
        prepare(make_plan(model, OWN.format(RING), "cp=2"), batches(mask=False)[0])
    message = error.value.render()
    line = next(
        k for k, line_text in enumerate(SOURCE.splitlines(), 1) if "+ self.far(x)" in line_text
    )
    assert "S661" in message and f"at test_context_known.py:{line}" in message, message
    assert "= help: compute it only from positions and integers of the batch" in message, message
