"""What is known of a tensor while a sharded forward is followed, and how following it can end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schedlang.placement import EVEN, Uneven, positions
from schedlang.runtime.following.trace import Frame
from schedlang.runtime.recording.lines import model_line


@dataclass(frozen=True)
class Tag:
    """A tensor dim split over an axis, with the sizes of the blocks that lie side by side in it.

    `along`: a dim of a tensor whose parts several ranks hold, along which its values are alike: the
    dim into which each key-value head is repeated for its query heads.
    """

    dim: int
    blocks: tuple[int, ...]  # of the whole dim
    by: str = field(default="", compare=False)  # the sharded module that split it
    uneven: Uneven = EVEN
    along: int | None = None

    def positions(self, size: int, parts: int, place: int) -> list[int]:
        """What a rank holds of a dim of `size`, in its order; indices beyond `size` are zeros."""
        total = sum(self.blocks)
        sizes = [block * size // total for block in self.blocks]
        return positions(sizes, self.uneven, parts, place)


@dataclass
class Note:
    """What is known of a tensor: its splits by axis, and where its gradient would go.

    `entered` are axes over which the value is whole but the gradient a part, to be summed where the
    tensor entered the sharded region.
    """

    tags: Mapping[str, Tag] = field(default_factory=dict)
    roots: frozenset[str] = frozenset()  # parameters it is made of, and of nothing else
    data: bool = False  # made from the batch
    entered: frozenset[str] = frozenset()

    @property
    def parts(self) -> frozenset[str]:
        """The axes over which this tensor's gradient is, rightly, not the whole one."""
        return self.entered | self.tags.keys()


class Hoist(Exception):
    """A tensor should be gathered where an enclosing module takes it, not deeper inside."""

    def __init__(self, fqn: str, axis: str) -> None:
        super().__init__(fqn, axis)
        self.fqn, self.axis = fqn, axis


class Mismatch(Exception):
    """The sharded model does not compute what its shapes should be.

    `integers` are arguments of the original call that should have been divided by the ranks of
    `axis`; empty where no division can help.  `place` counts the calls that agreed before.
    """

    def __init__(
        self, frame: Frame, reason: str, axis: str | None, integers: tuple[int, ...], place: int,
        helps: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(reason)
        self.frame, self.reason, self.axis = frame, reason, axis
        self.integers, self.place, self.helps = integers, place, helps
        self.line = model_line()  # of the model, that ran
        self.call = ""  # the function that was called there
        self.by = ""  # the sharded module that split what fails
        self.counted: tuple[
            int, ...
        ] = ()  # into which sizes (heads first) a view takes a split dim
        self.raw = False  # the reason is in the words of torch
        self.mixed = False  # parts that one rank holds met parts that several do
        # parameters of which whole tensors that met a split one are made, and how many it has
        self.made: tuple[frozenset[str], int] = (frozenset(), 0)
        self.unit = 0  # heads of a split tensor that met a whole one; 0: none did
