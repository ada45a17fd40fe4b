"""Megatron-Core's GPT under its own schedules, if installed: equal, or the mistake is named."""

from __future__ import annotations

import pytest
import torch

from schedlang import verify_program
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.versions.megatron_gpt import RIGHT, WRONG, Way, batch, loss, model

pytestmark = [pytest.mark.others, pytest.mark.deep]


def judge_variant(variant: Way) -> Report:
    """Return the verdict on a variant."""
    pytest.importorskip("megatron.core")
    torch.manual_seed(0)
    inputs = {"model": model(variant.tied), "batch": batch, "loss": loss, "ranks": variant.ranks}
    with Pool() as pool:  # Megatron leaves groups and patches in its processes
        return verify_program(variant.program, **inputs, pool=pool)


@pytest.mark.parametrize("way", RIGHT.values(), ids=RIGHT)
def test_a_way_equals_the_model(way: Way) -> None:
    """Gradients and three steps of Megatron's decoder equal the model's."""
    report = judge_variant(way)
    assert report.ok, str(report)


@pytest.mark.parametrize("way, said", WRONG.values(), ids=WRONG)
def test_what_is_forgotten_is_told(way: Way, said: str) -> None:
    """The verdict names the place and the kind of mistake."""
    report = judge_variant(way)
    assert not report.ok
    messages = "; ".join(f"{kind}: {text}" for kind, text in report.localised)
    assert said in messages, messages
