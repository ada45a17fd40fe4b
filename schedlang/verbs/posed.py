"""What is to be proven of a schedule file: its plan with values, or a reduced one, and batches."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedlang.modelfile import ModelFile
    from schedlang.nodes import File
    from schedlang.passes.proving.sides import Case
    from schedlang.passes.reading.state import Settings
    from schedlang.passes.shrinking.shrink import Shrunk
    from schedlang.plan import Plan


@dataclass(frozen=True)
class Posed:
    """A case, what was reduced for it (None if nothing was), and the command that poses it."""

    case: Case
    small: Shrunk | None
    command: str


def posed(
    file: Path, found: ModelFile, given: Settings, *, model: str | None = None, seed: int = 0,
    only: str | None = None, dtype: str | None = None, shrink: bool | None = None,
) -> Posed:  # fmt: skip
    """Read a schedule and make its model; the options are those of `schedlang verify`.

    `shrink` None reduces a model on the meta device only.  Raises Refusal for what cannot be run.
    """
    from schedlang.passes.proving.asked import STEPS, steps_of
    from schedlang.passes.proving.sides import Case
    from schedlang.passes.reading.rows import only_lines, repeated
    from schedlang.passes.shrinking.shrink import lies_on_meta, shrunk
    from schedlang.schedule import Schedule
    from schedlang.syntax import parse, read

    tree, module = parse(read(file)), found.model(seed=seed, meta=bool(shrink))
    small = None
    if shrink or (shrink is None and lies_on_meta(module)):
        small = shrunk(tree, given, found, module, _batches(found, seed, STEPS), seed)
        if (steps := steps_of(small.plan)) > STEPS:
            small = shrunk(tree, given, found, module, _batches(found, seed, steps), seed)
        plan, batches = small.plan, small.batches
    else:
        plan = Schedule(module, tree, given).plan()
        batches = _batches(found, seed, steps_of(plan))
    meant = None
    if only is not None:  # what a part of the rows costs, nobody has said anything about
        plan = replace(only_lines(plan, only), expected=())
    elif plan.expected:
        meant = _meant(tree, found, given, small.whole if small is not None else plan, seed)
    case = Case(plan, batches, found.loss, found.weight, seed, dtype, meant=meant)
    command = repeated(file, plan, seed, model, only) + (" --shrink" if small else "")
    return Posed(case, small, command)


def _meant(
    tree: File, found: ModelFile, given: Settings, whole: Plan, seed: int
) -> tuple[Plan, Any]:
    """What expectations are about: the whole model on the file's own mesh, whatever is run here."""
    from schedlang.diagnostic import Refusal
    from schedlang.schedule import Schedule

    if given.mesh:
        # its own mesh may ask for ranks that only a job has: then that of the command
        with suppress(Refusal):
            whole = Schedule(whole.model.model, tree, replace(given, mesh={})).plan()
    return whole, found.batch(seed)


def _batches(found: ModelFile, seed: int, steps: int) -> tuple[Any, ...]:
    return tuple(found.batch(seed + step) for step in range(steps))
