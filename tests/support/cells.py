"""One cell of the matrix: a combination proven on its model, and what came of it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.features import Combination, layers, schedule, subject
from tests.support.subjects import made
from tests.zoo_models.cell import compared, reason

VERIFIED, REFUSED, FAILED, NO_MODEL = "verified", "refused", "failed", "no model"


@dataclass(frozen=True)
class Cell:
    """What came of a combination.

    why      code and text of a refusal, or what differs
    worst    the largest relative error among what was compared
    text     the schedule
    """

    names: Combination
    status: str
    model: str = ""
    why: str = ""
    worst: float = 0.0
    seconds: float = 0.0
    day: str = ""
    text: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def judged(names: Combination, pool: Any = None) -> Cell:
    """The verdict of a combination; nothing is raised but what ends the process."""
    model = subject(names)
    if model is None:
        return Cell(names, NO_MODEL)
    start, worst = time.perf_counter(), 0.0
    text = schedule(names)
    try:
        found = compared(made(model, layers(names)), text, model.batches(), pool)
        bad = [row for row in found if not row.ok]
        worst = max((row.error for row in bad or found), default=0.0)
        status, why = VERIFIED, ""
        if bad:
            status = FAILED
            why = f"{len(bad)} of {len(found)} differ: {bad[0].kind} {bad[0].name} {bad[0].note}"
    except Exception as error:
        status, why = reason(error)
    seconds = round(time.perf_counter() - start, 1)
    return Cell(names, status, model.name, why.strip(), worst, seconds, _today(), text)


def _today() -> str:
    import datetime

    return datetime.datetime.now(datetime.UTC).date().isoformat()
