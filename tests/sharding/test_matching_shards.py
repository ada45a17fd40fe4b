"""Calls that combine two sharded tensors: legal if their shards match, refused otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.propagate.propagate import propagate
from schedlang.passes.static_checks.static import check_sums
from schedlang.runtime.propagation.follower import Follower
from tests.proofs import make_plan, refusal_text

BATCH = {"x": torch.zeros(2, 8, dtype=torch.float64)}
Combine = Callable[[Tensor, Tensor], Tensor]


class Meeting(nn.Module):
    """Two projections whose outputs a function combines."""

    def __init__(self, combine: Combine, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = combine
        self.a, self.b, self.last = nn.Linear(8, 16), nn.Linear(8, width), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the combined output."""
        output: Tensor = self.last(self.way(self.a(x), self.b(x))).square().mean()
        return output


def heads(x: Tensor) -> Tensor:
    """Heads of size 4: [rows, heads, 4]."""
    return x.unflatten(-1, (-1, 4))


def tiled(a: Tensor, b: Tensor) -> Tensor:
    """Multiply head k of four by head k % 2 of two."""
    return (heads(a) * heads(b).repeat(1, 2, 1)).flatten(1)


def expanded(a: Tensor, b: Tensor) -> Tensor:
    """The same by an expanded view, in a matrix product."""
    expanded_heads = heads(b)[:, None].expand(-1, 2, -1, -1).flatten(1, 2)
    return (heads(a)[..., None] @ expanded_heads[..., None, :])[..., 0].flatten(1)


def interleaved(a: Tensor, b: Tensor) -> Tensor:
    """Multiply head k of four by head k // 2 of two."""
    return (heads(a) * heads(b).repeat_interleave(2, 1)).flatten(1)


def masked(a: Tensor, b: Tensor) -> Tensor:
    """Mask one tensor by the sign of the other."""
    return a.masked_fill(b > 0, 0.0)


def added(a: Tensor, b: Tensor) -> Tensor:
    """Add element by element."""
    return a + b


def transposed(a: Tensor, b: Tensor) -> Tensor:
    """Add a column with one number for each rank to a matrix with split columns."""
    column = a[:1, :].unflatten(-1, (-1, 8)).sum(-1).transpose(0, 1)
    return (column + b[:2]).repeat(1, 8)


ROWS = "a shard(col, over=tp)\nb shard(col, over=tp{})\nlast shard(row, over=tp)"


@pytest.mark.parametrize(
    "way, width, more, how",
    [
        (tiled, 8, "", "in different orders"),
        (expanded, 8, "", "in different orders"),
        (masked, 16, ", blocks=2", "in different orders"),
        (added, 16, ", blocks=[4, 12]", "in different orders"),
        (transposed, 2, "", "along different dims"),
    ],
)
def test_parts_that_meet_others_are_refused(way: Combine, width: int, more: str, how: str) -> None:
    """Local shapes match, but each rank would combine wrong elements: refused."""
    message = refusal_text(Meeting(way, width).double(), ROWS.format(more), "tp=2", BATCH)
    assert "S405" in message and f"gets tensors that are sharded over `tp` {how}" in message


@pytest.mark.parametrize("way, width", [(interleaved, 8), (masked, 16), (added, 16)])
def test_parts_that_meet_their_own_are_legal(way: Combine, width: int) -> None:
    """Interleaved repeats of heads and equal splits are legal."""
    propagate(make_plan(Meeting(way, width).double(), ROWS.format(""), "tp=2"), BATCH)


class _Again(nn.Module):
    """One norm used twice, around two projections; the embedding is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.b(self.norm(self.a(self.words(ids))))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


_IDS = {"ids": torch.arange(24).view(4, 6) % 12, "labels": torch.arange(24).view(4, 6) % 12}
INTO, OUT_OF = "shard(input=R, output=S(seq), over=tp)", "shard(input=S(seq), output=R, over=tp)"


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (f"head {OUT_OF}", "words.weight"),
        (f"a {INTO}\nb {OUT_OF}", "norm.weight"),
    ],
)
def test_a_parameter_of_parts_and_of_the_whole_is_refused(rows: str, name: str) -> None:
    """One gradient is partial on each rank and the other is full: no sum is right for both."""
    message = refusal_text(_Again(), rows, "tp=2", batch=_IDS)
    assert "S405" in message and f"`{name}` is used with full activations" in message, message


def test_a_build_proves_what_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The static check of sums (S711) finds what the rule in propagation misses."""
    monkeypatch.setattr(
        Follower, "note_use", lambda self, name, parts: _note_partial(self, name, parts)
    )
    plan = make_plan(_Again(), f"head {OUT_OF}", "tp=2")
    with pytest.raises(Refusal, match="S711.*adds a gradient that is part"):
        check_sums(plan, _IDS, prepare(plan, _IDS))


def _note_partial(follower: Follower, name: str, parts: set[str]) -> None:
    if parts:
        follower.partial.setdefault(name, set()).update(parts)
