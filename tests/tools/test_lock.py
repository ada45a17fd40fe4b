"""Lock files: names with ranges, the text both ways, what changed, and who asks for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lock import (
    MODEL_ROOT,
    SECTIONS,
    Lock,
    compare_locks,
    compress_names,
    expand_names,
    read_lock,
    to_text,
)
from schedlang.verbs.lockfile import compare_lock

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "examples").glob("*/*.lock"))

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, wide), nn.Linear(wide, 6), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block(8) for _ in range(12))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x, y):
        for block in self.h:
            x = block(x)
        return ((x - y) ** 2).mean()

def model():
    return Net()

def batch(seed):
    return {"x": torch.zeros(4, 6), "y": torch.zeros(4, 6)}
"""
SCHEDULE = """\
schedule 1 for Net

knob tp: int = 2 in [1, 2, 4]

mesh(tp=tp)

at h.* {
  up    shard(col, over=tp)
  down  shard(row, over=tp)
}
"""


@pytest.fixture
def schedule(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "x.sched").write_text(SCHEDULE)
    return tmp_path / "x.sched"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def locked(schedule: Path, *words: object) -> Path:
    """The schedule with a lock written for it as it is."""
    found = run("plan", schedule, "--lock", *words)
    assert found.exit_code == 0, found.output
    return schedule.with_name("x.sched.lock")


# ---- names --------------------------------------------------------------------------------------

parts = st.sampled_from(["a", "b", "01", "*", "1a", *map(str, range(12))])
names = st.lists(parts, min_size=1, max_size=4).map(".".join) | st.just(MODEL_ROOT)


@given(st.sets(names, max_size=30))
def test_names_with_ranges_stand_for_exactly_these(given: set[str]) -> None:
    """Gathering loses no name and adds none."""
    back = [name for one in compress_names(given) for name in expand_names(one)]
    assert sorted(back) == sorted(given)


def test_layers_become_one_name() -> None:
    """What differs in whole runs of numbers is one line; a gap ends a run."""
    every = [f"h.{i}.e.{j}.w" for i in range(12) for j in range(3)]
    assert compress_names(every) == ["h.0..11.e.0..2.w"]
    every.remove("h.10.e.1.w")
    assert compress_names(every) == ["h.0..9.e.0..2.w", "h.10.e.0.w", "h.10.e.2.w", "h.11.e.0..2.w"]


# ---- the text -----------------------------------------------------------------------------------

texts = st.text(max_size=12)
sections = st.dictionaries(names, st.lists(texts, min_size=1, max_size=3).map(tuple), max_size=4)


@settings(max_examples=25)
@given(st.fixed_dictionaries({name: sections for name in SECTIONS}))
def test_the_text_holds_all_of_it(found: dict[str, Any]) -> None:
    """Whatever a lock says is read back, whichever signs it contains."""
    lock = Lock(found, (("--knob", "a=1"), ("--mesh", "dp=2,tp=4")), (("torch", "2"),))
    back = read_lock(to_text(lock), "x")
    assert back == lock and back.structure == lock.structure
    assert compare_locks(lock, back) == []


