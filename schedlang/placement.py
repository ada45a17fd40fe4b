"""How a tensor lies on a mesh: split, replicated or pending a sum; which part each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from schedlang.mesh import Mesh


@dataclass(frozen=True)
class S:
    """Split along a dim, named (`out`, `vocab`, `seq`) or by number.

    `blocks`: how many equal blocks, or the sizes of the blocks, lie side by side along the dim
    and are split one by one (a fused q, k, v weight has 3).
    """

    dim: str | int
    blocks: int | tuple[int, ...] = 1

    def __str__(self) -> str:
        if self.blocks == 1:
            return f"S({self.dim})"
        blocks = self.blocks if isinstance(self.blocks, int) else list(self.blocks)
        return f"S({self.dim}, blocks={blocks})"


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


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor of a given shape lie on a mesh.

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

    def split(self, axis: str, dim: int, blocks: Sequence[int] = ()) -> Layout:
        """The same, split once more."""
        sizes = tuple(blocks) or (self.padded[dim],)
        assert sum(sizes) == self.padded[dim], (sizes, self.padded)
        return replace(self, splits=(*self.splits, Split(axis, dim, sizes)))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split this tensor."""
        return tuple(split.axis for split in self.splits)

    def segments(self, mesh: Mesh, at: Mapping[str, int]) -> tuple[tuple[Segment, ...], ...]:
        """For each dim, the runs of the padded whole that the rank at coordinates `at` holds."""
        held = [[Segment(0, size)] for size in self.padded]
        for split in self.splits:
            parts, place = mesh.size(split.axis), mesh.index_at(at, split.axis)
            whole = held[split.dim] == [Segment(0, self.padded[split.dim])]
            runs = _blocks(split.blocks) if whole else held[split.dim]
            assert all(run.length % parts == 0 for run in runs), (split, runs, parts)
            held[split.dim] = [
                Segment(run.start + place * (run.length // parts), run.length // parts)
                for run in runs
            ]
        return tuple(tuple(_joined(runs)) for runs in held)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape that every rank holds (padding included)."""
        shape = list(self.padded)
        for split in self.splits:
            shape[split.dim] //= mesh.size(split.axis)
        return tuple(shape)

    def show(self, names: Sequence[str] | None = None) -> str:
        """The layout as it is printed, `[768, 2304@tp]`; `names` replace sizes where given."""
        cells = []
        for dim, size in enumerate(self.padded):
            over = "".join(f"@{split.axis}" for split in self.splits if split.dim == dim)
            cells.append(f"{names[dim] if names else size}{over}")
        return f"[{', '.join(cells)}]"


def _blocks(sizes: Sequence[int]) -> list[Segment]:
    runs, start = [], 0
    for size in sizes:
        runs.append(Segment(start, size))
        start += size
    return runs


def _joined(runs: Sequence[Segment]) -> list[Segment]:
    """Neighbouring runs as one."""
    out: list[Segment] = []
    for run in runs:
        if out and out[-1].start + out[-1].length == run.start:
            out[-1] = Segment(out[-1].start, out[-1].length + run.length)
        else:
            out.append(run)
    return out
