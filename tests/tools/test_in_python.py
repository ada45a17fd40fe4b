"""The Python interface: reprs, notebook views, helps spelled in Python, mistakes in calls."""

from __future__ import annotations

import html
import linecache
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import schedlang
from schedlang.cursor import PendingCall
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.language.lift import spell_in_python
from schedlang.schedule import Schedule
from tests import forks
from tests.tools.test_api import Block


class Net(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Six rows of random inputs."""
    return {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))}


@pytest.fixture
def sch() -> Schedule:
    schedule = schedlang.create_schedule(Net())
    schedule.mesh(tp=2)
    return schedule


def shard_both(sch: Schedule) -> None:
    """Shard both projections of every block."""
    sch["blocks.*.up"].shard("col", over="tp")
    sch["blocks.*.down"].shard("row", over="tp")


# -- verify -----------------------------------------------------------------------------------


def test_verify_verifies(sch: Schedule) -> None:
    """`sch.verify(batch=...)` gives the report of `schedlang.verify`, and adds no row."""
    shard_both(sch)
    report = sch.verify(batch=batch, dtype="none")
    assert isinstance(report, schedlang.Report) and report.ok and len(report.rows) > 20
    assert not any(action.name == "verify" for action in sch.plan().actions)


def test_a_verify_row_is_added_by_its_name(sch: Schedule) -> None:
    """`row` adds a row of any primitive, on the schedule, a scope or a path."""
    sch.row("verify", "forward", "backward")
    sch["blocks[1:]"].row("checkpoint")
    with sch.at("blocks.0") as scope:
        scope.row("offload", "activations")
    assert [a.name for a in sch.plan().actions] == ["verify", "checkpoint", "offload"]
    assert "verify(forward, backward)" in sch.to_sched()


@pytest.mark.parametrize("call", ["sch.verify()", "sch.verify('forward')"])
def test_verify_without_a_batch_says_what_it_needs(sch: Schedule, call: str) -> None:
    """`sch.verify()` without a batch is refused, with both ways to go on."""
    with pytest.raises(Refusal) as caught:
        eval(call)
    message = caught.value.render()
    assert "sch.verify(batch=batch)" in message and 'sch.row("verify"' in message
    assert "loss=loss" in message  # Python as it is stays as it is
    assert not sch.plan().actions


# -- what is printed --------------------------------------------------------------------------


def test_reprs_are_short(sch: Schedule) -> None:
    """Each repr is one line with the model, the mesh and the number of rows."""
    shard_both(sch)
    with sch.step("less memory"):
        sch["blocks.*"].checkpoint()
    assert repr(sch) == "<Schedule for Net on tp=2: 3 rows in 1 step>"
    assert str(sch) == sch.to_sched().rstrip()
    assert repr(sch.plan()) == "<Plan for Net on tp=2: 3 rows, may differ in rounding>"
    assert repr(sch["blocks.*.up"]) == (
        '<sch["blocks.*.up"]: 3 modules (Linear): blocks.0.up, blocks.1.up, blocks.2.up>'
    )
    assert repr(sch["blocks.7"]) == '<sch["blocks.7"]: index 7 is out of range>'
    assert repr(sch["blocks"].checkpoint) == '<sch["blocks"].checkpoint: call it to add the row>'
    warning = repr(sch.warnings())
    assert warning.startswith("[<warning[W") and warning.count("\n") == 0 and "Span" not in warning


def test_a_printed_plan_is_that_of_the_verb(sch: Schedule, tmp_path: Path) -> None:
    """`print(sch.plan())` has the table and the memory of `schedlang plan`."""
    from typer.testing import CliRunner

    from schedlang.cli import app

    shard_both(sch)
    (tmp_path / "a.sched").write_text(sch.to_sched())
    code = Path(__file__).read_text()
    (tmp_path / "model.py").write_text(f"{code}\n\ndef model():\n    return Net()\n\ndel batch\n")
    verb = CliRunner().invoke(app, ["plan", str(tmp_path / "a.sched")])
    assert verb.exit_code == 0, verb.output

    def rows(text: str) -> list[str]:
        lines = text.splitlines()[
            1:
        ]  # the first one names the file, and lines end with their place
        return [line.rpartition(" :")[0].rstrip() or line.rstrip() for line in lines]

    assert rows(verb.stdout) == rows(str(sch.plan()))
    assert "per rank" in str(sch.plan()) and "f32[12@tp, 8]" in str(sch.plan())


def test_a_printed_program_has_no_weights() -> None:
    """A program prints as one line, before and after it is built."""
    sch = schedlang.create_schedule(Net())
    program: Any = sch.build()
    assert "sch.build(batch=batch, ...)" in repr(program) and len(repr(program)) < 120
    program.train_step(batch())
    assert str(program) == "<Program of Net: 636 parameters here, no optimizer, step 1>"


def test_notebooks_show_pictures(sch: Schedule) -> None:
    """Notebooks show a plan and a schedule as a picture, and a report as a table."""
    shard_both(sch)
    assert sch.plan()._repr_html_().startswith("<svg")
    assert sch._repr_html_() == sch.plan()._repr_html_()
    report = sch.verify(batch=batch, dtype="none")
    page, printed = report._repr_html_(), str(report)
    assert "PASS" in page and "PASS" in printed and "gradients" in page
    assert repr(report).startswith("<Report") and "\n" not in repr(report)
    assert is_valid_html(page)


def test_a_notebook_shows_what_a_cursor_selects(sch: Schedule) -> None:
    """A cursor shows its modules and their rows, at most twenty; a wrong path says why."""
    shard_both(sch)
    page = sch["blocks.*.up"]._repr_html_()
    rows = re.findall("<tr>(.*?)</tr>", page)
    assert len(rows) == 4 and "rows that act on it" in rows[0]
    assert "blocks.1.up" in rows[2] and "Linear" in rows[2] and "style=col" in rows[2]
    assert "<tr>" not in sch["blocks.7"]._repr_html_()
    assert "index 7 is out of range" in sch["blocks.7"]._repr_html_()
    many = schedlang.create_schedule(nn.Sequential(*(nn.Linear(2, 2) for _ in range(30))))
    assert "and 10 more" in many["*"]._repr_html_()
    assert str(sch["blocks.*.up"]) == repr(sch["blocks.*.up"])
    for page_part in (page, sch["blocks.7"]._repr_html_(), many["*"]._repr_html_()):
        assert is_valid_html(page_part) and len(page_part) < 4000


def test_a_notebook_shows_a_program() -> None:
    """A program shows a few facts, before and after its first batch, and no weights."""
    program: Any = schedlang.create_schedule(Net()).build()
    assert "sch.build(batch=batch, ...)" in html.unescape(program._repr_html_())
    assert is_valid_html(program._repr_html_())
    program.train_step(batch())
    page = program._repr_html_()
    assert is_valid_html(page) and len(page) < 400
    for name, value in (("parameters here", "636"), ("optimizer", "no optimizer"), ("step", "1")):
        assert f"<th>{name}</th><td>{value}</td>" in page
    assert "Program of Net" in page and "microbatches" not in page


def is_valid_html(text: str) -> bool:
    """Whether every tag is closed in order, and names are escaped."""
    closed = re.sub("<(br|meta)[^>]*>", "", text)
    return ElementTree.fromstring(f"<body>{closed}</body>").tag == "body"


# -- what is said in Python's words -----------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "python"),
    [
        ("`mlp.up  shard(col, over=tp)`", '`sch["mlp.up"].shard("col", over="tp")`'),
        ("use `zero(stage=1, over=dp)` here", 'use `sch.zero(stage=1, over="dp")` here'),
        ("`shard(col, output=R, over=tp)`", '`.shard("col", output=R, over="tp")`'),
        ("`h  shard(input=S(1), over=cp)`", '`sch["h"].shard(input=S(1), over="cp")`'),
        ('`step "..." relax(dtype) {`', '`with sch.step("...", relax="dtype"):`'),
        ("add `relax(dtype)`", 'add `sch.step(..., relax="dtype")`'),
        ('`step "a" relax(dtype, model) {`', '`with sch.step("a", relax=["dtype", "model"]):`'),
        ("did you mean `over=tp`?", 'did you mean `over="tp"`?'),
        ("`checkpoint(plan=rotor, memory=2GiB)`", '`.checkpoint(plan="rotor", memory="2GiB")`'),
        ('`pipeline(order="1F1B", micro=...)`', '`sch.pipeline(order="1F1B", micro=...)`'),
        ("`x  fuse(p, with=triton)`", '`sch["x"].fuse("p", with_="triton")`'),
        ("`h  offload(params), checkpoint()`", "`h  offload(params), checkpoint()`"),
        ("`mesh(dp=_, tp=2)`", '`sch.mesh(dp="_", tp=2)`'),
        ("`expect bubble < 0.2`", '`sch.expect("bubble < 0.2")`'),
        ("`verify(forward)`", '`sch.row("verify", "forward")`'),
        ("`--mesh dp=2,tp=1`, `--knob n=3`", "`sch.mesh(dp=2, tp=1)`, `sch.set(n=3)`"),
        # Python, commands and names are not changed
        ("`sch.build(batch=batch, ...)`", "`sch.build(batch=batch, ...)`"),
        ("`loss(output, batch)`, `loss=loss`", "`loss(output, batch)`, `loss=loss`"),
        ("`schedlang init model.py`", "`schedlang init model.py`"),
        ("did you mean `c_fc`?", "did you mean `c_fc`?"),
        ("`with sch.step(...)`", "`with sch.step(...)`"),
    ],
)
def test_spelled(schedule: str, python: str) -> None:
    """Rows in helps become Python calls; other text does not change."""
    assert spell_in_python(schedule) == python


def test_a_file_is_answered_in_its_own_words(sch: Schedule, tmp_path: Path) -> None:
    """The same mistake is answered in Python for a call, and as a row for a file."""
    with pytest.raises(Refusal) as caught:
        sch["blocks.*.up"].shard("col")
    assert 'for example `sch["mlp.up"].shard("col", over="tp")`' in caught.value.render()
    path = tmp_path / "a.sched"
    path.write_text("schedule 1 for Net\n\nmesh(tp=2)\n\nblocks.*.up  shard(col)\n")
    with pytest.raises(Refusal) as caught:
        schedlang.load(path, Net())
    assert "for example `mlp.up  shard(col, over=tp)`" in caught.value.render()


def test_what_is_offered_in_python_is_legal(sch: Schedule) -> None:
    """The step that a refusal offers runs as it is written."""
    with pytest.raises(Refusal) as caught:
        sch.cast("bf16")
    offered = 'with sch.step("...", relax="dtype"):'
    assert offered in caught.value.render()
    exec(f"{offered}\n    sch.cast('bf16')", {"sch": sch})
    assert "dtype" in sch.grade


def test_nothing_is_framed_where_there_are_no_lines(sch: Schedule) -> None:
    """At a prompt whose source is unknown, a message has no frame, only notes."""
    for name, has_frame in (("<stdin>", False), ("<string>", True)):
        linecache.cache.pop(name, None)
        with pytest.raises(Refusal) as caught:
            exec(compile('sch["blocks.*.wrong"].modules', name, "exec"), {"sch": sch})
        message = caught.value.render()
        assert (f"--> {name}:1:1" in message) is has_frame
        assert " |" not in message
        assert "has no child `wrong`" in message


@pytest.mark.parametrize(("call", "meant"), [("sch.pln()", "plan"), ("sch.undoo()", "undo")])
def test_a_method_that_was_meant(sch: Schedule, call: str, meant: str) -> None:
    """A misspelt method of the schedule is refused with the similar name."""
    with pytest.raises(Refusal) as caught:
        eval(call)
    assert f"did you mean `sch.{meant}`?" in caught.value.render()
    with pytest.raises(Refusal) as caught:
        sch["blocks"].chekpoint()
    assert "did you mean `checkpoint`?" in caught.value.render()


def test_other_places_are_named_without_their_lines(sch: Schedule) -> None:
    """A second place without source is named by file and line."""
    code = 'sch["blocks.0"].checkpoint()\nsch["blocks.0.up"].shard("col", over="tp")\n'
    with pytest.raises(Refusal) as caught:
        exec(compile(code, "<string>", "exec"), {"sch": sch})
    assert "= note: <string>:1: " in caught.value.render()


# -- small things -----------------------------------------------------------------------------


def test_paths_are_chained(sch: Schedule) -> None:
    """Indexing a cursor extends its path with names, numbers and slices."""
    assert sch["blocks"]["0"].modules == sch["blocks"][0].modules == ("blocks.0",)
    assert sch["blocks"][1]["up"].modules == ("blocks.1.up",)
    assert sch["blocks"][-1].modules == ("blocks.2",)
    assert sch["blocks"][1:].modules == ("blocks.1", "blocks.2")
    assert sch["blocks"][::2].modules == ("blocks.0", "blocks.2")
    sch["blocks"][:2]["up"].shard("col", over="tp")
    assert "blocks[:2].up  shard(col, over=tp)" in sch.to_sched()
    for access in (
        lambda: sch["blocks"][:2][0],
        lambda: sch.blocks[0],
        lambda: sch["blocks"][9].modules,
    ):
        with pytest.raises(Refusal):
            access()


def test_undo_takes_back_several(sch: Schedule) -> None:
    """`undo(2)` removes two rows, and a step that becomes empty; a too large number removes all."""
    empty = sch.to_sched()
    shard_both(sch)
    before_step = sch.to_sched()
    with sch.step("last"):
        sch["blocks.0"].checkpoint()
        sch["blocks.1"].checkpoint()
    sch.undo(2)
    assert sch.to_sched() == before_step
    sch.undo()
    assert len(sch.plan().actions) == 1
    sch.undo(9)
    assert "shard" not in sch.to_sched()
    assert empty != before_step


def test_plain_texts_do(sch: Schedule) -> None:
    """One name needs no tuple; `axis=` is accepted for `over=`; sizes may have units."""
    with sch.step("a", relax="dtype"):
        sch.cast("bf16")
    assert sch.plan().relaxed == (("a", ("dtype",)),)
    sch["blocks.*.up"].shard("col", axis="tp")
    assert "shard(col, over=tp)" in sch.to_sched()
    sch.view("all", of="tp")
    sch["blocks.*"].checkpoint(plan="rotor", memory="2GiB")
    assert "memory=2GiB" in sch.to_sched()


def test_a_program_knows_its_place() -> None:
    """`rank_of` works before and after the first batch; an unknown axis is refused."""
    sch = schedlang.create_schedule(Net())
    sch.mesh(dp=1)
    sch.zero(stage=1, over="dp")
    for program in (sch.build(), sch.build(batch=batch())):
        assert (program.dp_size, program.dp_rank, program.rank_of("dp")) == (1, 0, 0)
        with pytest.raises(Refusal, match="the mesh has no axis `tp`"):
            program.rank_of("tp")


def test_no_optimizer_before_the_first_batch() -> None:
    """An LR scheduler before the first batch is refused; the message asks for `batch=`."""
    sch = schedlang.create_schedule(Net())
    program: Any = sch.build(optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
    with pytest.raises(Refusal) as caught:
        torch.optim.lr_scheduler.StepLR(program.optimizer, 1)
    message = caught.value.render()
    assert "sch.build(batch=batch, ...)" in message and "LR scheduler" in message


def test_verbs_need_not_be_loaded_before() -> None:
    """In a fresh process a row is spelled in Python as in any other."""
    code = (
        "from schedlang.language.lift import spell_in_python\n"
        "print(spell_in_python('`zero(stage=1, over=dp)`'))"
    )
    result = forks.run_interpreter("-c", code)
    assert result.stdout.strip() == '`sch.zero(stage=1, over="dp")`', result


def test_who_imports_schedules_is_answered_in_python() -> None:
    """Importing `create_schedule` registers the spelling of helps in Python."""
    code = (
        "import schedlang\n"
        "from schedlang.diagnostics.diagnostic import HELP_SPELLERS\n"
        "assert not HELP_SPELLERS\n"
        "schedlang.create_schedule\n"
        "assert HELP_SPELLERS\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- mistakes ---------------------------------------------------------------------------------


class Labelled(nn.Module):
    """A model that returns its output, and a loss if it gets targets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = self.head(x)
        return out, None if targets is None else (out - targets).square().mean()


def labelled_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch with targets."""
    return {**batch(seed), "targets": torch.ones(6, 4)}


def second_output(output: Any, batch: Any) -> Any:
    """The loss that the model returned."""
    return output[1]


def refusal_text(call: Any) -> str:
    """The message of a call's refusal."""
    with pytest.raises(Refusal) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, batch: None, "returns None"),
        (lambda output, batch: 1.0, "returns a float"),
        (lambda output, batch: output[0], "returns a tensor of shape [6, 4]"),
        (lambda output: output[0], "positional argument but 2 were given"),
        ("mse", "`loss` is a str"),
    ],
)
def test_a_loss_that_is_none(loss: Any, words: str) -> None:
    """A loss that is not a scalar tensor is refused, by `verify` and by `build`."""
    sch = schedlang.create_schedule(Labelled())
    for call in (
        lambda: sch.verify(batch=labelled_batch(), loss=loss),
        lambda: sch.build(batch=labelled_batch(), loss=loss).train_step(labelled_batch()),
    ):
        message = " ".join(refusal_text(call).split())
        assert words in message and "dryrun" not in message and "the model returns" not in message


