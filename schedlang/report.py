"""Report: the result of `verify` as a value, as JSON, as text for a terminal, and as HTML.

Text never shortens names, however narrow the terminal is. The HTML shows how far each comparison is
from its gate; as a fragment for notebooks or as a page, it needs no other files, and supports dark
mode.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from schedlang.diagnostics.tables import GAP, wrap_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


WIDTH = 100
_SHORT = 36  # characters of a fact that shares a line
_HEADS = ("vs the original", "compared", "worst", "gate", "verdict")
Line: TypeAlias = tuple[str, str]  # a style of rich, and the text
EQUAL = {"exact": "bit by bit", "algebraic": "up to floating-point rounding"}
WORDS = {0: "PASS", 1: "FAIL", 3: "NOT FULLY CHECKED"}


def report_lines(
    report: Report, width: int = WIDTH, *, verbose: bool = False, more: str = "--verbose"
) -> Iterator[Line]:
    """Yield all lines of a report; `verbose` adds what each unexercised condition could hide.

    `more` names where a reader finds that otherwise.
    """
    if report.title:
        yield "bold", report.title
    for text in _facts(report.facts):
        yield from (("", line) for line in wrap_text(text, width, "  "))
    yield "", ""
    yield from _table(report, width)
    yield "", ""
    yield from _failure(report)
    styles = {True: "green", False: "red", None: "yellow"}
    for bound in report.bounds:
        yield styles[bound.holds], f" expected           {bound}"
        yield from ((styles[bound.holds], f"   {text}") for text in bound.why)
    for claim in report.unchecked:
        yield from (("yellow", line) for line in wrap_text(f"not checked: {claim}", width, " "))
    yield "bold green" if report.ok else "bold red", f" {verdict_text(report)}"
    yield from (("yellow", text) for text in _unexercised(report, width, "" if verbose else more))


def verdict_text(report: Report) -> str:
    """PASS in 3.2 s · equal up to floating-point rounding"""
    equivalence = describe_equivalence(report.equivalence)
    verdict = "equal" if report.ok else "compared"
    return f"{WORDS[report.exit_code]} in {report.seconds:.1f} s · {verdict} {equivalence}"


def describe_equivalence(equivalence: str) -> str:
    """Describe how far the two sides may differ; names of relaxed rules come last."""
    kind, _, names = equivalence.partition(" ")
    if names:
        return f"to the original under the same relaxed rules {names}"
    return EQUAL.get(kind, kind)


def _facts(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield short facts side by side, then each long fact on its own line."""
    texts = [f"{name} {value}".strip() for name, value in facts]
    short = [text for text in texts if len(text) <= _SHORT]
    if short:
        yield " · ".join(short)
    yield from (text for text in texts if len(text) > _SHORT)


def _table(report: Report, width: int) -> Iterator[Line]:
    """Yield one line for each kind; names that do not fit beside the numbers go below."""
    rows = [(summary, _cells(summary)) for summary in report.summary]
    widths = [max(map(len, column)) for column in zip(_HEADS, *(cells for _, cells in rows))]
    others = sum(widths) - widths[1] + len(GAP) * (len(widths) - 1) + 1
    fits = others + widths[1] <= width
    if not fits:
        shorts = [cells[1].partition("   ")[0] for _, cells in rows]
        room = max(len(_HEADS[1]), width - others)
        widths[1] = max([len(_HEADS[1]), *(len(text) for text in shorts if len(text) <= room)])
    yield "bold", _row(_HEADS, widths)
    yield "", " " + "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    for summary, cells in rows:
        style = "" if summary.ok else "red"
        cell, overflow = cells[1], ""
        if len(cell) > widths[1]:
            cell, _, overflow = cell.partition("   ")
        if len(cell) > widths[1]:
            cell, overflow = "", f"{cell}   {overflow}".strip()
        yield style, _row((cells[0], cell, *cells[2:]), widths)
        if overflow:
            yield from ((style, line) for line in wrap_text(overflow, width, "     "))


