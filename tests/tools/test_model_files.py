"""Model files: where a schedule finds its own, and that changes within one second are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.modelfile import load_model_file, model_beside
from schedlang.runtime.launch.pool import Pool

ROOT = Path(__file__).parents[2]
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


LAYERS = """from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range({layers}))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
"""
USES_LAYERS = """import torch

from {layers} import Net


def model():
    return Net()


def batch(seed):
    return {{"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))}}
"""
SCHEDULE = "schedule 1 for Net\nmesh(dp=2)\nzero(stage=1, over=dp)\n"


def _write_project(folder: Path, name: str, layers: int, imports: str) -> Path:
    """Write a package, or plain files, whose model file imports `layers`; return the schedule."""
    (folder / name).mkdir(parents=True)
    (folder / name / "layers.py").write_text(LAYERS.format(layers=layers))
    (folder / name / "model.py").write_text(USES_LAYERS.format(layers=imports))
    (folder / name / "zero.sched").write_text(SCHEDULE)
    return folder / name / "zero.sched"


@pytest.mark.parametrize("kind", ["beside", "relative", "nested", "dotted"])
def test_imports_of_a_model_file(kind: str, tmp_path: Path) -> None:
    """Imports of files beside it, relative imports, and dotted modules work as with Python.

    They work from the installed command, which does not have the current folder on its path, and on
    ranks.
    """
    name = {"nested": "tiny/models"}.get(kind, "tiny")
    imports = "layers" if kind == "beside" else ".layers"
    schedule = _write_project(tmp_path, name, 2, imports)
    if kind != "beside":
        for folder in {schedule.parent, tmp_path / "tiny"}:
            (folder / "__init__.py").write_text("")
    command = [sys.executable, "-P", "-m", "schedlang", "verify", str(schedule)]
    command += ["--model", "tiny.model"] if kind == "dotted" else []
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_of_one_name_in_two_folders(tmp_path: Path) -> None:
    """Each model file of one command imports the `layers.py` of its own folder, on ranks, too."""
    _write_project(tmp_path, "a", 2, "layers")
    _write_project(tmp_path, "b", 3, "layers")
    before = list(sys.path)
    for name, layers in [("a", 2), ("b", 3), ("a", 2)]:
        loaded = load_model_file(None, tmp_path / name / "zero.sched")
        assert len(loaded.model().layers) == layers
        assert len([entry for entry in sys.path if entry not in before]) <= 1
    result = CliRunner().invoke(app, ["ci", str(tmp_path)])
    assert result.exit_code == 0 and result.output.count("verify holds") == 2, result.output


def test_a_folder_that_is_on_the_path_already(tmp_path: Path) -> None:
    """The next folder's `layers.py` is imported anew though the last one was on the path before."""
    for name, layers in [("a", 2), ("b", 3)]:
        _write_project(tmp_path, name, layers, "layers")
    code = "import sys; from pathlib import Path; from schedlang.ir.modelfile import *\n"
    code += "print([len(load_model_file(None, Path(n, 'z.sched')).model().layers) for n in 'aba'])"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path / 'a'}"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stdout == "[2, 3, 2]\n", done.stdout + done.stderr


PROGRAM = """import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import schedlang
from layers import mine

world = 2


def program(model):
    ddp = DistributedDataParallel(model)

    def step(batch):
        loss = ddp(batch["x"].chunk(world)[dist.get_rank()])
        loss.backward()
        return loss

    return schedlang.TrainingProgram(ddp, step)
"""


def test_a_program_and_its_original_have_a_module_of_one_name(tmp_path: Path) -> None:
    """Each imports the `layers.py` of its own folder, on ranks, too."""
    _write_project(tmp_path, "a", 2, "layers")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "layers.py").write_text("mine = True\n")
    (tmp_path / "b" / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-P", "-m", "schedlang", "verify", "a/model.py"]
    command += ["--against", "b/program.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


NEVER_CALLED = "def train():\n    from .trainer import Trainer\n"
WORDS = '"""Use it as\n\nfrom .net import x\n"""\n'


@pytest.mark.parametrize("text", [NEVER_CALLED, WORDS], ids=["never called", "words"])
def test_a_package_that_a_model_file_does_not_need(text: str, tmp_path: Path) -> None:
    """Relative imports that never run, and words that look like one, ask for no package."""
    schedule = _write_project(tmp_path, "tiny", 2, "layers")
    (schedule.parent / "__init__.py").write_text("import not_installed\n")
    path = schedule.parent / "model.py"
    path.write_text(text + path.read_text())
    result = CliRunner().invoke(app, ["verify", str(schedule)])
    assert result.exit_code == 0, result.output + result.stderr


def test_an_import_that_fails_is_shown_in_full(tmp_path: Path) -> None:
    """The help of S905 is a command that shows the traceback, whatever the current folder is."""
    schedule = _write_project(tmp_path, "tiny", 2, ".layers")
    (schedule.parent / "__init__.py").write_text("")
    (schedule.parent / "layers.py").write_text("raise ValueError('here')")
    with pytest.raises(Refusal) as refused:
        load_model_file(None, schedule)
    (help_,) = refused.value.diagnostic.helps
    done = subprocess.run(help_.split("`")[1], shell=True, capture_output=True, text=True)
    assert "layers.py" in done.stderr and "ValueError: here" in done.stderr


def test_a_folder_or_a_name_without_its_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands for its `model.py`; the file of a path without `.py` is offered."""
    schedule = _write_project(tmp_path, "tiny", 2, "layers")
    assert len(load_model_file(str(schedule.parent), schedule).model().layers) == 2
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(schedule), "--model", "tiny/model"])
    assert result.exit_code == 2 and "[S904]" in result.stderr
    assert "`--model tiny/model.py`" in result.stderr


def test_a_module_in_place_of_a_function_is_refused(tmp_path: Path) -> None:
    """`model = Net()` is a module: the message says that a function is needed."""
    (tmp_path / "model.py").write_text("from torch import nn\nmodel = nn.Linear(2, 2)\n")
    with pytest.raises(Refusal, match="is a module, not a function"):
        load_model_file(str(tmp_path / "model.py"))


@pytest.mark.parametrize("verb", ["check", "plan", "verify", "run", "simulate", "tree"])
def test_a_schedule_that_is_missing_is_named(verb: str) -> None:
    """The schedule is refused, not its model file, which is missing as well."""
    result = CliRunner().invoke(app, [verb, "nowhere.sched"])
    assert result.exit_code == 2 and "[S000]: cannot read `nowhere.sched`" in result.stderr


def _width() -> int:
    """The output width of the model, on a rank."""
    import sys

    return int(sys.modules["a_model_file"].model().out_features)
