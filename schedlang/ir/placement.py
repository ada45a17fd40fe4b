"""Placements of a tensor on a mesh: split, replicated or partial; sizes that do not divide.

* How a tensor lies on a mesh: which part each rank holds.
* Sizes that ranks do not divide: what is padded, what several ranks hold, and what is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from schedlang.ir.mesh import Mesh


@dataclass(frozen=True)
class Uneven:
    """The rule that makes a dim fit its ranks where they do not divide it: all parts get one size.

    wide    elements that all ranks hold together, for each true one; above 1 in both cases
    repeat  neighbouring ranks that hold the same part; 1: each block ends in zeros instead
    """

    wide: Fraction = Fraction(1)
    repeat: int = 1

    def padded(self, size: int) -> int:
        """The size of a block with its zeros."""
        held = size * self.wide / self.repeat
        assert held.denominator == 1, (size, self)
        return held.numerator

    def true(self, held: int, ranks: int) -> int:
        """The true size of a dim of which each rank holds so many."""
        size = held * ranks / self.wide
        assert size.denominator == 1, (held, ranks, self)
        return size.numerator


EVEN = Uneven()


@dataclass(frozen=True)
class S:
    """Split along a dim, named (`out`, `vocab`, `seq`) or by number.

    `blocks`: how many equal blocks, or the sizes of the blocks, lie side by side along the dim
    and are split one by one (a fused q, k, v weight has 3).
    """

    dim: str | int
    blocks: int | tuple[int, ...] = 1
    uneven: Uneven = field(default=EVEN, repr=False)

    def __str__(self) -> str:
        blocks = self.blocks if isinstance(self.blocks, int) else list(self.blocks)
        also = "" if blocks == 1 else f", blocks={blocks}"
        if self.uneven != EVEN:
            also += ", replicate" if self.uneven.repeat > 1 else ", pad"
        return f"S({self.dim}{also})"


@dataclass(frozen=True)
class Replicate:
    """The whole tensor on every rank; written `R`."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class P:
    """A pending reduction: the whole is the `op` ("sum") over the ranks."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


R = Replicate()
Placement = S | Replicate | P


@dataclass(frozen=True)
class Segment:
    """A run of indices of one dim: `length` of them from `start` (of the padded whole)."""

    start: int
    length: int


@dataclass(frozen=True)
class Split:
    """One split of one tensor dim over one mesh axis; `blocks` are sizes that add up to the dim."""

    axis: str
    dim: int
    blocks: tuple[int, ...]
    uneven: Uneven = field(default=EVEN, repr=False)


@dataclass(frozen=True)
class Layout:
    """The places of the elements of a tensor of a given shape on a mesh.

    `padded` is the shape after padding (equal to `shape` without), `splits` are applied in order,
    so the first named axis is the slowest.  Axes that no split names hold replicas.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    splits: tuple[Split, ...] = ()

    @staticmethod
    def whole(shape: Sequence[int]) -> Layout:
        """The layout of an unsplit, unpadded tensor."""
        return Layout(tuple(shape), tuple(shape))

    def pad(self, dim: int, size: int) -> Layout:
        """The same with one dim padded to `size`; padding comes before splitting."""
        assert not self.splits and size >= self.shape[dim]
        padded = list(self.padded)
        padded[dim] = size
        return replace(self, padded=tuple(padded))

    def split(
        self, axis: str, dim: int, blocks: Sequence[int] = (), uneven: Uneven = EVEN
    ) -> Layout:
        """The same, split once more; what was padded before is the first split's own padding."""
        size, padded = self.shape[dim], list(self.padded)
        sizes = tuple(blocks) or (size,)
        assert sum(sizes) == size, (sizes, self.shape)
        if all(split.dim != dim for split in self.splits):
            if padded[dim] != size:
                assert uneven == EVEN
                uneven = Uneven(Fraction(padded[dim], size))
            padded[dim] = sum(uneven.padded(block) for block in sizes)
        made = Split(axis, dim, sizes, uneven)
        return replace(self, padded=tuple(padded), splits=(*self.splits, made))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split this tensor."""
        return tuple(split.axis for split in self.splits)

    def segments(self, mesh: Mesh, at: Mapping[str, int]) -> tuple[tuple[Segment, ...], ...]:
        """Return the runs of the padded whole, dim by dim, that the rank at coordinates `at`
        holds."""
        held = [[[Segment(0, size)]] for size in self.padded]
        cut: set[int] = set()
        for split in self.splits:
            parts = mesh.size(split.axis) // split.uneven.repeat
            place = mesh.index_at(at, split.axis) // split.uneven.repeat
            if split.dim not in cut:
                held[split.dim] = strips(split.blocks, split.uneven)
            cut.add(split.dim)
            held[split.dim] = [_part(strip, parts, place) for strip in held[split.dim]]
        return tuple(tuple(joined([run for strip in dim for run in strip])) for dim in held)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape that every rank holds (padding included)."""
        shape = list(self.padded)
        for split in self.splits:
            shape[split.dim] //= mesh.size(split.axis) // split.uneven.repeat
        return tuple(shape)

    def show(self, names: Sequence[str] | None = None) -> str:
        """The layout as it is printed, `[768, 2304@tp]`; `names` replace sizes where given."""
        cells = []
        for dim, size in enumerate(self.padded):
            over = "".join(f"@{split.axis}" for split in self.splits if split.dim == dim)
            cells.append(f"{names[dim] if names else size}{over}")
        return f"[{', '.join(cells)}]"


