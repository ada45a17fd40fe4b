"""Report: what `verify` found, as a value, as JSON and as a table for the terminal."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions
    from rich.text import Text


@dataclass(frozen=True)
class Row:
    """One comparison. `error` is relative, at most `gate` if equal; a gate of 0 means bitwise."""

    condition: str  # under which optimizer, batches, clipping
    kind: str  # what kind of thing: "gradients", "trainable set", ...
    name: str  # which of them
    error: float
    gate: float
    ok: bool
    step: int | None = None
    note: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def place(self) -> str:
        """The row in words."""
        step = "" if self.step is None else f", step {self.step}"
        where = f" ({self.condition}{step})" if self.condition else ""
        return f"{self.kind}: {self.name}{where}" if self.name else f"{self.kind}{where}"


@dataclass(frozen=True)
class Gap:
    """A condition that was not exercised, and the mistakes that it could hide."""

    condition: str
    hides: str


@dataclass(frozen=True)
class Bound:
    """What the schedule expects of its plan's costs; `holds` is None where that cannot be told.

    `found` is the figure in words, `why` what it is made of and what would lower it.  What is
    `left` to other verbs is no part of this verdict.
    """

    said: str
    holds: bool | None
    found: str = ""
    why: tuple[str, ...] = ()
    left: bool = False

    def __str__(self) -> str:
        untold = "is not held here" if self.left else "cannot be computed"
        word = {True: "holds", False: "does not hold", None: untold}[self.holds]
        return f"{self.said}   {word}" + (f": it is {self.found}" if self.found else "")


@dataclass(frozen=True)
class Summary:
    """All rows of one kind: what was compared, in words, and what failed or came nearest."""

    kind: str
    compared: str
    worst: Row
    ok: bool


@dataclass(frozen=True, repr=False)
class Report:
    """The outcome of one verification; `str()` is the table, `text(verbose=True)` all of it."""

    rows: tuple[Row, ...]
    title: str = ""
    facts: tuple[tuple[str, str], ...] = ()  # mesh, seed, versions: printed above the table
    equivalence: str = "algebraic"
    gaps: tuple[Gap, ...] = ()
    unchecked: tuple[str, ...] = ()  # what should have been compared and was not, and why
    diagnosis: str = ""
    blamed: tuple[str, ...] = ()  # rows of the schedule
    command: str = ""  # repeats this verification
    seconds: float = 0.0
    more: dict[str, Any] = field(default_factory=dict, hash=False)
    localised: tuple[tuple[str, str], ...] = ()  # where a difference arose: words and their heads
    bounds: tuple[Bound, ...] = ()  # what the schedule expects of its costs

    @property
    def ok(self) -> bool:
        """Whether everything was compared, everything is equal, and what is expected holds."""
        equal = bool(self.rows) and all(row.ok for row in self.rows) and not self.unchecked
        return equal and all(bound.holds or bound.left for bound in self.bounds)

    @property
    def exit_code(self) -> int:
        """0 equal, 1 not equal or dearer than expected, 3 not (fully) checked."""
        if any(not row.ok for row in self.rows) or any(b.holds is False for b in self.bounds):
            return 1
        return 0 if self.ok else 3

    @property
    def worst(self) -> Row | None:
        """The failing row first found, else the row nearest to its gate."""
        return self.first or max(self.rows, key=_closeness, default=None)

    @property
    def first(self) -> Row | None:
        """The first failing row, in the order of comparison: forward, backward, updates."""
        return next((row for row in self.rows if not row.ok), None)

    @property
    def summary(self) -> tuple[Summary, ...]:
        """One line for each kind of thing that was compared, in the order of comparison."""
        return tuple(_summed(kind, rows) for kind, rows in _kinds(self.rows).items())

    @property
    def account(self) -> tuple[tuple[str, str], ...]:
        """What is told of a failure, as heads and words: where, which row, how to repeat it."""
        first = self.first
        if first is None:
            return ()
        told = (
            ("first difference", f"{first.place}   error {first.error:.1e}"), ("what", first.note),
            ("pattern", self.diagnosis), *self.localised,
            *(("to blame", row) for row in self.blamed), ("repeat", self.command),
        )  # fmt: skip
        return tuple((head, text) for head, text in told if text)

    def blame(self, *rows: str, diagnosis: str = "") -> Report:
        """The same report with the rows of the schedule that are to blame."""
        return replace(self, blamed=rows, diagnosis=diagnosis or self.diagnosis)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; numbers that are not finite become strings."""
        found = asdict(self) | {"ok": self.ok, "exit_code": self.exit_code}
        found["worst"] = None if self.worst is None else asdict(self.worst)
        found["facts"] = dict(self.facts)
        plain: dict[str, Any] = json.loads(json.dumps(_finite(found)))
        return plain

    def text(self, width: int = 100, *, verbose: bool = False) -> str:
        """The table and the verdict; `verbose`: also what was not exercised, line by line."""
        from schedlang.report_text import lines

        told = lines(self, width, verbose=verbose, more="report.gaps")
        return "\n".join(text for _, text in told).rstrip()

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        from schedlang.report_text import verdict

        of = f" of {self.title}" if self.title else ""
        failed = f", first: {self.first.place}" if self.first is not None else ""
        return f"<Report{of}: {verdict(self)}, {len(self.rows)} comparisons{failed}>"

    def _repr_html_(self) -> str:
        """The table with its errors on a scale, for notebooks."""
        from schedlang.report_page import fragment

        return fragment(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        from schedlang.report_text import lines

        yield from (Text(text, style=style) for style, text in lines(self, options.max_width))


def _closeness(row: Row) -> float:
    """How near a row is to its gate; an error at a gate of 0 is beyond any."""
    if math.isnan(row.error):
        return math.inf
    return row.error / row.gate if row.gate else row.error * math.inf if row.error else 0.0


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def _kinds(rows: tuple[Row, ...]) -> dict[str, list[Row]]:
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return kinds


def _summed(kind: str, rows: list[Row]) -> Summary:
    failed = [row for row in rows if not row.ok]
    worst = failed[0] if failed else max(rows, key=_closeness)
    names = {row.name for row in rows}
    good = len(names - {row.name for row in failed})
    count = f"{good} / {len(names)}" if len(names) > 1 or failed else _single(worst)
    detail = f"{count}   worst {worst.name}" if len(names) > 1 else count
    if not failed and worst.step is None and " = " in worst.name:  # sets of names: counts
        detail = ", ".join(dict.fromkeys(row.name for row in rows))
    return Summary(kind, detail, worst, not failed)


def _single(row: Row) -> str:
    return "×".join(map(str, row.shape)) if row.shape else row.name
