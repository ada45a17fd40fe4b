"""The memory of a rank by class of tensor, over the operations of a step.

Filled by the simulators, printed by `schedlang plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# activations: saved by a forward for its backward; communication: gathered parameters,
# gradients not yet reduced, messages; temporary: allocated within one forward or backward,
# recomputed tensors included
CLASSES = ("parameters", "gradients", "optimizer", "activations", "communication", "temporary")
STATE = CLASSES[:3]  # allocated between two steps, or created in one
ADAMW_MOMENTS = 2  # AdamW's, in the parameter's dtype


@dataclass(frozen=True)
class OperationMemory:
    """One operation of a step: bytes by class at the operation's peak, and after it.

    passing  peak of all classes but parameters, gradients and optimizer state
    """

    what: str
    most: tuple[int, ...]
    end: tuple[int, ...]
    passing: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes over a step for ranks of equal memory: their number, and the lowest such rank.

    place  the position along the pipeline's axis, if there is one
    host   peak bytes in host memory of offloaded tensors
    left   descriptions of the calls that kernels decline and leave to the model
    """

    ranks: int
    first: int
    place: int | None
    moments: tuple[OperationMemory, ...]
    host: int = 0
    left: tuple[str, ...] = ()

    @property
    def top(self) -> OperationMemory:
        """The operation with the highest peak."""
        return max(self.moments, key=lambda moment: sum(moment.most))

    @property
    def peak(self) -> int:
        """The bytes at the peak."""
        return sum(self.top.most)

    @property
    def classes(self) -> dict[str, int]:
        """The bytes at the peak, by class."""
        return dict(zip(CLASSES, self.top.most))

    @property
    def passing(self) -> int:
        """The highest peak, over all operations, without parameters, gradients and optimizer
        state."""
        return max(moment.passing for moment in self.moments)

    @property
    def activations(self) -> int:
        """The highest number of bytes, over all operations, of activations saved for backward."""
        index = CLASSES.index("activations")
        return max(moment.most[index] for moment in self.moments)

    def to_json(self) -> dict[str, object]:
        """Return plain values; the curve has the classes of each operation."""
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


def find_heaviest(memories: Sequence[RankMemory]) -> RankMemory:
    """Return the memory of the ranks with the highest peak."""
    return max(memories, key=lambda memory: memory.peak)
