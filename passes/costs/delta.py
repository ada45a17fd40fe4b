"""What changes in cost from one plan to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from schedlang.memory import CLASSES, heaviest

if TYPE_CHECKING:
    from schedlang.passes.costs.account import Account

PEAK = "peak of the fullest rank"


@dataclass(frozen=True)
class Cost:
    """One figure before and after; None where it is not counted."""

    name: str
    unit: str  # "bytes", "share" or "times"
    old: float | None
    new: float | None

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{self.name} unchanged ({self.said(self.new)})"
        change = f" ({self.change})" if self.change else ""
        return f"{self.name} {self.said(self.old)} -> {self.said(self.new)}{change}"

    @property
    def change(self) -> str:
        """By how much it is more or less; empty where nothing can be said."""
        if self.old is None or self.new is None or self.old == self.new:
            return ""
        if self.unit == "share":
            return f"{100 * (self.new - self.old):+.1f} points"
        return f"{self.new / self.old - 1:+.1%}" if self.old else ""

    def said(self, value: float | None) -> str:
        """A value of this figure in words."""
        from schedlang.amounts import size

        if value is None:
            return "not counted"
        if self.unit == "bytes":
            return size(int(value))
        return f"{value:.1%}" if self.unit == "share" else f"{value:g}"


def delta(old: Account, new: Account) -> tuple[Cost, ...]:
    """Bytes of the fullest rank at its peak, by class and between steps, collectives, the bubble.

    What neither plan tells (the peak, where no memory was asked for) is left out.
    """
    return tuple(
        Cost(name, unit, before, after)
        for (name, unit, before), (_, _, after) in zip(_figures(old), _figures(new))
        if not (name.startswith(PEAK) and before is None and after is None)
    )


def _peaks(one: Account) -> Iterator[tuple[str, str, float | None]]:
    """The peak of the fullest rank, and what it holds then."""
    top = heaviest(one.memory) if one.memory else None
    yield PEAK, "bytes", None if top is None else top.peak
    for name in CLASSES:
        yield f"{PEAK}: {name}", "bytes", None if top is None else top.classes[name]


def _figures(one: Account) -> Iterator[tuple[str, str, float | None]]:
    yield from _peaks(one)
    classes = one.classes
    for name in ("parameters", "gradients", "optimizer"):
        most = None if classes is None else max(getattr(c, name) for c in classes)
        yield f"{name} per rank, at most", "bytes", most
    counted = one.collectives is not None
    mine = [one.at(c.place) for c in classes or ()]
    yield (
        "collectives of a step per rank, at most", "times",
        max((sum(x.count for x in m) for m in mine), default=None) if counted else None,
    )  # fmt: skip
    yield (
        "their bytes, at most", "bytes",
        max((sum(x.total for x in m) for m in mine), default=None) if counted else None,
    )  # fmt: skip
    yield "bubble", "share", one.bubble or 0.0
