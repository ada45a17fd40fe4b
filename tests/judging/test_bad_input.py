"""User mistakes in `verify_program`: each is refused or ended, with the rank and the line."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import schedlang
from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge import judge, program_rows
from schedlang.report import Report, Row
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.launch.rank_job import Hang
from tests import forks

ORIGINAL = """
import torch
from torch import nn


def model():
    return nn.Linear(4, 2)


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return {"input": torch.randn(4, 4, generator=g), "target": torch.randn(4, 2, generator=g)}


def loss(output, batch):
    return nn.functional.mse_loss(output, batch["target"])
"""
HEAD = """
import torch
import torch.distributed as dist
import schedlang

world = 2


def ahead(model, batch):
    loss = torch.nn.functional.mse_loss(model(batch["input"]), batch["target"])
    loss.backward()
    return loss


def program(model):
    rank = dist.get_rank()
"""
RIGHT = "    return schedlang.TrainingProgram(model, lambda batch: ahead(model, batch))\n"


def step_body(*lines: str) -> str:
    """Return the body of a program whose step begins with these lines."""
    body = "".join(f"        {line}\n" for line in lines)
    head = f"    def step(batch):\n{body}        return ahead(model, batch)\n"
    return head + "    return schedlang.TrainingProgram(model, step)\n"


OTHER = """    from torch.distributed.tensor import Shard
    with torch.no_grad():
        model.weight.mul_(2)
"""
REFUSED = {
    "returns nothing on one rank": (
        "    if rank == 1:\n        return None\n" + RIGHT,
        "S761",
        "returns nothing on rank 1",
    ),
    "returns a module": ("    return model\n", "S761", "a Linear on rank"),
    "a module that is none": (
        "    return schedlang.TrainingProgram([model, 3], print)\n",
        "S761",
        "`module` of the program",
    ),
    "a step that is none": (
        "    return schedlang.TrainingProgram(model, 3)\n",
        "S761",
        "`step` of the program",
    ),
    "a step that takes a batch apart": (
        "    return schedlang.TrainingProgram(model, lambda input, target: None)\n",
        "S761",
        "is step(input, target): it takes no batch",
    ),
    "raises while it is built": ("    model.nothing\n" + RIGHT, "S762", "`program` raises"),
    "raises on one rank": (
        step_body("if rank == 1:", "    raise ValueError('no data')"),
        "S762",
        "`step` raises ValueError: no data on rank 1",
    ),
    "ends by itself": (
        step_body("raise SystemExit(0)"),
        "S762",
        "`step` raises SystemExit: 0 on rank",
    ),
    "a GPU": ("    model.cuda()\n" + RIGHT, "S765", "asks for a GPU"),
    "pinned memory": (
        step_body("torch.zeros(1, dtype=torch.float32).pin_memory()"),
        "S765",
        "asks for a GPU",
    ),
    "eight bits under gloo": (
        step_body("raise RuntimeError('Invalid scalar type')"),  # gloo's words
        "S762",
        "gloo sums no floats of eight bits",
    ),
    "a batch changed in place": (
        step_body("batch['target'].mul_(2)"),
        "S764",
        "changes the batch in place",
    ),
    "no loss on any rank": (
        "    return schedlang.TrainingProgram(model, lambda batch: None)\n",
        "S766",
        "a loss on no rank",
    ),
    "a loss that is none": (
        "    return schedlang.TrainingProgram(model, lambda batch: model(batch['input']))\n",
        "S766",
        "`step` returns a Tensor",
    ),
    "weights of its own": (
        "    model.more = torch.nn.Linear(2, 2).double()\n" + RIGHT,
        "S763",
        "`more.weight` (2, 2)",
    ),
    "weights in float32": (
        "    with torch._C.DisableTorchFunction():\n        model.float()\n" + RIGHT,
        "S763",
        "is float32, not float64",
    ),
    "a way to join losses": (
        RIGHT.replace("))\n", "), world_loss='men')\n"),
        "S767",
        "did you mean `mean`?",
    ),
    "a name that is none": (
        RIGHT.replace("))\n", "), names={'weight': 'wieght'})\n"),
        "S767",
        "which the original does not have",
    ),
    "an optimizer that is none": (
        RIGHT.replace("))\n", "), optimizer=lambda named: None)\n"),
        "S767",
        "`optimizer` returns nothing on rank",
    ),
    "no optimizer for the original": (
        "    def optimizer(named):\n"
        "        return torch.optim.SGD(named, lr=0.1) if dist.is_initialized() else None\n"
        + RIGHT.replace("))\n", "), optimizer=optimizer)\n"),
        "S767",
        "`optimizer` returns nothing in the process of the original",
    ),
    "a clipping without a norm": (
        RIGHT.replace("))\n", "), clip=lambda most: None)\n"),
        "S767",
        "`clip` returns nothing on rank",
    ),
    "layouts in a list": (
        RIGHT.replace("))\n", "), layouts=['weight'])\n"),
        "S767",
        "`layouts` of the program on rank 0 is a list, not a dict",
    ),
    "a clipping that is none": (
        RIGHT.replace("))\n", "), clip=1.0)\n"),
        "S767",
        "`clip` of the program on rank 0 is a float, not a function",
    ),
    "names that raise": (
        OTHER + RIGHT.replace("))\n", "), names=lambda name: {}[name])\n"),
        "S762",
        "`names` raises KeyError",
    ),
    "a layout of a dim that is not there": (
        OTHER + RIGHT.replace("))\n", "), layouts={'weight': Shard(3)})\n"),
        "S767",
        "the layout of `weight` is of dim 3, and it has 2",
    ),
    "a step without a batch": (
        "    return schedlang.TrainingProgram(model, lambda: ahead(model, {}))\n",
        "S761",
        "is step(): it takes no batch",
    ),
    "a process group of its own": (
        "    dist.init_process_group('gloo')\n" + RIGHT,
        "S762",
        "make it only `if not dist.is_initialized()",
    ),
    "an optimizer that raises": (
        RIGHT.replace("))\n", "), optimizer=lambda named: 1 / 0)\n"),
        "S762",
        "`optimizer` raises ZeroDivisionError",
    ),
}


def write_files(folder: Path, body: str, head: str = HEAD) -> Path:
    """Write an original and a program, and return the program's path."""
    (folder / "original.py").write_text(ORIGINAL)
    (folder / "program.py").write_text(head + body)
    return folder / "program.py"