def _cells(summary: Summary) -> tuple[str, ...]:
    gate = f"{summary.worst.gate:.0e}" if summary.worst.gate else "exact"
    verdict = "equal" if summary.ok else "DIFFERENT"
    return summary.kind, summary.compared, f"{summary.worst.error:.1e}", gate, verdict


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    left, compared, *numbers, verdict = cells
    padded = [left.ljust(widths[0]), compared.ljust(widths[1])]
    padded += [text.rjust(width) for text, width in zip(numbers, widths[2:])]
    return " " + GAP.join([*padded, verdict]).rstrip()


def _failure(report: Report) -> Iterator[Line]:
    yield from (("red", f" {head:17}  {text}") for head, text in report.account)


def _unexercised(report: Report, width: int, hint: str) -> Iterator[str]:
    """Yield one line with a hint; without a hint, a line for each condition."""
    conditions = [gap.condition for gap in report.gaps]
    if not hint:
        yield from (f" not exercised: {g.condition} (could hide {g.hides})" for g in report.gaps)
        return
    for count in range(len(conditions), 0, -1):
        rest = len(conditions) - count
        suffix = f" and {rest} more" if rest else ""
        line = f" not exercised: {', '.join(conditions[:count])}{suffix} ({hint})"
        if len(line) <= width or count == 1:
            yield line
            return


@dataclass(frozen=True)
class Row:
    """One comparison. `error` is relative, at most `gate` if equal; a gate of 0 means bitwise."""

    condition: str  # the training run: optimizer, batches, clipping
    kind: str  # "gradients", "trainable set", ...
    name: str  # name of the tensor or set
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
        suffix = f" ({self.condition}{step})" if self.condition else ""
        return f"{self.kind}: {self.name}{suffix}" if self.name else f"{self.kind}{suffix}"


@dataclass(frozen=True)
class Gap:
    """A condition that was not exercised, and the mistakes that it could hide."""

    condition: str
    hides: str


@dataclass(frozen=True)
class CostExpectation:
    """An expectation about the plan's costs; `holds` is None if it cannot be decided.

    `found` is the figure in words, `why` its components and what would lower it. An expectation
    that is `left` to other verbs does not affect the verdict.
    """

    said: str
    holds: bool | None
    found: str = ""
    why: tuple[str, ...] = ()
    left: bool = False

    def __str__(self) -> str:
        unknown = "is not held here" if self.left else "cannot be computed"
        verdict = {True: "holds", False: "does not hold", None: unknown}[self.holds]
        return f"{self.said}   {verdict}" + (f": it is {self.found}" if self.found else "")


