"""A report of equivalence as text for a terminal; names are never cut, however narrow it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from schedlang.tables import GAP, wrapped

if TYPE_CHECKING:
    from schedlang.report import Report, Summary

WIDTH = 100
_SHORT = 36  # characters of a fact that stands beside others
_HEADS = ("vs the original", "compared", "worst", "gate", "verdict")
Line: TypeAlias = tuple[str, str]  # a style of rich, and the text
EQUAL = {"exact": "bit by bit", "algebraic": "up to floating-point rounding"}
WORDS = {0: "PASS", 1: "FAIL", 3: "NOT FULLY CHECKED"}


def lines(
    report: Report, width: int = WIDTH, *, verbose: bool = False, more: str = "--verbose"
) -> Iterator[Line]:
    """All lines; `verbose`: also what each condition that was not exercised could hide.

    `more` is where a reader finds that otherwise.
    """
    if report.title:
        yield "bold", report.title
    for text in _facts(report.facts):
        yield from (("", line) for line in wrapped(text, width, "  "))
    yield "", ""
    yield from _table(report, width)
    yield "", ""
    yield from _failure(report)
    styles = {True: "green", False: "red", None: "yellow"}
    for bound in report.bounds:
        yield styles[bound.holds], f" expected           {bound}"
        yield from ((styles[bound.holds], f"   {text}") for text in bound.why)
    for what in report.unchecked:
        yield from (("yellow", line) for line in wrapped(f"not checked: {what}", width, " "))
    yield "bold green" if report.ok else "bold red", f" {verdict(report)}"
    yield from (("yellow", text) for text in _unexercised(report, width, "" if verbose else more))


def verdict(report: Report) -> str:
    """PASS in 3.2 s · equal up to floating-point rounding"""
    how = equal(report.equivalence)
    word = "equal" if report.ok else "compared"
    return f"{WORDS[report.exit_code]} in {report.seconds:.1f} s · {word} {how}"


def equal(equivalence: str) -> str:
    """How far the two sides may be apart, in words; what is relaxed is named behind."""
    kind, _, names = equivalence.partition(" ")
    if names:
        return f"to the original under the same relaxed rules {names}"
    return EQUAL.get(kind, kind)


def _facts(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Short facts side by side, then each that is a sentence on a line of its own."""
    said = [f"{name} {value}".strip() for name, value in facts]
    short = [one for one in said if len(one) <= _SHORT]
    if short:
        yield " · ".join(short)
    yield from (one for one in said if len(one) > _SHORT)


def _table(report: Report, width: int) -> Iterator[Line]:
    """A line for each kind; where names do not fit beside the numbers, they stand below."""
    rows = [(one, _cells(one)) for one in report.summary]
    widths = [max(map(len, column)) for column in zip(_HEADS, *(cells for _, cells in rows))]
    others = sum(widths) - widths[1] + len(GAP) * (len(widths) - 1) + 1
    fits = others + widths[1] <= width
    if not fits:
        shorts = [cells[1].partition("   ")[0] for _, cells in rows]
        room = max(len(_HEADS[1]), width - others)
        widths[1] = max([len(_HEADS[1]), *(len(s) for s in shorts if len(s) <= room)])
    yield "bold", _row(_HEADS, widths)
    yield "", " " + "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    for one, cells in rows:
        style = "" if one.ok else "red"
        beside, below = cells[1], ""
        if len(beside) > widths[1]:
            beside, _, below = beside.partition("   ")
        if len(beside) > widths[1]:
            beside, below = "", f"{beside}   {below}".strip()
        yield style, _row((cells[0], beside, *cells[2:]), widths)
        if below:
            yield from ((style, line) for line in wrapped(below, width, "     "))


def _cells(one: Summary) -> tuple[str, ...]:
    gate = f"{one.worst.gate:.0e}" if one.worst.gate else "exact"
    verdict = "equal" if one.ok else "DIFFERENT"
    return one.kind, one.compared, f"{one.worst.error:.1e}", gate, verdict


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    left, compared, *numbers, verdict = cells
    shown = [left.ljust(widths[0]), compared.ljust(widths[1])]
    shown += [text.rjust(wide) for text, wide in zip(numbers, widths[2:])]
    return " " + GAP.join([*shown, verdict]).rstrip()


def _failure(report: Report) -> Iterator[Line]:
    yield from (("red", f" {head:17}  {text}") for head, text in report.account)


def _unexercised(report: Report, width: int, hint: str) -> Iterator[str]:
    """One line with a hint, or without one a line for each condition with what it could hide."""
    said = [gap.condition for gap in report.gaps]
    if not hint:
        yield from (f" not exercised: {g.condition} (could hide {g.hides})" for g in report.gaps)
        return
    for count in range(len(said), 0, -1):
        rest = len(said) - count
        more = f" and {rest} more" if rest else ""
        line = f" not exercised: {', '.join(said[:count])}{more} ({hint})"
        if len(line) <= width or count == 1:
            yield line
            return