def strips(sizes: Sequence[int], uneven: Uneven = EVEN) -> list[list[Segment]]:
    """Each block as its true indices and its zeros; all zeros lie behind the true whole."""
    found, start, beyond = [], 0, sum(sizes)
    for size in sizes:
        more = uneven.padded(size) - size
        found.append([Segment(start, size), *([Segment(beyond, more)] if more else [])])
        start, beyond = start + size, beyond + more
    return found


@dataclass(frozen=True)
class HeldRun:
    """A run of indices that a rank holds: at `at` of its own, from `start` of the whole."""

    rank: int
    at: int
    start: int
    length: int


def holds(sizes: Sequence[int], uneven: Uneven, ranks: int) -> list[HeldRun]:
    """All runs of all ranks, in their order; `start` beyond the sum of the sizes: zeros."""
    found = []
    for rank in range(ranks):
        at = 0
        for strip in strips(sizes, uneven):
            for run in _part(strip, ranks // uneven.repeat, rank // uneven.repeat):
                found.append(HeldRun(rank, at, run.start, run.length))
                at += run.length
    return found


def positions(sizes: Sequence[int], uneven: Uneven, ranks: int, place: int) -> list[int]:
    """The indices that one of the ranks holds, in its order; those beyond the sum are zeros."""
    mine = [run for run in holds(sizes, uneven, ranks) if run.rank == place]
    return [run.start + k for run in mine for k in range(run.length)]


def _part(strip: Sequence[Segment], parts: int, place: int) -> list[Segment]:
    """One of equal parts of a chain of runs."""
    whole = sum(run.length for run in strip)
    assert whole % parts == 0, (strip, parts)
    first, last = place * (whole // parts), (place + 1) * (whole // parts)
    found, at = [], 0
    for run in strip:
        low, high = max(first, at), min(last, at + run.length)
        if low < high:
            found.append(Segment(run.start + low - at, high - low))
        at += run.length
    return found


def joined(runs: Sequence[Segment]) -> list[Segment]:
    """Neighbouring runs as one."""
    out: list[Segment] = []
    for run in runs:
        if out and out[-1].start + out[-1].length == run.start:
            out[-1] = Segment(out[-1].start, out[-1].length + run.length)
        else:
            out.append(run)
    return out


Rule = Literal["pad", "replicate"]
MOST_SHOWN = 8


@dataclass(frozen=True)
class Cut:
    """A dim to be split: its blocks, into how many heads each may be cut, and by which rule.

    `heads` None: between any two elements.
    """

    blocks: tuple[int, ...]
    heads: int | None
    rule: Rule | None

    @property
    def units(self) -> tuple[int, ...]:
        """The number of pieces that each block may be cut into."""
        return tuple(self.heads or block for block in self.blocks)

    def even(self, ranks: int) -> bool:
        """Do the ranks divide every block, between its heads?"""
        return all(count % ranks == 0 for count in self.units)

    def uneven(self, ranks: int) -> Uneven | None:
        """Return the rule by which the dim fits the ranks; None where the rule does not fit the
        sizes."""
        if self.even(ranks) or ranks == 1:
            return EVEN
        if self.rule == "pad":
            wide = {Fraction(-(-n // ranks) * ranks, n) for n in self.units}
            return Uneven(wide.pop()) if len(wide) == 1 and min(self.units) > 1 else None
        if self.rule == "replicate" and self.heads and ranks % self.heads == 0:
            return Uneven(Fraction(ranks // self.heads), ranks // self.heads)
        return None

    def fitting(self) -> list[int]:
        """The numbers of ranks, up to 1024, that divide it evenly."""
        return [n for n in range(2, 1025) if self.even(n)]


def some(numbers: Sequence[int]) -> str:
    """The first of some numbers."""
    shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
    return shown if len(numbers) <= MOST_SHOWN else f"{shown}, ..."


def remedy(heads: int | None, ranks: int, splits_out: bool) -> tuple[tuple[str, str], ...]:
    """The arguments of the first of `remedies`, names and values."""
    rule = "pad" if heads != 1 else None
    if heads and splits_out and ranks % heads == 0:
        rule = "replicate"
    count = (("heads", str(heads)),) if heads else ()
    return (*count, ("uneven", rule)) if rule is not None else ()


def remedies(row: str, heads: int | None, ranks: int, splits_out: bool) -> list[str]:
    """Rows that make heads, or any sizes, fit; `row` is the call without its closing bracket."""
    count = f", heads={heads}" if heads else ""
    found = []
    if heads and splits_out and ranks % heads == 0:
        found.append(f"let several ranks hold one head: `{row}{count}, uneven=replicate)`")
    if heads != 1:
        found.append(f"pad with zeros: `{row}{count}, uneven=pad)`")
    return found


def sizes_of(blocks: int | Sequence[int], size: int) -> tuple[int, ...]:
    """Sizes of the blocks that lie side by side in a dim: as given, or of a number of equal ones.

    Of more than there are elements one too many stands for all: these do not add up either.
    """
    if isinstance(blocks, int):
        return (size // blocks,) * min(blocks, size + 1)
    return tuple(blocks)


def blocks_of(blocks: object, size: int) -> tuple[str, ...]:
    """Return helps that say which `blocks` are legal for a dim of this size."""
    if isinstance(blocks, int):
        fit = [n for n in range(1, size + 1) if size % n == 0]
        return (f"`blocks` may be {some(fit)}, or sizes that add up to {size}: `blocks=[...]`",)
    return (f"the sizes must add up to {size}, or a number of equal blocks divide it: `blocks=2`",)
