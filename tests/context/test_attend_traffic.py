"""What distributed attention sends, saves and computes, against the papers' closed forms."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.runtime.comm.collectives import Group, listen_to_collectives
from schedlang.runtime.comm.fake_rank import LoggedOperation, fake_rank
from schedlang.runtime.context_parallel import local_attention
from schedlang.runtime.context_parallel.attention import place_of
from schedlang.runtime.context_parallel.installation import ExchangeKeys
from schedlang.runtime.context_parallel.local_attention import (
    BlockRules,
    PlacedTokens,
    split_blocks,
)
from schedlang.runtime.context_parallel.local_tokens import (
    AttentionCall,
    AttentionMethod,
    SequenceShard,
)
from schedlang.runtime.context_parallel.token_layout import (
    AttentionMask,
    PositionMask,
    SequenceLayout,
    TokenTags,
    needed_steps,
)
from tests.attention_cases import SIZES, Case, groups_of, local_tensors, run_attention
from tests.engine import Threads

# 2 rows, 4 heads of width 4, 24 tokens: all methods divide them
EVEN = Case("ring", (4,), "zigzag", 24, heads=4, kv_heads=4, widths=(4, 4))
FEW = replace(EVEN, kv_heads=1)  # one head of keys and values for all
Collectives = list[tuple[str, str, int]]


def local_elements(case: Case, heads: int) -> int:
    """The number of elements of a tensor with one rank's tokens."""
    return case.rows * heads * case.tokens // case.ranks * case.widths[0]


