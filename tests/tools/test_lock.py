"""Lock files: compressed names, text form, what counts as a change, comparing commands."""

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


def run_cli(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def write_lock(schedule: Path, *options: object) -> Path:
    """Write a lock for the schedule, and return its path."""
    result = run_cli("plan", schedule, "--lock", *options)
    assert result.exit_code == 0, result.output
    return schedule.with_name("x.sched.lock")


# ---- names --------------------------------------------------------------------------------------

parts = st.sampled_from(["a", "b", "01", "*", "1a", *map(str, range(12))])
names = st.lists(parts, min_size=1, max_size=4).map(".".join) | st.just(MODEL_ROOT)


@given(st.sets(names, max_size=30))
def test_names_with_ranges_stand_for_exactly_these(given: set[str]) -> None:
    """Compressing names into ranges and expanding them gives the same names."""
    expanded = [name for range_name in compress_names(given) for name in expand_names(range_name)]
    assert sorted(expanded) == sorted(given)


def test_layers_become_one_name() -> None:
    """Names that differ in consecutive numbers are one line; a gap ends a range."""
    all_names = [f"h.{i}.e.{j}.w" for i in range(12) for j in range(3)]
    assert compress_names(all_names) == ["h.0..11.e.0..2.w"]
    all_names.remove("h.10.e.1.w")
    assert compress_names(all_names) == [
        "h.0..9.e.0..2.w",
        "h.10.e.0.w",
        "h.10.e.2.w",
        "h.11.e.0..2.w",
    ]


# ---- the text -----------------------------------------------------------------------------------

texts = st.text(max_size=12)
sections = st.dictionaries(names, st.lists(texts, min_size=1, max_size=3).map(tuple), max_size=4)


@settings(max_examples=25)
@given(st.fixed_dictionaries({name: sections for name in SECTIONS}))
def test_the_text_holds_all_of_it(found: dict[str, Any]) -> None:
    """Any lock is read back equal from its text."""
    lock = Lock(found, (("--knob", "a=1"), ("--mesh", "dp=2,tp=4")), (("torch", "2"),))
    parsed = read_lock(to_text(lock), "x")
    assert parsed == lock and parsed.structure == lock.structure
    assert compare_locks(lock, parsed) == []


def test_the_text_is_the_same_anywhere(schedule: Path, tmp_path: Path) -> None:
    """Another process, hash seed, folder and model file name give the same bytes."""
    content = write_lock(schedule).read_bytes()
    schedule.with_name("x.sched.lock").unlink()
    schedule.with_name("model.py").rename(tmp_path / "other.py")
    command = [sys.executable, "-m", "schedlang", "plan", "x.sched", "--lock"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    result = subprocess.run(
        [*command, "--model", "other.py"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert schedule.with_name("x.sched.lock").read_bytes() == content
    assert str(tmp_path).encode() not in content and str(ROOT).encode() not in content


def test_one_fact_a_line_and_sorted(schedule: Path) -> None:
    """Twelve equal layers are one line; lines are sorted by name."""
    text = write_lock(schedule).read_text()
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
    """A changed model: exit 1, and one line that says what changed in all layers."""
    write_lock(schedule)
    assert run_cli("plan", schedule, "--locked").exit_code == 0
    model = schedule.with_name("model.py")
    assert old in MODEL
    text = MODEL.replace(old, new)
    if "zeros(8" in new:
        text = text.replace('"y": torch.zeros(4', '"y": torch.zeros(8')
    model.write_text(text)
    result = run_cli("plan", schedule, "--locked")
    assert result.exit_code == (1 if said else 0), result.output
    assert said in result.stdout, result.stdout
    value = json.loads(run_cli("plan", schedule, "--locked", "--json").stdout)
    assert value["exit"] == result.exit_code and bool(value["changes"]) == bool(said)


def test_a_changed_schedule_is_a_difference(schedule: Path) -> None:
    """Changed rows, placements, collectives and memory are differences, too."""
    write_lock(schedule)
    schedule.write_text(SCHEDULE.replace("tp: int = 2", "tp: int = 4"))
    result = run_cli("plan", schedule, "--locked")
    assert result.exit_code == 1 and "the model is the same" in result.stdout
    assert "~ schedule  axis tp  2 -> 4" in result.stdout
    assert "~ ranks  from rank 0  ranks: 2, parameters: " in result.stdout
    schedule.write_text(SCHEDULE.replace("up    shard(col, over=tp)", "up    checkpoint()"))
    result = run_cli("plan", schedule, "--locked")
    assert "~ rows  h.0..11.up  shard(col, over=tp) -> checkpoint()" in result.stdout
    assert "- placements  h.0..11.up.weight  [8@tp, 6]" in result.stdout


def test_versions_explain_and_are_not_compared(schedule: Path) -> None:
    """Other library versions are no difference, but are named beside one."""
    lock = write_lock(schedule)
    lock.write_text(re.sub(r'torch = ".*"', 'torch = "1.0.0"', lock.read_text()))
    assert run_cli("plan", schedule, "--locked").exit_code == 0
    schedule.with_name("model.py").write_text(MODEL.replace("Block(8)", "Block(16)"))
    assert "since then: torch 1.0.0 -> " in run_cli("plan", schedule, "--locked").stdout


def test_settings_are_part_of_the_lock(schedule: Path) -> None:
    """A lock with settings is compared under them; further settings are refused."""
    write_lock(schedule, "--mesh", "tp=4")
    assert run_cli("plan", schedule, "--locked").exit_code == 0
    assert compare_lock(schedule, None).changes == ()
    write_lock(schedule, "--knob", "tp=1")
    assert '"axis tp" = "1"' in schedule.with_name("x.sched.lock").read_text()
    assert run_cli("plan", schedule, "--locked").exit_code == 0
    result = run_cli("plan", schedule, "--locked", "--mesh", "tp=2")
    assert result.exit_code == 2 and "uses the settings of the lock" in result.stderr


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
    """An edited lock, a bad merge or another version exits 2 with the reason."""
    lock = write_lock(schedule)
    assert old in lock.read_text()
    lock.write_text(lock.read_text().replace(old, new, 1))
    result = run_cli("plan", schedule, "--locked")
    if not why:  # a section that is gone is a difference like any other
        assert result.exit_code == 1 and "+ ranks" in result.stdout
        return
    assert result.exit_code == 2 and "S721" in result.stderr and why in result.stderr


def test_a_missing_lock_is_refused(schedule: Path) -> None:
    """`--locked` without a lock exits 2 with the command that writes it."""
    for verb in ("plan", "verify"):
        result = run_cli(verb, schedule, "--locked")
        assert result.exit_code == 2 and f"`schedlang plan {schedule} --lock`" in result.stderr
    schedule.with_name("x.sched.lock").write_bytes(b"\xff\xfe")
    assert run_cli("plan", schedule, "--locked").exit_code == 2


def test_verify_asks_the_lock_first(schedule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify --locked` of a changed model exits 1 before any rank starts."""
    import schedlang.runtime.launch.pool

    write_lock(schedule)
    schedule.with_name("model.py").write_text(MODEL.replace("Block(8)", "Block(16)"))
    monkeypatch.setattr(schedlang.runtime.launch.pool, "Pool", None)
    result = run_cli("verify", schedule, "--locked", "--json")
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["changes"]


def test_a_lock_is_written_whole_or_not_at_all(
    schedule: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write leaves the old lock, and no other file."""
    lock = write_lock(schedule)
    before, files = lock.read_text(), sorted(schedule.parent.iterdir())
    schedule.with_name("model.py").write_text(MODEL.replace("Block(8)", "Block(16)"))

    def fail(*paths: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    result = run_cli("plan", schedule, "--lock")
    assert result.exit_code == 2 and "S109" in result.stderr and "no space left" in result.stderr
    monkeypatch.undo()
    assert lock.read_text() == before and sorted(schedule.parent.iterdir()) == files


def test_check_compares_locks(schedule: Path) -> None:
    """`check --locked` compares the lock of every schedule with rows: exit 0, 1, or 2 without
    one."""
    library = schedule.with_name("library.sched")
    library.write_text("schedule 1\n\ndef pair(over: axis) {\n  up  shard(col, over=over)\n}\n")
    assert run_cli("check", schedule, library, "--locked").exit_code == 2
    write_lock(schedule)
    assert run_cli("check", schedule, library, "--locked").exit_code == 0
    schedule.with_name("model.py").write_text(MODEL.replace("Block(8)", "Block(16)"))
    result = run_cli("check", schedule, library, "--locked")
    assert result.exit_code == 1 and "~ parameters  h.0..11.up.weight" in result.stdout
    value = json.loads(run_cli("check", schedule, "--locked", "--json").stdout)
    assert value["exit"] == 1 and value["locks"][0]["changes"]
    assert run_cli("check", schedule).exit_code == 0


# ---- the examples -------------------------------------------------------------------------------


def test_examples_have_locks() -> None:
    """The examples ship a lock of a library's model and of a custom one."""
    assert {path.parent.name for path in LOCKS} >= {"gpt2", "custom"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_locks_of_the_examples_hold(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped locks match the examples, unless library versions differ."""
    monkeypatch.chdir(ROOT)
    compared = compare_lock(lock.relative_to(ROOT).with_suffix(""), None)
    updated = [text for text in compared.versions if not text.startswith("schedlang ")]
    if updated and compared.structure[0] != compared.structure[1]:
        pytest.skip(f"the lock is of other versions: {', '.join(updated)}")
    assert not compared.changes, str(compared)


def test_a_refusal_of_the_lock_names_its_file() -> None:
    """The message names the lock, not the schedule."""
    with pytest.raises(Refusal, match="`a.lock` is not a readable lock"):
        read_lock("", "a.lock")
