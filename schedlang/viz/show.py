"""A plan prepared for printing, and its text: rows folded over equal modules, with their costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from schedlang.diagnostics.tables import (
    column_widths,
    format_bytes,
    format_count,
    format_row,
    format_table,
    wrap_text,
)
from schedlang.ir.memory import CLASSES
from schedlang.ir.model import are_nested
from schedlang.ir.placement import Layout
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.language.value import show_value
from schedlang.passes.elaborate.plan_record import plan_to_record
from schedlang.passes.elaborate.rows import describe_group, group_sites
from schedlang.passes.elaborate.state import arguments_text, short_dtype
from schedlang.passes.simulate.account import NOT_ESTIMATED, Account
from schedlang.passes.simulate.memory import RankClass
from schedlang.passes.simulate.traffic import Collective
from schedlang.report import describe_equivalence

# -- a plan as a value to print --------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """Collectives of one sort caused by a line, summed over its modules and microbatches."""

    kind: str
    axes: tuple[str, ...]
    what: str
    count: int
    bytes: int  # of all of them

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        return asdict(self) | {"axes": list(self.axes)}


@dataclass(frozen=True)
class Line:
    """One row at modules that it treats equally.

    sign   `~` changed in place, `=` follows from another name of the same weight, `?` a check
    said   the layout of the parameters as a type, or the arguments of the row
    place  file, line and column of the row
    """

    sign: str
    pattern: str
    sites: tuple[str, ...]
    verb: str
    said: str
    row: int
    place: tuple[str, int, int]
    effects: tuple[Effect, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "sign": self.sign,
            "pattern": self.pattern,
            "sites": list(self.sites),
            "do": self.verb,
            "said": self.said,
            "row": self.row,
            "from": list(self.place),
            "collectives": [effect.to_json() for effect in self.effects],
        }


@dataclass(frozen=True)
class Step:
    """The lines of one step; the name is "" outside of steps."""

    name: str
    relaxed: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class View:
    """Everything that a printed plan shows; `format_view` formats it."""

    title: str
    plan: Plan = field(repr=False)
    account: Account
    steps: tuple[Step, ...]

    @property
    def rows(self) -> int:
        """The number of rows that change something."""
        return len({line.row for line in self._lines() if line.sign != "?"})

    @property
    def changes(self) -> int:
        """The number of changed modules, summed over rows."""
        return sum(len(line.sites) for line in self._lines() if line.sign != "?")

    @property
    def checks(self) -> int:
        """The number of rows that only check."""
        return len({line.row for line in self._lines() if line.sign == "?"})

    @property
    def grade(self) -> str:
        """The grade of equality: exact, rounding, or what else the plan gives up."""
        return ", ".join(sorted(self.plan.gives_up)) or "exact"

    def to_json(self) -> dict[str, Any]:
        """Return the plan's record and its account, and the lines as printed."""
        return {
            **plan_to_record(self.plan),
            "title": self.title,
            "grade": self.grade,
            "parameters": sum(fact.numel for fact in self.plan.model.unique_parameters.values()),
            "steps": [
                {
                    "name": step.name,
                    "relaxed": list(step.relaxed),
                    "lines": [x.to_json() for x in step.lines],
                }
                for step in self.steps
            ],
            "account": self.account.to_json(),
        }

    def _lines(self) -> Iterator[Line]:
        for step in self.steps:
            yield from step.lines


def make_view(plan: Plan, account: Account, title: str = "", *, each: bool = False) -> View:
    """Prepare the plan for printing; with `each`, one line for each module."""
    steps: list[Step] = []
    relaxed = dict(plan.relaxed)
    split: set[str] = set()  # parameters whose layout an earlier row has set
    for action in plan.actions:
        lines = tuple(_lines_of(plan, account, action, split, each))
        if action.changes(Facet.PLACEMENT):
            split |= {f.name for s in action.sites for f in plan.model.sites[s].parameters.values()}
        if steps and steps[-1].name == action.step:
            previous = steps.pop()
            lines = (*previous.lines, *lines)
        steps.append(Step(action.step, relaxed.get(action.step, ()), lines))
    return View(title, plan, account, tuple(steps))


