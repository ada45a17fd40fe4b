"""The table of models: twelve cells in every run, all cells in deep runs; verdicts and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import survey
from tests.engine import Threads
from tests.zoo_models import cases, cell, meshes, store, table, worker
from tests.zoo_models.cell import Verdict

DOZEN = {
    "llama": "3d",
    "gpt2": "tp",
    "bert": "pp",
    "t5": "tp",
    "mixtral": "zero",
    "vit": "tp",
    "falcon": "zero",
    "bloom": "pp",
    "longcat_flash": "zero",
    "whisper (both)": "zero",
    "resnet": "pp",
    "wav2vec2": "zero",
}


@pytest.mark.parametrize("kind", DOZEN)
def test_a_dozen_models(kind: str, threads: Threads) -> None:
    """Models of all families are verified, each under one of the four schedules."""
    verdict = cell.judge_cell(cases.make_subject(kind), DOZEN[kind], threads)
    assert verdict.status == "verified", verdict.why
    assert verdict.rows and verdict.worst < 1e-9


@pytest.mark.deep
@pytest.mark.parametrize("mesh", meshes.MESHES)
@pytest.mark.parametrize("kind", cases.model_families())
def test_every_model(kind: str, mesh: str, threads: Threads) -> None:
    """No cell of the table fails: it is verified, or refused with a code."""
    try:
        subject = cases.make_subject(kind)
    except Exception as error:
        pytest.skip(str(error))
    verdict = cell.judge_cell(subject, mesh, threads)
    assert verdict.status != "failed", verdict.why


def test_a_wrong_number_is_a_failed_cell(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with unsummed gradients gives a failed cell."""
    from schedlang.runtime.grad_reduction import zero

    add_unit = zero.ShardedStage.add_unit

    def averaged(self: Any, module: Any, *args: Any) -> None:
        add_unit(self, module, *args)
        module.set_gradient_divide_factor(2.0)

    monkeypatch.setattr(zero.ShardedStage, "add_unit", averaged)
    verdict = cell.judge_cell(cases.make_subject("gpt2"), "zero", threads)
    assert (verdict.status, "gradients" in verdict.why) == ("failed", True), verdict.why


def test_a_refusal_is_told_with_its_code(monkeypatch: pytest.MonkeyPatch, threads: Threads) -> None:
    """A refusal gives a refused cell; its reason begins with the code."""
    text = 'schedule 1\n\nmesh(pp=2)\n\nstep "all" {\n  zero(stage=1, over=dp)\n}\n'
    monkeypatch.setattr(meshes, "schedule", lambda *_: text)
    verdict = cell.judge_cell(cases.make_subject("gpt2"), "zero", threads)
    assert verdict.status == "refused" and verdict.why.startswith("S204 "), verdict.why


def test_a_process_that_ends_or_hangs_costs_one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash or hang fails its own cell only; the other cells of the model are judged."""
    import os
    import time

    def judge(kind: str, mesh_names: list[str]) -> Any:
        for mesh in mesh_names:
            if mesh == "zero":
                os._exit(3)
            if mesh == "pp":
                time.sleep(60)
            yield Verdict(kind, mesh, "verified")

    monkeypatch.setattr(worker, "_judged", judge)
    monkeypatch.setattr(worker, "LIMIT", 0.1)
    verdicts_by_mesh = {v.mesh: v for v in worker.verdicts([("one", ["tp", "zero", "pp", "3d"])])}
    assert [verdicts_by_mesh[m].status for m in ("tp", "3d")] == ["verified"] * 2
    assert verdicts_by_mesh["zero"].why == "the process ended (exit code 3)"
    assert verdicts_by_mesh["pp"].why.startswith("time: ")


def test_verdicts_are_kept_and_half_a_line_is_not(tmp_path: Path) -> None:
    """The newest verdict of a cell counts; an incomplete line is ignored."""
    verdict_store = store.Store(tmp_path / "verdicts.jsonl")
    verdict_store.add(Verdict("gpt2", "tp", "failed", "x"))
    verdict_store.add(Verdict("gpt2", "tp", "verified", rows=7))
    with verdict_store.path.open("a") as file:
        file.write('{"source": "abc", "ki')
    stored = verdict_store.known()
    assert stored["gpt2", "tp"].verdict.status == "verified"
    assert stored["gpt2", "tp"].source == store.source() and len(stored) == 1


def test_the_page_counts_what_it_shows() -> None:
    """Every verdict is shown in the row of its model; refusals and failures are listed below."""
    verdicts = [
        Verdict("gpt2", "tp", "verified", rows=7),
        Verdict("gpt2", "zero", "refused", "S604 why"),
        Verdict("gpt2", "pp", "verified", "relax(batch_stats)", rows=2),
        Verdict("odd", "tp", worker.NOT_TINY, "too large"),
    ]
    cells = {(v.kind, v.mesh): store.StoredVerdict(v, store.source()) for v in verdicts}
    page = table.page(cells, {"gpt2": "model", "odd": "model"})
    assert "| gpt2 | verified, 7 | refused S604 | verified, 2 `*` | not run |" in page
    assert "| tensor parallel, 2 ranks | 1 of 1 | 0 | 0 | 0 |" in page
    assert "* gpt2, zero: refused: S604 why" in page and "* odd: too large" in page


def test_every_kind_of_the_library_is_in_the_table() -> None:
    """The table has all causal language models of transformers, and the other models."""
    assert {*survey.kinds()} <= {*cases.model_families()} and "t5" in cases.model_families()
