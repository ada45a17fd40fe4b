"""Execute the statements of a schedule in order: from the syntax tree to the plan's rows.

`expand` is the door for files, `plan_of_calls` for calls made from Python. `Expander` holds the
state while statements are executed, and collects the problems of all statements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import (
    MAX_MESSAGES,
    Diagnostic,
    Label,
    Refusal,
)
from schedlang.diagnostics.source import Span
from schedlang.garbage_collection import without_collector
from schedlang.ir.features import Located, Resolved
from schedlang.ir.model import are_nested
from schedlang.ir.primitive import Primitive, find
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.kinds import bind
from schedlang.language.knob import refuse_unknown_settings
from schedlang.language.value import UNKNOWN, Names, evaluate, show_value, unknown_words
from schedlang.passes.elaborate import base_schedules, declare, legality
from schedlang.passes.elaborate.declare import arguments_of
from schedlang.passes.elaborate.state import (
    RELAXABLE,
    Settings,
    State,
    check_agreement,
    current_selector,
    evaluate_arguments,
    initial_state,
    resolve_pattern,
    unknown_primitive,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schedlang.ir.mesh import Mesh
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.plan import Plan
    from schedlang.language.selector import Selector


def open_step(node: n.Step, state: State) -> State:
    """Return the state with one more step, and what the step may relax (S101, S303)."""
    if node.name in state.steps:
        label = Label(node.span and step_title_span(node), "the second step of this name")
        raise Refusal.of("S101", f"there are two steps `{node.name}`", label)
    for name in node.relax:
        if name not in RELAXABLE:
            title = f"a step cannot relax `{name}`"
            label = Label(step_title_span(node))
            raise Refusal.unknown("S303", title, name, RELAXABLE, "choose among", label)
    plan = state.plan
    if plan is not None:
        plan = replace(plan, relaxed=(*plan.relaxed, (node.name, node.relax)))
    return replace(state, steps=(*state.steps, node.name), plan=plan)


def step_title_span(node: n.Step) -> Span:
    """Return the span of the words `step "name"`."""
    if not node.span or not node.span.source.name.endswith(".sched"):
        return node.span
    start_ = node.span
    end = start_.col + len(f'step "{node.name}"')
    return Span(start_.source, start_.line, start_.col, start_.line, end)


def check_relaxed(primitive: Primitive, state: State, span: Span) -> None:
    """Refuse a row that gives up something that its step does not relax (S505)."""
    step = state.step
    relaxed = {"rounding", *(step.relax if step else ())}
    disallowed = sorted(primitive.gives_up - relaxed)
    if not disallowed:
        return
    name = disallowed[0]
    title = f"this row changes numerics (`{name}`): its step does not allow that"
    labels = (Label(step_title_span(step), "allows only " + _allowed_text(step)),) if step else ()
    if step:
        names = ", ".join((*step.relax, *disallowed))
        help_ = f'allow it: `step "{step.name}" relax({names}) {{`'
    else:
        help_ = f'move it into a step that allows it: `step "..." relax({name}) {{`'
    label = Label(span, f"results may differ in {', '.join(disallowed)}")
    raise Refusal.of("S505", title, label, labels, (), (help_,))


def _allowed_text(step: n.Step) -> str:
    return " and ".join(("rounding", *step.relax))


Roots = Sequence[str] | None  # the modules of a scope; None without a model


@without_collector()
def expand(file: n.File, facts: ModelFacts | None, settings: Settings | None = None) -> State:
    """Execute a whole file and return the final state, with its plan.

    Without `facts` only names and arguments are checked, and the state's plan is None. Raises
    Refusal with the diagnostics of every independent mistake.
    """
    has_uses = any(isinstance(item, n.Use | n.Override | n.Drop) for item in file.items)
    with base_schedules.counting_used_files() if has_uses else nullcontext():
        spliced = (
            base_schedules.splice_file(file)
            if has_uses
            else base_schedules.SplicedFile(file.items, (file.header,))
        )
        settings = settings or Settings()
        if settings.mesh:
            settings = _with_sizing_knobs(spliced.items, settings)
        runner = Expander(initial_state(facts, settings))
        runner.problems += spliced.problems
        for header in spliced.headers:
            runner.declare(partial(declare.check_header, header, runner.state))
        for item in spliced.items:
            runner.execute_item(item)
    if runner.problems:
        raise Refusal(*runner.problems)
    state = runner.state
    if settings.knobs:
        refuse_unknown_settings(settings.knobs, state.knobs, file.header.span)
    if settings.mesh and state.mesh is None:
        label = Label(file.header.span)
        raise Refusal.of("S204", "the schedule has no mesh to set", label)
    if state.plan is not None and state.plan.cuts:  # all rows have been executed
        legality.check_cuts(state.plan)
    return state


def plan_of_calls(
    calls: Sequence[tuple[n.Call, Sequence[str]]],
    facts: ModelFacts,
    mesh: Mesh,
    step: str,
    relax: tuple[str, ...] = (),
) -> Plan:
    """Return the plan of calls that stand in one step, on a mesh.

    `calls` are pairs of a call and its modules; without modules the call is made at the model
    itself. `relax` is what the step may give up. Raises Refusal at the place of a refused call.
    """
    runner = Expander(initial_state(facts, Settings()).with_mesh(mesh))
    with runner.inside_step(n.Step(step, relax, n.Block(()))):
        for call, sites in calls:
            runner.execute_call(call, tuple(sites) or ("",), runner.state.names, chosen=bool(sites))
    plan = runner.state.plan
    assert plan is not None
    if plan.cuts:
        legality.check_cuts(plan)
    return plan


def _with_sizing_knobs(items: Sequence[n.Item], settings: Settings) -> Settings:
    """Return settings in which the size given for an axis also sets the knob that sizes the axis.

    The knobs are set before any `require` is executed. Refuses (S109) two different sizes.
    """
    knobs = dict(settings.knobs)
    declared = {item.name for item in items if isinstance(item, n.Knob)}
    for item in items:
        for arg in item.args if isinstance(item, n.Mesh) else ():
            if not isinstance(arg, n.Keyword) or not isinstance(arg.value, n.Name):
                continue
            size, name = settings.mesh.get(arg.name), arg.value.text
            if size is None or name not in declared:
                continue
            if str(knobs.get(name, size)) != str(size):
                title = f"the knob `{name}` is set to {knobs[name]} and its axis to {size}"
                raise Refusal.of("S109", title, Label(arg.span), helps=("set one",))
            knobs[name] = size
    return replace(settings, knobs=knobs)


@dataclass(frozen=True)
class RefusedRow:
    """The sites of a refused row: later errors at these sites may be consequences of the first."""

    sites: tuple[str, ...]

    def is_cause_at(self, plan_sites: Sequence[str]) -> bool:
        """Return whether a site equals, contains or is inside one of `plan_sites`."""
        return any(are_nested(a, b) for a in self.sites for b in plan_sites)


class Expander:
    """The executor of statements: each call replaces `state` and may extend `problems`."""

    def __init__(self, state: State, selector: Selector | None = None) -> None:
        self.state = state
        self.problems: list[Diagnostic] = []
        self.refused_rows: list[RefusedRow] = []
        self.rows: int = 0  # statements executed, those of definitions at each call
        self.depth: int = 0  # blocks and calls around the one that is executed
        self.selector = selector
        if selector is None and state.facts is not None:
            from schedlang.language.selector import Selector

            self.selector = Selector(state.facts)

    @property
    def is_stopped(self) -> bool:
        """Whether the remaining statements are skipped: too many rows or too many problems."""
        return self.rows > base_schedules.MAX_ROWS or len(self.problems) > MAX_MESSAGES

    # ---- declarations -----------------------------------------------------------------

    def execute_item(self, item: n.Item) -> None:
        """Execute one statement at the top level of a file."""
        if self.is_stopped:
            return
        state = self.state
        match item:
            case n.Knob(name):
                self.declare(lambda: declare.declare_knob(item, state), name)
            case n.Mesh():
                if not self.declare(lambda: declare.declare_mesh(item, state)):
                    self.state = declare.with_stand_in_mesh(item, self.state)
            case n.View(name):
                self.declare(lambda: declare.declare_view(item, state), name)
            case n.Require():
                self.declare(lambda: declare.check_require(item, state))
            case n.Search():
                self.declare(lambda: declare.declare_search(item, state))
            case n.Def(name):
                self.declare(lambda: declare.declare_def(item, state), name)
            case n.Use():
                self._use(item)
            case n.Step():
                self.execute_step(item)
            case n.Pattern(name):
                self.declare(lambda: declare.declare_pattern(item, state), name)
            case n.Override() | n.Drop():
                raise AssertionError("bases were not spliced in")
            case _:
                self.execute_statement(item, ("",) if state.facts else None, state.names)

    def _use(self, node: n.Use) -> None:
        """Add a library's definitions, or execute a base's items if they were not spliced in."""
        above = (Path(node.span.source.name).resolve(),) if node.span else ()
        with base_schedules.counting_used_files():
            self._execute_use(node, above)

    def _execute_use(self, node: n.Use, above: tuple[Path, ...]) -> None:
        base = base_schedules.open_base(node, above)
        for header in base.headers:
            self.declare(partial(declare.check_header, header, self.state))
        for item in base.items:
            self.execute_item(item)
        if not base.items:
            declaration = partial(declare.use_library, node, self.state, above)
            self.declare(declaration, f"{node.alias}.")

    def declare(self, step: Callable[[], State], *names: str) -> bool:
        """Execute a declaration; return whether it was accepted.

        After a refusal, later errors about `names` are not reported.
        """
        refused = self.state.refused_names
        try:
            self.state = step()
            return True
        except Refusal as refusal:
            self.state = self.state.with_refused(*names)
            if not any(self._is_consequence(problem, refused) for problem in refusal.diagnostics):
                self.problems += refusal.diagnostics
            return False

    def _is_consequence(self, problem: Diagnostic, broken: frozenset[str]) -> bool:
        """Return whether a diagnostic only says that a refused declaration is missing."""
        if not broken or problem.code not in ("S204", "S210", "S301", "S106", "S111", "S304"):
            return False
        words = [word for fact, word in problem.facts if fact == "unknown"]
        return any(
            word.startswith(name) if name[-1] == "." else word == name
            for name in broken
            for word in words
        )

    def execute_step(self, node: n.Step) -> None:
        """Execute the statements of a step."""
        with self.inside_step(node):
            roots = ("",) if self.state.facts else None
            for statement in node.block.body:
                self.execute_statement(statement, roots, self.state.names)

    @contextmanager
    def inside_step(self, node: n.Step) -> Iterator[None]:
        """Set `state.step` inside the context, and reset it after."""
        if not self.declare(lambda: open_step(node, self.state)):
            self.state = replace(self.state, steps=(*self.state.steps, node.name))
        self.state = replace(self.state, step=node)
        yield
        self.state = replace(self.state, step=None)

    # ---- statements -------------------------------------------------------------------

    def execute_statement(self, node: n.Stmt, roots: Roots, names: Names) -> None:
        """Execute one statement; `roots` are the modules of its scope."""
        if self.is_stopped:
            return
        self.rows += 1
        self.depth += 1
        try:
            if self.rows > base_schedules.MAX_ROWS or self.depth > base_schedules.MAX_DEPTH:
                raise base_schedules.limit_refusal(self.rows, node.span)
            match node:
                case n.Rule(call=call):
                    self.execute_call(call, self._select(node, roots, names), names, chosen=True)
                case n.Do(_, call):
                    self.execute_call(call, roots, names, chosen=False)
                case n.At(block=block):
                    inner = self._select(node, roots, names)
                    for statement in block.body:
                        self.execute_statement(statement, inner, names)
                case n.When(test, block, orelse):
                    self._when(test, block, orelse, roots, names)
                case n.Expect():
                    self._expect(node, names)
        except Refusal as refusal:
            self._note_problems(refusal)
        finally:
            self.depth -= 1

    def _note_problems(self, refusal: Refusal) -> None:
        """Add the diagnostics of a refusal that are not consequences of earlier ones."""
        broken = self.state.refused_names
        self.problems += [
            d
            for d in refusal.diagnostics
            if not self._is_consequence(d, broken) and d not in self.problems
        ]

    def _expect(self, node: n.Expect, names: Names) -> None:
        """Add an `expect` to the plan; its bound is checked after the plan's costs are counted."""
        expectation, plan = declare.expectation_of(node, names), self.state.plan
        if expectation is not None and plan is not None:
            plan = replace(plan, expected=(*plan.expected, expectation))
            self.state = replace(self.state, plan=plan)

    def _select(self, node: n.Rule | n.At, roots: Roots, names: Names) -> Roots:
        """Return the modules that a selector selects, or None if the selector is refused.

        With None, only names and arguments of the rows below are checked.
        """
        if self.selector is None or roots is None:
            return None
        plan = self.state.plan
        if plan is not None and plan.model is not self.selector.tree:  # a row has changed it
            self.selector = current_selector(self.selector, self.state)
        selector = self.selector
        try:
            if isinstance(node, n.At):
                return selector.select_scope(node, roots, names)
            selected = [selector.select(path, roots, names) for path in node.paths]
            return selected[0] if len(selected) == 1 else selector.sort(itertools.chain(*selected))
        except Refusal as refusal:
            self._note_problems(refusal)
            return None

    def _when(
        self, test: n.Expr, block: n.Block, orelse: n.Block | None, roots: Roots, names: Names
    ) -> None:
        condition = evaluate(test, names)
        if condition is not UNKNOWN and not isinstance(condition, bool):
            label = Label(test.span, f"this is {show_value(condition)}")
            title = "`when` needs a condition: true or false"
            raise Refusal.of("S304", title, label, facts=unknown_words(condition))
        blocks = (
            [block] if condition is True else [orelse] if condition is False else [block, orelse]
        )
        for body in blocks:
            for statement in body.body if body else ():
                self.execute_statement(statement, roots, names)

    # ---- calls ------------------------------------------------------------------------

    def execute_call(self, call: n.Call, sites: Roots, names: Names, chosen: bool) -> None:
        """Execute a call: the body of a definition, or one row of the plan.

        `chosen` says whether a selector stands before the call.
        """
        name = call.name.text
        if name in self.state.defs:
            self._expand(call, sites, names)
            return
        kind = find(name)
        if kind is None:
            raise Refusal(unknown_primitive(call.name, self.state))
        primitive = bind(kind, evaluate_arguments(call, names), call.span, names.axes)
        if kind.takes == "model" and chosen:
            title = f"`{kind.__name__}` takes no selector"
            help_ = f"leave the selector out: `{printer.expr(call)}`"
            label = Label(call.span, "acts on the whole scope")
            raise Refusal.of("S306", title, label, helps=(help_,))
        if isinstance(primitive, Resolved):
            primitive = resolve_pattern(primitive, self.state, call.span)
        self.add_row(primitive, sites, call.span)

    def _expand(self, call: n.Call, sites: Roots, names: Names) -> None:
        """Execute the body of a definition with its arguments and the names of its own file."""
        definition = self.state.defs[call.name.text]
        values = arguments_of(call, definition.node, names, replace(names, knobs=definition.knobs))
        inner = replace(names, knobs=definition.knobs, arguments=values)
        outer, count = self.state, len(self.problems)
        self.state = replace(outer, defs=definition.earlier_defs, patterns=definition.patterns)
        for statement in definition.node.block.body:
            self.execute_statement(statement, sites, inner)
        self.state = replace(self.state, defs=outer.defs, patterns=outer.patterns)
        caller = Label(call.span, f"in this call of `{call.name.text}`")
        self.problems[count:] = [
            replace(problem, also=(*problem.also, caller)) for problem in self.problems[count:]
        ]

    def add_row(self, primitive: Primitive, sites: Roots, span: Span) -> None:
        """Add one row to the plan, at all its sites or, with a refusal, at none."""
        plan = self.state.plan
        if plan is not None and sites is not None and not sites:
            self.state = replace(self.state, empty_rows=(*self.state.empty_rows, span))
        if plan is None or not sites:
            check_agreement(primitive, self.state, span)
            return
        if primitive.takes == "model" and len(sites) > 1:
            title = f"`{type(primitive).__name__}` must stand in a scope of one module"
            label = Label(span, f"this scope has {len(sites)} modules")
            raise Refusal.of("S306", title, label)
        if isinstance(primitive, Located):
            try:
                primitive = primitive.located(_folder_of(span))
            except Refusal as refusal:
                raise refusal.at(span) from None
        if primitive.gives_up - {"rounding"}:
            check_relaxed(primitive, self.state, span)
        step = self.state.step
        try:
            legality.check_row(plan, primitive, sites, span)
            plan = plan.add(primitive, sites, step=step.name if step else "", span=span)
        except Refusal as refusal:
            is_consequence = any(failed.is_cause_at(sites) for failed in self.refused_rows)
            self.refused_rows.append(RefusedRow((*sites, *legality.tied_modules(plan, sites))))
            if is_consequence:
                return
            raise _with_earlier_row(refusal.at(span), primitive, self.state) from None
        self.state = replace(self.state, plan=plan)


def _folder_of(span: Span) -> Path:
    """Return the folder to which paths in a row are relative.

    It is the folder of the schedule file, or the working directory for rows made from Python.
    """
    name = Path(span.source.name)
    return name.parent if name.suffix == ".sched" else Path()


def _with_earlier_row(refusal: Refusal, primitive: Primitive, state: State) -> Refusal:
    """Add the place of the last row of the same verb to S5xx diagnostics that show no other row."""
    rows = state.plan.actions if state.plan else ()
    earlier_spans = [a.span for a in rows if type(a.primitive) is type(primitive) and a.span]
    if not earlier_spans:
        return refusal
    earlier_label = (Label(earlier_spans[-1], "the row above"),)
    return Refusal(
        *(
            replace(d, also=earlier_label) if d.code.startswith("S5") and not d.also else d
            for d in refusal.diagnostics
        )
    )