def _lines_of(
    plan: Plan, account: Account, action: Action, split: set[str], each: bool
) -> Iterator[Line]:
    def key(site: str) -> tuple[str, str]:
        sign, description = _sign_of(plan, action, site, split), _describe_row(plan, action, site)
        return (sign, f"{description}\n{site}") if each else (sign, description)

    related = [comm for comm in account.collectives or () if comm.row == action.row]
    groups = group_sites(action.sites, key)
    for index, ((_, (sign, description)), sites) in enumerate(groups.items()):
        last = index == len(groups) - 1  # collectives of no group go with the last
        included = [comm for comm in related if last or _is_at_modules(comm, sites)]
        related = [comm for comm in related if comm not in included]
        yield Line(
            sign,
            describe_group(sites, plan.model.sites),
            sites,
            action.name,
            description.split("\n")[0],
            action.row,
            _place(action),
            _effects(included),
        )


def _is_at_modules(comm: Collective, sites: Sequence[str]) -> bool:
    """Return whether a collective happens at one of these modules, below or above it."""
    return any(are_nested(comm.fqn, site) for site in sites)


def _place(action: Action) -> tuple[str, int, int]:
    span = action.span
    return (span.source.name, span.line, span.col) if span else ("", 0, 0)


def _effects(comms: Sequence[Collective]) -> tuple[Effect, ...]:
    sums: dict[tuple[str, tuple[str, ...], str], list[int]] = {}
    for comm in comms:
        what = comm.what.split(" to stage")[0].removeprefix("to stage").strip()
        what = "output" if comm.what.startswith("to stage") else what
        what = "output grad" if comm.what.startswith("grad to stage") else what
        entry = sums.setdefault((comm.kind, comm.axes, what), [0, 0])
        entry[0], entry[1] = entry[0] + comm.count, entry[1] + comm.total
    return tuple(Effect(*key, count, size) for key, (count, size) in sums.items())


def _sign_of(plan: Plan, action: Action, site: str, split: set[str]) -> str:
    if not action.has_effect:
        return "?"
    names = {fact.name for fact in plan.model.sites[site].parameters.values()}
    tied = action.changes(Facet.PLACEMENT) and names and names <= split
    return "=" if tied and _tied_to(plan, site) else "~"


def _tied_to(plan: Plan, site: str) -> str:
    """Return the module that owns the weight of this one under another name; "" if there is
    none."""
    for local, fact in plan.model.sites[site].parameters.items():
        name = f"{site}.{local}" if site else local
        if fact.name != name:
            return plan.model.owner(fact.name).fqn
    return ""


def _describe_row(plan: Plan, action: Action, site: str) -> str:
    """Describe a row at a module: a type where it changes a layout, else its arguments."""
    facts, shapes = plan.model.sites[site].parameters, action.changes(Facet.SHAPE)
    if shapes or action.changes(Facet.PLACEMENT):
        tied = _tied_to(plan, site)
        if tied and action.changes(Facet.PLACEMENT):
            return f"tied to {tied}"
        changed = [f for f in facts.values() if plan.layout(f.name) != Layout.whole(f.shape)]
        if changed:
            return _type_text(plan, changed[0].name, padding=shapes)
        edges = plan.boundaries.get(site, ())
        if edges:
            return ", ".join(f"{e.show()} over {e.axis}" for e in edges)
    return arguments_text(action.primitive)


def _type_text(plan: Plan, name: str, padding: bool = False) -> str:
    """Format a parameter as f32[768, 2304@tp]; with `padding`, f32[50257 -> 50304, 768]."""
    layout, dtype = plan.layout(name), short_dtype(plan.model.parameters[name].dtype)
    if not padding:
        return dtype + layout.show()
    pairs = zip(layout.shape, layout.padded)
    return f"{dtype}[{', '.join(str(a) if a == b else f'{a} -> {b}' for a, b in pairs)}]"


# -- its text --------------------------------------------------------------------------------------


WIDTH = 100
MOST_CLASSES = 16
Row = tuple[str, ...]


def format_view(view: View, *, each: bool = False, width: int | None = None) -> str:
    """Format the plan for a terminal; `each` shows all kinds of ranks.

    Tables wider than `width` are split over more lines; None: unlimited width.
    """
    lines = [*wrap_text(_headline(view), width), ""]
    cells = [(step, [_cells(line) for line in step.lines]) for step in view.steps]
    lay = _layout([line for _, rows in cells for line in rows], width)
    for step, rows in cells:
        relaxed = f"  relax({', '.join(step.relaxed)})" if step.relaxed else ""
        lines.append((f'step "{step.name}"' if step.name else "outside of steps") + relaxed)
        lines += [text for line in rows for text in lay(line)]
        lines.append("")
    return "\n".join(
        [
            *lines,
            *_ranks(view, each, width),
            *_fused(view, width),
            *_traffic(view, width),
            *_timeline(view, width or WIDTH),
            *_footer(view, width),
        ]
    )


