"""Distributed attention against dense attention in one process, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.context_parallel.attention import (
    AttentionOptions,
    attend,
    attend_lse,
    place_of,
)
from schedlang.runtime.context_parallel.token_layout import (
    AttentionDropout,
    AttentionMask,
    SequenceLayout,
)
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.scope import Scope, enter_scope
from tests.attention_cases import (
    KINDS,
    SIZES,
    Case,
    cases,
    dense_results,
    full_tensors,
    groups_of,
    join_results,
    local_tensors,
    run_attention,
    run_rank,
)
from tests.engine import Faults, Threads

FIRST = [Case(method, sizes[0]) for method, sizes in SIZES.items()]


def assert_agrees(case: Case, threads: Threads, block: int = 512) -> None:
    """Assert that results and gradients equal dense attention to 1e-12."""
    results = join_results(case, threads.run(run_rank, case.ranks, case, block))
    for actual, expected in zip(results, dense_results(case), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", SIZES)
def test_it_is_attention(method: str, kind: str, threads: Threads) -> None:
    """Every method gives dense causal attention and its gradients, for tokens in any layout."""
    assert_agrees(Case(method, SIZES[method][0], kind), threads)


@given(case=cases(), block=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_any_mask_any_layout(threads: Threads, case: Case, block: int) -> None:
    """Windows, documents, padding, slopes, caps, sinks, given masks, few kv heads, any length."""
    assert_agrees(case, threads, block)


SHARP = 18.0  # with this scale of scores most queries attend to one key


def _float32_attention(case: Case) -> list[torch.Tensor]:
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    local = {name: t.float() for name, t in local_tensors(case, layout, place_of(groups)).items()}
    leaves = [local[name].requires_grad_() for name in "qkv"]
    output = run_attention(case, local, groups, layout, 4)
    return [output.detach(), *torch.autograd.grad(output, leaves, local["grad"])]


def _torch_attention(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    tensors = {name: t.float().to(dtype) for name, t in full_tensors(case).items()}
    leaves = [tensors[name].requires_grad_() for name in "qkv"]
    output = F.scaled_dot_product_attention(
        *leaves, is_causal=True, scale=case.scale, enable_gqa=True
    )
    return [output.detach(), *torch.autograd.grad(output, leaves, tensors["grad"])]


@pytest.mark.parametrize("method", SIZES)
def test_large_scores_cost_no_precision(method: str, threads: Threads) -> None:
    """In float32, where one key has nearly all weight, errors are at most twice torch's."""
    errors = torch.zeros(2, 4, dtype=torch.float64)
    for seed in range(4):
        case = Case(method, SIZES[method][-1], heads=12, widths=(4, 4), scale=SHARP, seed=seed)
        schedlang_and_torch = (
            join_results(case, threads.run(_float32_attention, case.ranks, case)),
            _torch_attention(case, torch.float32),
        )
        for row, tensors in zip(errors, schedlang_and_torch, strict=True):
            exact = _torch_attention(case, torch.float64)
            row += torch.stack([(a - b).norm() / b.norm() for a, b in zip(tensors, exact)])
    assert bool((errors[0] <= 2 * errors[1]).all()), errors


def test_late_messages_change_nothing() -> None:
    """Results do not change when messages arrive late and buffers are poisoned before."""
    with Threads(Faults(order=3)) as threads:
        for case in FIRST:
            assert_agrees(case, threads, 4)


def _run_cases() -> list[list[torch.Tensor]]:
    return [run_rank(case) for case in _FOUR_RANKS]


_FOUR_RANKS = [
    Case(method, sizes, has=frozenset({"present", "documents"}))
    for method, several in SIZES.items()
    for sizes in several
    if math.prod(sizes) == 4 and method != "gather"
] + [Case("gather", (4,), has=frozenset({"present"}))]


