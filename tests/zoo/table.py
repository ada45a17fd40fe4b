"""The table of hunted bugs: one line per hunt, and a summary line."""

from __future__ import annotations

from collections.abc import Sequence

from tests.zoo.bug import Bug
from tests.zoo.hunt import Verdict


def verdict_line(bug: Bug, verdict: Verdict | None) -> str:
    """Return one line: id, bug, operator, first failing check, row named or missed, seconds."""
    head = f"{bug.id}  {_shorten(bug.what, 66):66}  {bug.operator.name.lower():9}"
    if verdict is None:
        return f"{head}  inapplicable: `{bug.primitive}` is not registered"
    row = {True: "row named", False: "ROW MISSED", None: ""}[verdict.right]
    found_by = verdict.by or "LIVES"
    return f"{head}  {verdict.scene:14}  {found_by:18}  {row:10}  {verdict.seconds:4.1f} s"


def summary_line(bugs: Sequence[Bug], verdicts: Sequence[Verdict]) -> str:
    """Return how many applicable bugs are killed, and how often the guilty row was named."""
    applicable = {b.id for b in bugs if b.applies}
    missed = {v.bug.id for v in verdicts if not v.killed}
    killed = {v.bug.id for v in verdicts} & applicable - missed
    right_rows = [v.right for v in verdicts if v.right is not None]
    rows = (
        f", guilty row named {sum(right_rows)} / {len(right_rows)}"
        if any(v.blamed for v in verdicts)
        else ""
    )
    return f"{killed_summary(len(killed), bugs)}{rows}"


def primitive_table(verdicts: Sequence[Verdict]) -> str:
    """Return for each primitive how often the guilty row was named, and where it was not."""
    kinds: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict.bug.primitive or "every program", []).append(verdict)
    lines = [f"{'primitive':18} right  wrong  no row is sought"]
    for kind, kind_verdicts in sorted(kinds.items()):
        wrong = [f"{v.spec} on {v.scene}" for v in kind_verdicts if v.right is False]
        right_count = sum(v.right is True for v in kind_verdicts)
        unasked = len(kind_verdicts) - right_count - len(wrong)
        missed = f"   {', '.join(wrong)}" if wrong else ""
        lines.append(f"{kind:18} {right_count:5}  {len(wrong):5}  {unasked:5}{missed}")
    return "\n".join(lines)


def killed_summary(killed: int, bugs: Sequence[Bug]) -> str:
    """Return in words how many applicable bugs are killed."""
    applicable = sum(bug.applies for bug in bugs)
    left = len(bugs) - applicable
    return (
        f"killed {killed} / {applicable} applicable ({left} inapplicable: primitive not registered)"
    )


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
