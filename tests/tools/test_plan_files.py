"""Saved plans and locks: they never choose code to run, and damaged ones are refused."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.model import ModelFacts
from schedlang.ir.modelfile import load_model_file
from schedlang.passes.elaborate.plan_record import plan_from_record, read_record
from schedlang.passes.lock import expand_names, read_lock
from schedlang.verbs.inputs import write_text

CUSTOM = Path(__file__).parents[2] / "examples" / "custom"
DEEP = pytest.mark.deep
VALUES: list[Any] = [
    *(None, -1, 0, 1.5, 10**30, 1e308, float("nan"), "x", "", "R", "S(-1)", "S(", True),
    *([], {}, [[]], ["x", 1, 1], "9" * 5000 + ")", "(" * 5000 + ")", "../../etc", "\0\n"),
    *("model.__class__)", "__import__('os').system('id'))"),
]


def _run_cli(*args: object) -> Any:
    """Run a command of schedlang."""
    return CliRunner().invoke(app, list(map(str, args)))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a plan with many rows."""
    out = tmp_path_factory.mktemp("plan") / "p.json"
    assert _run_cli("plan", CUSTOM / "2d.sched", "--out", out).exit_code == 0
    record: dict[str, Any] = json.loads(out.read_text())
    return record


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes longer than this."""

    def late(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("verb", ["diff", "run", "why"])
def test_a_plan_does_not_choose_what_runs(tmp_path: Path, plan: dict[str, Any], verb: str) -> None:
    """A plan's model file is named and not run; `--model` names one that is."""
    trace = tmp_path / "told"
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(trace)!r}, 'w').write('ran')\n")
    saved = tmp_path / "p.json"
    saved.write_text(json.dumps(plan | {"model_file": str(evil)}))
    args = {
        "diff": ("diff", saved, saved),
        "run": ("run", "--plan", saved, "--steps", 1),
        "why": ("why", saved, "blocks.0"),
    }[verb]
    result = _run_cli(*args)
    assert not trace.exists()
    assert result.exit_code == 2
    if verb != "why":  # which asks of schedules alone
        assert "S904" in result.stderr and f"--model {evil}" in result.stderr
    if verb == "diff":
        assert _run_cli(*args, "--model", CUSTOM / "model.py").exit_code == 0
        (tmp_path / "model.py").write_text((CUSTOM / "model.py").read_text())
        assert _run_cli(*args).exit_code == 0 and not trace.exists()


