"""TRL's fine-tuning on FSDP2, where it is installed: equal, and told what is left out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang import verify_program
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.versions import sft


def judged(program: Any) -> Report:
    """The verdict on its trainer."""
    pytest.importorskip("trl")
    torch.manual_seed(0)
    given = {"model": sft.model(), "batch": sft.batch, "ranks": 2, "vary": False}
    with Pool() as pool:  # it leaves settings in its processes
        return verify_program(program, **given, pool=pool)


def test_fine_tuning_equals_the_model() -> None:
    """Rows of two ranks in micro-batches, each with another number of labels."""
    report = judged(sft.program)
    assert report.ok, str(report)


def test_labels_that_are_not_counted_are_told() -> None:
    """Each micro-batch takes its own mean."""
    said = dict(judged(sft.uncounted).localised)
    assert "the plain mean of what 4 parts of the batch give" in said["gradients"], said