def test_the_text_is_the_same_anywhere(schedule: Path, tmp_path: Path) -> None:
    """A process of another hash seed, folder and name of the model file writes the same bytes."""
    here = locked(schedule).read_bytes()
    schedule.with_name("x.sched.lock").unlink()
    schedule.with_name("model.py").rename(tmp_path / "other.py")
    command = [sys.executable, "-m", "schedlang", "plan", "x.sched", "--lock"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [*command, "--model", "other.py"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert schedule.with_name("x.sched.lock").read_bytes() == here
    assert str(tmp_path).encode() not in here and str(ROOT).encode() not in here


def test_one_fact_a_line_and_sorted(schedule: Path) -> None:
    """Twelve equal layers are one line, and lines stand in the order of their names."""
    text = locked(schedule).read_text()
    assert '"h.0..11.up.weight" = "float32[8, 6]"' in text
    assert '"h.0..11.drop" = "Dropout(p=0.1, inplace=False)"' in text
    assert '"scale" = "float32[3]"' in text
    for part in text.split("\n\n"):
        keys = re.findall(r'^"(.*?)" = ', part, re.M)
        assert keys == sorted(keys)  # no name here has two digits or more
    assert max(map(len, text.split("\n"))) < 120


# ---- what is noticed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "Block(8)",
            "Block(16)",
            "~ parameters  h.0..11.up.weight  float32[8, 6] -> float32[16, 6]",
        ),
        ("range(12)", "range(11)", "- modules  h.11  Block()"),
        ("nn.Dropout(0.1)", "nn.Dropout(0.2)", "~ modules  h.0..11.drop  Dropout(p=0.1, inplace="),
        ("torch.ones(3)", "torch.ones(4)", "~ buffers  scale  float32[3] -> float32[4]"),
        (
            "self.register_buffer(",
            "self.norm = nn.LayerNorm(6)\n        self.register_buffer(",
            "+ parameters  norm.weight  float32[6]",
        ),
        ("class Net(nn.Module):", "class Net(nn.Module):\n    half = True", ""),
        (
            "return Net()",
            "m = Net(); m.h[3].up.weight.requires_grad_(False); return m",
            "~ parameters  h.3.up.weight  float32[8, 6] -> float32[8, 6], frozen",
        ),
        (
            "return Net()",
            "m = Net(); m.h[1].up.weight = m.h[0].up.weight; return m",
            "~ parameters  h.0.up.weight  now also tied to h.1.up.weight",
        ),
        (
            "torch.zeros(4, 6), ",
            "torch.zeros(8, 6), ",
            "backward: all-reduce over tp, input grad: 1 x 96 B -> ",
        ),
    ],
)
def test_a_changed_model_is_a_readable_difference(
    schedule: Path, old: str, new: str, said: str
) -> None:
    """Exit 1 and the line that says what changed, once for all layers."""
    locked(schedule)
    assert run("plan", schedule, "--locked").exit_code == 0
    model = schedule.with_name("model.py")
    assert old in MODEL
    text = MODEL.replace(old, new)
    if "zeros(8" in new:
        text = text.replace('"y": torch.zeros(4', '"y": torch.zeros(8')
    model.write_text(text)
    found = run("plan", schedule, "--locked")
    assert found.exit_code == (1 if said else 0), found.output
    assert said in found.stdout, found.stdout
    value = json.loads(run("plan", schedule, "--locked", "--json").stdout)
    assert value["exit"] == found.exit_code and bool(value["changes"]) == bool(said)


def test_a_changed_schedule_is_a_difference(schedule: Path) -> None:
    """Rows, placements, collectives and memory belong to the lock as well."""
    locked(schedule)
    schedule.write_text(SCHEDULE.replace("tp: int = 2", "tp: int = 4"))
    found = run("plan", schedule, "--locked")
    assert found.exit_code == 1 and "the model is the same" in found.stdout
    assert "~ schedule  axis tp  2 -> 4" in found.stdout
    assert "~ ranks  from rank 0  ranks: 2, parameters: " in found.stdout
    schedule.write_text(SCHEDULE.replace("up    shard(col, over=tp)", "up    checkpoint()"))
    found = run("plan", schedule, "--locked")
    assert "~ rows  h.0..11.up  shard(col, over=tp) -> checkpoint()" in found.stdout
    assert "- placements  h.0..11.up.weight  [8@tp, 6]" in found.stdout


def test_versions_explain_and_are_not_compared(schedule: Path) -> None:
    """Another version alone is no difference; beside one it is named."""
    lock = locked(schedule)
    lock.write_text(re.sub(r'torch = ".*"', 'torch = "1.0.0"', lock.read_text()))
    assert run("plan", schedule, "--locked").exit_code == 0
    schedule.with_name("model.py").write_text(MODEL.replace("Block(8)", "Block(16)"))
    assert "since then: torch 1.0.0 -> " in run("plan", schedule, "--locked").stdout


