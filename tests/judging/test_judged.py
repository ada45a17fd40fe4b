"""`verify_program`: right programs pass; wrong ones fail, with tensors and kind of mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from schedlang import verify_program
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging import by_hand, net, wrapped

DEEP = pytest.mark.deep


@cache  # several tests use the report of one program
def judge_program(pool: Pool, program: Callable[[Any], Any], ranks: int, **sizes: Any) -> Report:
    """Judge a program of the small decoder (one block by default), and return the report."""
    torch.manual_seed(0)
    original: nn.Module = net.Net(**{"depth": 1} | sizes)
    return verify_program(
        program, model=original, batch=net.batch, loss=net.loss, ranks=ranks, pool=pool
    )


RIGHT = [
    pytest.param(wrapped.ddp_full_api, 2, {}, id="ddp"),
    pytest.param(wrapped.compiled, 2, {}, id="compiled", marks=DEEP),
    pytest.param(wrapped.fsdp2, 4, {}, id="fsdp2"),
    pytest.param(wrapped.fsdp2_crosswise, 4, {}, id="fsdp2 along the second dim", marks=DEEP),
    pytest.param(wrapped.fsdp1, 2, {}, id="fsdp1"),
    pytest.param(wrapped.fsdp1_names, 2, {}, id="fsdp1 with names"),
    pytest.param(wrapped.fsdp2, 2, {"tied": True, "frozen": True}, id="fsdp2, tied and frozen"),
    pytest.param(wrapped.tp, 2, {}, id="tp"),
    pytest.param(wrapped.tp_fsdp, 4, {}, id="tp and fsdp2"),
    pytest.param(wrapped.vocab_parallel, 2, {}, id="split vocabulary and sequence"),
    pytest.param(wrapped.hybrid, 4, {}, id="hybrid fsdp2", marks=DEEP),
    pytest.param(wrapped.recomputed, 2, {}, id="checkpoint wrappers", marks=DEEP),
    pytest.param(by_hand.megatron, 2, {}, id="plain parts"),
    pytest.param(by_hand.gpipe, 2, {"depth": 2}, id="pipeline by hand"),
    pytest.param(by_hand.gpipe_tied, 2, {"depth": 2, "tied": True}, id="pipeline with a tie"),
    pytest.param(by_hand.torch_pipeline, 2, {"depth": 2}, id="torch's pipelining"),
]


@pytest.mark.parametrize("program, ranks, model", RIGHT)
def test_a_right_program_passes(pool: Pool, program: Any, ranks: int, model: Any) -> None:
    """Loss, gradients, parameters and optimizer state are compared, and equal."""
    report = judge_program(pool, program, ranks, **model)
    assert report.ok, str(report)
    kinds = {row.kind for row in report.rows}
    assert kinds >= {"loss", "gradients", "parameters", "optimizer exp_avg", "initial weights"}
    trained = {row.name for row in report.rows if row.kind == "gradients"}
    parameters = 4 + 16 * model.get("depth", 1) - ("tied" in model) - ("frozen" in model)
    assert len(trained) == parameters, sorted(trained)


WRONG = [
    (wrapped.ddp_mean, 2, {}, "head.weight", "the plain mean of what 2 parts of the batch give"),
    (wrapped.ddp_twice, 2, {}, "head.weight", "1/ranks = 1/2 times the right value everywhere"),
    (wrapped.ddp_unsynced, 2, {}, "head.weight", "ranks differ and their mean is right"),
    (wrapped.ddp_other_start, 2, {}, "norm.weight", "changed it before the first step"),
    (by_hand.renamed, 2, {}, "emb.weight", "changed it before the first step"),
    (wrapped.fsdp2_sum, 4, {}, "head.weight", "1/ranks = 1/4 times the right value everywhere"),
    (wrapped.fsdp1_doubled, 2, {}, "head.weight", "ranks = 2 times the right value everywhere"),
    (wrapped.tp_summed, 2, {}, "norm.weight", "ranks = 2 times the right value everywhere"),
    (wrapped.tp_fsdp_once, 4, {}, "head.weight", "1/dp = 1/2 times the right value everywhere"),
    (
        by_hand.norms_unreduced,
        2,
        {},
        "blocks.0.n2.weight",
        "their sum is right: a sum over ranks is",
    ),
    (by_hand.grad_doubled, 2, {}, "blocks.0.down.weight", "what rank 0 holds is 2 times the right"),
    (by_hand.one_rank_off, 2, {}, "norm.bias", "only rank 0 has the right value"),
    (by_hand.gpipe, 2, {"depth": 2, "tied": True}, "emb.weight", "a tie is broken between"),
    (by_hand.untied, 2, {"tied": True}, "emb.weight", "copies differ and their sum is right"),
    (by_hand.trains_frozen, 2, {"frozen": True}, "norm.weight", "the original has none"),
]


@pytest.mark.parametrize(
    "program, ranks, model, name, said", WRONG, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_wrong_program_fails_with_the_kind_of_mistake(
    pool: Pool, program: Any, ranks: int, model: Any, name: str, said: str
) -> None:
    """One sentence per group of tensors names the arithmetic mistake."""
    report = judge_program(pool, program, ranks, **model)
    assert report.exit_code == 1, str(report)
    assert any(f"`{name}`" in text and said in text for _, text in report.localised), str(report)


def test_only_the_wrong_tensors_are_named(pool: Pool) -> None:
    """With a missing all-reduce of sequence parallel norms, only the norms fail."""
    report = judge_program(pool, by_hand.norms_unreduced, 2)
    gradient_rows = [r for r in report.rows if r.kind == "gradients" and r.step == 0 and not r.ok]
    wrong = {row.name for row in gradient_rows if row.condition == "SGD"}
    norms = {f"blocks.0.{n}.{p}" for n in ("n1", "n2") for p in ("weight", "bias")}
    assert wrong == norms


def test_a_mistake_that_only_padding_shows(pool: Pool) -> None:
    """Batches without padding hide a mean of means; varied batches show it, and the report says so.

    With `vary=False` batches are not varied, and the report lists what was not exercised.
    """

    def batch(seed: int) -> Any:
        tensors = net.batch(seed)
        return {**tensors, "labels": tensors["ids"].roll(1, 1)}

    torch.manual_seed(0)
    options: Any = {
        "model": net.Net(depth=1),
        "batch": batch,
        "loss": net.loss,
        "ranks": 2,
        "pool": pool,
    }
    report = verify_program(wrapped.ddp_mean, **options)
    assert report.exit_code == 1 and report.localised[-1][0] == "only where", str(report)
    not_varied = verify_program(wrapped.ddp_mean, **options, vary=False)
    assert not_varied.ok and "no ignored labels" in {gap.condition for gap in not_varied.gaps}


def test_what_is_not_offered_is_said(pool: Pool) -> None:
    """Each optional part of a program is compared, or reported as not offered."""
    full = judge_program(pool, wrapped.ddp_full_api, 2)
    bare = judge_program(pool, wrapped.ddp_mean, 2)
    parts = {"outputs", "training outputs", "gradient norm", "saved state"}
    assert parts <= {row.kind for row in full.rows}
    conditions = {gap.condition for gap in bare.gaps}
    assert {f"{part} (not offered)" for part in parts} <= conditions, conditions
    assert not parts & {row.kind for row in bare.rows}


def test_an_optimizer_of_its_own(pool: Pool) -> None:
    """With ZeRO's optimizer, parameters after three steps equal those of AdamW."""
    report = judge_program(pool, wrapped.zero1, 2)
    assert report.ok, str(report)
    assert {row.condition for row in report.rows if row.kind == "parameters"} == {
        "own optimizer",
        "own optimizer, clipped",
    }


def test_statistics_of_a_batch(pool: Pool) -> None:
    """A batch norm with statistics per rank is named, and not taken for a mean of means."""
    report = verify_program(
        wrapped.unsynced_norm,
        model=wrapped.BatchNormNet(),
        batch=wrapped.images,
        loss=wrapped.image_loss,
        ranks=2,
        pool=pool,
    )
    text = " ".join(text for _, text in report.localised)
    assert report.exit_code == 1 and "the original sees the whole batch at once" in text, text
    assert any(row.name == "buffer bn.running_mean" and not row.ok for row in report.rows)
