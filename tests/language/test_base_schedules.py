"""Base schedules: `use` of a file that has steps, `override step` and `drop step`."""

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
from tests.toy_primitives import GPT2LMHeadModel, only_toys

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
    with only_toys():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.sched").write_text(BASE)
    return tmp_path


def test_a_used_file_is_parsed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base and a library are parsed once each, however often `use` names them."""
    (folder / "library.sched").write_text("schedule 1\n\ndef twice() {\n  checkpoint()\n}\n")
    parsed: list[str] = []

    def noting(source: Source) -> Any:
        parsed.append(Path(source.name).name)
        return parse(source)

    monkeypatch.setattr(base_schedules, "parse", noting)
    _expand_text(folder, 'use "base.sched"\nuse "library.sched" as a\nuse "library.sched" as b\n')
    assert sorted(parsed) == ["base.sched", "library.sched"]


def _expand_text(folder: Path, body: str, model: bool = True, **settings: object) -> State:
    """Expand a schedule that begins with `schedule 1` and has this body."""
    source = Source(str(folder / "main.sched"), f"schedule 1\n{body}")
    return expand(parse(source), FACTS if model else None, Settings(**settings))  # type: ignore[arg-type]


def _plan_rows(state: State) -> list[tuple[str, int, str]]:
    """The rows of the plan: primitive, number of modules, step."""
    assert state.plan
    return [(a.name, len(a.sites), a.step) for a in state.plan.actions]


def _refusal_text(folder: Path, body: str) -> str:
    """The message of the refusal of a schedule with this body."""
    with pytest.raises(Refusal) as caught:
        _expand_text(folder, body)
    return caught.value.render()


BASE_ROWS = [("checkpoint", 2, "memory"), ("shard", 4, "tensor")]


def test_a_base_is_part_of_the_file(folder: Path) -> None:
    """The base's knobs, mesh, definitions and steps come first, and the file's own rows follow."""
    body = 'use "base.sched"\nstep "more" {\n  transformer.h[3]  checkpoint()\n}\n'
    state = _expand_text(folder, body)
    assert _plan_rows(state) == [*BASE_ROWS, ("checkpoint", 1, "more")]
    assert state.mesh is not None and state.mesh.sizes == {"tp": 2}
    assert _plan_rows(_expand_text(folder, body, knobs={"deep": 1}))[0] == (
        "checkpoint",
        1,
        "memory",
    )
    assert _expand_text(folder, body, model=False).plan is None


def test_arguments_set_its_knobs(folder: Path) -> None:
    """A `use` sets new defaults of the base's knobs; a setting from outside overrides them."""
    body = 'knob all: int = 3\nuse "base.sched" (deep=all)\n'
    assert _plan_rows(_expand_text(folder, body))[0] == ("checkpoint", 3, "memory")
    assert _plan_rows(_expand_text(folder, body, knobs={"deep": 1}))[0] == (
        "checkpoint",
        1,
        "memory",
    )
    assert "error[S103]" in _refusal_text(folder, 'use "base.sched" (deep=5)\n')
    assert "did you mean `deep`?" in _refusal_text(folder, 'use "base.sched" (dep=1)\n')
    assert "error[S302]" in _refusal_text(folder, 'use "base.sched" (1)\n')


def test_an_axis_set_from_outside_sets_the_knob_of_the_base(folder: Path) -> None:
    """`--mesh` sets the knob that sizes an axis of the base, as in the file's own mesh."""
    state = _expand_text(folder, 'use "base.sched"\n', mesh={"tp": 1})
    assert state.knobs["tp"].value == 1


def test_override_stands_where_the_step_stood(folder: Path) -> None:
    """The new step runs in place of the base's step of that name, in the base's order."""
    body = 'use "base.sched"\noverride step "memory" {\n  transformer.h[0]  checkpoint()\n}\n'
    assert _plan_rows(_expand_text(folder, body)) == [("checkpoint", 1, "memory"), BASE_ROWS[1]]


def test_drop_leaves_a_step_out(folder: Path) -> None:
    """A dropped step is not run; the steps before and after it still are, and may be overridden."""
    assert (
        _plan_rows(_expand_text(folder, 'use "base.sched"\ndrop step "memory"\n')) == BASE_ROWS[1:]
    )
    body = 'use "base.sched"\ndrop step "memory"\noverride step "tensor" {\n}\n'
    assert _plan_rows(_expand_text(folder, body)) == []


def test_bases_of_bases(folder: Path) -> None:
    """A base may change its own base, and the result can be changed again."""
    middle = 'schedule 1\nuse "base.sched" (deep=1)\ndrop step "tensor"\n'
    (folder / "middle.sched").write_text(middle)
    assert _plan_rows(_expand_text(folder, 'use "middle.sched"\n')) == [("checkpoint", 1, "memory")]
    assert (
        _plan_rows(_expand_text(folder, 'use "middle.sched" (deep=3)\ndrop step "memory"\n')) == []
    )
    assert "no base has a step `tensor`" in _refusal_text(
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
    """Each mistake is refused with its code, at its place in the file that contains it."""
    (folder / "bad.sched").write_text('schedule 1\nstep "a" {\n  nowhere  checkpoint()\n}\n')
    (folder / "bert.sched").write_text('schedule 1 for BertModel\nstep "a" {\n}\n')
    text = _refusal_text(folder, body)
    assert all(fragment in text for fragment in words), text


def test_several_mistakes_at_once(folder: Path) -> None:
    """A wrong `drop step` does not hide a mistake further down."""
    body = 'use "base.sched"\ndrop step "x"\nstep "a" {\n  nowhere  checkpoint()\n}\n'
    text = _refusal_text(folder, body)
    assert "S114" in text and "S201" in text


def test_in_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sch.use` adds the same rows, prints as one line, and `undo` removes it as one."""
    monkeypatch.chdir(folder)
    sch = create_schedule(GPT2LMHeadModel())
    sch.use("base.sched", deep=1)
    assert [a.name for a in sch.plan().actions] == ["checkpoint", "shard"]
    assert 'use "base.sched" (deep=1)' in sch.to_sched()
    assert "`transformer.h[:deep]`" in sch.why("transformer.h.0")
    sch.undo()
    assert not sch.plan().actions


def test_a_loaded_file_is_written_as_it_was(folder: Path) -> None:
    """`to_sched` keeps `use` and `drop step`; setting a knob plans everything again."""
    text = 'schedule 1\n\nuse "base.sched"\n\ndrop step "tensor"\n'
    (folder / "main.sched").write_text(text)
    sch = load(folder / "main.sched", GPT2LMHeadModel())
    assert sch.to_sched() == text
    sch.set(deep=4)
    assert [(a.name, len(a.sites)) for a in sch.plan().actions] == [("checkpoint", 4)]
    assert not is_library(folder / "main.sched")
