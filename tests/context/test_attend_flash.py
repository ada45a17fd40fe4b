"""Distributed attention in small dtypes: whole runs of tokens by torch's flash attention."""

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
from tests.attending import KINDS, SIZES, Case, attended, dense, groups_of, joined, part, place_of
from tests.engine import Threads
from tests.proofs import planned

CASE = Case("ring", (3,), tokens=25, widths=(8, 8))
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps}


def _small(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    mine = {n: t.to(dtype) for n, t in part(case, layout, place_of(groups)).items()}
    leaves = [mine[name].requires_grad_() for name in "qkv"]
    out = attended(case, mine, groups, layout)
    grads = torch.autograd.grad(out, leaves, mine["grad"])
    return [t.detach().double() for t in (out, *grads)]


def check(case: Case, dtype: torch.dtype, threads: Threads) -> int:
    """Errors are those of one rounding or two; gives how often flash attention was asked."""
    x = torch.empty(1, 1, 1, case.widths[0], dtype=dtype)
    local_attention.can_use_flash(
        x, x
    )  # it is tried once in a process: those calls are not counted
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            run = getattr(local_attention, name)
            patch.setattr(local_attention, name, lambda *a, run=run: asked.append(1) or run(*a))
        found = threads.run(_small, case.ranks, case, dtype)
    for one, other in zip(joined(case, found), dense(case)):
        assert float((one - other).norm() / other.norm()) < BOUNDS[dtype]
    return len(asked)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_flash_attention_does_whole_runs(kind: str, dtype: torch.dtype, threads: Threads) -> None:
    """Full blocks and causal squares of every layout, also where tokens lie between each other."""
    for method in ("gather", "ring", "usp"):
        case = replace(CASE, method=method, sizes=SIZES[method][-1], kind=kind)
        asked = check(case, dtype, threads)
        assert asked >= 2 * case.ranks


@pytest.mark.parametrize("more", [{"cap": 2.0}, {"back": 3}, {"widths": (8, 4)}], ids=str)
def test_what_it_cannot_do_goes_by_blocks(more: dict[str, Any], threads: Threads) -> None:
    """Caps, and values of another width, never; a window where all of a block is seen."""
    asked = check(replace(CASE, **more), torch.float32, threads)
    assert (asked == 0) or "back" in more


def test_forms() -> None:
    """Which runs are full, causal, or causal without the first query and the last key."""
    causal = PositionMask(ahead=0)
    whole = slice(0, 4)
    assert local_attention.flash_form(causal, range(8, 12), range(4)) == (whole, whole, False)
    assert local_attention.flash_form(causal, range(4, 8), range(4, 8)) == (whole, whole, True)
    assert local_attention.flash_form(causal, range(1, 9, 2), range(0, 8, 2)) == (
        whole,
        whole,
        True,
    )
    late = local_attention.flash_form(causal, range(0, 8, 2), range(1, 9, 2))
    assert late == (slice(1, 4), slice(0, 3), True)
    assert local_attention.flash_form(causal, range(4), range(4, 8)) is None
    assert local_attention.flash_form(causal, range(0, 8, 2), range(2, 10, 2)) is None
    assert local_attention.flash_form(PositionMask(ahead=0, back=2), range(4), range(4)) is None


def _checkpointed(plan: Plan, batch: dict[str, torch.Tensor]) -> float:
    local_attention._right.cache_clear()
    return float(build(plan, batch).train_step(batch))


def test_it_is_tried_within_a_checkpoint(pool: Pool) -> None:
    """The example runs in no call of the model: its gradients would run a region that is made again
    within its own forward, and the messages of a ring would meet others."""
    torch.manual_seed(0)
    model = models.llama(2).float()
    batch = dict(models.tokens(4, 8, seed=1))
    rows = "model.layers.*.self_attn context_parallel(ring, over=cp)\nmodel.layers.* checkpoint()"
    plan = planned(model, f"{rows}\nzero(stage=0, over=cp)", "cp=2")
    wanted = float(model(**batch).loss)
    for loss in pool.run(_checkpointed, 2, plan, batch, timeout=600):
        assert loss == pytest.approx(wanted, rel=1e-5)


def test_an_operator_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to give what plain products give on this device, or attention goes by blocks."""
    x = torch.ones(1, 2, 3, 16)
    local_attention._right.cache_clear()
    assert (
        local_attention.can_use_flash(x, x)
        and not local_attention.can_use_flash(x.double(), x)
        and not local_attention.can_use_flash(x, x[..., 1:])
    )
    right = local_attention.flash_backward
    for wrong in (
        lambda *a: right(*a[:5], a[5] * 1.01, *a[6:]),
        lambda *a: (right(*a)[0], *right(*a)[:0:-1]),
    ):
        local_attention._right.cache_clear()
        monkeypatch.setattr(local_attention, "flash_backward", wrong)
        assert not local_attention.can_use_flash(x, x)
    local_attention._right.cache_clear()
