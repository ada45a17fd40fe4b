"""Parts that meet in a call as their wholes do, and those that do not, which are refused."""

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
from tests.proofs import planned, refused

BATCH = {"x": torch.zeros(2, 8, dtype=torch.float64)}
Way = Callable[[Tensor, Tensor], Tensor]


class Meeting(nn.Module):
    """Two projections, of 16 and of some width, whose results meet in some way."""

    def __init__(self, way: Way, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.a, self.b, self.last = nn.Linear(8, 16), nn.Linear(8, width), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what they give together."""
        out: Tensor = self.last(self.way(self.a(x), self.b(x))).square().mean()
        return out


def heads(x: Tensor) -> Tensor:
    """Heads of size 4: [rows, heads, 4]."""
    return x.unflatten(-1, (-1, 4))


def tiled(a: Tensor, b: Tensor) -> Tensor:
    """Head k of four meets head k % 2 of two."""
    return (heads(a) * heads(b).repeat(1, 2, 1)).flatten(1)


def spread(a: Tensor, b: Tensor) -> Tensor:
    """The same by a view of tiles, in a product of matrices."""
    two = heads(b)[:, None].expand(-1, 2, -1, -1).flatten(1, 2)
    return (heads(a)[..., None] @ two[..., None, :])[..., 0].flatten(1)


def beside(a: Tensor, b: Tensor) -> Tensor:
    """Head k of four meets head k // 2 of two."""
    return (heads(a) * heads(b).repeat_interleave(2, 1)).flatten(1)


def masked(a: Tensor, b: Tensor) -> Tensor:
    """One decides which elements of the other are kept."""
    return a.masked_fill(b > 0, 0.0)


def added(a: Tensor, b: Tensor) -> Tensor:
    """Element by element."""
    return a + b


def crossed(a: Tensor, b: Tensor) -> Tensor:
    """A column of as many numbers as ranks meets a matrix, whose columns are split."""
    column = a[:1, :].unflatten(-1, (-1, 8)).sum(-1).transpose(0, 1)
    return (column + b[:2]).repeat(1, 8)


ROWS = "a shard(col, over=tp)\nb shard(col, over=tp{})\nlast shard(row, over=tp)"


@pytest.mark.parametrize(
    "way, width, more, how",
    [
        (tiled, 8, "", "in different orders"),
        (spread, 8, "", "in different orders"),
        (masked, 16, ", blocks=2", "in different orders"),
        (added, 16, ", blocks=[4, 12]", "in different orders"),
        (crossed, 2, "", "along different dims"),
    ],
)
def test_parts_that_meet_others_are_refused(way: Way, width: int, more: str, how: str) -> None:
    """Local shapes fit, and each rank would compute with the wrong elements."""
    said = refused(Meeting(way, width).double(), ROWS.format(more), "tp=2", BATCH)
    assert "S405" in said and f"gets tensors that are sharded over `tp` {how}" in said


@pytest.mark.parametrize("way, width", [(beside, 8), (masked, 16), (added, 16)])
def test_parts_that_meet_their_own_are_legal(way: Way, width: int) -> None:
    """Heads repeated next to themselves, and splits alike."""
    propagate(planned(Meeting(way, width).double(), ROWS.format(""), "tp=2"), BATCH)


class _Again(nn.Module):
    """One norm before and after two projections; a table of words that is the head, too."""

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
    """One of its gradients is a part on each rank, the other whole: no sum is right for both."""
    said = refused(_Again(), rows, "tp=2", batch=_IDS)
    assert "S405" in said and f"`{name}` is used with full activations" in said, said


def test_a_build_proves_what_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are parts, a program asks types, too: S711 if the first rule saw nothing."""
    monkeypatch.setattr(Follower, "note_use", lambda self, name, parts: _noted(self, name, parts))
    plan = planned(_Again(), f"head {OUT_OF}", "tp=2")
    with pytest.raises(Refusal, match="S711.*adds a gradient that is part"):
        check_sums(plan, _IDS, prepare(plan, _IDS))


def _noted(follower: Follower, name: str, parts: set[str]) -> None:
    if parts:
        follower.partial.setdefault(name, set()).update(parts)
