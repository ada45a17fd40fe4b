"""Distributed attention in small dtypes: torch's flash attention on contiguous runs of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.runtime.context_parallel import local_attention
from schedlang.runtime.context_parallel.token_layout import PositionMask, SequenceLayout
from schedlang.runtime.launch.pool import Pool
from tests import models
from tests.attention_cases import (
    KINDS,
    SIZES,
    Case,
    dense_results,
    groups_of,
    join_results,
    local_tensors,
    place_of,
    run_attention,
)
from tests.engine import Threads
from tests.proofs import make_plan

CASE = Case("ring", (3,), tokens=25, widths=(8, 8))
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps}


def _attend_in_dtype(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    local = {n: t.to(dtype) for n, t in local_tensors(case, layout, place_of(groups)).items()}
    leaves = [local[name].requires_grad_() for name in "qkv"]
    output = run_attention(case, local, groups, layout)
    grads = torch.autograd.grad(output, leaves, local["grad"])
    return [t.detach().double() for t in (output, *grads)]


def count_flash_calls(case: Case, dtype: torch.dtype, threads: Threads) -> int:
    """Assert errors of one or two roundings; return the number of calls of flash attention."""
    x = torch.empty(1, 1, 1, case.widths[0], dtype=dtype)
    local_attention.can_use_flash(
        x, x
    )  # it is tried once in a process: those calls are not counted
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("flash_forward", "flash_backward"):
            original = getattr(local_attention, name)
            patch.setattr(
                local_attention, name, lambda *a, original=original: calls.append(1) or original(*a)
            )
        results = threads.run(_attend_in_dtype, case.ranks, case, dtype)
    for actual, expected in zip(join_results(case, results), dense_results(case)):
        assert float((actual - expected).norm() / expected.norm()) < BOUNDS[dtype]
    return len(calls)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_flash_attention_does_whole_runs(kind: str, dtype: torch.dtype, threads: Threads) -> None:
    """Full and causal blocks of every layout use flash attention, also interleaved tokens."""
    for method in ("gather", "ring", "usp"):
        case = replace(CASE, method=method, sizes=SIZES[method][-1], kind=kind)
        calls = count_flash_calls(case, dtype, threads)
        assert calls >= 2 * case.ranks


@pytest.mark.parametrize("more", [{"cap": 2.0}, {"back": 3}, {"widths": (8, 4)}], ids=str)
def test_what_it_cannot_do_goes_by_blocks(more: dict[str, Any], threads: Threads) -> None:
    """Caps and values of another width never use it; a window does for fully visible blocks."""
    calls = count_flash_calls(replace(CASE, **more), torch.float32, threads)
    assert (calls == 0) or "back" in more


def test_forms() -> None:
    """Which runs are full, causal, or causal without the first query and the last key."""
    causal = PositionMask(ahead=0)
    all_four = slice(0, 4)
    assert local_attention.flash_form(causal, range(8, 12), range(4)) == (all_four, all_four, False)
    assert local_attention.flash_form(causal, range(4, 8), range(4, 8)) == (
        all_four,
        all_four,
        True,
    )
    assert local_attention.flash_form(causal, range(1, 9, 2), range(0, 8, 2)) == (
        all_four,
        all_four,
        True,
    )
    late = local_attention.flash_form(causal, range(0, 8, 2), range(1, 9, 2))
    assert late == (slice(1, 4), slice(0, 3), True)
    assert local_attention.flash_form(causal, range(4), range(4, 8)) is None
    assert local_attention.flash_form(causal, range(0, 8, 2), range(2, 10, 2)) is None
    assert local_attention.flash_form(PositionMask(ahead=0, back=2), range(4), range(4)) is None


def _checkpointed_loss(plan: Plan, batch: dict[str, torch.Tensor]) -> float:
    local_attention._right.cache_clear()
    return float(build(plan, batch).train_step(batch))


def test_it_is_tried_within_a_checkpoint(pool: Pool) -> None:
    """The trial of flash attention does not run inside a call of the model: in a recomputed region
    its backward would mix with the messages of a ring."""
    torch.manual_seed(0)
    model = models.llama(2).float()
    batch = dict(models.tokens(4, 8, seed=1))
    rows = "model.layers.*.self_attn context_parallel(ring, over=cp)\nmodel.layers.* checkpoint()"
    plan = make_plan(model, f"{rows}\nzero(stage=0, over=cp)", "cp=2")
    expected = float(model(**batch).loss)
    for loss in pool.run(_checkpointed_loss, 2, plan, batch, timeout=600):
        assert loss == pytest.approx(expected, rel=1e-5)


def test_an_operator_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """If flash attention differs from plain products on this device, it is not used."""
    x = torch.ones(1, 2, 3, 16)
    local_attention._right.cache_clear()
    assert (
        local_attention.can_use_flash(x, x)
        and not local_attention.can_use_flash(x.double(), x)
        and not local_attention.can_use_flash(x, x[..., 1:])
    )
    original = local_attention.flash_backward
    for faulty in (
        lambda *a: original(*a[:5], a[5] * 1.01, *a[6:]),
        lambda *a: (original(*a)[0], *original(*a)[:0:-1]),
    ):
        local_attention._right.cache_clear()
        monkeypatch.setattr(local_attention, "flash_backward", faulty)
        assert not local_attention.can_use_flash(x, x)
    local_attention._right.cache_clear()