def test_no_loss_is_said_in_python() -> None:
    """A missing loss is refused with the argument to add, or with the missing targets."""
    sch = schedlang.create_schedule(Labelled())
    message = refusal_text(lambda: sch.verify(batch=labelled_batch()))
    assert "give one: `loss=lambda output, batch: output[1]`" in message
    assert "model file" not in message
    message = refusal_text(lambda: sch.verify(batch=batch()))
    assert "its forward takes `targets`, which is not in the batch" in message


def test_arguments_of_verify() -> None:
    """Wrong arguments of `verify` are refused with the right call."""
    sch = schedlang.create_schedule(Net())
    assert "`sch.verify(batch=batch, loss=loss)`" in refusal_text(lambda: sch.verify(batch))
    assert "`sch.verify(batch=batch" in refusal_text(lambda: schedlang.verify(sch, batch))
    assert "did you mean `dtype`?" in refusal_text(lambda: sch.verify(batch=batch, dtyp="none"))
    assert 'sch.row("verify", "forward")' in refusal_text(lambda: sch.verify("forward"))
    assert "needs a batch" in refusal_text(lambda: schedlang.verify(sch))


def test_what_a_step_is_given() -> None:
    """A step takes a dict with the keys of `build`; anything else is refused."""
    program = schedlang.create_schedule(Labelled()).build(
        batch=labelled_batch(), loss=second_output
    )
    delayed = schedlang.create_schedule(Labelled()).build(loss=second_output)
    for program_kind in (program, delayed):
        for call in (program_kind.train_step, program_kind.eval_step):
            assert "a batch is a dict, not a Tensor" in refusal_text(
                lambda call=call: call(batch()["x"])
            )
            assert "call it: `batch(0)`" in refusal_text(lambda call=call: call(batch))
    renamed = {"x": batch()["x"], "target": torch.ones(6, 4)}
    assert "did you mean `targets`?" in refusal_text(lambda: program.train_step(renamed))
    message = refusal_text(lambda: program.train_step(batch()))
    assert "returns None" in message and "its forward takes `targets`" in message


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda sch: sch[0], "not by an int"),
        (lambda sch: sch[None], "not by None"),
        (lambda sch: sch["blocks"][None], "not by None"),
        (lambda sch: sch["blocks"][1.5], "not by a float"),
        (lambda sch: sch.undo(-1), "not -1"),
        (lambda sch: sch.undo(1.5), "not 1.5"),
        (lambda sch: sch.diff(3), "not with an int"),
        (lambda sch: sch.why(3), "no module or parameter `3`"),
        (lambda sch: sch.step("a", relax=3).__enter__(), "not 3"),
        (lambda sch: sch.step("a", relax=None).__enter__(), "not None"),
        (lambda sch: sch.step("a", relax=["dtype", 2]).__enter__(), "not ['dtype', 2]"),
        (lambda sch: sch.build(batch=batch), "call it: `batch=batch(0)`"),
        (lambda sch: schedlang.create_schedule(Net), "for a class"),
        (lambda sch: schedlang.create_schedule(batch), "for a function"),
        (lambda sch: schedlang.create_schedule(3), "for an int"),
        (lambda sch: sch.zero(stage=1, over="dp"), "declare it: `sch.mesh(tp=2, dp=2)`"),
    ],
)
def test_no_raw_errors(sch: Schedule, call: Any, words: str) -> None:
    """A value of the wrong type is refused at the caller's line, and changes nothing."""
    before = sch.to_sched()
    message = refusal_text(lambda: call(sch))
    assert words in message and "test_in_python.py" in message
    assert sch.to_sched() == before


