"""Rows of a plan: subsets of rows, comparison of plans, short texts for many modules.

* Plans of some rows only: of given lines (`--only`), or of rows that localization suspects.
* Whether the text of a schedule expands to a given plan.
* Many module names as one short text, or as one path of the language.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.mesh import Mesh
from schedlang.ir.model import ModelFacts
from schedlang.ir.plan import Action, Plan
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings


def plan_of_rows_only(plan: Plan, rows: Sequence[Action]) -> Plan:
    """Return a plan of some rows, on a mesh in which axes that no such row uses have size 1.

    Raises Refusal where these rows alone are not legal.
    """
    used = plan_of_rows(plan, rows).used_axes
    axes = tuple((name, size if name in used else 1) for name, size in plan.mesh.axes)
    return plan_of_rows(plan, rows, replace(plan.mesh, axes=axes))


def plan_of_rows(plan: Plan, rows: Sequence[Action], mesh: Mesh | None = None) -> Plan:
    """Return a plan of other rows, with the model and decisions of `plan`, on its mesh or `mesh`.

    Raises Refusal where these rows alone are not legal.
    """
    new_plan = Plan.empty(plan.model, mesh or plan.mesh)
    new_plan = replace(new_plan, decisions=plan.decisions, relaxed=plan.relaxed)
    for action in rows:
        new_plan = new_plan.add(action.primitive, action.sites, step=action.step, span=action.span)
    return new_plan


def describe_row(action: Action) -> str:
    """Return a row as text: its place, its modules and its primitive."""
    span = action.span
    location = f"{span.source.name}:{span.line}: " if span else ""
    sites = (
        action.sites[0]
        if len(action.sites) == 1
        else f"{action.sites[0]} and {len(action.sites) - 1} more"
    )
    return f"{location}{sites}  {action.primitive}".rstrip()


def plan_of_lines(plan: Plan, lines: str) -> Plan:
    """Return the plan of the rows on the given lines, such as "11,14-17" (S705)."""
    line_numbers: set[int] = set()
    for part in lines.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise Refusal.of(
                "S705",
                f"cannot read the lines `--only {lines}`",
                helps=("write `--only 11,14-17`",),
            )
        line_numbers |= set(range(int(first), int(last or first) + 1))
    rows = [action for action in plan.actions if action.span.line in line_numbers]
    if not rows:
        raise Refusal.of(
            "S705",
            f"no row is on the lines {lines}",
            helps=("give line numbers of the schedule file",),
        )
    return plan_of_rows_only(plan, rows)


def verify_command(
    file: object, plan: Plan, seed: int, model: str | None, lines: str | None
) -> str:
    """Return the shell command that repeats a verification."""
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.axes)
    parts = ["schedlang verify", str(file), f"--seed {seed}"]
    parts += [f"--mesh {mesh}"] if mesh else []
    parts += [f"--model {model}"] if model else []
    parts += [f"--only {lines}"] if lines else []
    return " ".join(parts)


def expands_to(file: n.File, plan: Plan, facts: ModelFacts, settings: Settings) -> bool:
    """Return whether a file expands to a plan equal to `plan`; its rows may be grouped otherwise.

    Returns False where the file is refused.
    """
    try:
        expanded = expand(file, facts, settings).plan
    except Refusal:
        return False
    if expanded is None or _count_actions(expanded) != _count_actions(plan):
        return False
    return replace(expanded, actions=()) == replace(plan, actions=())


def _count_actions(plan: Plan) -> Counter[tuple[str, str, tuple[str, ...]]]:
    """Count the actions of a plan by (primitive, step, module)."""
    return Counter((repr(a.primitive), a.step, site) for a in plan.actions for site in a.groups)


Key = TypeVar("Key")


def fold_names(sites: Sequence[str]) -> str:
    """Return one text for several sites.

    It is `transformer.h.*.mlp` for sites that differ in numbers only, else the first site and the
    number of the others.
    """
    if len(sites) == 1:
        return sites[0] or "the model"
    rows = [site.split(".") for site in sites]
    if len({len(row) for row in rows}) == 1:
        merged = [_merge_segment(column) for column in zip(*rows)]
        if all(merged):
            return ".".join(merged)
    return f"{sites[0] or 'the model'} and {len(sites) - 1} more"


def _merge_segment(column: Sequence[str]) -> str:
    """Return the common segment of names: `*` for different numbers, "" for different words."""
    if len(set(column)) == 1:
        return column[0]
    return "*" if all(name.isdigit() for name in column) else ""


def shape_of(site: str) -> str:
    """Return a site's name with `*` for each number: equal for the same module of other layers."""
    return ".".join("*" if part.isdigit() else part for part in site.split("."))


def group_sites(
    sites: Iterable[str], key: Callable[[str], Key]
) -> Mapping[tuple[str, Key], tuple[str, ...]]:
    """Group sites by (`shape_of(site)`, `key(site)`), in the order of the first site of each."""
    sites_by_key: dict[tuple[str, Key], list[str]] = {}
    for site in sites:
        sites_by_key.setdefault((shape_of(site), key(site)), []).append(site)
    return {group_key: tuple(group) for group_key, group in sites_by_key.items()}


def describe_group(group: Sequence[str], all_sites: Iterable[str]) -> str:
    """Return the path that `selector_path` finds for sites of one shape, as text for display.

    Without such a path: the first site and the number of the others.
    """
    path = selector_path(group, all_sites)
    if path is None:
        return f"{group[0]} and {len(group) - 1} more"
    return ".".join(printer.seg(seg).replace("`", "") for seg in path.segs) or "the model"


def selector_path(group: Sequence[str], all_sites: Iterable[str]) -> n.Path | None:
    """Return the path that selects exactly the sites of `group`, which have one `shape_of`.

    The path is `h.*` if `group` has all sites of this shape among `all_sites`. Otherwise numbers
    become a slice (`h[0:6]`, `h[0:6:2]`, `h[1, 5]`), or alternatives where no name precedes them.
    Returns None where several slices would select other sites, too.
    """
    shape = shape_of(group[0])
    if len(group) == 1 or len(group) == sum(1 for site in all_sites if shape_of(site) == shape):
        return path_of(group[0] if len(group) == 1 else shape)
    columns = [list(dict.fromkeys(column)) for column in zip(*(s.split(".") for s in group))]
    if math.prod(map(len, columns)) != len(group):
        return None
    segs: list[n.Seg] = []
    for names in columns:
        if len(names) == 1:
            segs += path_of(names[0]).segs
        elif segs and not segs[-1].index and all(name.isdigit() for name in names):
            segs[-1] = replace(segs[-1], index=_index_of([int(name) for name in names]))
        else:
            segs.append(n.Seg(f"{{{','.join(names)}}}"))
    return n.Path(tuple(segs))


PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|\*")


def path_of(*names: str) -> n.Path:
    """Return the path of nested names; a name outside the language's syntax gets backquotes."""
    parts = (part for name in names if name for part in name.split("."))
    return n.Path(tuple(n.Seg(p if PLAIN.fullmatch(p) else f"`{p}`") for p in parts))


def _index_of(numbers: Sequence[int]) -> tuple[str | n.Slice, ...]:
    """Return numbers as an index of the language: `[2:5]`, `[0:8:2]`, `[1, 5, 6]`."""
    first, end, step = numbers[0], numbers[-1] + 1, numbers[1] - numbers[0]
    is_regular = step > 0 and list(numbers) == list(range(first, end, step))
    if is_regular and (len(numbers) > 2 or step == 1):
        return (n.Slice(str(first), str(end), None if step == 1 else str(step)),)
    return tuple(map(str, numbers))
