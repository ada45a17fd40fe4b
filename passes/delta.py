"""What changes in cost from one plan to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedlang.passes.account import Account


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
            return f"{self.name} unchanged ({self._said(self.new)})"
        return f"{self.name} {self._said(self.old)} -> {self._said(self.new)}"

    def _said(self, value: float | None) -> str:
        from schedlang.passes.show_text import size

        if value is None:
            return "not counted"
        if self.unit == "bytes":
            return size(int(value))
        return f"{value:.1%}" if self.unit == "share" else f"{value:g}"


def delta(old: Account, new: Account) -> tuple[Cost, ...]:
    """Bytes of the fullest rank, bytes and number of collectives of the busiest, the bubble."""
    return tuple(
        Cost(name, unit, before, after)
        for (name, unit, before), (_, _, after) in zip(_figures(old), _figures(new))
    )


def _figures(one: Account) -> Iterator[tuple[str, str, float | None]]:
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
