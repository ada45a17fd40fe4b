"""Compressed activations with context parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.propagate.saved_splits import SavedPlace, SavedSplit, TokenCounts, TokenSplits
from schedlang.passes.prove import Case, prove
from schedlang.runtime.context_parallel.token_layout import SequenceLayout
from tests import models
from tests.engine import Threads
from tests.memory.test_compressed_activations import ROW, random_tensor, token_batches
from tests.proofs import assert_proven, make_plan
from tests.tiers import thin_out

GPT2 = "transformer.h.*.attn  context_parallel({})\n" + ROW
LLAMA = (
    "model.layers.*.self_attn  context_parallel({})\n"
    "model.layers.*  compress(activations, {}, block=16)\n"
)
TENSOR_PARALLEL = """
  model.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)
  model.layers.*.self_attn.o_proj        shard(row, over=tp)
  model.layers.*.mlp.{gate,up}_proj      shard(col, over=tp)
  model.layers.*.mlp.down_proj           shard(row, over=tp)
"""
LLAMA_CHECKPOINT = LLAMA.replace(
    "model.layers.*  ", "model.layers.*  checkpoint()\nmodel.layers.*  ", 1
)


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("total", [8, 11])
def test_parts_come_back_in_their_places(kind: str, total: int) -> None:
    """Each rank's tokens are changed separately, in order, and put back; with several samples in
    one dim, and uneven sequences."""
    layout = SequenceLayout.of_kind(kind, total, 2)
    x = random_tensor(3, total, 4)
    for tensor, dim in ((x, 1), (x.flatten(0, 1), 0)):
        splits = TokenSplits(2, kind, {("m", "m.s"): (SavedSplit(dim),)})
        shards: list[Tensor] = []

        def change(part: Tensor, shards: list[Tensor] = shards) -> Tensor:
            shards.append(part.reshape(3, -1, 4))
            return part * 2 ** len(shards)

        changed = splits.change_shards(SavedPlace("m", "m.s", 1, 3), tensor, change)
        for rank in range(2):
            assert torch.equal(shards[rank], layout.take(x, 1, rank))
            assert torch.equal(
                layout.take(changed.reshape(x.shape), 1, rank), shards[rank] * 2 ** (rank + 1)
            )


def test_heads_and_copies_of_them() -> None:
    """Of repeated heads one is changed; all of them where attention without a mask takes the heads
    unrepeated."""
    x = random_tensor(2, 2, 6, 4)
    copied = x.repeat_interleave(3, 1)
    for split, count in ((SavedSplit(2, copies=3), 2), (SavedSplit(heads=True, copies=3), 1)):
        changed_parts: list[Tensor] = []

        def change(part: Tensor, changed_parts: list[Tensor] = changed_parts) -> Tensor:
            changed_parts.append(part)
            return part * 2

        splits = TokenSplits(2, "zigzag", {("m", "m"): (split,)})
        assert torch.equal(
            splits.change_shards(SavedPlace("m", "m", 1, 2), copied, change), copied * 2
        )
        assert torch.equal(splits.change_shards(SavedPlace("m", "m", 1, 2), x, change), x * 2)
        assert len(changed_parts) == 4 and all(part.shape[1] == count for part in changed_parts)


@pytest.mark.parametrize(
    "whole, part, split",
    [
        ((3, 8, 16), (3, 4, 16), SavedSplit(1)),
        ((24, 16), (12, 16), SavedSplit(0)),
        ((3, 4, 8, 8), (3, 4, 4, 8), SavedSplit(2)),
        ((3, 4, 8, 8), (3, 2, 4, 8), SavedSplit(2, copies=2)),
        ((3, 4, 8, 8), (3, 2, 8, 8), SavedSplit(heads=True)),
        ((3, 8, 8, 8), (3, 4, 8, 8), SavedSplit(heads=True)),
        ((3, 4, 8), (3, 2, 8), SavedSplit(heads=True)),
        ((3, 8, 4, 8), (3, 4, 4, 8), SavedSplit(1)),
        ((3, 16), (3, 16), SavedSplit()),
        ((3, 4, 8, 8), (3, 4, 4, 4), None),
        ((3, 8, 16), (3, 4, 8), None),
        ((3, 1, 8, 8), (3, 1, 8, 4), None),
        ((3, 8, 16), (24, 16), None),
    ],
)
def test_shapes_tell_what_is_split(
    whole: tuple[int, ...], part: tuple[int, ...], split: SavedSplit | None
) -> None:
    """With 8 tokens on 2 ranks: tokens, samples of tokens, heads, and keys of several queries."""
    assert TokenCounts(8, 4, 2).split_of(whole, part) == split


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, rows, mesh",
    thin_out(
        [
            (lambda: models.gpt2(2), GPT2.format("ring, over=cp, layout=zigzag", "int2"), "cp=2"),
            (lambda: models.gpt2(2), GPT2.format("ulysses, over=cp", "int4"), "cp=2"),
            (
                lambda: models.llama(2),
                LLAMA_CHECKPOINT.format("ring, over=cp, layout=striped", "int2")
                + "zero(stage=3, over=(dp, cp))",
                "dp=2, cp=2",
            ),
            (lambda: models.llama(2), LLAMA.format("ulysses, over=cp", "int2"), "cp=2"),
            (lambda: models.llama(2), LLAMA.format("gather, over=cp", "adaptive, bits=4"), "cp=3"),
            (lambda: models.llama(2), LLAMA.format("ring, over=cp, layout=zigzag", "int4"), "cp=2"),
            (
                lambda: models.llama(1),
                TENSOR_PARALLEL + LLAMA.format("ring, over=cp, layout=zigzag", "int2"),
                "cp=2, tp=2",
            ),
            (
                lambda: models.llama(2),
                TENSOR_PARALLEL
                + LLAMA.format("ulysses, over=cp", "adaptive, bits=4")
                + "zero(stage=3, over=cp)",
                "cp=2, tp=2",
            ),
            (
                lambda: models.llama(2),
                TENSOR_PARALLEL + LLAMA_CHECKPOINT.format("gather, over=cp", "int4"),
                "cp=2, tp=2",
            ),
        ],
        3,
    ),
)
def test_equal_to_one_process_that_rounds_tokens_alike(
    threads: Threads, model: Callable[[], nn.Module], rows: str, mesh: str
) -> None:
    """Each rank compresses blocks of its tokens, or of its heads with Ulysses; one process with the
    same blocks has equal gradients."""
    report = assert_proven(threads, make_plan(model(), rows, mesh, "lossy"), token_batches())
    assert report.equivalence == "relaxed (lossy)"


@pytest.mark.deep
def test_another_layout_is_found(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process with another token layout fails the proof."""
    monkeypatch.setattr(
        TokenSplits,
        "_layout",
        lambda self, total: SequenceLayout.of_kind("striped", total, self.ranks),
    )
    plan = make_plan(
        models.llama(1), LLAMA.format("ring, over=cp, layout=zigzag", "int2"), "cp=2", "lossy"
    )
    report = prove(Case(plan, tuple(token_batches()), None, None, 0, "none"), pool=threads)
    assert "gradients" in {row.kind for row in report.rows if not row.ok and not row.step}


