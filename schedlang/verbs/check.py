"""check: syntax, names, domains and arguments of schedules; with a model, static proofs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.exits import FAILS, HOLDS, REFUSED, UNCHECKED, show_json
from schedlang.verbs.options import AsJson, Common, verb

if TYPE_CHECKING:
    from schedlang.passes.static_checks.static import Static
    from schedlang.verbs.lockfile import LockComparison


@verb
def check(
    files: Annotated[list[Path], typer.Argument(help="Schedule files.", metavar="FILE")],
    *,
    common: Common,
    locked: Annotated[
        bool, typer.Option("--locked", help="Also compare with each FILE.lock; needs the model.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check syntax, names, domains and arguments; needs neither torch nor the model.

    With `--model` it also proves, without starting a rank: gradients are all-reduced over the right
    axes, only partial values are all-reduced, ranks agree on collectives, and every tensor has an
    owner.
    """
    from schedlang.verbs.inputs import parse_settings
    from schedlang.verbs.quick_check import collect_warnings, show_warnings

    warnings = collect_warnings(files, parse_settings(common.knob, common.mesh))
    proven = _prove_static(files, common) if common.model is not None else {}
    problems = [item for static in proven.values() for item in static.problems]
    unchecked = any(not claim.checked for item in proven.values() for claim in item.claims)
    changed = _changed_locks(files, common.model) if locked else []
    code = REFUSED if problems else FAILS if changed else UNCHECKED if unchecked else HOLDS
    if as_json:
        show_json(
            {
                "exit": code,
                "diagnostics": [diagnostic.to_json() for diagnostic in (*problems, *warnings)],
                **({"static": {str(f): p.to_json() for f, p in proven.items()}} if proven else {}),
                **({"locks": [item.to_json() for item in changed]} if locked else {}),
            }
        )
    else:
        show_warnings([*problems, *warnings])
        for file in files:
            _print_result(file, proven.get(file))
        for compared in changed:
            print(compared)
    if code:
        raise typer.Exit(code)


def _prove_static(files: Sequence[Path], common: Common) -> dict[Path, Static]:
    """Return the static proofs of each schedule, with the model file's batch."""
    from schedlang.passes.simulate.kernel_gains import count_step_gains
    from schedlang.passes.static_checks.static import static
    from schedlang.verbs.inputs import plan_schedule

    proven = {}
    for file in files:
        planned = plan_schedule(file, common.model, common.knob, common.mesh)
        count_step_gains(planned.plan, planned.model.batch(0))
        proven[file] = static(
            planned.plan, planned.model.batch(0), planned.model.loss, planned.model.weight
        )
    return proven


def _changed_locks(files: Sequence[Path], model: str | None) -> list[LockComparison]:
    """Return the schedules whose locks do not hold; refuse a schedule with rows but without a
    lock."""
    from schedlang.verbs.examine import is_library
    from schedlang.verbs.lockfile import compare_lock

    compared = [compare_lock(file, model) for file in files if not is_library(file)]
    return [comparison for comparison in compared if comparison.changes]


def _print_result(file: Path, static: Static | None) -> None:
    if static is None:
        print(f"{file}: holds")
        return
    holds = all(claim.holds for claim in static.claims)
    verdict = (
        "holds" if holds else "DOES NOT HOLD" if static.problems else "not all of it was checked"
    )
    print(f"{file}: {verdict}")
    for claim in static.claims:
        print(f"  {claim.name:<16} {claim.description}: {claim.verdict}")
    for gap in static.unseen:
        print(f"  not covered: {gap}")
