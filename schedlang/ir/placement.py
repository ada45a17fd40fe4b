"""Placements of a tensor on a mesh: sharded, replicated or partial; dims that do not divide.

* `Layout`: the shards of a tensor on the ranks of a mesh.
* `SplitDim`: a dim whose size the ranks may not divide: padded, replicated by several ranks, or
  refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from schedlang.ir.mesh import Mesh


@dataclass(frozen=True)
class Uneven:
    """The rule for a dim that its ranks do not divide, so that all shards have one size.

    wide    elements that all ranks hold together, per true element; above 1 if padded or replicated
    repeat  neighbouring ranks that hold the same shard; 1: each block is padded with zeros instead
    """

    wide: Fraction = Fraction(1)
    repeat: int = 1

    def padded_size(self, size: int) -> int:
        """Return the size of a block with its padding."""
        padded = size * self.wide / self.repeat
        assert padded.denominator == 1, (size, self)
        return padded.numerator

    def true_size(self, local_size: int, ranks: int) -> int:
        """Return the true size of a dim of which each rank holds `local_size` elements."""
        size = local_size * ranks / self.wide
        assert size.denominator == 1, (local_size, ranks, self)
        return size.numerator


EVEN = Uneven()


@dataclass(frozen=True)
class S:
    """Split along a dim, given by name (`out`, `vocab`, `seq`) or number.

    `blocks`: the number of equal blocks, or the sizes of the blocks, that are concatenated along
    the dim and are split one by one (a fused q, k, v weight has 3).
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
    """The full tensor on every rank; written `R`."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class P:
    """A pending reduction (partial): the full tensor is the `op` ("sum") over the ranks."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


R = Replicate()
Placement = S | Replicate | P


@dataclass(frozen=True)
class Segment:
    """A run of indices of one dim: `length` of them from `start` (of the padded full dim)."""

    start: int
    length: int


@dataclass(frozen=True)
class Split:
    """One split of one tensor dim over one mesh axis; `blocks` are sizes that add up to the dim."""

    axis: str
    dim: int
    blocks: tuple[int, ...]
    uneven: Uneven = field(default=EVEN, repr=False)


def slicing_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the dim along which ZeRO slices the tensor of this shape, which `ranks` hold equally.

    It is dim 0, if it has a row for each rank; else the first dim whose size the ranks divide, if
    there is one.
    """
    if not shape or shape[0] >= ranks or 0 in shape:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


@dataclass(frozen=True)
class Layout:
    """The distribution of a tensor of a given shape over the ranks of a mesh.

    `padded_size` is the shape after padding (equal to `shape` without). `splits` are applied in
    order, so the first named axis is the slowest. Axes that no split names hold replicas.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    splits: tuple[Split, ...] = ()

    @staticmethod
    def whole(shape: Sequence[int]) -> Layout:
        """Return the layout of an unsharded, unpadded tensor."""
        return Layout(tuple(shape), tuple(shape))

    def pad(self, dim: int, size: int) -> Layout:
        """Return the layout with one dim padded to `size`; padding must precede splitting."""
        assert not self.splits and size >= self.shape[dim]
        padded = list(self.padded)
        padded[dim] = size
        return replace(self, padded=tuple(padded))

    def split(
        self, axis: str, dim: int, blocks: Sequence[int] = (), uneven: Uneven = EVEN
    ) -> Layout:
        """Return the layout with one more split; earlier padding of the dim becomes the split's
        own."""
        size, padded = self.shape[dim], list(self.padded)
        sizes = tuple(blocks) or (size,)
        assert sum(sizes) == size, (sizes, self.shape)
        if all(split.dim != dim for split in self.splits):
            if padded[dim] != size:
                assert uneven == EVEN
                uneven = Uneven(Fraction(padded[dim], size))
            padded[dim] = sum(uneven.padded_size(block) for block in sizes)
        new_split = Split(axis, dim, sizes, uneven)
        return replace(self, padded=tuple(padded), splits=(*self.splits, new_split))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split this tensor."""
        return tuple(split.axis for split in self.splits)

    def segments(self, mesh: Mesh, coords: Mapping[str, int]) -> tuple[tuple[Segment, ...], ...]:
        """Return, for each dim, the runs of the padded full dim that the rank at coordinates
        `coords` holds."""
        strips = [[[Segment(0, size)]] for size in self.padded]
        cut: set[int] = set()
        for split in self.splits:
            parts = mesh.size(split.axis) // split.uneven.repeat
            index = mesh.index_at(coords, split.axis) // split.uneven.repeat
            if split.dim not in cut:
                strips[split.dim] = block_segments(split.blocks, split.uneven)
            cut.add(split.dim)
            strips[split.dim] = [_part(strip, parts, index) for strip in strips[split.dim]]
        return tuple(
            tuple(merge_segments([run for strip in dim for run in strip])) for dim in strips
        )

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape that every rank holds, padding included."""
        shape = list(self.padded)
        for split in self.splits:
            shape[split.dim] //= mesh.size(split.axis) // split.uneven.repeat
        return tuple(shape)

    def show(self, names: Sequence[str] | None = None) -> str:
        """Format the layout, `[768, 2304@tp]`; `names` replace sizes where given."""
        cells = []
        for dim, size in enumerate(self.padded):
            suffix = "".join(f"@{split.axis}" for split in self.splits if split.dim == dim)
            cells.append(f"{names[dim] if names else size}{suffix}")
        return f"[{', '.join(cells)}]"


