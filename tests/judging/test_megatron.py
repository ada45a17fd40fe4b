"""Megatron-Core's model by its own schedules, where it is installed: equal, or told why not."""

from __future__ import annotations

import pytest
import torch

from schedlang import verify_program
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.versions.megatron_gpt import RIGHT, WRONG, Way, batch, loss, model

pytestmark = [pytest.mark.others, pytest.mark.deep]


def judged(way: Way) -> Report:
    """The verdict on a way."""
    pytest.importorskip("megatron.core")
    torch.manual_seed(0)
    given = {"model": model(way.tied), "batch": batch, "loss": loss, "ranks": way.ranks}
    with Pool() as pool:  # it leaves groups and patches in its processes
        return verify_program(way.program, **given, pool=pool)


@pytest.mark.parametrize("way", RIGHT.values(), ids=RIGHT)
def test_a_way_equals_the_model(way: Way) -> None:
    """Gradients, and three steps, of what it makes of a decoder."""
    report = judged(way)
    assert report.ok, str(report)


@pytest.mark.parametrize("way, said", WRONG.values(), ids=WRONG)
def test_what_is_forgotten_is_told(way: Way, said: str) -> None:
    """The place, and the kind of the mistake."""
    report = judged(way)
    assert not report.ok
    told = "; ".join(f"{kind}: {text}" for kind, text in report.localised)
    assert said in told, told