def hang_message(folder: Path, body: str) -> str:
    """Run a program that hangs, and return the message with the ranks' stacks."""
    for seconds in (6, 24, 96):  # longer if a slow machine has not reached the step
        with pytest.raises(Hang) as hang:
            schedlang.verify_program(
                write_files(folder, body), model=folder / "original.py", timeout=seconds
            )
        if " in step" in str(hang.value) and "waits for the others" in str(hang.value):
            break
    return str(hang.value)


def run_verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `schedlang verify` in a subprocess."""
    return forks.run("-m", "schedlang", "verify", "original.py", *arguments, cwd=folder)


@pytest.mark.parametrize("body, code, said", REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_refused(tmp_path: Path, pool: Pool, body: str, code: str, said: str) -> None:
    """The message has a code, the mistake, the rank, and a help line."""
    scope: dict[str, Any] = {"__name__": f"bad_{code}"}
    file = write_files(tmp_path, body)
    exec(compile(file.read_text(), str(file), "exec"), scope)
    exec(ORIGINAL, original := {"__name__": "original"})
    with pytest.raises(Refusal) as refusal:
        schedlang.verify_program(
            scope["program"],
            model=original["model"](),
            batch=original["batch"],
            loss=original["loss"],
            ranks=2,
            pool=pool,
        )
    text = refusal.value.render()
    assert f"error[{code}]" in text and said in text and "= help: " in text, text
    if code in ("S762", "S765"):
        assert re.search(r"program\.py:\d+:\d+", text), text


def test_a_hang_ends_with_stacks(tmp_path: Path) -> None:
    """A hang ends in time, with the current line of each rank."""
    body = step_body("if rank == 0:", "    dist.barrier()")
    message = hang_message(tmp_path, body)
    assert re.search(r'rank 0:(\n.*)?\n +File ".*program.py", line 19 in step\nrank 1', message)
    ahead = message.partition("rank 1:\n")[2].splitlines()
    assert len(ahead) == 2 and "waits for the others" in ahead[1], message


LEAVES = """
    ddp = torch.nn.parallel.DistributedDataParallel(model)

    def step(batch):
        loss = torch.nn.functional.mse_loss(ddp(batch["input"]), batch["target"])
        if rank == 1:
            return loss
        loss.backward()
        return loss

    return schedlang.TrainingProgram(ddp, step)
