"""Observers of forwards with imitated units: they note for these what equal units have left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor

from schedlang.ir.model import is_inside
from schedlang.runtime.propagation.follower import Follower
from schedlang.runtime.propagation.trace import Lattice, ModuleStack, Note
from schedlang.runtime.sharding.edges import Edge
from schedlang.runtime.tracing.equal_units import DifferentUnits, ShownCall, UnitObserver


@dataclass
class EqualTurns(UnitObserver):
    """Notes how often the modules of imitated units are called, in the order of their calls."""

    stack: ModuleStack
    calls: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def ran(self, name: str, leaves: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Note the calls of the modules of a unit."""
        if any(is_inside(around, name) for _, around in self.stack.outside):
            raise DifferentUnits
        turns = self.stack.turns.items()
        self.calls[name] = [(fqn[len(name) :], n) for fqn, n in turns if is_inside(fqn, name)]

    def imitated(
        self, name: str, shown: ShownCall, leaves: Sequence[Any], results: Sequence[Tensor]
    ) -> None:
        """Note the same calls for another unit."""
        self.stack.turns.update({name + path: count for path, count in self.calls[shown.name]})


@dataclass
class Unmarked(UnitObserver):
    """Raises DifferentUnits where a unit gets or returns a tensor that a lattice has marked.

    Also where a unit has drawn: `drawn` has an entry for each (module, turn).
    """

    lattice: Lattice
    drawn: Mapping[tuple[str, int], object]

    def before(self, name: str, leaves: Sequence[Any]) -> None:
        """Check the arguments of a unit."""
        if any(self.lattice.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            raise DifferentUnits

    def ran(self, name: str, leaves: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Check the results and the draws of a unit."""
        self.before(name, results)
        if any(is_inside(fqn, name) for fqn, _ in self.drawn):
            raise DifferentUnits

    def imitated(
        self, name: str, shown: ShownCall, leaves: Sequence[Any], results: Sequence[Tensor]
    ) -> None:
        """Check the arguments of a unit that does not run."""
        self.before(name, leaves)


@dataclass
class EqualLayouts(UnitObserver):
    """Notes for imitated units the layouts that a run of the sharded copy has found.

    narrowed   modules whose arguments are narrowed
    arguments  (module, argument) -> its first split
    """

    follower: Follower
    edges: dict[str, tuple[Edge, ...]]
    layouts: dict[tuple[str, int], list[tuple[Note, ...] | None]]
    narrowed: Mapping[str, object]
    arguments: Mapping[tuple[str, str], object]
    _noted: dict[str, _NotedNames] = field(default_factory=dict)  # of units that have run

    def before(self, name: str, leaves: Sequence[Any]) -> None:
        """Refuse units that a state of the follower may distinguish."""
        if self.follower.after_logits or self.follower.left_out:
            raise DifferentUnits

    def ran(self, name: str, leaves: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Refuse a unit that draws, or whose arguments are narrowed."""
        self.before(name, leaves)
        named = (*self.narrowed, *(fqn for fqn, _ in self.arguments))
        drawn = (*self.follower.draw_counts, *(fqn for fqn, _ in self.follower.masks))
        if any(is_inside(fqn, name) for fqn in (*named, *drawn)):
            raise DifferentUnits

    def imitated(
        self, name: str, shown: ShownCall, leaves: Sequence[Any], results: Sequence[Tensor]
    ) -> None:
        """Note the layouts of the call that stands for a unit; its arguments must have the same."""
        follower, old = self.follower, shown.name
        for new_leaf, old_leaf in zip(leaves, shown.arguments):
            if isinstance(new_leaf, Tensor) and follower.of(new_leaf) != follower.of(old_leaf):
                raise DifferentUnits
        for new_tensor, old_tensor in zip(results, shown.results):
            note: Note = follower.of(old_tensor)
            if any(is_inside(root, old) for root in note.roots):
                raise DifferentUnits
            follower.put(new_tensor, note)
        if old not in self._noted:  # all that is noted for a unit is noted while it runs
            self._noted[old] = _NotedNames.of(self, old)
        noted = self._noted[old]
        for fqn in noted.edges:
            renamed = name + fqn[len(old) :]
            self.edges[renamed] = tuple(labelled(edge, renamed) for edge in self.edges[fqn])
        for frame in noted.frames:
            self.layouts[name + frame[0][len(old) :], frame[1]] = self.layouts[frame]
        _follow_renamed(follower, noted, old, name)


def labelled(edge: Edge, label: str) -> Edge:
    """Return the edge of another module."""
    return replace(edge, group=replace(edge.group, label=label))


@dataclass(frozen=True)
class _NotedNames:
    """The parameters and modules of a unit for which something is noted."""

    edges: Sequence[str]
    frames: Sequence[tuple[str, int]]
    partial: Sequence[str]
    used: Sequence[str]
    tokens: Sequence[tuple[str, str]]
    sharing: Sequence[str]

    @classmethod
    def of(cls, layouts: EqualLayouts, unit: str) -> Self:
        """Return those of a unit that has run."""
        follower = layouts.follower

        def inside(names: Iterable[str]) -> list[str]:
            return [name for name in names if is_inside(name, unit)]

        return cls(
            inside(layouts.edges),
            [frame for frame in layouts.layouts if is_inside(frame[0], unit)],
            inside(follower.partial),
            inside(follower.used),
            [token for token in follower.tokens if is_inside(token[0], unit)],
            inside(follower.arrivals.sharing),
        )


def _follow_renamed(follower: Follower, noted: _NotedNames, old: str, name: str) -> None:
    """Note for the parameters and modules of unit `name` what a follower has noted for `old`."""
    for param in noted.partial:
        renamed = name + param[len(old) :]
        follower.partial.setdefault(renamed, set()).update(follower.partial[param])
    for param in noted.used:
        follower.used[name + param[len(old) :]] = follower.used[param]
    for fqn, axis in noted.tokens:
        follower.tokens.add((name + fqn[len(old) :], axis))
    follower.arrivals.sharing.update(name + fqn[len(old) :] for fqn in noted.sharing)