def _key_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of keys to every value of a record."""
    if path:
        yield path
    if not isinstance(value, dict | list):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _key_paths(item, (*path, key))


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=DEEP)])
def test_damaged_plans_are_refused(tmp_path: Path, plan: dict[str, Any], count: int) -> None:
    """With one field deleted or replaced, a plan of the model or a refusal results."""
    rng, model_facts = (
        random.Random(3),
        ModelFacts(load_model_file(str(CUSTOM / "model.py")).model()),
    )
    paths, file, refused = list(_key_paths(plan)), tmp_path / "p.json", 0
    for _ in range(count):
        damaged = copy.deepcopy(plan)
        *parents, last = rng.choice(paths)
        holder = damaged
        for key in parents:
            holder = holder[key]
        if rng.random() < 0.25:
            del holder[last]
        else:
            holder[last] = rng.choice(VALUES)
        file.write_text(json.dumps(damaged))
        with _time_limit(20):
            try:
                plan_from_record(read_record(file), model_facts)
            except Refusal as refusal:
                refused += 1
                assert refusal.render()
    assert count / 2 < refused < count


@pytest.mark.parametrize("text", ["[" * 100_000, '{"plan": ' + "9" * 5000 + "}", "\ud800"])
def test_what_is_hardly_json(tmp_path: Path, text: str) -> None:
    """Very deep lists, very long numbers and invalid text are refused."""
    file = tmp_path / "p.json"
    file.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(Refusal, match="is not a plan"):
        read_record(file)


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=DEEP)])
def test_damaged_locks_are_refused(count: int) -> None:
    """With characters deleted, changed or inserted, a consistent lock or a refusal results."""
    original, rng, refused = (CUSTOM / "2d.sched.lock").read_text(), random.Random(3), 0
    insertions = [
        "\n",
        "9" * 5000,
        "--knob x",
        "\0",
        "sha256:",
        "e",
        "[",
        "\u2028",
        " ",
        "0..99999999",
    ]
    for _ in range(count):
        text = list(original)
        for _ in range(rng.choice([1, 1, 2, 5])):
            position, kind = rng.randrange(len(text)), rng.random()
            if kind < 0.3:
                del text[position : position + rng.choice([1, 1, 5, 60])]
            elif kind < 0.6:
                text[position] = chr(rng.randrange(32, 127))
            else:
                text[position:position] = list(rng.choice(insertions))
        with _time_limit(20):
            try:
                read_lock("".join(text), "x.lock")
            except Refusal as refusal:
                refused += 1
                assert refusal.render()
    assert count / 2 < refused < count


@pytest.mark.parametrize(
    "text",
    [
        "lock = 1\nmade = 3",
        "lock = 1\nsettings = 3",
        "lock = 1\n[settings]\ngiven = 3",
        "lock = 1\n[settings]\ngiven = [3]",
        "x = " + "9" * 5000,
        "x = " + "[" * 100_000,
        'lock = 1\n[parameters]\n"h.0..999999999.w" = "float32"',
    ],
)
def test_no_lock(text: str) -> None:
    """Each broken lock is refused quickly, with the command that writes one."""
    with _time_limit(5), pytest.raises(Refusal, match="plan FILE --lock"):
        read_lock(text, "x.lock")


def test_ranges_of_many_names() -> None:
    """Ranges of up to a million names are read; larger ones are refused."""
    assert sum(1 for _ in expand_names("h.0..9.w.0..9")) == 100
    with pytest.raises(ValueError, match="more than"):
        list(expand_names("h.0..99999.w.0..99999"))


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    """Writing through a link changes its target and keeps the mode; a new file is readable by
    all."""
    file, link, new = (tmp_path / name for name in ("file.svg", "link.svg", "new.svg"))
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to(file)
    write_text(link, "first")
    write_text(new, "second")
    assert link.is_symlink() and file.read_text() == "first" and new.read_text() == "second"
    assert [path.stat().st_mode & 0o777 for path in (file, new)] == [0o600, 0o644]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.svg", "link.svg", "new.svg"]


def test_a_full_disk_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is S109 with the system's message; the old file stays."""
    file = tmp_path / "p.json"
    file.write_text("before")

    def full(handle: int, mode: str) -> Any:
        os.close(handle)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(Refusal, match="No space left") as caught:
        write_text(file, "after")
    assert caught.value.diagnostic.code == "S109"
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


MIXER = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return self.out(attend(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.near = nn.Conv1d(8, 8, 3, padding=1)
        self.attention = Attention()

    def forward(self, x):
        return self.attention(self.near(self.words(x).mT).mT)


def model():
    return Net()


def batch(seed):
    return {"x": torch.randint(9, (4, 8))}


def loss(output, batch):
    return output.pow(2).mean()
"""


def test_a_model_that_mixes_tokens_is_refused_before_it_trains(tmp_path: Path) -> None:
    """`plan` and `tune` run a small copy of the model, and refuse context parallelism for it."""
    model = tmp_path / "model.py"
    model.write_text(MIXER)
    file = tmp_path / "my.sched"
    file.write_text("schedule 1\nmesh(cp=2)\nattention context_parallel(ring, over=cp)\n")
    result = CliRunner().invoke(app, ["plan", str(file)])
    assert (
        result.exit_code == 2
        and "S659" in result.output
        and "`near` is a `Conv1d`" in result.output
    )
    args = ["tune", str(model), "--gpus", "2", "--on", "a100", "--pin", "cp=2"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2 and "`near` is a `Conv1d`" in result.output, result.output