def _layout(lines: Sequence[list[Row]], width: int | None) -> Callable[[list[Row]], list[str]]:
    """Choose a layout of lines: all in columns, else collectives below, else arguments below."""
    widths = column_widths([row for line in lines for row in line])
    if width is None or sum(w + 2 for w in widths if w) <= width:
        return lambda line: [format_row(row, widths) for row in line]
    tight = column_widths([_without_collectives(line) for line in lines])
    sent = column_widths([row[5:8] for line in lines for row in line])
    narrow = sum(w + 2 for w in tight if w) > width
    if narrow:
        tight = column_widths([_without_collectives(line)[:3] for line in lines])

    def lay(line: list[Row]) -> list[str]:
        first = _without_collectives(line)
        if narrow:
            head, rest = format_row(first[:3], tight), "  ".join(cell for cell in first[3:] if cell)
            fits = len(head) + len(rest) + 2 <= width
            printed = (
                [f"{head}  {rest}".rstrip()] if fits else [head, *wrap_text(rest, width, " " * 5)]
            )
        else:
            printed = [format_row(first, tight)]
        return printed + [" " * 5 + format_row(row[5:8], sent) for row in line if row[5]]

    return lay


def _without_collectives(line: list[Row]) -> Row:
    """Return the cells of a line without its collectives."""
    return (*line[0][:5], line[0][8])


def _headline(view: View) -> str:
    plan = view.plan
    knobs = "   ".join(f"{name} = {show_value(value)}" for name, value in plan.decisions)
    mesh = f"mesh {plan.mesh}" + (f" on {plan.mesh.device}" if plan.mesh.device else "")
    counts = f"{_count(view.rows, 'row')}, {_count(view.changes, 'change')}"
    checks = f", {_count(view.checks, 'check')}" if view.checks else ""
    parts = (view.title or plan.model.class_name, knobs, mesh, counts + checks)
    return "   ".join(part for part in parts if part)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


# -- rows --------------------------------------------------------------------------------------


def _cells(line: Line) -> list[Row]:
    """Return the first row with the line's own cells, then one row for each further collective."""
    times = f"x{len(line.sites)}" if len(line.sites) > 1 else ""
    position = f":{line.place[1]}" if line.place[1] else ""
    effects = [_effect(effect) for effect in line.effects] or [("", "", "")]
    site = "" if line.pattern == "the model" and line.sign == "?" else line.pattern
    head: Row = (line.sign, site, line.verb, line.said, times)
    rows = [(*head, *effects[0], position)]
    return rows + [("", "", "", "", "", *effect, "") for effect in effects[1:]]


