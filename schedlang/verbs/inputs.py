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
from schedlang.diagnostics.source import open_regular
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
    given = dict(_parse_pair("--knob", part) for part in knobs or ())
    return Settings(given, sizes, int(world) if world.isdigit() else None)


def _parse_pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not name or not equals or not value:
        bad_option(f"cannot read `{option} {text}`", "write name=value")
    return name, value


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

    from schedlang.ir.modelfile import load_model_file
    from schedlang.passes.elaborate.plan_record import read_record

    record = read_record(file)
    named = record.get("model_file")
    if model is None and named and not (file.parent / "model.py").is_file():
        title = f"`{file}` has the rows; `--model` gives the model"
        notes = (f"the plan was made for {ascii(named)}; there is no `model.py` next to it",)
        model = shlex.quote(named) if named.isprintable() else "FILE"
        helps = (f"if you trust that file: `--model {model}`",)
        raise Refusal.of("S904", title, notes=notes, helps=helps)
    return record, load_model_file(model, file)


def load_saved_plan(file: Path, model: str | None) -> PlannedSchedule:
    """Return a saved plan for its model on the meta device; refuses S907 a file without a plan."""
    from schedlang.diagnostics.source import Source
    from schedlang.ir.model import ModelFacts
    from schedlang.language.syntax import parse
    from schedlang.passes.elaborate.plan_record import plan_from_record

    record, found = read_saved_plan(file, model)
    plan = plan_from_record(record, ModelFacts(found.model(meta=True)))
    text = Source(str(record.get("schedule_file", file)), str(record.get("schedule_text", "")))
    return PlannedSchedule(file, parse(text), plan, found)


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

    given = parse_settings(knobs, mesh)
    tree = parse(read(file))
    start = time.perf_counter()
    found = load_model_file(model, file)
    import torch  # noqa: F401  (a model file may defer it; it counts as an import)

    imports = time.perf_counter() - start
    module = found.model(meta=True)
    schedule = Schedule(module, tree, given)
    made = schedule.plan()
    slices = made.order.slices if made.order is not None else 1
    if slices * made.mesh.size(made.context_axes) > 1:
        schedule = Schedule(model_to_try(found, module), tree, given)
        made = schedule.plan()
    if made.completions:
        from schedlang.passes.complete.complete import complete_plan

        made = complete_plan(made, _batch_of_rows(found, rows), found.loss)
    return PlannedSchedule(file, tree, made, found, imports, tuple(schedule.warnings()), rows)


MAX_TRIED_PARAMETERS = 1 << 24  # parameters: a model up to this size is made with values quickly


def model_to_try(found: ModelFile, module: nn.Module) -> nn.Module:
    """Return the model with values if it is small, else as it is, on the meta device.

    Whether a model can run on a part of its tokens shows only with values: a trial runs, as before
    training.
    """
    small = sum(parameter.numel() for parameter in module.parameters()) <= MAX_TRIED_PARAMETERS
    return found.model() if small else module


def _batch_of_rows(model: ModelFile, rows: int | None) -> dict[str, Any] | None:
    from schedlang.passes.simulate.one_rank_step import expand_rows

    batch = model.batch(0) if model.has_batch else None
    return batch if batch is None or rows is None else expand_rows(batch, rows)


def account_costs(one: PlannedSchedule, *, memory: bool = False) -> Account:
    """Account the costs of the plan, with a batch if there is one."""
    from schedlang.passes.simulate.account import account

    loss, weight = one.model.loss, one.model.weight
    try:
        return account(one.plan, one.batch(), loss, weight=weight, memory=memory)
    except Refusal as refusal:
        if refusal.diagnostic.code != "S606":
            raise
        more = f"or see a step of more such rows: `schedlang plan {one.file.name} --rows N`"
        raise Refusal(
            replace(refusal.diagnostic, helps=(*refusal.diagnostic.helps, more))
        ) from refusal


def check_folders(**written: Path | None) -> None:
    """Refuse (S109), before any work, output options whose folder does not exist or is not
    writable."""
    for option, path in written.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            title = f"cannot write `--{option} {path}`: there is no folder `{path.parent}`"
            bad_option(title, f"make it: `mkdir -p {path.parent}`")
        if path.is_dir():
            bad_option(f"`--{option} {path}` is a folder, not a file", "give a file in it")
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
    found: ModelFile,
    given: Settings,
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

    tree, module = parse(read(file)), found.model(seed=seed, meta=bool(shrink))
    small = None
    if shrink or (shrink is None and has_meta_parameters(module)):
        small = reduce_model_file(
            tree, given, found, module, _make_batches(found, seed, STEPS), seed
        )
        if (steps := steps_of(small.plan)) > STEPS:
            small = reduce_model_file(
                tree, given, found, module, _make_batches(found, seed, steps), seed
            )
        plan, batches = small.plan, small.batches
    else:
        plan = Schedule(module, tree, given).plan()
        batches = _make_batches(found, seed, steps_of(plan))
    subject = None
    if only is not None:  # expectations are about all rows, not about a part
        plan = replace(plan_of_lines(plan, only), expected=())
    elif plan.expected:
        subject = _expectation_subject(
            tree, found, given, small.full_plan if small is not None else plan, seed
        )
    case = Case(plan, batches, found.loss, found.weight, seed, dtype, expected_for=subject)
    command = verify_command(file, plan, seed, model, only) + (" --shrink" if small else "")
    return ProofCase(case, small, command)


def _expectation_subject(
    tree: File, found: ModelFile, given: Settings, whole: Plan, seed: int
) -> tuple[Plan, Any]:
    """Return the plan and the batch that expectations are about: the full model on the file's own
    mesh."""
    from schedlang.schedule import Schedule

    if given.mesh:
        # the file's mesh may need ranks that only a job has: then use the command's
        with suppress(Refusal):
            whole = Schedule(whole.model.model, tree, replace(given, mesh={})).plan()
    return whole, found.batch(seed)


def _make_batches(found: ModelFile, seed: int, steps: int) -> tuple[Any, ...]:
    return tuple(found.batch(seed + step) for step in range(steps))
