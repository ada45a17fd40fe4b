"""Base schedules: `use` of a file with steps, `override step` and `drop step`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.language.syntax import parse
from schedlang.passes.elaborate import base_schedules
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings, State
from schedlang.schedule import create_schedule, load
from schedlang.verbs.examine import is_library
from tests.verbs_for_tests import GPT2LMHeadModel, toys

FACTS = ModelFacts(GPT2LMHeadModel())
BASE = """\
schedule 1 for GPT2LMHeadModel

knob deep: int = 2 in 1..4
knob tp: int = 2 in [1, 2]

mesh(tp=tp)

require deep <= 4

def twice() {
  transformer.h[:deep]  checkpoint()
}

step "memory" {
  twice()
}

step "tensor" {
  transformer.h.*.mlp.c_fc  shard(col, over=tp)
}
"""


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with toys():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.sched").write_text(BASE)
    return tmp_path


def test_a_used_file_is_parsed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base and a library, however often they are used and looked at."""
    (folder / "library.sched").write_text("schedule 1\n\ndef twice() {\n  checkpoint()\n}\n")
    parsed: list[str] = []

    def noting(source: Source) -> Any:
        parsed.append(Path(source.name).name)
        return parse(source)

    monkeypatch.setattr(base_schedules, "parse", noting)
    _run(folder, 'use "base.sched"\nuse "library.sched" as a\nuse "library.sched" as b\n')
    assert sorted(parsed) == ["base.sched", "library.sched"]


def _run(folder: Path, body: str, model: bool = True, **settings: object) -> State:
    source = Source(str(folder / "main.sched"), f"schedule 1\n{body}")
    return expand(parse(source), FACTS if model else None, Settings(**settings))  # type: ignore[arg-type]


def _rows(state: State) -> list[tuple[str, int, str]]:
    assert state.plan
    return [(a.name, len(a.sites), a.step) for a in state.plan.actions]


def _said(folder: Path, body: str) -> str:
    with pytest.raises(Refusal) as caught:
        _run(folder, body)
    return caught.value.render()


PLAIN = [("checkpoint", 2, "memory"), ("shard", 4, "tensor")]


def test_a_base_is_part_of_the_file(folder: Path) -> None:
    """Knobs, mesh, definitions and steps are this file's own, and rows follow them."""
    body = 'use "base.sched"\nstep "more" {\n  transformer.h[3]  checkpoint()\n}\n'
    state = _run(folder, body)
    assert _rows(state) == [*PLAIN, ("checkpoint", 1, "more")]
    assert state.mesh is not None and state.mesh.sizes == {"tp": 2}
    assert _rows(_run(folder, body, knobs={"deep": 1}))[0] == ("checkpoint", 1, "memory")
    assert _run(folder, body, model=False).plan is None


def test_arguments_set_its_knobs(folder: Path) -> None:
    """A `use` gives new defaults, which a setting from outside still goes before."""
    body = 'knob all: int = 3\nuse "base.sched" (deep=all)\n'
    assert _rows(_run(folder, body))[0] == ("checkpoint", 3, "memory")
    assert _rows(_run(folder, body, knobs={"deep": 1}))[0] == ("checkpoint", 1, "memory")
    assert "error[S103]" in _said(folder, 'use "base.sched" (deep=5)\n')
    assert "did you mean `deep`?" in _said(folder, 'use "base.sched" (dep=1)\n')
    assert "error[S302]" in _said(folder, 'use "base.sched" (1)\n')


def test_an_axis_set_from_outside_sets_the_knob_of_the_base(folder: Path) -> None:
    """The mesh of a base is sized as one's own is."""
    state = _run(folder, 'use "base.sched"\n', mesh={"tp": 1})
    assert state.knobs["tp"].value == 1


def test_override_stands_where_the_step_stood(folder: Path) -> None:
    """The other step of that name is executed in its place, in the order of the base."""
    body = 'use "base.sched"\noverride step "memory" {\n  transformer.h[0]  checkpoint()\n}\n'
    assert _rows(_run(folder, body)) == [("checkpoint", 1, "memory"), PLAIN[1]]