"""


def test_a_rank_that_leaves_before_backward(tmp_path: Path, pool: Pool) -> None:
    """Of two waiting ranks, only the one in the user's code is shown with its line.

    Where no rank waits, ranks without a gradient or loss are named.
    """
    lines = hang_message(tmp_path, LEAVES).splitlines()
    assert len(lines) == 7 and lines[3].endswith("in step") and "program.py" in lines[3], lines
    assert "waits for the others" in lines[6], lines
    report = judge_body(step_body("if rank == 1:", "    return torch.zeros(())"), pool)
    messages = dict(report.localised)
    assert "only rank 0 has the right value: there is none on rank 1" in messages["gradients"], (
        messages
    )
    assert re.search(r"ranks return [\d.]+, 0$", messages["loss"]), messages


def test_a_step_that_steps_the_optimizer(pool: Pool) -> None:
    """The verdict says that the step itself changes parameters."""
    body = """
    own = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = ahead(model, batch)
        own.step()
        return loss

    return schedlang.TrainingProgram(model, step)
"""
    report = judge_body(body, pool)
    message = dict(report.localised)["parameters"]
    assert "the step itself changes `bias`, `weight`" in message, str(report)


def judge_body(body: str, pool: Pool) -> Report:
    """Judge a program given as source lines, and return the report."""
    scope: dict[str, Any] = {"__name__": "written"}
    exec(compile(HEAD + body, "written.py", "exec"), scope)
    exec(ORIGINAL, original := {"__name__": "original"})
    parts = {name: original[name] for name in ("batch", "loss")}
    return schedlang.verify_program(
        scope["program"], model=original["model"](), **parts, ranks=2, pool=pool
    )


def test_a_step_that_puts_other_parameters(pool: Pool) -> None:
    """Replaced parameters are not stepped by the existing optimizer, and the verdict says why."""
    report = judge_body(step_body("model.bias = torch.nn.Parameter(model.bias.detach() * 1)"), pool)
    assert "the step puts other parameters for `bias`" in dict(report.localised)["parameters"]


OUTPUT = """
    def step(batch):
        part = {{k: v.chunk(2)[rank] for k, v in batch.items()}}
        loss = ahead(model, part)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        return loss, {}

    return schedlang.TrainingProgram(model, step)
"""


@pytest.mark.parametrize(
    "output, said",
    [
        ("model(part['input'])", ""),
        ("model(batch['input'])[rank:][:3]", ""),  # overlapping rows: part not known
        ("model(batch['input'])[rank * 2:][:2, :1]", "(2, 1) instead of torch.float64 (4, 2)"),
        ("model(part['input'])[:1]", "(1, 2) instead of torch.float64 (4, 2)"),
        ("model(batch['input'])[..., None]", "(4, 2, 1) instead of torch.float64 (4, 2)"),
    ],
)
def test_an_output_of_another_shape(output: str, said: str, pool: Pool) -> None:
    """Outputs that cannot be parts of the original's output fail with both shapes."""
    report = judge_body(OUTPUT.format(output), pool)
    notes = [row.note for row in report.rows if row.kind == "training outputs" and not row.ok]
    assert report.ok == (not said) and all(said in note for note in notes), str(report)
    assert bool(notes) == bool(said)