def _list_collectives(case: Case, meta: bool = False) -> tuple[Collectives, Collectives]:
    """Kind, axis and elements of each collective: of the forward, and of the backward."""
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    local = local_tensors(case, layout, place_of(groups))
    if meta:
        local = {name: t.to("meta") for name, t in local.items()}
        groups = tuple(replace(group, pg=None) for group in groups)
    leaves = [local[name].requires_grad_() for name in "qkv"]
    heard: Collectives = []

    def listen(kind: str, group: Group, size: int) -> None:
        heard.append((kind, group.axes[0], size // 8))

    with listen_to_collectives(listen):
        out = run_attention(case, local, groups, layout)
        forward = [*heard]
        grads = torch.autograd.grad(out, leaves, local["grad"])
    assert [t.shape for t in grads] == [t.shape for t in leaves] and out.shape == local[
        "grad"
    ].shape
    return forward, heard[len(forward) :]


def elements_by_kind(collectives: Collectives) -> dict[str, int]:
    """Elements by kind."""
    counts: Counter[str] = Counter()
    for kind, _, size in collectives:
        counts[kind] += size
    return dict(counts)


def elements_sent(case: Case, threads: Threads) -> tuple[dict[str, int], dict[str, int]]:
    """Elements by kind, forward and backward, which are equal on all ranks."""
    results = [
        tuple(map(elements_by_kind, phases))
        for phases in threads.run(_list_collectives, case.ranks, case)
    ]
    assert all(result == results[0] for result in results)
    forward, backward = results[0]
    return forward, backward


@pytest.mark.parametrize("case", [EVEN, FEW], ids=["all heads", "one kv head"])
def test_a_ring_sends_keys_and_values_once_around(case: Case, threads: Threads) -> None:
    """p-1 times a rank's keys and values; backward the same again, and as much for gradients."""
    forward, backward = elements_sent(case, threads)
    around = (case.ranks - 1) * 2 * local_elements(case, case.kv_heads)
    assert forward == {"send": around} and backward == {"send": 2 * around}


def test_all_gather_moves_what_a_ring_does(threads: Threads) -> None:
    """The whole of keys and values once, in backward again, and one reduce-scatter as large."""
    forward, backward = elements_sent(replace(FEW, method="gather"), threads)
    everything = 4 * 2 * local_elements(FEW, 1)
    assert forward == {"all-gather": everything}
    assert backward == {"all-gather": everything, "reduce-scatter": everything}


def test_ulysses_sends_four_tensors(threads: Threads) -> None:
    """4Nh/P elements for each row in the forward, and in the backward (Jacobs et al., 2023)."""
    forward, backward = elements_sent(replace(EVEN, method="ulysses"), threads)
    hidden = EVEN.heads * EVEN.widths[0]
    expected = {"all-to-all": EVEN.rows * 4 * EVEN.tokens * hidden // 4}
    assert forward == backward == expected


def _listen_to_exchange(case: Case) -> Collectives:
    """Kind, axis and elements of each collective when a model's attention exchanges keys."""
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    index, heard = place_of(groups), Collectives()
    local = local_tensors(case, layout, index)
    call = AttentionCall(local["q"], local["k"], local["v"], AttentionMask(causal=True))

    def listen(kind: str, group: Group, size: int) -> None:
        heard.append((kind, group.axes[0], size // 8))

    shard = SequenceShard(layout, index, ExchangeKeys())
    with listen_to_collectives(listen):
        shard.attend(AttentionMethod(case.method, groups), call)
    return heard


def test_a_model_under_ulysses_sends_four_tensors_too(threads: Threads) -> None:
    """The log-sum-exp stays on its rank where no query gets the mean of all values."""
    case = replace(EVEN, method="ulysses")
    for heard in threads.run(_listen_to_exchange, 4, case):
        assert elements_by_kind(heard) == {"all-to-all": 4 * local_elements(case, case.heads)}


def test_ulysses_copies_few_heads_of_keys_as_little_as_it_can(threads: Threads) -> None:
    """2 heads on 4 ranks are copied twice, 3 heads on 2 ranks too, 2 on 2 not at all."""
    for heads, kv_heads, ranks, copied in ((4, 2, 4, 4), (6, 3, 2, 6), (4, 2, 2, 2)):
        case = replace(EVEN, method="ulysses", sizes=(ranks,), heads=heads, kv_heads=kv_heads)
        forward, _ = elements_sent(case, threads)
        assert forward == {
            "all-to-all": 2 * local_elements(case, heads) + 2 * local_elements(case, copied)
        }


def test_a_ring_of_rings_crosses_nodes_once_an_inner_round(threads: Threads) -> None:
    """Between n nodes n-1 transfers, inside them the rest of the p-1 (Sun et al., 2024)."""
    case = replace(FEW, method="double ring", sizes=(2, 3))
    packet = 2 * local_elements(case, 1)
    for forward, backward in threads.run(_list_collectives, 6, case):
        assert Counter(forward) == {("send", "axis0", packet): 1, ("send", "axis1", packet): 4}
        assert Counter(backward) == {("send", "axis0", packet): 2, ("send", "axis1", packet): 8}


def test_usp_is_ulysses_in_a_ring(threads: Threads) -> None:
    """All-to-all of four tensors inside; outside a ring of as many steps as it has ranks."""
    case = replace(EVEN, method="usp", sizes=(2, 2))
    forward, backward = elements_sent(case, threads)
    packet = local_elements(case, 4)
    assert forward == {"all-to-all": 4 * packet, "send": 2 * packet}
    assert backward == {"all-to-all": 4 * packet, "send": 4 * packet}


def test_teams_send_less_around_the_ring(threads: Threads) -> None:
    """p/c of a rank's keys and values at most, where a ring sends p-1; teams of one are a ring."""
    case = replace(FEW, method="nbody", sizes=(4, 2), tokens=32)
    packet = 2 * local_elements(case, 1)
    sent_elements = [
        elements_by_kind(forward).get("send")
        for forward, _ in threads.run(_list_collectives, 8, case)
    ]
    assert sent_elements == [2 * packet, 4 * packet] * 4 and case.ranks // 2 == 4
    single_teams = replace(FEW, method="nbody", sizes=(4, 1))
    assert elements_sent(single_teams, threads)[0] == elements_sent(FEW, threads)[0]


def test_a_window_ends_the_ring_early(threads: Threads) -> None:
    """A window no longer than a rank's tokens needs one neighbour, and its gradient comes home."""
    case = replace(FEW, kind="contiguous", back=6)
    forward, backward = elements_sent(case, threads)
    packet = 2 * local_elements(case, 1)
    assert forward == {"send": packet} and backward == {"send": 2 * packet}


@pytest.mark.parametrize("method", SIZES)
def test_meta_tensors_are_counted_alike(method: str, threads: Threads) -> None:
    """Without values and without a process group the same is counted, and shapes are right."""
    sizes = max(SIZES[method], key=math.prod)
    features = frozenset({"documents", "slopes", "dense", "sinks"})
    case = replace(FEW, method=method, sizes=sizes, heads=12, tokens=25, has=features)
    real = threads.run(_list_collectives, case.ranks, case)
    assert threads.run(_list_collectives, case.ranks, case, True) == real


# -- memory ----------------------------------------------------------------------------------------


def _saved_elements(case: Case) -> int:
    saved_tensors: list[Tensor] = []
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    local = local_tensors(case, layout, place_of(groups))
    for name in "qkv":
        local[name].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved_tensors.append(t) or t, lambda t: t
    ):
        run_attention(case, local, groups, layout)
    return sum({t.untyped_storage()._cdata: t.numel() for t in saved_tensors}.values())


@pytest.mark.parametrize("method", SIZES)
def test_nothing_of_tokens_by_tokens_is_saved(method: str, threads: Threads) -> None:
    """Queries, keys, values, result, and a number for each query and head: of a rank's tokens."""
    sizes = (2, 2) if (2, 2) in SIZES[method] else (4,)
    case = replace(EVEN, method=method, sizes=sizes)
    local_size = local_elements(case, 4)
    assert (
        threads.run(_saved_elements, 4, case) == [4 * local_size + local_size // case.widths[0]] * 4
    )


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def _largest_elements(case: Case) -> int:
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    local = {n: t.clone() for n, t in local_tensors(case, layout, place_of(groups)).items()}
    leaves = [local[name].requires_grad_() for name in "qkv"]
    with _Largest() as mode:
        torch.autograd.grad(run_attention(case, local, groups, layout, 4), leaves, local["grad"])
    return mode.elements


def test_memory_does_not_grow_with_the_sequence(threads: Threads) -> None:
    """As many tokens on each of more ranks: no tensor of a ring becomes larger."""
    wide_case = replace(EVEN, rows=1, widths=(16, 16))
    largest = [
        max(
            threads.run(
                _largest_elements, ranks, replace(wide_case, sizes=(ranks,), tokens=8 * ranks)
            )
        )
        for ranks in (2, 4)
    ]
    assert largest == [2 * 8 * 4 * 16] * 2  # a rank's keys and values side by side


# -- work ------------------------------------------------------------------------------------------


def work_per_step(kind: str, tokens: int, ranks: int) -> list[list[int]]:
    """The number of query-key pairs of each place at each step of a causal ring."""
    layout = SequenceLayout.of_kind(kind, tokens, ranks)
    rules = BlockRules(PositionMask(ahead=0), 1.0, block=1)
    tokens_by_rank = [PlacedTokens(runs, TokenTags()) for runs in layout.runs]
    return [
        [
            sum(1 for _ in split_blocks(rules, tokens_by_rank[index], tokens_by_rank[index - step]))
            for index in range(ranks)
        ]
        for step in range(ranks)
    ]


def imbalance(amounts: list[int]) -> float:
    """The largest amount divided by the mean."""
    return max(amounts) * len(amounts) / sum(amounts)


def test_zigzag_and_striped_balance_a_causal_ring() -> None:
    """Contiguous: 2p/(p+1) times the mean, tending to 2; zigzag: 1; striped: nearly 1 a step."""
    ranks, tokens = 4, 64
    total = {
        kind: imbalance([sum(steps) for steps in zip(*work_per_step(kind, tokens, ranks))])
        for kind in ("contiguous", "zigzag", "striped")
    }
    assert total["contiguous"] == pytest.approx(2 * ranks / (ranks + 1), rel=0.1)
    assert total["zigzag"] == 1
    assert total["striped"] < 1.06
    assert max(imbalance(step) for step in work_per_step("striped", tokens, ranks)) < 1.12
    assert max(imbalance(step) for step in work_per_step("contiguous", tokens, ranks)) == ranks


def test_blocks_that_see_nothing_are_not_computed() -> None:
    """Of contiguous causal blocks little more than half are computed; of a window a band."""
    placed = PlacedTokens((range(64),), TokenTags())
    causal = BlockRules(PositionMask(ahead=0), 1.0, block=8)
    assert sum(1 for _ in split_blocks(causal, placed, placed)) == 8 * 9 // 2
    window = BlockRules(PositionMask(ahead=0, back=7), 1.0, block=8)
    assert sum(1 for _ in split_blocks(window, placed, placed)) == 8 + 7


def test_only_wanted_steps_are_taken() -> None:
    """A bidirectional window wants neighbours on both sides; all of a zigzag ring is wanted."""
    line = SequenceLayout.of_kind("contiguous", 32, 4)
    assert needed_steps(PositionMask(ahead=3, back=3), line, (4,)) == {(0,), (1,), (3,)}
    assert (
        len(needed_steps(PositionMask(ahead=0), SequenceLayout.of_kind("zigzag", 32, 4), (4,))) == 4
    )


def _operation_order() -> list[str]:
    operations: list[str] = []
    case = EVEN
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    local = {n: t.to("meta").requires_grad_() for n, t in local_tensors(case, layout, 0).items()}
    with pytest.MonkeyPatch.context() as patch:
        for kind in (local_attention.BlockwiseForward, local_attention.BlockwiseBackward):
            add = kind.add

            def noted(self: Any, *args: Any, add: Any = add) -> Any:
                operations.append("compute")
                return add(self, *args)

            patch.setattr(kind, "add", noted)
        with listen_to_collectives(lambda kind, group, size: operations.append(kind)):
            dry = tuple(replace(group, pg=None) for group in groups)
            run_attention(case, local, dry, layout).sum().backward()
    return operations


def test_what_is_computed_next_is_on_its_way_already(threads: Threads) -> None:
    """A block is sent on before it is used; a gradient right after it is computed."""
    (operations, *_) = threads.run(_operation_order, 4)
    assert operations[:7] == ["send", "compute"] * 3 + ["compute"]
    assert operations[7:] == [
        "send",
        "compute",
        *["send", "compute", "send"] * 2,
        "compute",
        "send",
    ]


# -- played on meta, rank by rank ------------------------------------------------------------------


@pytest.mark.parametrize("method", SIZES)
def test_ranks_that_are_played_alone_would_meet(method: str) -> None:
    """Every message has its other end and every collective all its ranks, in one order."""
    sizes = max(SIZES[method], key=math.prod)
    case = replace(FEW, method=method, sizes=sizes, heads=12, tokens=25, chunk=9)
    logs: list[list[LoggedOperation]] = []
    for rank in range(case.ranks):
        with fake_rank(rank, case.ranks) as tap:
            groups = groups_of(case.sizes)
            layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
            local = {name: t.to("meta") for name, t in local_tensors(case, layout, rank).items()}
            leaves = [local[name].requires_grad_() for name in "qkv"]
            torch.autograd.grad(run_attention(case, local, groups, layout), leaves, local["grad"])
            logs.append([operation for operation in tap.log if operation.lane is not None])
    sends = Counter(operation for log in logs for operation in log if operation.op == "send")
    receives = Counter(
        replace(operation, op="send") for log in logs for operation in log if operation.op == "recv"
    )
    assert sends == receives and (sends or method in ("gather", "ulysses"))
    for lane in {operation.lane for log in logs for operation in log if operation.ends is None}:
        logs_of_lane = [
            [
                operation
                for operation in logs[r]
                if operation.lane == lane and operation.ends is None
            ]
            for r in lane.ranks
        ]
        assert all(operation == logs_of_lane[0] for operation in logs_of_lane), lane
