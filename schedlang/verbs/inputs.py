"""Inputs of verbs: settings, schedules with their plans, saved plans, proof cases; and output
files."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.diagnostics.source import Source, open_regular
from schedlang.verbs.exits import bad_option

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.modelfile import ModelFile
    from schedlang.ir.plan import Plan
    from schedlang.language.nodes import File
    from schedlang.passes.elaborate.state import Settings
    from schedlang.passes.reduce_model.shrink import ReducedModel
    from schedlang.passes.simulate.account import Account
    from schedlang.passes.verify.proof_case import Case


def parse_settings(knobs: Sequence[str] | None, mesh: str | None) -> Settings:
    """Parse `--knob` and `--mesh`, with the world of torchrun if there is one; refuses S109."""
    from schedlang.passes.elaborate.state import Settings

    sizes = {}
    for name, text in (
        _parse_pair("--mesh", part) for part in (mesh or "").split(",") if part.strip()
    ):
        if not text.isdigit() or int(text) < 1:
            title = f"cannot read `--mesh {name}={text}`"
            bad_option(title, "the size of an axis must be an integer above 0")
        sizes[name] = int(text)
    world = os.environ.get("WORLD_SIZE", "")
    values = dict(_parse_pair("--knob", part) for part in knobs or ())
    return Settings(values, sizes, int(world) if world.isdigit() else None)


def _parse_pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not name or not equals or not value:
        bad_option(f"cannot read `{option} {text}`", "write name=value")
    return name, value


def use_one_thread() -> None:
    """Let libraries that this process will import start no threads: only a process with one thread
    can be forked, and a verb without values computes nothing with them."""
    for library, variable in (("numpy", "OPENBLAS_NUM_THREADS"), ("torch", "OMP_NUM_THREADS")):
        if library not in sys.modules:
            os.environ.setdefault(variable, "1")


def is_saved_plan(file: Path) -> bool:
    """Return whether a file begins as JSON does: a saved plan, not a schedule."""
    try:
        with open_regular(file) as opened:
            return opened.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except OSError:  # reading it as a schedule reports why it cannot be read
        return False


def read_saved_plan(file: Path, model: str | None) -> tuple[dict[str, Any], ModelFile]:
    """Read a saved plan and its model file: that of `--model`, or the one beside the plan.

    The model file that the plan names is printed but never run: otherwise the author of a plan
    could choose what runs.
    """
    import shlex

    from schedlang.ir.modelfile import load_model_file, model_beside
    from schedlang.passes.elaborate.plan_record import read_record

    record = read_record(file)
    model_file = record.get("model_file")
    if model is None and model_file and not model_beside(file).is_file():
        title = f"`{file}` has the rows; `--model` gives the model"
        notes = (f"the plan was made for {ascii(model_file)}; there is no `model.py` next to it",)
        model = shlex.quote(model_file) if model_file.isprintable() else "FILE"
        helps = (f"if you trust that file: `--model {model}`",)
        raise Refusal.of("S904", title, notes=notes, helps=helps)
    return record, load_model_file(model, file)


def load_saved_plan(file: Path, model: str | None) -> PlannedSchedule:
    """Return a saved plan for its model on the meta device; refuses S907 a file without a plan."""
    from schedlang.ir.model import ModelFacts
    from schedlang.language.syntax import parse
    from schedlang.passes.elaborate.plan_record import plan_from_record

    record, model_file = read_saved_plan(file, model)
    plan = plan_from_record(record, ModelFacts(model_file.model(meta=True)))
    text = Source(str(record.get("schedule_file", file)), str(record.get("schedule_text", "")))
    return PlannedSchedule(file, parse(text), plan, model_file)


@dataclass(frozen=True)
class PlannedSchedule:
    """A schedule file, its plan for the model on the meta device, the model file, and warnings."""

    file: Path
    tree: File
    plan: Plan
    model: ModelFile
    imports: float = 0.0  # seconds spent on importing the model file
    warnings: tuple[Diagnostic, ...] = ()
    rows: int | None = None  # of a step; None: those of the model file's batch

    def batch(self) -> dict[str, Any] | None:
        """Return the batch of a step; None where the model file has none."""
        return _batch_of_rows(self.model, self.rows)


def plan_schedule(
    file: Path,
    model: str | None,
    knobs: Sequence[str] | None,
    mesh: str | None,
    rows: int | None = None,
) -> PlannedSchedule:
    """Read a schedule and its model file, and plan; refuses mistakes in either.

    With `rows` a step has this number of rows, each as the first of the model file's batch.
    """
    from schedlang.ir.modelfile import load_model_file
    from schedlang.language.syntax import parse, read
    from schedlang.schedule import Schedule

    settings = parse_settings(knobs, mesh)
    tree = parse(read(file))
    start = time.perf_counter()
    model_file = load_model_file(model, file)
    import torch  # noqa: F401  (a model file may defer it; it counts as an import)

    imports = time.perf_counter() - start
    module = model_file.model(meta=True)
    schedule = Schedule(module, tree, settings)
    plan = schedule.plan()
    slices = plan.order.slices if plan.order is not None else 1
    if slices * plan.mesh.size(plan.context_axes) > 1:
        schedule = Schedule(model_to_try(model_file, module), tree, settings)
        plan = schedule.plan()
    if plan.completions:
        from schedlang.passes.complete.complete import complete_plan

        plan = complete_plan(plan, _batch_of_rows(model_file, rows), model_file.loss)
    return PlannedSchedule(file, tree, plan, model_file, imports, tuple(schedule.warnings()), rows)


MAX_TRIED_PARAMETERS = 1 << 24  # parameters: a model up to this size is made with values quickly


def model_to_try(model_file: ModelFile, module: nn.Module) -> nn.Module:
    """Return the model with values if it is small, else as it is, on the meta device.

    Whether a model can run on a part of its tokens shows only with values: a trial runs, as before
    training.
    """
    small = sum(parameter.numel() for parameter in module.parameters()) <= MAX_TRIED_PARAMETERS
    return model_file.model() if small else module


def _batch_of_rows(model: ModelFile, rows: int | None) -> dict[str, Any] | None:
    from schedlang.passes.simulate.one_rank_step import expand_rows

    batch = model.batch(0) if model.has_batch else None
    return batch if batch is None or rows is None else expand_rows(batch, rows)


def account_costs(planned: PlannedSchedule, *, memory: bool = False) -> Account:
    """Account the costs of the plan, with a batch if there is one."""
    from schedlang.passes.simulate.account import account

    loss, weight = planned.model.loss, planned.model.weight
    try:
        return account(planned.plan, planned.batch(), loss, weight=weight, memory=memory)
    except Refusal as refusal:
        if refusal.diagnostic.code != "S606":
            raise
        hint = f"or see a step of more such rows: `schedlang plan {planned.file.name} --rows N`"
        raise Refusal(
            replace(refusal.diagnostic, helps=(*refusal.diagnostic.helps, hint))
        ) from refusal


def check_folders(**written: Path | None) -> None:
    """Refuse (S109), before any work, output options whose folder does not exist or is not
    writable, and those that would replace a Python file, such as the model's."""
    for option, path in written.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            title = f"cannot write `--{option} {path}`: there is no folder `{path.parent}`"
            bad_option(title, f"make it: `mkdir -p {path.parent}`")
        if path.is_dir():
            bad_option(f"`--{option} {path}` is a folder, not a file", "give a file in it")
        if path.suffix == ".py":
            bad_option(f"`--{option} {path}` would replace a Python file", "give another name")
        if not os.access(path.parent, os.W_OK):
            title = f"cannot write `--{option} {path}`: you may not write into `{path.parent}`"
            bad_option(title, "give a file in another folder")