def test_settings_are_part_of_the_lock(schedule: Path) -> None:
    """A lock of another mesh is compared on that mesh; settings beside it are refused."""
    locked(schedule, "--mesh", "tp=4")
    assert run("plan", schedule, "--locked").exit_code == 0
    assert compare_lock(schedule, None).changes == ()
    locked(schedule, "--knob", "tp=1")
    assert '"axis tp" = "1"' in schedule.with_name("x.sched.lock").read_text()
    assert run("plan", schedule, "--locked").exit_code == 0
    found = run("plan", schedule, "--locked", "--mesh", "tp=2")
    assert found.exit_code == 2 and "uses the settings of the lock" in found.stderr


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("float32[8, 6]", "float32[9, 6]", "do not match"),
        ("lock = 1", "lock = 2", "version"),
        ("[made]", "<<<<<<< HEAD\n[made]", "not TOML"),
        ('"float32[3]"', "3", "a value that is not a string"),
        ("[ranks]  # bytes held, by kind of rank", "[ranked]", ""),
    ],
)
def test_what_is_no_lock_is_refused(schedule: Path, old: str, new: str, why: str) -> None:
    """A lock that was edited, merged badly or is of another version ends with 2, and says why."""
    lock = locked(schedule)
    assert old in lock.read_text()
    lock.write_text(lock.read_text().replace(old, new, 1))
    found = run("plan", schedule, "--locked")
    if not why:  # a section that is gone is a difference like any other
        assert found.exit_code == 1 and "+ ranks" in found.stdout
        return
    assert found.exit_code == 2 and "S721" in found.stderr and why in found.stderr


def test_a_missing_lock_is_refused(schedule: Path) -> None:
    """Who asks for a lock that is not there gets the command that writes it, and exit 2."""
    for verb in ("plan", "verify"):
        found = run(verb, schedule, "--locked")
        assert found.exit_code == 2 and f"`schedlang plan {schedule} --lock`" in found.stderr
    schedule.with_name("x.sched.lock").write_bytes(b"\xff\xfe")
    assert run("plan", schedule, "--locked").exit_code == 2


def test_verify_asks_the_lock_first(schedule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify --locked` of a model that changed ends with 1 before any rank is started."""
    import schedlang.runtime.launch.pool

    locked(schedule)
    schedule.with_name("model.py").write_text(MODEL.replace("Block(8)", "Block(16)"))
    monkeypatch.setattr(schedlang.runtime.launch.pool, "Pool", None)
    found = run("verify", schedule, "--locked", "--json")
    assert found.exit_code == 1, found.output
    assert json.loads(found.stdout)["changes"]


def test_a_lock_is_written_whole_or_not_at_all(
    schedule: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops the writing leaves the old lock and nothing beside it."""
    lock = locked(schedule)
    before, there = lock.read_text(), sorted(schedule.parent.iterdir())
    schedule.with_name("model.py").write_text(MODEL.replace("Block(8)", "Block(16)"))

    def fail(*paths: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    found = run("plan", schedule, "--lock")
    assert found.exit_code == 2 and "S109" in found.stderr and "no space left" in found.stderr
    monkeypatch.undo()
    assert lock.read_text() == before and sorted(schedule.parent.iterdir()) == there


def test_check_compares_locks(schedule: Path) -> None:
    """`check --locked` asks every schedule with rows for its lock: 0, 1, or 2 without one."""
    library = schedule.with_name("library.sched")
    library.write_text("schedule 1\n\ndef pair(over: axis) {\n  up  shard(col, over=over)\n}\n")
    assert run("check", schedule, library, "--locked").exit_code == 2
    locked(schedule)
    assert run("check", schedule, library, "--locked").exit_code == 0
    schedule.with_name("model.py").write_text(MODEL.replace("Block(8)", "Block(16)"))
    found = run("check", schedule, library, "--locked")
    assert found.exit_code == 1 and "~ parameters  h.0..11.up.weight" in found.stdout
    value = json.loads(run("check", schedule, "--locked", "--json").stdout)
    assert value["exit"] == 1 and value["locks"][0]["changes"]
    assert run("check", schedule).exit_code == 0


# ---- the examples -------------------------------------------------------------------------------


def test_examples_have_locks() -> None:
    """One of a library's model, one of a model of one's own."""
    assert {path.parent.name for path in LOCKS} >= {"gpt2", "custom"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_locks_of_the_examples_hold(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The locks that ship are those of the examples as they are, with the libraries of then."""
    monkeypatch.chdir(ROOT)
    compared = compare_lock(lock.relative_to(ROOT).with_suffix(""), None)
    moved = [text for text in compared.versions if not text.startswith("schedlang ")]
    if moved and compared.structure[0] != compared.structure[1]:
        pytest.skip(f"the lock is of other versions: {', '.join(moved)}")
    assert not compared.changes, str(compared)


def test_a_refusal_of_the_lock_names_its_file() -> None:
    """The message is about the lock, not about the schedule."""
    with pytest.raises(Refusal, match="`a.lock` is not a readable lock"):
        read_lock("", "a.lock")
