"""Tests of activations in fewer bits where ranks split sequences."""

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
from tests.memory.test_coded import ROW, drawn, tokens
from tests.proofs import planned, proven
from tests.tiers import thinned

GPT2 = "transformer.h.*.attn  context_parallel({})\n" + ROW
LLAMA = (
    "model.layers.*.self_attn  context_parallel({})\n"
    "model.layers.*  compress(activations, {}, block=16)\n"
)
BOTH = """
  model.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)
  model.layers.*.self_attn.o_proj        shard(row, over=tp)
  model.layers.*.mlp.{gate,up}_proj      shard(col, over=tp)
  model.layers.*.mlp.down_proj           shard(row, over=tp)
"""
AGAIN = LLAMA.replace("model.layers.*  ", "model.layers.*  checkpoint()\nmodel.layers.*  ", 1)


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("total", [8, 11])
def test_parts_come_back_in_their_places(kind: str, total: int) -> None:
    """Each rank's tokens are changed by themselves, in their order, and put back; also of several
    samples in one dim, and of sequences that the ranks do not divide."""
    layout = SequenceLayout.of_kind(kind, total, 2)
    x = drawn(3, total, 4)
    for whole, dim in ((x, 1), (x.flatten(0, 1), 0)):
        parts = TokenSplits(2, kind, {("m", "m.s"): (SavedSplit(dim),)})
        seen: list[Tensor] = []

        def change(part: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(part.reshape(3, -1, 4))
            return part * 2 ** len(seen)

        made = parts.change_shards(SavedPlace("m", "m.s", 1, 3), whole, change)
        for place in range(2):
            assert torch.equal(seen[place], layout.take(x, 1, place))
            assert torch.equal(
                layout.take(made.reshape(x.shape), 1, place), seen[place] * 2 ** (place + 1)
            )


def test_heads_and_copies_of_them() -> None:
    """Runs of heads, and heads that are there several times: one of each is changed; all of them,
    where attention without a mask takes the heads as they are."""
    x = drawn(2, 2, 6, 4)
    copied = x.repeat_interleave(3, 1)
    for split, count in ((SavedSplit(2, copies=3), 2), (SavedSplit(heads=True, copies=3), 1)):
        seen: list[Tensor] = []

        def change(part: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(part)
            return part * 2

        made = TokenSplits(2, "zigzag", {("m", "m"): (split,)})
        assert torch.equal(
            made.change_shards(SavedPlace("m", "m", 1, 2), copied, change), copied * 2
        )
        assert torch.equal(made.change_shards(SavedPlace("m", "m", 1, 2), x, change), x * 2)
        assert len(seen) == 4 and all(part.shape[1] == count for part in seen)


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
    """Of 8 tokens on 2 ranks: tokens, samples of tokens, heads, and keys of several queries."""
    assert TokenCounts(8, 4, 2).split_of(whole, part) == split


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, rows, mesh",
    thinned(
        [
            (lambda: models.gpt2(2), GPT2.format("ring, over=cp, layout=zigzag", "int2"), "cp=2"),
            (lambda: models.gpt2(2), GPT2.format("ulysses, over=cp", "int4"), "cp=2"),
            (
                lambda: models.llama(2),
                AGAIN.format("ring, over=cp, layout=striped", "int2")
                + "zero(stage=3, over=(dp, cp))",
                "dp=2, cp=2",
            ),
            (lambda: models.llama(2), LLAMA.format("ulysses, over=cp", "int2"), "cp=2"),
            (lambda: models.llama(2), LLAMA.format("gather, over=cp", "adaptive, bits=4"), "cp=3"),
            (lambda: models.llama(2), LLAMA.format("ring, over=cp, layout=zigzag", "int4"), "cp=2"),
            (
                lambda: models.llama(1),
                BOTH + LLAMA.format("ring, over=cp, layout=zigzag", "int2"),
                "cp=2, tp=2",
            ),
            (
                lambda: models.llama(2),
                BOTH
                + LLAMA.format("ulysses, over=cp", "adaptive, bits=4")
                + "zero(stage=3, over=cp)",
                "cp=2, tp=2",
            ),
            (lambda: models.llama(2), BOTH + AGAIN.format("gather, over=cp", "int4"), "cp=2, tp=2"),
        ],
        3,
    ),
)
def test_equal_to_one_process_that_rounds_tokens_alike(
    threads: Threads, model: Callable[[], nn.Module], rows: str, mesh: str
) -> None:
    """Each rank rounds blocks of its tokens, or of its heads inside Ulysses; one process that
    rounds the same blocks agrees in every gradient, with padding and without; and where other ranks
    split weights."""
    report = proven(threads, planned(model(), rows, mesh, "lossy"), tokens())
    assert report.equivalence == "relaxed (lossy)"


@pytest.mark.deep
def test_another_layout_is_found(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one process took other tokens for a rank's, gradients would not agree."""
    monkeypatch.setattr(
        TokenSplits,
        "_layout",
        lambda self, total: SequenceLayout.of_kind("striped", total, self.ranks),
    )
    plan = planned(
        models.llama(1), LLAMA.format("ring, over=cp, layout=zigzag", "int2"), "cp=2", "lossy"
    )
    report = prove(Case(plan, tuple(tokens()), None, None, 0, "none"), pool=threads)
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
    """Attention that keeps its scores, or drops some, and tokens beside weights on two axes."""
    with pytest.raises(Refusal) as error:
        prepare(planned(model(), rows, mesh, "lossy"), models.tokens(rows=4))
    assert code in error.value.render() and said in error.value.render(), error.value.render()
