"""Saving and loading state into another program of the same ranks; what is lost is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging import net, saving, wrapped


def judge_program(pool: Pool, program: Any, ranks: int = 2, **sizes: Any) -> Report:
    """Judge a program of the small decoder, or of the batch-norm model, and return the report."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "model": net.Net(depth=1, **sizes),
        "batch": net.batch,
        "loss": net.loss,
    }
    if program in (saving.no_buffer, saving.with_buffers):
        options = {
            "model": wrapped.BatchNormNet(),
            "batch": wrapped.images,
            "loss": wrapped.image_loss,
        }
    return verify_program(program, **options, ranks=ranks, pool=pool)


RIGHT = [
    pytest.param(saving.ddp, 2, {}, id="ddp"),
    pytest.param(saving.ddp, 2, {"tied": True, "frozen": True}, id="ddp, tied and frozen"),
    pytest.param(saving.tied_once, 2, {"tied": True}, id="a tied weight once"),
    pytest.param(saving.first_saves, 2, {}, id="rank 0 saves"),
    pytest.param(saving.fsdp2, 4, {}, id="fsdp2"),
    pytest.param(saving.fsdp2_full, 2, {}, id="fsdp2, whole tensors"),
    pytest.param(saving.with_schedule, 2, {}, id="a schedule"),
    pytest.param(saving.folder, 2, {}, id="a folder"),
    pytest.param(saving.with_buffers, 2, {}, id="statistics"),
]


@pytest.mark.parametrize("program, ranks, model", RIGHT)
def test_what_is_saved_is_loaded(pool: Pool, program: Any, ranks: int, model: Any) -> None:
    """Loaded parameters, optimizer state, buffers and the next step equal the saved ones."""
    report = judge_program(pool, program, ranks, **model)
    assert report.ok, str(report)
    names = {row.name for row in report.rows if row.kind == "loaded state"}
    if program is saving.with_buffers:
        assert {"buffer bn.running_mean", "buffer bn.num_batches_tracked"} <= names
    else:
        assert {"norm.bias", "exp_avg of norm.bias", "buffer scale"} <= names
    after = {row.name for row in report.rows if row.kind == "step after loading"}
    assert {"loss", "gradient of conv.bias"} <= after or {"loss", "norm.bias"} <= after


WRONG = [
    (saving.no_momentum, {}, "loaded state", "exp_avg of head.weight", "lost"),
    (saving.steps_reset, {}, "loaded state", "step of head.weight", "not what was saved"),
    (saving.fewer_bits, {}, "saved state", "head.weight", "differs"),
    (saving.no_buffer, {}, "saved state", "bn.running_mean", "lost"),
    (saving.tied_twice, {"tied": True}, "saved state", "emb.weight", "differs"),
    (saving.schedule_lost, {}, "step after loading", "head.weight", ""),
    (saving.rate_doubled, {}, "step after loading", "head.weight", ""),
    (saving.prefixed, {}, "saved state", "head.weight", "lost"),
]


@pytest.mark.parametrize(
    "program, model, kind, name, note", WRONG, ids=lambda v: getattr(v, "__name__", "")
)
def test_what_is_lost_is_named(
    pool: Pool, program: Any, model: Any, kind: str, name: str, note: str
) -> None:
    """Training is right, but the loaded state is wrong, and the tensor is named."""
    report = judge_program(pool, program, **model)
    assert report.exit_code == 1, str(report)
    wrong_rows = [row for row in report.rows if not row.ok]
    assert {row.kind for row in wrong_rows} <= {"saved state", "loaded state", "step after loading"}
    assert any((r.kind, r.name, r.note) == (kind, name, note) for r in wrong_rows), str(report)
    assert any(said.startswith(kind[:10]) for said, _ in report.localised), str(report)


def test_what_is_as_it_was_built_is_said(pool: Pool) -> None:
    """A buffer that is not loaded is reported to be as it was built."""
    report = judge_program(pool, saving.no_buffer)
    notes = {row.name: row.note for row in report.rows if row.kind == "loaded state"}
    assert notes["buffer bn.running_mean"] == "not loaded: it is as it was built"
    assert not notes["bn.weight"]


def test_an_optimizer_that_is_not_saved_is_a_gap(pool: Pool) -> None:
    """A missing optimizer state is reported as a gap."""
    report = judge_program(pool, saving.weights_only)
    assert report.ok, str(report)
    assert any("saved optimizer state" in gap.condition for gap in report.gaps)


def test_a_load_of_nothing_is_refused(pool: Pool) -> None:
    """A program with `load` but without `state_dict` is refused."""

    def program(model: Any) -> TrainingProgram:
        wrapped_program = wrapped.ddp(model)
        return TrainingProgram(
            wrapped_program.module, wrapped_program.step, load=model.load_state_dict
        )

    with pytest.raises(Refusal, match="S767"):
        judge_program(pool, program)
