"""One cell of the support matrix: a combination is proven on its model, and the result recorded."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.features import Combination, layer_count, model_for, schedule_text
from tests.support.matrix_models import build_model
from tests.zoo_models.cell import compare_to_original, failure_reason

VERIFIED, REFUSED, FAILED, NO_MODEL = "verified", "refused", "failed", "no model"


@dataclass(frozen=True)
class Cell:
    """The result of a combination.

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
        """The cell as a JSON object."""
        return asdict(self)


def judge_cell(names: Combination, pool: Any = None) -> Cell:
    """Prove a combination and return its cell; exceptions become its status."""
    model = model_for(names)
    if model is None:
        return Cell(names, NO_MODEL)
    start, worst = time.perf_counter(), 0.0
    text = schedule_text(names)
    try:
        compared_rows = compare_to_original(
            build_model(model, layer_count(names)), text, model.batches(), pool
        )
        different = [row for row in compared_rows if not row.ok]
        worst = max((row.error for row in different or compared_rows), default=0.0)
        status, why = VERIFIED, ""
        if different:
            status = FAILED
            why = (
                f"{len(different)} of {len(compared_rows)} differ: {different[0].kind}"
                f" {different[0].name} {different[0].note}"
            )
    except Exception as error:
        status, why = failure_reason(error)
    seconds = round(time.perf_counter() - start, 1)
    return Cell(names, status, model.name, why.strip(), worst, seconds, _current_date(), text)


def _current_date() -> str:
    import datetime

    return datetime.datetime.now(datetime.UTC).date().isoformat()
