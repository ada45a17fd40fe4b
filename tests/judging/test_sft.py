"""TRL's fine-tuning on FSDP2, if installed: equal, and a missing label count is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang import verify_program
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.versions import sft


def judge_program(program: Any) -> Report:
    """Return the verdict on a trainer's program."""
    pytest.importorskip("trl")
    torch.manual_seed(0)
    inputs = {"model": sft.model(), "batch": sft.batch, "ranks": 2, "vary": False}
    with Pool() as pool:  # TRL leaves settings in its processes
        return verify_program(program, **inputs, pool=pool)


def test_fine_tuning_equals_the_model() -> None:
    """Micro-batches of two ranks, with different numbers of labels, are equal to the model."""
    report = judge_program(sft.program)
    assert report.ok, str(report)


def test_labels_that_are_not_counted_are_told() -> None:
    """A mean per micro-batch is named."""
    messages = dict(judge_program(sft.uncounted).localised)
    assert "the plain mean of what 4 parts of the batch give" in messages["gradients"], messages
