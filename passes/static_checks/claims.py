"""Claims of static proofs: what was examined, and what does not hold, at which row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from schedlang.diagnostics.diagnostic import Diagnostic, Label, quote_names
from schedlang.ir.plan import Action


@dataclass(frozen=True)
class Claim:
    """One proof: its name, what was counted, what does not hold, and what it cannot see.

    If `checked` is False nothing was examined, for the reason in `description`.
    """

    name: str
    description: str
    problems: tuple[Diagnostic, ...] = ()
    checked: bool = True
    unseen: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether something was examined and no problem was found."""
        return self.checked and not self.problems

    @property
    def verdict(self) -> str:
        """The verdict in a word or two."""
        if not self.checked:
            return "not checked"
        return "DOES NOT HOLD" if self.problems else "holds"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "proof": self.name,
            "checked": self.checked,
            "holds": self.holds,
            "said": self.description,
            "diagnostics": [d.to_json() for d in self.problems],
            "unseen": list(self.unseen),
        }


def row_label(row: Action | None) -> Label:
    """Return the label of a row; an empty one for no row."""
    return Label(row.span) if row is not None else Label()


def join_problems(problems: Iterable[tuple[str, Diagnostic]]) -> tuple[Diagnostic, ...]:
    """Join problems with equal messages at one line into one that lists the names."""
    from dataclasses import replace

    grouped: dict[tuple[object, ...], tuple[Diagnostic, list[str]]] = {}
    for name, diagnostic in problems:
        key = (
            diagnostic.code,
            diagnostic.title,
            diagnostic.primary,
            diagnostic.notes,
            diagnostic.helps,
        )
        grouped.setdefault(key, (diagnostic, []))[1].append(name)
    return tuple(
        replace(diagnostic, notes=(f"of {quote_names(dict.fromkeys(names), 4)}", *diagnostic.notes))
        for diagnostic, names in grouped.values()
    )
