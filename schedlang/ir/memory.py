"""The memory of a rank by class of tensor, over the operations of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# activations: what a forward leaves for its backward; communication: gathered parameters,
# gradients not yet reduced, messages; temporary: what lives within one forward or backward, with
# what is computed again there
CLASSES = ("parameters", "gradients", "optimizer", "activations", "communication", "temporary")
STATE = CLASSES[:3]  # what lies there between two steps, or comes to be in one
MOMENTS = 2  # AdamW's, in the parameter's dtype


@dataclass(frozen=True)
class Moment:
    """One operation of a step: bytes by class where their sum is greatest in it, and after it.

    passing  of all but parameters, gradients and optimizer state, at most in it
    """

    what: str
    most: tuple[int, ...]
    end: tuple[int, ...]
    passing: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes over a step of ranks that hold equally much: how many they are, the lowest one.

    place  along the pipeline's axis, if there is one
    host   bytes in host memory at most, of what was moved there
    left   calls that kernels leave to the model, in words
    """

    ranks: int
    first: int
    place: int | None
    moments: tuple[Moment, ...]
    host: int = 0
    left: tuple[str, ...] = ()

    @property
    def top(self) -> Moment:
        """The operation in which most bytes are held."""
        return max(self.moments, key=lambda one: sum(one.most))

    @property
    def peak(self) -> int:
        """The bytes then."""
        return sum(self.top.most)

    @property
    def classes(self) -> dict[str, int]:
        """The bytes then, by class."""
        return dict(zip(CLASSES, self.top.most))

    @property
    def passing(self) -> int:
        """The greatest number of bytes, in any operation, beside parameters, gradients, optimizer
        state."""
        return max(one.passing for one in self.moments)

    @property
    def activations(self) -> int:
        """The greatest number of bytes, in any operation, that forwards have saved for
        backwards."""
        place = CLASSES.index("activations")
        return max(one.most[place] for one in self.moments)

    def to_json(self) -> dict[str, object]:
        """Return plain values; the curve has a row of classes for each operation."""
        return {
            "ranks": self.ranks,
            "first": self.first,
            "place": self.place,
            "peak": self.peak,
            "at": self.top.what,
            "classes": self.classes,
            "host": self.host,
            "activations": self.activations,
            "curve": [
                {"op": m.what, "most": list(m.most), "end": list(m.end)} for m in self.moments
            ],
        }


def heaviest(found: Sequence[RankMemory]) -> RankMemory:
    """Return the memory of the ranks with the highest peak."""
    return max(found, key=lambda one: one.peak)