def block_segments(sizes: Sequence[int], uneven: Uneven = EVEN) -> list[list[Segment]]:
    """Return each block as its true indices and its padding; all padding follows the true dim."""
    blocks, start, beyond = [], 0, sum(sizes)
    for size in sizes:
        padding = uneven.padded_size(size) - size
        blocks.append([Segment(start, size), *([Segment(beyond, padding)] if padding else [])])
        start, beyond = start + size, beyond + padding
    return blocks


@dataclass(frozen=True)
class HeldRun:
    """A run of indices that a rank holds: at local index `at`, from `start` of the full dim."""

    rank: int
    at: int
    start: int
    length: int


def held_runs(sizes: Sequence[int], uneven: Uneven, ranks: int) -> list[HeldRun]:
    """Return the runs of all ranks, in order of rank; `start` beyond the sum of `sizes` means
    padding."""
    runs = []
    for rank in range(ranks):
        offset = 0
        for strip in block_segments(sizes, uneven):
            for run in _part(strip, ranks // uneven.repeat, rank // uneven.repeat):
                runs.append(HeldRun(rank, offset, run.start, run.length))
                offset += run.length
    return runs


def positions(sizes: Sequence[int], uneven: Uneven, ranks: int, rank: int) -> list[int]:
    """Return the indices that a rank holds, in its order; indices beyond the sum are
    padding."""
    runs = [run for run in held_runs(sizes, uneven, ranks) if run.rank == rank]
    return [run.start + k for run in runs for k in range(run.length)]


def _part(strip: Sequence[Segment], parts: int, index: int) -> list[Segment]:
    """Return one of `parts` equal pieces of a sequence of runs."""
    length = sum(run.length for run in strip)
    assert length % parts == 0, (strip, parts)
    first, last = index * (length // parts), (index + 1) * (length // parts)
    segments, offset = [], 0
    for run in strip:
        low, high = max(first, offset), min(last, offset + run.length)
        if low < high:
            segments.append(Segment(run.start + low - offset, high - low))
        offset += run.length
    return segments


def merge_segments(runs: Sequence[Segment]) -> list[Segment]:
    """Merge neighbouring runs."""
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
class SplitDim:
    """A dim to be split: its blocks, the number of heads of each block, and the rule for uneven
    sizes.

    `heads` None: a block may be split between any two elements.
    """

    blocks: tuple[int, ...]
    heads: int | None
    rule: Rule | None

    @property
    def units(self) -> tuple[int, ...]:
        """The number of pieces that each block may be split into."""
        return tuple(self.heads or block for block in self.blocks)

    def divides_evenly(self, ranks: int) -> bool:
        """Return whether the ranks divide every block between its heads."""
        return all(count % ranks == 0 for count in self.units)

    def uneven_rule(self, ranks: int) -> Uneven | None:
        """Return the rule that fits the dim to the ranks; None where the rule does not fit the
        sizes."""
        if self.divides_evenly(ranks) or ranks == 1:
            return EVEN
        if self.rule == "pad":
            factors = {Fraction(-(-n // ranks) * ranks, n) for n in self.units}
            return Uneven(factors.pop()) if len(factors) == 1 and min(self.units) > 1 else None
        if self.rule == "replicate" and self.heads and ranks % self.heads == 0:
            return Uneven(Fraction(ranks // self.heads), ranks // self.heads)
        return None

    def fitting_rank_counts(self) -> list[int]:
        """Return the numbers of ranks, up to 1024, that divide the dim evenly."""
        return [n for n in range(2, 1025) if self.divides_evenly(n)]


def format_numbers(numbers: Sequence[int]) -> str:
    """Format the first of some numbers."""
    shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
    return shown if len(numbers) <= MOST_SHOWN else f"{shown}, ..."


def first_remedy(heads: int | None, ranks: int, splits_out: bool) -> tuple[tuple[str, str], ...]:
    """Return the arguments (names and values) of the first of `find_remedies`."""
    rule = "pad" if heads != 1 else None
    if heads and splits_out and ranks % heads == 0:
        rule = "replicate"
    count = (("heads", str(heads)),) if heads else ()
    return (*count, ("uneven", rule)) if rule is not None else ()


def find_remedies(row: str, heads: int | None, ranks: int, splits_out: bool) -> list[str]:
    """Return rows that make heads, or any sizes, fit; `row` is the call without its closing
    bracket."""
    count = f", heads={heads}" if heads else ""
    remedies = []
    if heads and splits_out and ranks % heads == 0:
        remedies.append(f"let several ranks hold one head: `{row}{count}, uneven=replicate)`")
    if heads != 1:
        remedies.append(f"pad with zeros: `{row}{count}, uneven=pad)`")
    return remedies


def block_sizes_of(blocks: int | Sequence[int], size: int) -> tuple[int, ...]:
    """Return the sizes of the blocks of a dim: as given, or of a number of equal blocks.

    For more blocks than elements, one block too many is returned: such sizes do not add up either.
    """
    if isinstance(blocks, int):
        return (size // blocks,) * min(blocks, size + 1)
    return tuple(blocks)


def suggest_blocks(blocks: object, size: int) -> tuple[str, ...]:
    """Return helps with the `blocks` that are legal for a dim of this size."""
    if isinstance(blocks, int):
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        legal = format_numbers(divisors)
        return (f"`blocks` may be {legal}, or sizes that add up to {size}: `blocks=[...]`",)
    return (f"the sizes must add up to {size}, or a number of equal blocks divide it: `blocks=2`",)
