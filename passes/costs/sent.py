"""One collective of a step as a value, and the plan as counting them asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.cutting.staging import Staged
    from schedlang.passes.laying.propagate import Traced
    from schedlang.passes.preparing.prepare import Prepared
    from schedlang.runtime.context.tokens import Tokens
    from schedlang.runtime.saving.holding import Holding


@dataclass(frozen=True)
class Collective:
    """One collective operation of a step, as often as one rank takes part in it.

    phase    "forward", "backward" (with recomputed forwards) or "step" (after the last backward)
    what     what is sent, in words: "output", "input grad", "parameters", ...
    fqn      the module where it happens; empty for the model as a whole
    bytes    of the whole tensor, once; of the largest slice where ranks sum slices of their own
    places   along the pipeline's axis where it happens; None: everywhere
    row      the row of the plan that asks for it, if one does
    to       the place along the pipeline's axis to which it is sent; None: not to a certain one
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    what: str
    fqn: str
    count: int
    bytes: int
    places: frozenset[int] | None = None
    row: int | None = None
    to: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.count * self.bytes

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        places = None if self.places is None else sorted(self.places)
        return {**asdict(self), "axes": list(self.axes), "places": places, "total": self.total}


@dataclass(frozen=True)
class Context:
    """A plan, and what is known of it, as counting asks for them."""

    plan: Plan
    prepared: Prepared

    @property
    def traced(self) -> Traced:
        """What a forward showed."""
        return self.prepared.traced

    @property
    def staged(self) -> Staged:
        """The stages."""
        return self.prepared.staged

    @property
    def holdings(self) -> Mapping[str, Holding]:
        """Where the parts of every parameter lie."""
        return self.prepared.holdings

    @property
    def tokens(self) -> Tokens | None:
        """How sequences are split over ranks, where they are."""
        return self.prepared.tokens

    @property
    def micro(self) -> int:
        """Microbatches of a step."""
        return self.plan.micro

    def row(self, facet: str) -> int | None:
        """The last row that writes a facet."""
        found = [a.row for a in self.plan.actions if facet in a.primitive.writes]
        return found[-1] if found else None

    def runs(self, fqn: str) -> list[tuple[frozenset[int] | None, int]]:
        """Where along the pipeline a module runs, and for how many microbatches.

        Code between units runs on several stages, which are not told apart.
        """
        cut = self.staged.cut
        for unit, name in enumerate(cut.graph.units if self.staged.axis is not None else ()):
            if fqn == name or fqn.startswith(f"{name}."):
                return self.copies(cut.stage_of[unit])
        return [(None, self.micro)]

    def copies(self, stage: int) -> list[tuple[frozenset[int] | None, int]]:
        """The places that hold a stage, and how many microbatches each of them runs."""
        if self.staged.axis is None:
            return [(None, self.micro)]
        found: dict[int, set[int]] = {}
        for place in self.staged.places(stage):
            found.setdefault(self.staged.microbatches(stage, place), set()).add(place)
        return [(frozenset(places), count) for count, places in found.items()]