def test_drop_leaves_a_step_out(folder: Path) -> None:
    """What stands before and after it stays, and is changed where it is."""
    assert _rows(_run(folder, 'use "base.sched"\ndrop step "memory"\n')) == PLAIN[1:]
    both = 'use "base.sched"\ndrop step "memory"\noverride step "tensor" {\n}\n'
    assert _rows(_run(folder, both)) == []


def test_bases_of_bases(folder: Path) -> None:
    """A base may change its own base; what it made of it can be changed again."""
    middle = 'schedule 1\nuse "base.sched" (deep=1)\ndrop step "tensor"\n'
    (folder / "middle.sched").write_text(middle)
    assert _rows(_run(folder, 'use "middle.sched"\n')) == [("checkpoint", 1, "memory")]
    assert _rows(_run(folder, 'use "middle.sched" (deep=3)\ndrop step "memory"\n')) == []
    assert "no base has a step `tensor`" in _said(
        folder, 'use "middle.sched"\ndrop step "tensor"\n'
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('drop step "memory"\n', ("S114", "use a base schedule above")),
        (
            'use "base.sched"\ndrop step "memry"\n',
            ("S114", "has a step `memry`", "did you mean `memory`?"),
        ),
        ('use "base.sched"\nstep "a" {\n}\ndrop step "a"\n', ("S114", "where it is written")),
        (
            'use "base.sched"\ndrop step "memory"\noverride step "memory" {\n}\n',
            ("S101", "changed twice", "first changed here"),
        ),
        ('use "base.sched" as b\n', ("S115", 'write `use "base.sched"`')),
        ('use "base.sched"\nstep "memory" {\n}\n', ("S101", "two steps `memory`")),
        ('use "main.sched"\n', ("S112", "main.sched -> main.sched")),
        ('use "bad.sched"\n', ("S201", "bad.sched:3")),
        ('use "bert.sched"\n', ("S110", "this schedule is for the model class BertModel")),
    ],
)
def test_refused(folder: Path, body: str, words: tuple[str, ...]) -> None:
    """Each mistake is told with its code, at its place in the file where it stands."""
    (folder / "bad.sched").write_text('schedule 1\nstep "a" {\n  nowhere  checkpoint()\n}\n')
    (folder / "bert.sched").write_text('schedule 1 for BertModel\nstep "a" {\n}\n')
    said = _said(folder, body)
    assert all(word in said for word in words), said


def test_several_mistakes_at_once(folder: Path) -> None:
    """A wrong change hides no mistake below it."""
    body = 'use "base.sched"\ndrop step "x"\nstep "a" {\n  nowhere  checkpoint()\n}\n'
    said = _said(folder, body)
    assert "S114" in said and "S201" in said


def test_in_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sch.use` brings the same rows, is written as one line, and is taken back as one."""
    monkeypatch.chdir(folder)
    sch = create_schedule(GPT2LMHeadModel())
    sch.use("base.sched", deep=1)
    assert [a.name for a in sch.plan().actions] == ["checkpoint", "shard"]
    assert 'use "base.sched" (deep=1)' in sch.to_sched()
    assert "`transformer.h[:deep]`" in sch.why("transformer.h.0")
    sch.undo()
    assert not sch.plan().actions


def test_a_loaded_file_is_written_as_it_was(folder: Path) -> None:
    """The text keeps `use` and what it changes; setting a knob plans all of it anew."""
    text = 'schedule 1\n\nuse "base.sched"\n\ndrop step "tensor"\n'
    (folder / "main.sched").write_text(text)
    sch = load(folder / "main.sched", GPT2LMHeadModel())
    assert sch.to_sched() == text
    sch.set(deep=4)
    assert [(a.name, len(a.sites)) for a in sch.plan().actions] == [("checkpoint", 4)]
    assert not is_library(folder / "main.sched")