def test_parts_of_an_output_in_two_dims() -> None:
    """Blocks of a grid of ranks are assembled, whichever dim comes first."""
    full = torch.arange(24.0).reshape(4, 6)
    rows = [part for strip in full.chunk(2) for part in strip.chunk(3, 1)]
    columns = [part for strip in full.chunk(3, 1) for part in strip.chunk(2)]
    strided = [full[k::2] for k in range(2)]  # as samplers distribute rows
    for parts in (rows, columns, strided, full.chunk(4), full.chunk(3, 1)):
        assert torch.equal(program_rows._assemble_output(parts, full), full)
    zigzag = [full[:, [0, 1, 4, 5]], full[:, [2, 3]]]
    for dtype in (torch.float32, torch.bfloat16):  # nearest places, within roundings
        parts = [(part * 1.001).to(dtype) for part in zigzag]
        made = program_rows._assemble_output(parts, full)
        assert made is not None and torch.allclose(made, full, rtol=0.01)
    back = [part.flip(1) for part in zigzag]
    assert not torch.equal(program_rows._assemble_output(back, full), full)
    assert program_rows._assemble_output(rows[:5], full) is None


def test_lines_that_ranks_print(tmp_path: Path) -> None:
    """Printed lines of ranks are shown; with --json they do not spoil the document."""
    write_files(tmp_path, step_body("print('rank', rank, 'steps', flush=True)"))
    as_text = run_verify(tmp_path, "--against", "program.py")
    assert as_text.returncode == 0 and "rank 1 steps" in as_text.stdout, (
        as_text.stdout + as_text.stderr
    )
    as_json = run_verify(tmp_path, "--against", "program.py", "--json")
    assert json.loads(as_json.stdout)["ok"] is True, as_json.stdout


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing files, missing `program`, wrong numbers of ranks: each has its code, and exit 2."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, RIGHT)
    (tmp_path / "other.py").write_text("def programme(model):\n    pass\n")
    (tmp_path / "broken.py").write_text("import nothing_like_it\n")
    (tmp_path / "unsaid.py").write_text((HEAD + RIGHT).replace("world = 2", ""))
    for arguments, message in (
        (("--against", "nowhere.py"), "[S904]: there is no file `nowhere.py`"),
        (("--against", "other.py"), "did you mean `programme`?"),
        (("--against", "broken.py"), "[S905]: importing"),
        (("--against", "unsaid.py"), "[S767]: the number of ranks is not given"),
        (("--against", "program.py", "--ranks", "0"), "[S767]: `0` ranks"),
        (("--against", "program.py", "--ranks", "64"), "[S702]"),
        (("--against", "program.py", "--mesh", "dp=2"), "`--mesh` is about a schedule"),
        (("--ranks", "2"), "`--ranks` is about a program"),
    ):
        result = CliRunner().invoke(app, ["verify", "original.py", *arguments])
        assert result.exit_code == 2 and message in result.stderr, (
            arguments,
            result.stdout,
            result.stderr,
        )


def test_a_model_that_nothing_trains() -> None:
    """A model without trainable parameters is refused."""
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(Refusal, match="S710"):
        schedlang.verify_program(print, model=frozen, batch={"input": torch.ones(2, 2)}, ranks=2)


ROW = Row("SGD", "loss", "loss", 0.0, 1e-9, True, 0)


class SlowPool:
    """A pool whose exit takes longer than the time limit."""

    def __enter__(self) -> SlowPool:
        return self

    def __exit__(self, *_: object) -> None:
        signal.raise_signal(signal.SIGALRM)  # the signal of the time limit


def test_a_verdict_that_is_there_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that end after the time limit do not change a verdict that came before it."""
    write_files(tmp_path, RIGHT)
    monkeypatch.setattr(judge, "judge", lambda *_, **__: Report((ROW,), title="there"))
    monkeypatch.setattr(judge, "Pool", lambda **_: SlowPool())
    monkeypatch.chdir(tmp_path)
    files = {"program": tmp_path / "program.py", "model": tmp_path / "original.py"}
    assert schedlang.verify_program(**files, timeout=300).title == "there"
    arguments = ["verify", "original.py", "--against", "program.py", "--timeout", "300"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "not finished" not in result.stderr, result.stderr


def test_the_limit_ends_what_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit before a verdict ends with Hang."""
    write_files(tmp_path, RIGHT)
    monkeypatch.setattr(judge, "judge", lambda *_, **__: signal.raise_signal(signal.SIGALRM))
    monkeypatch.setattr(judge, "Pool", lambda **_: contextlib.nullcontext())
    files = {"program": tmp_path / "program.py", "model": tmp_path / "original.py"}
    with pytest.raises(Hang, match="not finished after 300 s"):
        schedlang.verify_program(**files, timeout=300)