def test_on_processes(pool: Pool) -> None:
    """The same over gloo."""
    results = pool.run(_run_cases, 4)
    for case, *parts in zip(_FOUR_RANKS, *results):
        for actual, expected in zip(join_results(case, parts), dense_results(case), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@given(kind=st.sampled_from(KINDS), ranks=st.integers(1, 6), more=st.integers(0, 20))
def test_layouts_hold_every_token_once(kind: str, ranks: int, more: int) -> None:
    """Taking and joining parts is the identity; parts differ by at most two tokens."""
    layout = SequenceLayout.of_kind(kind, ranks + more, ranks)
    tokens = torch.arange(ranks + more)[None]
    parts = [layout.take(tokens, 1, index) for index in range(ranks)]
    assert layout.concatenate(parts, 1).equal(tokens)
    assert all(p[0].equal(layout.positions(index)) for index, p in enumerate(parts))
    assert max(layout.counts) - min(layout.counts) <= 2


def test_short_sequences_are_refused() -> None:
    """Every rank needs a token; the message says how many are needed."""
    with pytest.raises(Refusal, match="give sequences of 4 tokens or more") as refused:
        SequenceLayout.of_kind("zigzag", 3, 4)
    assert refused.value.diagnostic.code == "S680"


def _ulysses_refusal() -> str:
    case = Case("ulysses", (3,))
    groups, layout = groups_of(case.sizes), SequenceLayout.of_kind("striped", case.tokens, 3)
    local = local_tensors(case, layout, groups[0].rank)
    with pytest.raises(Refusal) as refused:
        attend(
            local["q"],
            local["k"],
            local["v"],
            AttentionMask(),
            AttentionOptions("ulysses", groups, layout),
        )
    return str(refused.value)


def test_heads_that_ulysses_cannot_divide_are_refused(threads: Threads) -> None:
    """The message names the heads, the ranks, the numbers that work, and the ring."""
    for message in threads.run(_ulysses_refusal, 3):
        for part_of_it in (
            "S681",
            "4 heads between 3 ranks",
            "2 or 4 ranks",
            "context_parallel(ring",
        ):
            assert part_of_it in message, message


# -- dropout ---------------------------------------------------------------------------------------

P = 0.4


def _attend_with_dropout(case: Case) -> list[torch.Tensor]:
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    local = local_tensors(case, layout, place_of(groups))
    leaves = [local[name].requires_grad_() for name in "qkv"]
    draw = LogicalDropout(7)
    with enter_modes(draw), enter_scope(Scope(2, 0, (5, 8))):
        dropout = AttentionDropout.from_logical(P, draw, case.rows, case.heads, case.tokens)
        options = AttentionOptions(case.method, groups, layout, dropout=dropout, block=4)
        output = attend(*leaves, AttentionMask(causal=True), options)
    return [output.detach(), *torch.autograd.grad(output, leaves, local["grad"])]


@pytest.mark.parametrize("method", SIZES)
def test_the_same_weights_are_dropped(method: str, threads: Threads) -> None:
    """Logical dropout drops the same weights as in torch's attention over the full sequence."""
    case = Case(method, SIZES[method][-1], "zigzag", heads=12)
    tensors = full_tensors(case)
    leaves = [tensors[name].requires_grad_() for name in "qkv"]
    with enter_modes(LogicalDropout(7)), enter_scope(Scope(2, 0, (5, 8))):
        output = F.scaled_dot_product_attention(*leaves, None, P, is_causal=True, enable_gqa=True)
    expected = [output.detach(), *torch.autograd.grad(output, leaves, tensors["grad"])]
    for actual, expected_tensor in zip(
        join_results(case, threads.run(_attend_with_dropout, case.ranks, case)), expected
    ):
        torch.testing.assert_close(actual, expected_tensor, rtol=1e-12, atol=1e-12)


def test_fresh_dropout_drops_as_often_as_it_says() -> None:
    """A share of p is dropped, the rest is scaled; another draw drops other weights."""
    torch.manual_seed(1)
    drops = [AttentionDropout.from_generator(P, 2, 3, 64) for _ in range(2)]
    first, second = (d.factor(range(64), range(64), torch.ones(1)) for d in drops)
    assert first.shape == (2, 3, 64, 64) and len(first.unique()) == 2
    assert float((first == 0).float().mean()) == pytest.approx(P, abs=0.02)
    assert float(first.mean()) == pytest.approx(1, abs=0.04)
    assert not first.equal(second) and not first[0].equal(first[1])


def _attend_lse(case: Case) -> list[torch.Tensor]:
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    local = local_tensors(case, layout, place_of(groups))
    leaves = [local[name].requires_grad_() for name in "qkv"]
    mask = AttentionMask(causal=True, present=local["present"])
    output, lse = attend_lse(*leaves, mask, AttentionOptions(case.method, groups, layout))
    assert bool((output.detach()[lse.isneginf()] == 0).all())
    scored = lse.masked_fill(lse.isneginf(), 0)
    grads = torch.autograd.grad((scored * local["grad"][..., 0]).sum(), leaves[:2])
    return [lse.detach(), *grads]


@pytest.mark.parametrize("method", SIZES)
def test_the_sum_of_exponents_is_given_too(method: str, threads: Threads) -> None:
    """Each query's log-sum-exp and its gradient; -inf and a result of 0 where no key is visible."""
    case = Case(method, SIZES[method][-1], heads=12, has=frozenset({"present"}), seed=1)
    tensors = full_tensors(case)
    q, k = (tensors[name].requires_grad_() for name in "qk")
    scores = q @ k.repeat_interleave(6, 1).mT / 5**0.5
    hidden = torch.ones(13, 13, dtype=torch.bool).triu(1) | ~tensors["present"][:, None, None]
    lse = scores.masked_fill(hidden, -math.inf).logsumexp(-1)
    assert lse.isneginf().any()
    scored = lse.masked_fill(lse.isneginf(), 0)
    expected = [
        lse.detach(),
        *torch.autograd.grad((scored * tensors["grad"][..., 0]).sum(), [q, k]),
    ]
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    for parts, expected_tensor in zip(zip(*threads.run(_attend_lse, case.ranks, case)), expected):
        torch.testing.assert_close(
            layout.concatenate(parts, 2), expected_tensor, rtol=1e-12, atol=1e-12
        )
