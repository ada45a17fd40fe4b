"""Model files are read again after every change, also within one second."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schedlang.ir.modelfile import load_model_file
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


def _width() -> int:
    """The output width of the model, on a rank."""
    import sys

    return int(sys.modules["a_model_file"].model().out_features)
