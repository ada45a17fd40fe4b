"""The table of the zoo: one line for each hunt, and the line that sums it up."""

from __future__ import annotations

from collections.abc import Sequence

from tests.zoo.bug import Bug
from tests.zoo.hunt import Verdict


def line(bug: Bug, verdict: Verdict | None) -> str:
    """One bug: id, what it is, operator, what found it first, was the row named, seconds."""
    head = f"{bug.id}  {_cut(bug.what, 66):66}  {bug.operator.name.lower():9}"
    if verdict is None:
        return f"{head}  inapplicable: `{bug.primitive}` is not registered"
    row = {True: "row named", False: "ROW MISSED", None: ""}[verdict.right]
    by = verdict.by or "LIVES"
    return f"{head}  {verdict.scene:14}  {by:18}  {row:10}  {verdict.seconds:4.1f} s"


def last_line(bugs: Sequence[Bug], verdicts: Sequence[Verdict]) -> str:
    """How many are killed of those that apply, and how often the guilty row was named."""
    applicable = {b.id for b in bugs if b.applies}
    lived = {v.bug.id for v in verdicts if not v.killed}
    killed = {v.bug.id for v in verdicts} & applicable - lived
    asked = [v.right for v in verdicts if v.right is not None]
    rows = (
        f", guilty row named {sum(asked)} / {len(asked)}" if any(v.blamed for v in verdicts) else ""
    )
    return f"{counted(len(killed), bugs)}{rows}"


def by_kind(verdicts: Sequence[Verdict]) -> str:
    """Of each primitive how often the guilty row was named, and where it was not."""
    kinds: dict[str, list[Verdict]] = {}
    for one in verdicts:
        kinds.setdefault(one.bug.primitive or "every program", []).append(one)
    lines = [f"{'primitive':18} right  wrong  no row is sought"]
    for kind, found in sorted(kinds.items()):
        wrong = [f"{v.spec} on {v.scene}" for v in found if v.right is False]
        right = sum(v.right is True for v in found)
        other = len(found) - right - len(wrong)
        missed = f"   {', '.join(wrong)}" if wrong else ""
        lines.append(f"{kind:18} {right:5}  {len(wrong):5}  {other:5}{missed}")
    return "\n".join(lines)


def counted(killed: int, bugs: Sequence[Bug]) -> str:
    """How many are killed of those that apply, in words."""
    applicable = sum(bug.applies for bug in bugs)
    left = len(bugs) - applicable
    return (
        f"killed {killed} / {applicable} applicable ({left} inapplicable: primitive not registered)"
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