@dataclass(frozen=True)
class Summary:
    """All rows of one kind: what was compared, and the row that failed or is nearest its gate."""

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
    unchecked: tuple[str, ...] = ()  # what could not be compared, and why
    diagnosis: str = ""
    blamed: tuple[str, ...] = ()  # rows of the schedule
    command: str = ""  # repeats this verification
    seconds: float = 0.0
    more: dict[str, Any] = field(default_factory=dict, hash=False)
    localised: tuple[tuple[str, str], ...] = ()  # where a difference arose: (head, text)
    bounds: tuple[CostExpectation, ...] = ()  # what the schedule expects of its costs

    @property
    def ok(self) -> bool:
        """Whether everything was compared and is equal, and all expectations hold."""
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
        return tuple(_summarise(kind, rows) for kind, rows in _kinds(self.rows).items())

    @property
    def account(self) -> tuple[tuple[str, str], ...]:
        """A failure as pairs of head and text: where it is, which row, how to repeat it."""
        first = self.first
        if first is None:
            return ()
        size = f"   error {first.error:.1e}" * math.isfinite(first.error)
        note = "" if any(first.note in text for _, text in self.localised) else first.note
        pairs = (
            ("first difference", f"{first.place}{size}"),
            ("what", note),
            ("pattern", self.diagnosis),
            *self.localised,
            *(("to blame", row) for row in self.blamed),
            ("repeat", self.command),
        )
        return tuple((head, text) for head, text in pairs if text)

    def blame(self, *rows: str, diagnosis: str = "") -> Report:
        """Return the report with the rows of the schedule to blame."""
        return replace(self, blamed=rows, diagnosis=diagnosis or self.diagnosis)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; numbers that are not finite become strings."""
        values = asdict(self) | {"ok": self.ok, "exit_code": self.exit_code}
        values["worst"] = None if self.worst is None else asdict(self.worst)
        values["facts"] = dict(self.facts)
        result: dict[str, Any] = json.loads(json.dumps(_finite(values)))
        return result

    def text(self, width: int = 100, *, verbose: bool = False) -> str:
        """Return the table and the verdict; `verbose` adds what was not exercised, line by line."""
        all_lines = report_lines(self, width, verbose=verbose, more="report.gaps")
        return "\n".join(text for _, text in all_lines).rstrip()

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:

        suffix = f" of {self.title}" if self.title else ""
        failed = f", first: {self.first.place}" if self.first is not None else ""
        return f"<Report{suffix}: {verdict_text(self)}, {len(self.rows)} comparisons{failed}>"

    def _repr_html_(self) -> str:
        """The table with its errors on a scale, for notebooks."""
        return html_fragment(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        yield from (
            Text(text, style=style) for style, text in report_lines(self, options.max_width)
        )


def _closeness(row: Row) -> float:
    """Return the ratio of error to gate; infinite for NaN and for errors at a gate of 0."""
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


def _summarise(kind: str, rows: list[Row]) -> Summary:
    failed = [row for row in rows if not row.ok]
    worst = failed[0] if failed else max(rows, key=_closeness)
    names = {row.name for row in rows}
    passed = len(names - {row.name for row in failed})
    count = f"{passed} / {len(names)}" if len(names) > 1 or failed else _describe_single(worst)
    detail = f"{count}   worst {worst.name}" if len(names) > 1 else count
    if not failed and worst.step is None and " = " in worst.name:  # sets of names: counts
        detail = ", ".join(dict.fromkeys(row.name for row in rows))
    return Summary(kind, detail, worst, not failed)


def _describe_single(row: Row) -> str:
    return "×".join(map(str, row.shape)) if row.shape else row.name


LOW, HIGH, WIDE = -18.0, 1.0, 228.0  # decades of a scale, and its width in points
HOLDS: dict[bool | None, str] = {True: "equal", False: "different", None: "open"}
# Okabe and Ito's blue and vermilion; a failure also has another mark, and a word
STYLE = (
    ".eq{font:14px system-ui,sans-serif;color:#1f2328;background:#fff;padding:1px 0}"
    ".eq h1{font-size:20px;font-weight:600;margin:.6em 0 .3em}"
    ".eq p{margin:.3em 0}.eq .s{color:#59636e}.eq .equal{color:#0067a5}"
    ".eq .different{color:#b34700;font-weight:600}.eq .open{color:#7a5a00}"
    ".eq .verdict{font-size:16px;font-weight:600}"
    ".eq .frame{overflow-x:auto}.eq table{border-collapse:collapse;margin:1em 0;color:inherit}"
    ".eq td,.eq th{padding:3px 14px 3px 0;text-align:left;vertical-align:top;background:none;"
    "border:0;border-bottom:1px solid #d1d9e0;font-variant-numeric:tabular-nums}"
    ".eq tr{background:none}.eq .n{text-align:right;white-space:nowrap}.eq code,.eq pre{"
    "font:12px ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;"
    "color:inherit;background:none}"
    ".eq svg{display:block}.eq .axis{stroke:#8c959f}.eq .free{fill:#eef1f4}"
    ".eq .gate{stroke:#1f2328;stroke-width:2}.eq .dot{fill:#0072b2}"
    ".eq .cross{stroke:#d55e00;stroke-width:2.5}"
    "@media(max-width:640px){.eq .scale{display:none}.eq td,.eq th{padding-right:8px}"
    ".eq td+td{overflow-wrap:anywhere}.eq td.equal,.eq td.different{white-space:nowrap}}"
    "@media(prefers-color-scheme:dark){.eq{color:#e6edf3;background:#0d1117}.eq .s{color:#9198a1}"
    ".eq .equal{color:#56b4e9}.eq .different{color:#ff9d5c}.eq .open{color:#f0e442}"
    ".eq td,.eq th{border-color:#3d444d}.eq .free{fill:#22272e}.eq .gate{stroke:#e6edf3}"
    ".eq .dot{fill:#56b4e9}.eq .cross{stroke:#ff9d5c}}"
)


def html_fragment(report: Report) -> str:
    """Return the report as HTML for another page."""
    parts = [
        *_head_html(report),
        *_table_html(report),
        *_failure_html(report),
        *_notes_html(report),
    ]
    return f'<div class="eq"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</div>"


def html_page(report: Report) -> str:
    """Return the report as one self-contained HTML page."""
    title = html.escape(report.title or "equivalence")
    style = (
        "body{margin:2em auto;max-width:1100px;padding:0 1em;background:#fff}"
        "@media(prefers-color-scheme:dark){body{background:#0d1117}}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        f'content="light dark"><style>{style}</style>\n{html_fragment(report)}\n</html>\n'
    )


def _head_html(report: Report) -> Iterator[str]:
    if report.title:
        yield f"<h1>{html.escape(report.title)}</h1>"
    kind = {0: "equal", 1: "different"}.get(report.exit_code, "open")
    yield f'<p class="verdict {kind}">{html.escape(verdict_text(report))}</p>'
    text = " · ".join(f"{name} {value}".strip() for name, value in report.facts)
    if text:
        yield f'<p class="s">{html.escape(text)}</p>'


def _table_html(report: Report) -> Iterator[str]:
    heads = ("", "compared", "worst", "gate", "error and its gate, by decades", "verdict")
    kinds = {"worst": "n", "gate": "n", heads[4]: "scale"}  # hidden on phones
    cells = "".join(f'<th class="{kinds.get(h, "")}">{html.escape(h)}</th>' for h in heads)
    yield f'<div class="frame"><table><tr>{cells}</tr>'
    for summary in report.summary:
        kind, verdict = ("equal", "equal") if summary.ok else ("different", "DIFFERENT")
        gate = f"{summary.worst.gate:.0e}" if summary.worst.gate else "exact"
        yield (
            f"<tr><td>{html.escape(summary.kind)}</td><td>{html.escape(summary.compared)}</td>"
            f'<td class="n">{summary.worst.error:.1e}</td><td class="n">{gate}</td>'
            f'<td class="scale">{_scale(summary)}</td><td class="{kind}">{verdict}</td></tr>'
        )
    yield "</table></div>"


def _scale(summary: Summary) -> str:
    """Draw the error as a dot, or as a cross beyond the gate; an error of 0 is at the left end."""
    x, gate = _scale_x(summary.worst.error), _scale_x(summary.worst.gate)
    label = f"error {summary.worst.error:.1e}, gate {summary.worst.gate:.0e}"
    mark = f'<circle class="dot" cx="{x:.1f}" cy="8" r="4.5"/>'
    if not summary.ok:
        mark = f'<path class="cross" d="M{x - 4:.1f} 4l8 8m0 -8l-8 8"/>'
    return (
        f'<svg width="{WIDE + 12:.0f}" height="16" viewBox="-6 0 {WIDE + 12:.0f} 16" role="img" '
        f'aria-label="{label}"><title>{label}</title>'
        f'<rect class="free" y="5" width="{max(gate, 1.0):.1f}" height="6"/>'
        f'<path class="axis" d="M0 8H{WIDE:.0f}"/><path class="gate" d="M{gate:.1f} 1v14"/>'
        f"{mark}</svg>"
    )


def _scale_x(error: float) -> float:
    """Return the x of a relative error; NaN and infinity are at the right end."""
    if not error:
        return 0.0
    decade = math.log10(error) if 0 < error < math.inf else HIGH
    return WIDE * (min(max(decade, LOW), HIGH) - LOW) / (HIGH - LOW)


def _failure_html(report: Report) -> Iterator[str]:
    rows = "".join(
        f'<tr><td class="different">{html.escape(name)}</td>'
        f"<td><code>{html.escape(text)}</code></td></tr>"
        for name, text in report.account
    )
    if rows:
        yield f"<table>{rows}</table>"


def _notes_html(report: Report) -> Iterator[str]:
    for bound in report.bounds:
        yield _bound_html(bound)
    for claim in report.unchecked:
        yield f'<p class="open">not checked: {html.escape(claim)}</p>'
    for gap in report.gaps:
        text = f"not exercised: {gap.condition} (could hide {gap.hides})"
        yield f'<p class="s">{html.escape(text)}</p>'


def _bound_html(bound: CostExpectation) -> str:
    reasons = "".join(f"<br>{html.escape(text)}" for text in bound.why)
    return f'<p class="{HOLDS[bound.holds]}">expected: {html.escape(str(bound))}{reasons}</p>'