def _effect(effect: Effect) -> Row:
    size = format_bytes(effect.bytes // effect.count)
    return f"+ {effect.kind} {'x'.join(effect.axes)}", effect.what, f"{effect.count} x {size}"


# -- totals ------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], width: int | None, keys: int = 2) -> Iterator[str]:
    yield from format_table(rows, width, keys)
    yield ""


def _fused(view: View, width: int | None) -> Iterator[str]:
    """Yield kernels and bytes of fused modules, before and after."""
    if not view.account.gains:
        return
    rows: list[Row] = [("kernels of one", "", "forward", "backward", "bytes moved")]
    for fused in view.account.gains:
        before, after = fused.gain.before, fused.gain.after
        sites_text = describe_group(fused.sites, view.plan.model.sites)
        rows.append(
            (
                sites_text,
                fused.what,
                f"{before.forward} -> {after.forward}",
                f"{before.backward} -> {after.backward}",
                f"{format_bytes(before.bytes)} -> {format_bytes(after.bytes)}",
            )
        )
    yield from _table(rows, width)


def _ranks(view: View, each: bool, width: int | None) -> Iterator[str]:
    account = view.account
    total = format_count(sum(fact.numel for fact in view.plan.model.unique_parameters.values()))
    if account.classes is None:
        yield f"per rank   not counted (the model has {total} parameters)"
        return
    tiers = [
        tier for tier in ("cpu", "disk", "peer") if any(getattr(c, tier) for c in account.classes)
    ]
    head: Row = (
        "per rank",
        "",
        f"parameters (of {total})",
        "gradients",
        "optimizer",
        "temporary, during a step",
        *("for a peer" if tier == "peer" else f"on {tier}" for tier in tiers),
        "activations",
    )
    classes = account.classes if each else account.classes[:MOST_CLASSES]
    rows = [head, *(_rank(view, kind, tiers) for kind in classes)]
    if len(classes) < len(account.classes):
        rest = len(account.classes) - len(classes)
        blank = ("",) * (len(head) - 2)
        rows.append((f"and {rest} more", *blank, "(--each)"))
    yield from _table(rows, width)
    yield from _peaks(view, each, width)


def _peaks(view: View, each: bool, width: int | None) -> Iterator[str]:
    """Yield the peak of each kind of rank, by class of tensor."""
    memory = view.account.memory
    if memory is None:
        return
    rows: list[Row] = [("peak", "", "at", "sum", *CLASSES)]
    for entry in memory if each else memory[:MOST_CLASSES]:
        label = _where(view, entry.place) or f"rank {entry.first}"
        cells = (format_bytes(count) if count else "-" for count in entry.classes.values())
        rows.append(
            (label, _count(entry.ranks, "rank"), entry.top.what, format_bytes(entry.peak), *cells)
        )
    yield from _table(rows, width)


def _rank(view: View, kind: RankClass, tiers: Sequence[str]) -> Row:
    label = _where(view, kind.place)
    at_place = [c for c in view.account.classes or () if c.place == kind.place]
    if len(at_place) > 1 or not label:
        label += f" rank {kind.first}" + (", .." if kind.ranks > 1 else "")
    return (
        label.strip(),
        _count(kind.ranks, "rank"),
        f"{format_count(kind.elements)}, {format_bytes(kind.parameters)}",
        format_bytes(kind.gradients),
        format_bytes(kind.optimizer),
        f"+ {format_bytes(kind.working)}" if kind.working else "-",
        *(format_bytes(getattr(kind, tier)) for tier in tiers),
        _activations(view, kind),
    )


def _activations(view: View, kind: RankClass) -> str:
    """Return the maximal activations of these ranks."""
    memories = [memory for memory in view.account.memory or () if memory.first == kind.first]
    return format_bytes(memories[0].activations) if memories else NOT_ESTIMATED


def _where(view: View, place: int | None) -> str:
    return "" if place is None else f"{view.plan.cuts[0].axis}={place}"


def _traffic(view: View, width: int | None) -> Iterator[str]:
    """Yield, for each place of the pipeline, counts and bytes of each kind over each axis."""
    account = view.account
    if not account.collectives:
        if account.collectives is not None:
            yield "collectives of one step   none\n"
        return
    world = tuple(axis for axis, count in view.plan.mesh.axes if count > 1)
    kinds = list(dict.fromkeys((item.axes, item.kind) for item in account.collectives))
    labels = ["world" if axes == world and len(axes) > 1 else "x".join(axes) for axes, _ in kinds]
    rows: list[Row] = [
        ("collectives", *(f"{label} {kind}" for label, (_, kind) in zip(labels, kinds)), "all")
    ]
    places = list(dict.fromkeys(item.place for item in account.classes or ()))
    for place in sorted(places, key=lambda p: p or 0):
        comms = account.collectives_at(place)
        cells = [
            _format_sum([item for item in comms if (item.axes, item.kind) == kind])
            for kind in kinds
        ]
        rows.append((_where(view, place) or "each rank", *cells, _format_sum(comms)))
    yield from _table(rows, width, keys=1)


def _format_sum(comms: Sequence[Collective]) -> str:
    count, total = sum(comm.count for comm in comms), sum(comm.total for comm in comms)
    return f"{count}, {format_bytes(total)}" if count else "-"


def _timeline(view: View, width: int) -> Iterator[str]:
    account, order = view.account, view.plan.order
    if account.timeline is None or order is None:
        return
    bubble = f"bubble {account.bubble:.1%} at unit cost (forward 1, backward 2)"
    micro = f"{order.micro} microbatch{'es' * (order.micro > 1)}"
    chunks = f", {order.chunks} stages on each rank" if order.chunks > 1 else ""
    yield f"timeline   {order.name}, {micro}{chunks}, {bubble}"
    for line in account.timeline.text(width - 12).split("\n"):
        yield "  " + line.replace("rank ", f"{view.plan.cuts[0].axis}=", 1)
    yield ""


def _footer(view: View, width: int | None) -> Iterator[str]:
    yield f"result  {describe_result(view.plan)}"
    for note in view.account.notes:
        yield from wrap_text(f"note    {note}", width, more=" " * 8)


def describe_result(plan: Plan) -> str:
    """Describe how far the result may differ from the original's."""
    gives_up = sorted(plan.gives_up)
    if gives_up in ([], ["rounding"]):
        return f"equal to the original {describe_equivalence('algebraic' if gives_up else 'exact')}"
    return f"may differ from the original in {', '.join(gives_up)}"
