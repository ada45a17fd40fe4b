"""User lines in refusals: every public function that refuses names the line that called it."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest

import schedlang
from schedlang.cursor import Cursor, PendingCall
from schedlang.diagnostics.codes import model
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.program import Program
from schedlang.runtime.unbuilt_program import UnbuiltProgram
from schedlang.schedule import Schedule, Scope

CLASSES = (Scope, Schedule, Cursor, PendingCall, Program, UnbuiltProgram)  # a Report is a value

# set-up lines of each class; the last line of each case is refused
SETUP = {
    "Scope": "with sch.at('layers.*') as scope:\n    ",
    "Program": "program = sch.build(batch=batch)\n",
    "UnbuiltProgram": "program = sch.build()\n",
}
CASES = {
    "create_schedule": "schedlang.create_schedule(net, 'none.sched')",
    "load": "schedlang.load('none.sched', net)",
    "deferred_init": "schedlang.deferred_init(lambda: 3)",
    "verify": "schedlang.verify(sch, batch=3)",
    "verify_program": "schedlang.verify_program(lambda model: 3, model=net, batch=batch, ranks=0)",
    "transfer": "schedlang.transfer('none', sch.build(batch=batch))",
    "assert_equivalent": "schedlang.assert_equivalent(sch, batch=3)",
    "Scope.do": "scope.do(Split(style='col', over='tp'))",
    "Scope.row": "scope.row('checkpont')",
    "Scope.at": "scope.at('upp').__enter__()",
    "Schedule.why": "sch.why('layers.9')",
    "Schedule.build": "sch.build(clip=-1)",
    "Schedule.knob": "sch.knob('tp', 3, choices=[1, 2])",
    "Schedule.mesh": "sch.mesh(tp=0)",
    "Schedule.view": "sch.view('both', of=['tp', 'pp'])",
    "Schedule.require": "sch.require('1 > 2')",
    "Schedule.pattern": "sch.pattern('wrong(x) { nothing(x) }')",
    "Schedule.use": "sch.use('none.sched')",
    "Schedule.expect": "sch.expect('speed < 3')",
    "Schedule.set": "sch.set(tp=3)",
    "Schedule.search": "sch.search(batch, 'abacus', 4)",
    "Schedule.step": "sch.step('a', relax=['speed']).__enter__()",
    "Schedule.undo": "sch.undo(to='nothing')",
    "Schedule.redo": "sch.redo()",
    "Schedule.verify": "sch.verify('forward')",
    "Schedule.diff": "sch.diff(sch.mesh(tp=0))",
    "Cursor.do": "sch['layers.*'].do(Split(style='col', over='tp'))",
    "Cursor.row": "sch['layers.*'].row('checkpont')",
    "Cursor.modules": "sch['nothing.*'].modules",
    "PendingCall.__call__": "sch['layers.*'].checkpont()",
    "Program.train_step": "program.train_step({**batch, 'more': batch['ids']})",
    "Program.eval_step": "program.eval_step({'ids': 3})",
    "Program.generate": "program.generate(batch['ids'])",
    "Program.module": "away.module",
    "Program.rank_of": "program.rank_of('pp')",
    "UnbuiltProgram.rank_of": "program.rank_of('pp')",
    "Program.load_state_dict": "program.load_state_dict({})",
    "Program.save": "program.save(__file__)",
    "Program.load": "program.load('none')",
    "Program.export": "program.export('out', net.head)",
    "UnbuiltProgram.train_step": "program.train_step({'ids': 3})",
    "UnbuiltProgram.eval_step": "program.eval_step({'ids': 3})",
}
NEVER_REFUSE = {  # reasons why they never refuse
    "last_checkpoint": "None where there is none",
    "Schedule.model": "facts are read one by one",
    "Schedule.plan": "the plan is there already",
    "Schedule.grade": "a value",
    "Schedule.tree": "a value",
    "Schedule.to_sched": "text of what is there",
    "Schedule.to_json": "a record of what is there",
    "Schedule.warnings": "warnings are none",
    "Program.dp_rank": "a number",
    "Program.dp_size": "a number",
    "Program.grad_norm": "a number",
    "UnbuiltProgram.dp_rank": "a number",
    "UnbuiltProgram.dp_size": "a number",
    "Program.gradients": "tells what is there",
    "Program.input_gradients": "tells what is there",
    "Program.trained": "tells names",
    "Program.replica_errors": "compares what is there",
    "Program.buffers": "tells what is there",
    "Program.buffer_errors": "compares what is there",
    "Program.state_dict": "what could not be told was refused when it was built",
    "Program.optimizer_state": "tells what is there",
    "Program.saved": "what was wrong with a save in the background is no line's fault",
}
HEAD = """\
import schedlang
from schedlang.primitives.shard import shard as Split


def apply(net, batch, away):
    sch = schedlang.create_schedule(net)
"""


def public_names() -> set[str]:
    """Return the names of all public functions, methods and properties."""
    names = {
        name for name in schedlang.__all__ if inspect.isfunction(getattr(schedlang, name, None))
    }
    for cls in CLASSES:
        for name, value in vars(cls).items():
            is_callable = inspect.isfunction(value) or isinstance(value, property)
            if is_callable and (not name.startswith("_") or name == "__call__"):
                names.add(f"{cls.__name__}.{name}")
    return names


def test_each_has_a_case() -> None:
    """Every public function has a refusal case, or is listed with the reason why not."""
    assert public_names() == {*CASES, *NEVER_REFUSE}, public_names() ^ {*CASES, *NEVER_REFUSE}


def _model_and_batch() -> tuple[Any, Any]:
    namespace: dict[str, Any] = {}
    exec(model(), namespace)
    return namespace["model"](), namespace["batch"](0)


def _offloaded_program(net: Any, batch: Any) -> Any:
    """Build a program whose gradients are offloaded."""
    sch: Any = schedlang.create_schedule(net)
    sch["layers.*"].offload("gradients")
    return sch.build(batch=batch)


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_the_users_line(tmp_path: Path, name: str) -> None:
    """A refusal points at the last line of the calling function."""
    path = tmp_path / "mine.py"
    lines = SETUP.get(name.partition(".")[0], "") + CASES[name]
    text = HEAD + textwrap.indent(lines, "    ") + "\n"
    path.write_text(text)
    namespace: dict[str, Any] = {"__file__": str(path)}
    exec(compile(text, str(path), "exec"), namespace)
    net, batch = _model_and_batch()
    offloaded = _offloaded_program(net, batch) if "away" in CASES[name] else None
    with pytest.raises(Refusal) as caught:
        namespace["apply"](net, batch, offloaded)
    span = caught.value.diagnostic.primary.span
    assert (span.source.name, span.line) == (str(path), text.count("\n")), caught.value.render()
