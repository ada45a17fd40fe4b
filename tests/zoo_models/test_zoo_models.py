"""The table of models: a dozen of its cells in every run, the rest where there is time."""

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
    """Models of all families are proven, each under one of the four schedules."""
    found = cell.judged(cases.subject(kind), DOZEN[kind], threads)
    assert found.status == "verified", found.why
    assert found.rows and found.worst < 1e-9


@pytest.mark.deep
@pytest.mark.parametrize("mesh", meshes.MESHES)
@pytest.mark.parametrize("kind", cases.names())
def test_every_model(kind: str, mesh: str, threads: Threads) -> None:
    """No cell of the table fails: it is verified, or refused with a code."""
    try:
        subject = cases.subject(kind)
    except Exception as why:
        pytest.skip(str(why))
    found = cell.judged(subject, mesh, threads)
    assert found.status != "failed", found.why


def test_a_wrong_number_is_a_failed_cell(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose gradients are not summed over the ranks is told from one that is right."""
    from schedlang.runtime.grad_reduction import zero

    plain = zero.ShardedStage.add_unit

    def averaged(self: Any, module: Any, *given: Any) -> None:
        plain(self, module, *given)
        module.set_gradient_divide_factor(2.0)

    monkeypatch.setattr(zero.ShardedStage, "add_unit", averaged)
    found = cell.judged(cases.subject("gpt2"), "zero", threads)
    assert (found.status, "gradients" in found.why) == ("failed", True), found.why


def test_a_refusal_is_told_with_its_code(monkeypatch: pytest.MonkeyPatch, threads: Threads) -> None:
    """What a schedule may not do is refused, in one line that begins with the code."""
    text = 'schedule 1\n\nmesh(pp=2)\n\nstep "all" {\n  zero(stage=1, over=dp)\n}\n'
    monkeypatch.setattr(meshes, "schedule", lambda *_: text)
    found = cell.judged(cases.subject("gpt2"), "zero", threads)
    assert found.status == "refused" and found.why.startswith("S204 "), found.why


def test_a_process_that_ends_or_hangs_costs_one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict of such a cell says so, and the other cells of the model are judged."""
    import os
    import time

    def judge(kind: str, given: list[str]) -> Any:
        for mesh in given:
            if mesh == "zero":
                os._exit(3)
            if mesh == "pp":
                time.sleep(60)
            yield Verdict(kind, mesh, "verified")

    monkeypatch.setattr(worker, "_judged", judge)
    monkeypatch.setattr(worker, "LIMIT", 0.1)
    found = {v.mesh: v for v in worker.verdicts([("one", ["tp", "zero", "pp", "3d"])])}
    assert [found[m].status for m in ("tp", "3d")] == ["verified"] * 2
    assert found["zero"].why == "the process ended (exit code 3)"
    assert found["pp"].why.startswith("time: ")


def test_verdicts_are_kept_and_half_a_line_is_not(tmp_path: Path) -> None:
    """The newest verdict of a cell counts; a line that was cut off is left out."""
    kept = store.Store(tmp_path / "verdicts.jsonl")
    kept.add(Verdict("gpt2", "tp", "failed", "x"))
    kept.add(Verdict("gpt2", "tp", "verified", rows=7))
    with kept.path.open("a") as file:
        file.write('{"source": "abc", "ki')
    found = kept.known()
    assert found["gpt2", "tp"].verdict.status == "verified"
    assert found["gpt2", "tp"].source == store.source() and len(found) == 1


def test_the_page_counts_what_it_shows() -> None:
    """Every verdict of a kind stands in its row; refusals and failures are told below."""
    verdicts = [
        Verdict("gpt2", "tp", "verified", rows=7),
        Verdict("gpt2", "zero", "refused", "S604 why"),
        Verdict("gpt2", "pp", "verified", "relax(batch_stats)", rows=2),
        Verdict("odd", "tp", worker.NOT_TINY, "too large"),
    ]
    cells = {(v.kind, v.mesh): store.Known(v, store.source()) for v in verdicts}
    page = table.page(cells, {"gpt2": "model", "odd": "model"})
    assert "| gpt2 | verified, 7 | refused S604 | verified, 2 `*` | not run |" in page
    assert "| tensor parallel, 2 ranks | 1 of 1 | 0 | 0 | 0 |" in page
    assert "* gpt2, zero: refused: S604 why" in page and "* odd: too large" in page


def test_every_kind_of_the_library_is_in_the_table() -> None:
    """All causal language models that transformers names, and the others."""
    assert {*survey.kinds()} <= {*cases.names()} and "t5" in cases.names()
