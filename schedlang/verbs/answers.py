"""Questions of CI about one schedule, and their answers: wishes, outcomes and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.annotate import Note, table
from schedlang.verbs.ending import FAILS, HOLDS, REFUSED, UNCHECKED

if TYPE_CHECKING:
    from schedlang.report import Report

CHECK, LOCK, STATIC, VERIFY = "check", "lock", "static", "verify"
WORDS = {HOLDS: "holds", FAILS: "fails", REFUSED: "refused", UNCHECKED: "could not be checked"}
_MARKS = {HOLDS: "", FAILS: "❌ ", REFUSED: "❌ ", UNCHECKED: "⚠️ "}


@dataclass(frozen=True)
class Wish:
    """The terms of an examination of a schedule; see the options of `verify`.

    world    the most ranks that may be started; a larger mesh is left out, and says so
    shrink   reduce model and mesh where the mesh is larger, instead
    refused  the code with which the schedule is meant to be refused; empty if it is not
    timeout  seconds for a proof that runs; one that takes longer could not be checked
    """

    model: str | None = None
    knobs: tuple[str, ...] = ()
    mesh: str | None = None
    seed: int = 0
    dtype: str | None = None
    world: int = 8
    shrink: bool = False
    refused: str = ""
    timeout: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The answer to one question about one schedule.

    code     an exit code: 0 holds, 1 does not hold, 2 refused, 3 could not be checked
    skipped  why it was left out, if it was; then `code` means nothing
    """

    file: Path
    question: str
    code: int = HOLDS
    text: str = ""
    line: int = 0  # of `place`
    place: str = ""  # the file that the line is in, where it is not the schedule itself
    skipped: str = ""
    report: Report | None = field(default=None, repr=False)
    facts: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """The outcome in a word or two."""
        return "left out" if self.skipped else WORDS[self.code]

    @property
    def where(self) -> str:
        """file:line"""
        return f"{self.place or self.file}:{self.line or 1}"

    @property
    def note(self) -> Note | None:
        """The note for the schedule's line; None where it holds."""
        if self.skipped or self.code == HOLDS:
            return None
        title = "schedlang equivalence" if self.question == VERIFY else f"schedlang {self.question}"
        return Note(self.place or str(self.file), self.line or 1, title, self.text)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "file": str(self.file),
            "question": self.question,
            "outcome": self.word,
            "exit": UNCHECKED if self.skipped else self.code,
            "where": self.where,
            "text": self.skipped or self.text,
            "seconds": round(self.seconds, 2),
            "note": None if self.note is None else asdict(self.note),
            **dict(self.facts),
        }


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """Outcomes, as JSON has them, as a Markdown table."""
    head = ("schedule", "", "outcome", "largest relative error", "mesh", "where", "seconds")
    rows = [
        (
            f"`{one['file']}`",
            one["question"],
            _MARKS[one["exit"]] + one["outcome"],
            one.get("max_rel_err", ""),
            one.get("mesh", ""),
            "" if one["exit"] == HOLDS else f"`{one['where']}`",
            f"{one['seconds']:.1f}",
        )
        for one in found
    ]
    return f"### schedlang\n\n{table(head, rows)}\n"
