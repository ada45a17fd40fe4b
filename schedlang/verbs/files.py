"""What the verbs of a plan share: a schedule's plan from its files, its account, whole writes."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedlang.diagnostic import Diagnostic
    from schedlang.modelfile import ModelFile
    from schedlang.nodes import File
    from schedlang.passes.costs.account import Account
    from schedlang.plan import Plan


@dataclass(frozen=True)
class Planned:
    """A schedule file, its plan for the model on the meta device, the model file, warnings."""

    file: Path
    tree: File
    plan: Plan
    model: ModelFile
    imports: float = 0.0  # seconds spent on importing the model file
    warnings: tuple[Diagnostic, ...] = ()


def planned(
    file: Path, model: str | None, knobs: Sequence[str] | None, mesh: str | None
) -> Planned:
    """Read a schedule and its model file, and plan; refuses whatever is wrong in either."""
    from schedlang.modelfile import load_model_file
    from schedlang.schedule import Schedule
    from schedlang.syntax import parse, read
    from schedlang.verbs.settings import settings

    given = settings(knobs, mesh)
    tree = parse(read(file))
    start = time.perf_counter()
    found = load_model_file(model, file)
    import torch  # noqa: F401  (a model file may put it off; it is counted among the imports)

    imports = time.perf_counter() - start
    schedule = Schedule(found.model(meta=True), tree, given)
    made = schedule.plan()
    if made.completing:
        from schedlang.passes.completing.complete import completed

        made = completed(made, found.batch(0) if found.has_batch else None, found.loss)
    return Planned(file, tree, made, found, imports, tuple(schedule.warnings()))


def accounted(one: Planned, *, memory: bool = False) -> Account:
    """What the plan costs, with the model file's batch if it has one."""
    from schedlang.passes.costs.account import account

    batch = one.model.batch(0) if one.model.has_batch else None
    return account(one.plan, batch, one.model.loss, weight=one.model.weight, memory=memory)


def check_folders(**written: Path | None) -> None:
    """Refuse (S109), before any work, options that would write where there is no folder."""
    from schedlang.diagnostic import Diagnostic, Refusal

    for option, path in written.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            title = f"cannot write `--{option} {path}`: there is no folder `{path.parent}`"
            raise Refusal(Diagnostic("S109", title, helps=(f"make it: `mkdir -p {path.parent}`",)))
        if path.is_dir():
            title = f"`--{option} {path}` is a folder, not a file"
            raise Refusal(Diagnostic("S109", title, helps=("give a file in it",)))
        if not os.access(path.parent, os.W_OK):
            title = f"cannot write `--{option} {path}`: you may not write into `{path.parent}`"
            raise Refusal(Diagnostic("S109", title, helps=("give a file in another folder",)))


def write_asked(path: Path, text: str) -> None:
    """Write a file that an option named, and say so."""
    write_text(path, text)
    print(f"wrote {path}", file=sys.stderr)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; packed if its name ends in .gz."""
    import gzip

    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, 6, mtime=0)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
