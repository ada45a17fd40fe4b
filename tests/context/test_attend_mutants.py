"""Mutation tests: mistakes in distributed attention show in the comparison with dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from schedlang.runtime.context_parallel import attention, local_attention, ring, token_layout
from schedlang.runtime.context_parallel.attention import count_head_copies
from schedlang.runtime.context_parallel.local_attention import BlockwiseForward
from schedlang.runtime.context_parallel.ring import NestedRing
from schedlang.runtime.context_parallel.token_layout import PositionMask
from tests.attention_cases import Case, dense_results, join_results, run_rank
from tests.engine import Faults, Threads

Change = tuple[Any, str, Callable[..., Any]]

WINDOW = Case("ring", (4,), "contiguous", back=2, has=frozenset({"present"}))
CASES = [
    Case("ring", (3,), "zigzag", tokens=12, cap=2.0),
    Case("gather", (3,), "striped", scale=0.7),
    Case("ulysses", (4,), "zigzag", has=frozenset({"slopes", "documents"})),
    Case("double ring", (2, 2), "striped", has=frozenset({"sinks"})),
    Case("nbody", (3, 2), "zigzag", tokens=12, has=frozenset({"bias"})),
    WINDOW,
    replace(WINDOW, causal=False, ahead=1),
]


def _merge_unscaled(self: BlockwiseForward, rows: slice, out: Any, lse: Any) -> None:
    self.out[:, :, rows] += out
    self.lse[:, :, rows] = torch.logaddexp(self.lse[:, :, rows], lse)


def _merge_by_larger(self: BlockwiseForward, rows: slice, out: Any, lse: Any) -> None:
    larger = lse > self.lse[:, :, rows]
    self.out[:, :, rows] = torch.where(larger[..., None], out, self.out[:, :, rows])
    self.lse[:, :, rows] = torch.maximum(self.lse[:, :, rows], lse)


def _keep_gradients(self: NestedRing, prefix: Any, packet: Any, contribute: Any) -> Any:
    if len(prefix) == len(self.groups):
        return contribute(self.origin(prefix), packet)
    parts = []
    for step in range(self.last_step(prefix) + 1):
        coming = self._next((*prefix, step), packet) if step < self.last_step(prefix) else None
        parts.append(_back(self, (*prefix, step), packet, contribute))
        packet = coming.wait() if coming is not None else packet
    return parts[0]


_back, _last, _origin = NestedRing._back, NestedRing.last_step, NestedRing.origin
_block, _shift, _scores, _times = (
    PositionMask.block,
    ring.start_shift,
    local_attention._scores,
    local_attention._times,
)
_places, _of_heads = attention._find_order, token_layout.AttentionDropout.of_heads


def _see_more(self: PositionMask, *args: Any) -> Any:
    return _block(replace(self, ahead=None if self.ahead is None else self.ahead + 1), *args)


def _see_less(self: PositionMask, *args: Any) -> Any:
    return _block(replace(self, back=None if not self.back else self.back - 1), *args)


def _end_early(self: NestedRing, prefix: Any) -> int:
    return max(0, _last(self, prefix) - 1)


def _one_too_far(self: ring.TeamRing, step: int) -> int:
    return (self.ring.rank - step - (self.share.start if step else 0)) % self.ring.size


MUTANTS: dict[str, Change] = {
    "partial results are added without rescaling": (
        BlockwiseForward,
        "_merge",
        _merge_unscaled,
    ),
    "the block with the larger scores wins": (BlockwiseForward, "_merge", _merge_by_larger),
    "gradients of keys stay where they were made": (NestedRing, "_back", _keep_gradients),
    "a ring ends a step early": (NestedRing, "last_step", _end_early),
    "a packet is taken for the next one": (
        NestedRing,
        "origin",
        lambda self, steps: (_origin(self, steps) + 1) % len(self.layout.runs),
    ),
    "a query sees one key too many": (PositionMask, "block", _see_more),
    "a window is a token too short": (PositionMask, "block", _see_less),
    "a block that sees a little is left out": (
        PositionMask,
        "hides_all",
        lambda self, queries, keys: not self.shows_all(queries, keys),
    ),
    "tokens stay in the order in which they arrive": (attention, "_orders", lambda *_: None),
    "heads of keys are copied in turns": (
        attention,
        "repeat_heads",
        lambda x, ranks: torch.cat([x] * count_head_copies(x.shape[1], ranks), 1),
    ),
    "the cap has no derivative": (
        local_attention,
        "_scores",
        lambda *args: (_scores(*args)[0], None),
    ),
    "queries share keys in turns": (
        local_attention,
        "_times",
        lambda x, y: _times(x.flip(1), y).flip(1),
    ),
    "what is gathered is not summed": (
        ring,
        "reduce_scatter_packets",
        lambda packets, counts, group: packets[group.rank],
    ),
    "the gradient of the sum is left out": (
        ring,
        "BlockwiseBackward",
        lambda *args: local_attention.BlockwiseBackward(*args[:5], torch.zeros_like(args[5])),
    ),
    "gradients that arrive are not added": (ring, "add_packet", lambda arrived, part: part),
    "members of a team do not weigh what they found": (
        ring,
        "softmax_shares",
        lambda lse: torch.ones_like(lse),
    ),
    "a share of the steps begins one team too far": (ring.TeamRing, "origin", _one_too_far),
    "nothing that arrives is waited for": (ring.PendingPacket, "wait", lambda self: self.packet),
}


def differs_from_dense(case: Case, threads: Threads) -> bool:
    """Whether the ranks' results differ from dense attention."""
    results = join_results(case, threads.run(run_rank, case.ranks, case, 3))
    pairs = zip(results, dense_results(case), strict=True)
    return not all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in pairs)


@pytest.fixture(scope="module")
def late() -> Any:
    """Ranks whose messages arrive late."""
    with Threads(Faults()) as threads:
        yield threads


def test_without_a_mistake_nothing_is_found(late: Threads) -> None:
    """Without a mutation all cases equal dense attention."""
    assert not any(differs_from_dense(case, late) for case in CASES)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name: str, late: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one case differs from dense attention."""
    owner, attribute, instead = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, instead)
    token_layout.needed_steps.cache_clear()
    try:
        assert any(differs_from_dense(case, late) for case in CASES)
    finally:
        token_layout.needed_steps.cache_clear()