def write_output(path: Path, text: str) -> None:
    """Write a file that an option named, and print its path."""
    write_text(path, text)
    print(f"wrote {path}", file=sys.stderr)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; compressed if its name ends in .gz.

    A link keeps pointing to its file, and an existing file keeps its mode. Raises Refusal S109 if
    the file cannot be written: a full disk, a read-only folder.
    """
    target, data = Path(os.path.realpath(path)), text.encode()
    if path.suffix == ".gz":
        import gzip

        data = gzip.compress(data, 6, mtime=0)
    try:
        _write_atomically(target, data)
    except OSError as error:
        title = f"cannot write `{path}`: {error.strerror or error}"
        bad_option(title, "make room, or give a file in another folder")


def _write_atomically(target: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.chmod(name, target.stat().st_mode if target.exists() else 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


@dataclass(frozen=True)
class ProofCase:
    """A case to prove, the reduced model (None: not reduced), and the command that repeats the
    proof."""

    case: Case
    small: ReducedModel | None
    command: str


def make_proof_case(
    file: Path,
    model_file: ModelFile,
    settings: Settings,
    *,
    model: str | None = None,
    seed: int = 0,
    only: str | None = None,
    dtype: str | None = None,
    shrink: bool | None = None,
) -> ProofCase:
    """Read a schedule and make its model; the options are those of `schedlang verify`.

    `shrink` None reduces only a model on the meta device. Raises Refusal for what cannot be run.
    """
    from schedlang.language.syntax import parse, read
    from schedlang.passes.elaborate.rows import plan_of_lines, verify_command
    from schedlang.passes.reduce_model.shrink import has_meta_parameters, reduce_model_file
    from schedlang.passes.verify.proof_case import Case
    from schedlang.passes.verify.requirements import STEPS, steps_of
    from schedlang.schedule import Schedule

    tree, module = parse(read(file)), model_file.model(seed=seed, meta=bool(shrink))
    small = None
    if shrink or (shrink is None and has_meta_parameters(module)):
        small = reduce_model_file(
            tree, settings, model_file, module, _make_batches(model_file, seed, STEPS), seed
        )
        if (steps := steps_of(small.plan)) > STEPS:
            small = reduce_model_file(
                tree, settings, model_file, module, _make_batches(model_file, seed, steps), seed
            )
        plan, batches = small.plan, small.batches
    else:
        plan = Schedule(module, tree, settings).plan()
        batches = _make_batches(model_file, seed, steps_of(plan))
    target = None
    if only is not None:  # expectations are about all rows, not about a part
        plan = replace(plan_of_lines(plan, only), expected=())
    elif plan.expected:
        target = _expectation_subject(
            tree, model_file, settings, small.full_plan if small is not None else plan, seed
        )
    case = Case(plan, batches, model_file.loss, model_file.weight, seed, dtype, expected_for=target)
    command = verify_command(file, plan, seed, model, only) + (" --shrink" if small else "")
    return ProofCase(case, small, command)


def _expectation_subject(
    tree: File, model_file: ModelFile, settings: Settings, full_plan: Plan, seed: int
) -> tuple[Plan, Any]:
    """Return the plan and the batch that expectations are about: the full model on the file's own
    mesh."""
    from schedlang.schedule import Schedule

    if settings.mesh:
        # the file's mesh may need ranks that only a job has: then use the command's
        with suppress(Refusal):
            full_plan = Schedule(full_plan.model.model, tree, replace(settings, mesh={})).plan()
    return full_plan, model_file.batch(seed)


def _make_batches(model_file: ModelFile, seed: int, steps: int) -> tuple[Any, ...]:
    return tuple(model_file.batch(seed + step) for step in range(steps))