def test_undo_leaves_declarations_and_redo_brings_back(sch: Schedule) -> None:
    """`undo` of more rows than there are keeps the mesh; a new row ends what `redo` restores."""
    shard_both(sch)
    full = sch.to_sched()
    sch.undo(99)
    assert "mesh(" in sch.to_sched() and not sch.plan().actions
    sch.redo()
    assert sch.to_sched() == full
    sch.undo()
    sch.undo()
    sch.redo()
    sch.redo()
    assert sch.to_sched() == full
    assert "nothing was undone" in refusal_text(sch.redo)
    sch.undo()
    sch["blocks.0"].checkpoint()
    assert "nothing was undone" in refusal_text(sch.redo)


def test_help_is_the_page_of_the_verb(sch: Schedule) -> None:
    """`help` on a primitive's method shows its arguments and an example."""
    page = pydoc.render_doc(sch["blocks.0"].shard, renderer=pydoc.plaintext)
    assert "A style sets the placements" in page and "over=" in page
    assert sch["blocks.0"].nothing.__doc__ == PendingCall.__doc__


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda sch: sch.set(foo=3), "no knob `foo`"),
        (lambda sch: list(sch["blocks.*"]), 'their names: `sch["blocks.*"].modules`'),
        (lambda sch: sch.mesh({"tp": 2}), "for example `sch.mesh(tp=2)`"),
        (lambda sch: sch.mesh("tp", 2), "for example `sch.mesh(tp=2)`"),
    ],
)
def test_what_is_typed_at_a_prompt(sch: Schedule, call: Any, words: str) -> None:
    """Calls in the style of other libraries are refused with the right call."""
    before = sch.to_sched()
    assert words in refusal_text(lambda: call(sch))
    assert sch.to_sched() == before


@pytest.mark.parametrize("path", [3, None, ["saved"]])
def test_a_path_is_a_path(sch: Schedule, path: Any) -> None:
    """A path that is not a string or a Path is refused before any file is opened."""
    program = schedlang.create_schedule(Net()).build(batch=batch(), loss=lambda out, _: out.sum())
    for call in (
        lambda: program.load(path),
        lambda: program.save(path),
        lambda: program.export(path, Net()),
    ):
        assert "the place of saved state must be a path" in refusal_text(call)
    assert "a state dict is a dict" in refusal_text(lambda: program.load_state_dict(path))