@pytest.mark.parametrize(
    "model, rows, mesh, code, said",
    [
        (
            lambda: models.llama(1, attend="eager"),
            LLAMA.format("ring, over=cp", "int8"),
            "cp=2",
            "S935",
            "a single process would",
        ),
        (
            lambda: models.gpt2(1, dropout=0.1),
            GPT2.format("ring, over=cp", "int8"),
            "cp=2",
            "S935",
            "attention with dropout",
        ),
        (
            lambda: models.llama(1),
            "model.layers.*.mlp.{gate,up}_proj  shard(col, over=tp)\n"
            "model.layers.*.mlp.down_proj  shard(row, over=tp)\n"
            "model.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tq)\n"
            "model.layers.*.self_attn.o_proj  shard(row, over=tq)\n"
            + LLAMA.format("ring, over=cp", "int8"),
            "cp=2, tp=2, tq=2",
            "S858",
            "activations sharded over `tq`",
        ),
    ],
)
def test_refused(
    model: Callable[[], nn.Module], rows: str, mesh: str, code: str, said: str
) -> None:
    """Attention that saves scores, attention with dropout, and tokens with weights on two axes."""
    with pytest.raises(Refusal) as error:
        prepare(make_plan(model(), rows, mesh, "lossy"), models.tokens(rows=4))
    assert code in error.value.render() and said in error.value.render(), error.value.render()
