"""Model files: where a schedule finds its own, and that changes within one second are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.modelfile import load_model_file, model_beside
from schedlang.runtime.launch.pool import Pool

BEFORE = "from torch import nn\n\n\ndef model():\n    return nn.Linear(2, 3)\n"


def test_a_change_within_a_second_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed model file is read anew, here and on ranks; no bytecode is left beside it."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "model.py"

    def written(text: str) -> int:
        path.write_text(text)
        os.utime(path, (1, 1))
        loaded = load_model_file(str(path))
        with Pool(("torch",), files={"a_model_file": path}) as pool:
            (on_rank,) = pool.run(_width, 1)
        assert on_rank == loaded.model().out_features
        return int(on_rank)

    assert [written(BEFORE), written(BEFORE.replace("3", "5"))] == [3, 5]
    assert [file.name for file in tmp_path.iterdir()] == ["model.py"]


def test_the_file_beside_a_schedule(tmp_path: Path) -> None:
    """It is `model.py`, else the file of the schedule's name; other files are only offered."""
    (tmp_path / "tools.py").write_text("")
    (tmp_path / "gpt.py").write_text(BEFORE)
    with pytest.raises(Refusal) as refused:
        load_model_file(None, tmp_path / "tp.sched")
    (help_,) = refused.value.diagnostic.helps
    assert help_.endswith(f"`--model {tmp_path / 'gpt.py'}`")
    assert load_model_file(None, tmp_path / "gpt.sched").model().out_features == 3

    (tmp_path / "train.py").write_text("raise SystemExit('a program that must not run')")
    assert model_beside(tmp_path / "train.sched") == tmp_path / "model.py"

    (tmp_path / "model.py").write_text(BEFORE)
    assert model_beside(tmp_path / "gpt.sched") == tmp_path / "model.py"


@pytest.mark.parametrize("verb", ["check", "plan", "verify", "run", "simulate", "tree"])
def test_a_schedule_that_is_missing_is_named(verb: str) -> None:
    """The schedule is refused, not its model file, which is missing as well."""
    result = CliRunner().invoke(app, [verb, "nowhere.sched"])
    assert result.exit_code == 2 and "[S000]: cannot read `nowhere.sched`" in result.stderr


def _width() -> int:
    """The output width of the model, on a rank."""
    import sys

    return int(sys.modules["a_model_file"].model().out_features)
