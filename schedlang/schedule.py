"""Schedule: the interactive object; each call is checked when it is made and recorded as syntax."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from schedlang.cursor import Cursor, PendingCall, parse_selector, record_call
from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Label,
    Refusal,
    kind_of,
    refuse_at_caller,
    refuse_methods_at_caller,
)
from schedlang.diagnostics.source import NOWHERE, Source, Span, python_span
from schedlang.ir.limits import FORBID, LEAST, PIN
from schedlang.ir.model import ModelFacts, check_unwrapped
from schedlang.ir.primitive import Primitive, load_all, registry
from schedlang.language import lift, patterns, printer
from schedlang.language import nodes as n
from schedlang.language.knob import refuse_unknown_settings
from schedlang.language.nodes import drop_last_row, fold_rows
from schedlang.language.selector import Selector
from schedlang.language.syntax import parse, parse_expr, parse_path, source_of
from schedlang.passes.analyze.input_checks import check_build_arguments
from schedlang.passes.elaborate.expand import Expander, expand, open_step
from schedlang.passes.elaborate.lint import lint
from schedlang.passes.elaborate.plan_record import plan_to_record
from schedlang.passes.elaborate.rows import expands_to
from schedlang.passes.elaborate.state import (
    Settings,
    State,
    current_selector,
    initial_state,
    job_size,
)
from schedlang.passes.lower.build import join_job
from schedlang.passes.simulate.kernel_gains import count_step_gains
from schedlang.passes.simulate.one_rank_step import repeat_sample
from schedlang.viz import picture  # noqa: F401  (a plan is printed by it)
from schedlang.viz.diff import Difference, compare
from schedlang.viz.why import explain_rows

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.plan import Plan
    from schedlang.passes.analyze.prepare import Prepared
    from schedlang.passes.planner.search import SearchResult
    from schedlang.passes.simulate.machine import Cluster
    from schedlang.report import Report
    from schedlang.runtime.program import Program
    from schedlang.runtime.unbuilt_program import UnbuiltProgram


def _build_program(
    plan: Plan, options: Mapping[str, Any], batch: Mapping[str, Any], local: bool = False
) -> Program:
    """Build the program of a plan, after all checks that take about a second."""
    from schedlang.passes.lower.build import build
    from schedlang.passes.simulate.expectations import require_costs
    from schedlang.passes.static_checks.static import check_sums
    from schedlang.passes.verify.original import spread_rows
    from schedlang.passes.verify.probe import check_if_cheap
    from schedlang.runtime.declined_calls import warn_declined
    from schedlang.runtime.global_state import restore_loss_state

    loss, weight = options["loss"], options["weight"]
    full_batch = repeat_sample(batch, plan.shares) if local else batch

    def check(plan: Plan, batch: Mapping[str, Any], prepared: Prepared) -> None:
        check_sums(plan, batch, prepared, loss=loss, local=local)
        if (trial := spread_rows(plan, batch) if local else batch) is not None:
            check_if_cheap(plan, trial, prepared, loss=loss, weight=weight)

    with restore_loss_state(loss):  # its counters and random draws start with the first step
        require_costs(plan, full_batch, loss, weight)
        count_step_gains(plan, full_batch)
        program = build(plan, batch, local=local, check=check, **options)
    return warn_declined(program)


@refuse_at_caller()
def create_schedule(model: nn.Module, file: str | Path | None = None) -> Schedule:
    """Return an empty schedule for a model, or the one of a file. The model is read, never
    changed."""
    return load(file, model) if file is not None else Schedule(model)


@refuse_at_caller()
def load(path: str | Path, model: nn.Module, **knobs: object) -> Schedule:
    """Return the schedule of a file for a model, with these knobs. Refuses every mistake in it.

    A text of several lines is the schedule itself, not the path of its file.
    """
    return Schedule(model, parse(source_of(path)), Settings(knobs=knobs, world=job_size()))


@refuse_methods_at_caller
class Scope:
    """Some modules of the model, to which rows are applied."""

    def __init__(self, schedule: Schedule, roots: Sequence[str]) -> None:
        self._schedule, self._roots = schedule, tuple(roots)

    def __getitem__(self, path: str) -> Cursor:
        """Return the modules that `path` names, relative to this scope."""
        return Cursor(self._schedule, self._roots, parse_selector(path))

    def __getattr__(self, name: str) -> PendingCall:
        if name.startswith("_"):
            raise AttributeError(name)
        return PendingCall(self._schedule, self._roots, None, name)

    def row(self, verb: str, *args: object, **kwargs: object) -> None:
        """Add the row of a verb by its name: `sch.row("verify", "forward")`."""
        record_call(PendingCall(self._schedule, self._roots, None, verb), args, kwargs)

    def __repr__(self) -> str:
        return f"<{len(self._roots)} modules of {self._schedule._facts.class_name}>"

    def do(self, primitive: Primitive) -> None:
        """Apply a bound primitive to the scope."""
        self._schedule._record_call(self._roots, None, lift.call_of(primitive, python_span()))

    @contextmanager
    def at(
        self, *paths: str, where: str | None = None, except_: str | Sequence[str] = ()
    ) -> Iterator[Scope]:
        """Open a scope of the modules that `paths` name; its rows are undone if the block
        raises."""
        span = python_span()
        excluded = [except_] if isinstance(except_, str) else except_
        node = n.At(
            tuple(parse_path(path, span) for path in paths),
            parse_expr(where, span) if where is not None else None,
            tuple(parse_path(path, span) for path in excluded),
            n.Block((), span=span),
            span=span,
        )
        roots = self._schedule._scope(node, self._roots)
        with self._schedule._block(lambda body: replace(node, block=body)):
            yield Scope(self._schedule, roots)


@refuse_methods_at_caller
class Schedule(Scope):
    """A model and what to do with it.

    `sch["path"].primitive(...)`, `sch.primitive(...)`, `with sch.at(...)`, `with sch.step(...)`.
    The only mutable object of the language; `plan()` is an immutable value at any time.
    """

    def __init__(
        self, model: nn.Module, file: n.File | None = None, settings: Settings | None = None
    ) -> None:
        if isinstance(model, type) or not hasattr(model, "named_modules"):
            kind = "a class" if isinstance(model, type) else kind_of(model)
            title = f"a schedule is for a module of torch, not for {kind}"
            helps = ("give the model itself: `schedlang.create_schedule(model())`",)
            raise Refusal.of("S618", title, Label(python_span()), helps=helps)
        check_unwrapped(model)
        load_all()
        self._facts: ModelFacts = ModelFacts(model)
        self._selector = Selector(self._facts)
        self._settings = settings or Settings(world=job_size())
        header = lift.header(type(model).__name__)
        self._file = file or n.File(header, (), span=Span(Source("", ""), 1, 1, 1, 1))
        empty = initial_state(self._facts, self._settings)
        self._state: State = expand(file, self._facts, self._settings) if file else empty
        self._stack: list[list[Any]] = [list(self._file.items)]
        self._undone: list[list[Any]] = []
        super().__init__(self, ("",))

    # ---- the plan -----------------------------------------------------------------------

    @property
    def model(self) -> lift.RecordedFacts:
        """Facts of the model: `sch.model.config.n_head` is a value that remembers its path."""
        return lift.RecordedFacts(("model",), self._facts.model, lambda: self._state.names)

    def plan(self) -> Plan:
        """Return the plan, an immutable value; printed as `schedlang plan` prints it."""
        assert self._state.plan is not None
        return self._state.plan

    def verify(self, *what: Any, **options: Any) -> Report:
        """Compare with the model on local ranks, in float64: `schedlang.verify(sch, batch=batch)`.

        Takes the arguments of `schedlang.verify`. `sch.row("verify", "forward")` adds a row.
        """
        from schedlang.equivalence import verify

        return verify(self, *what, **options)

    def __repr__(self) -> str:
        plan = self.plan()
        steps = sum(isinstance(item, n.Step) for item in self._stack[0])
        rows = f"{len(plan.actions)} row{'s' * (len(plan.actions) != 1)}"
        within = f" in {steps} step{'s' * (steps != 1)}" if steps else ""
        return f"<Schedule for {plan.model.class_name} on {plan.mesh}: {rows}{within}>"

    def __str__(self) -> str:
        return self.to_sched().rstrip()

    @property
    def grade(self) -> frozenset[str]:
        """The properties in which the result may differ from the model's, such as `rounding` or
        `dtype`."""
        return self.plan().gives_up

    @property
    def tree(self) -> n.File:
        """The schedule as syntax."""
        return self._file_of(self._stack[0])

    def _file_of(self, items: Sequence[Any]) -> n.File:
        return replace(self._file, items=tuple(items))

    def to_sched(self, fold: bool = False) -> str:
        """Return the schedule as the text of a file, in canonical form.

        fold   equal rows for `h.0` to `h.11` become one, where the plan stays the same
        """
        state, items = (self.plan(), self._facts, self._settings), self._stack[0]
        folded = (
            fold_rows(items, lambda new: expands_to(self._file_of(new), *state)) if fold else items
        )
        return printer.to_text(self._file_of(folded))

    def to_json(self) -> dict[str, object]:
        """Return decisions and actions as plain values."""
        return plan_to_record(self.plan())

    def _repr_html_(self) -> str:
        """Return the plan as a picture for notebooks: placements on the model's tree, and
        memory."""
        return self.plan()._repr_html_()

    def warnings(self) -> list[Diagnostic]:
        """Return warnings about rows without effect, or not verified as usual; none is an error."""
        return lint(self.tree, self._state)

    def why(self, fqn: str) -> str:
        """Describe the rows that act on a module or a parameter, and where they are written."""
        return explain_rows(self.plan(), self.tree, str(fqn))

    def diff(self, other: Schedule | Plan) -> Difference:
        """Return the differences to another schedule or plan, action by action; refuse S618
        others."""
        other = other.plan() if isinstance(other, Schedule) else other
        if not hasattr(other, "actions"):
            title = f"a schedule is compared with a schedule or a plan, not with {kind_of(other)}"
            helps = ("give the other one: `sch.diff(other)`",)
            raise Refusal.of("S618", title, Label(python_span()), helps=helps)
        return compare(self.plan(), other)

    def build(
        self,
        *args: object,
        batch: Mapping[str, Any] | None = None,
        loss: Callable[..., Any] | None = None,
        optimizer: Callable[..., Any] | None = None,
        clip: float | None = None,
        weight: Callable[..., float] | None = None,
        seed: int | None = None,
        dropout: str | None = None,
        compare: str = "build",
        wait: float = 20.0,
        weights: str | os.PathLike[str] | None = None,
        ranks: Sequence[int] | None = None,
        **unknown: object,
    ) -> Program | UnbuiltProgram:
        """Return this rank's program, in the running job (torchrun's) or a world of one.

        batch      keyword arguments of the model for one whole step; only shapes count.  Without
                   it the program is built at its first `train_step` or `eval_step`: until then it
                   has no `optimizer` for an LR scheduler, no `module`, and can load nothing
        loss       loss(output, batch), for a model that returns no loss
        optimizer  a function from (name, parameter) pairs to an optimizer
        clip       bound for the global norm of the gradients
        weight     weight(part) of a part of the batch in the mean; default: the labels that count
        seed       of dropout's masks; alone it selects logical ones
        dropout    "native": as torch draws, seeded by each step, the default of several ranks;
                   "logical": masks that do not depend on the layout, as in `verify`
        compare    what the ranks of a job compare, and refuse where it differs: "build", all
                   inputs of the build, initial weights too, and the batch of the first step;
                   "batches", that of each step and the optimizer's settings; "nothing"
        wait       seconds in which all ranks must call `build`; then those that did refuse
        weights    the path of safetensors files (one, or a folder with an index), or of a
                   checkpoint of `save`: each rank reads its shards, and the model needs no values
        ranks      the ranks of the job that run the program, ascending, if not all: only these
                   build it, and call its methods

        A model for which the parts of a batch do not give the full batch's result (batch norm, a
        sum as the loss) is refused as by `verify`, if that is found within about a second: verify a
        larger model before training.
        """
        from schedlang.runtime.comm.collectives import enter_given_ranks
        from schedlang.runtime.unbuilt_program import UnbuiltProgram

        options: dict[str, Any] = dict(
            loss=loss,
            optimizer=optimizer,
            clip=clip,
            weight=weight,
            seed=seed,
            dropout=dropout,
            compare=compare,
            wait=wait,
            weights=weights,
        )
        plan = self.plan()
        check_build_arguments(args, unknown, {"batch": batch, **options})
        builder = enter_given_ranks(ranks)(partial(_build_program, plan, options))
        with enter_given_ranks(ranks):
            if batch is not None:
                return builder(batch)
            return UnbuiltProgram(builder, join_job(plan), plan.row_axes)

    def search(
        self,
        batch: Mapping[str, Any],
        on: str | Cluster,
        ranks: int | None = None,
        *,
        rows: int | None = None,
        loss: Callable[..., Any] | None = None,
        weight: Callable[..., float] | None = None,
        dtype: str = "bf16",
        pin: Mapping[str, Any] | None = None,
        forbid: Mapping[str, Any] | None = None,
        least: Mapping[str, int] | None = None,
        planner: str | None = None,
    ) -> SearchResult:
        """Become the schedule that trains the model fastest, as `schedlang tune` finds it.

        batch    keyword arguments of the model; `rows` of a step, by default those of `batch`
        on       "h100x64", or your own machine; `ranks` if the name does not include the number
        dtype    of the computation, master weights in 32 bits: "bf16", "fp16", or "": as stored
        pin      values that a name may have: `pin={"tp": (2, 4)}`; `forbid`, `least` likewise
        planner  the name of a planner of the literature to use instead

        Of the existing schedule only its lines of `search` apply. The result has what was rejected,
        and why. Where nothing fits its `best` is None, and the schedule stays unchanged. Raises
        Refusal S109 for an unknown machine, S106 for an unknown name, and what refuses the model.
        """
        from schedlang.passes.planner.paper_planners import find_planner, find_setting
        from schedlang.passes.planner.profile import Profiles
        from schedlang.passes.planner.tuning import job_of, tune_model
        from schedlang.passes.simulate.node_cluster import cluster_and_ranks

        if len(self._stack) > 1:
            title = "`search` inside an open step or scope"
            raise Refusal.of("S113", title, Label(python_span()), helps=("close it first",))
        limits = self._state.limits
        for kind, by_name in ((PIN, pin), (FORBID, forbid), (LEAST, least)):
            for name, value in (by_name or {}).items():
                values = value if isinstance(value, tuple | list) else (value,)
                limits = limits.with_limit(kind, name, tuple(values))
        if planner is not None:
            find_planner(planner)
        cluster, count = cluster_and_ranks(on, ranks)
        profiles = Profiles(self._facts, batch, loss, weight, dtype)
        job = job_of(profiles, cluster, count, rows, [limits])
        tuned = tune_model(profiles, job, partial(find_setting, limits=limits, planner=planner))
        if tuned.written is not None:
            self._replay(tuned.written.file.items, replace(self._settings, knobs={}))
            self._undone.clear()
        return tuned.found

    # ---- declarations -------------------------------------------------------------------

    def knob(
        self,
        name: str,
        default: object,
        choices: Sequence[object] | None = None,
        range: tuple[object, object] | None = None,
    ) -> lift.RecordedValue:
        """Declare a parameter of the schedule with its domain; return a value that remembers its
        name."""
        span = python_span()
        kinds = {bool: "bool", int: "int", float: "float"}
        domain: n.Expr | n.Interval | None = None
        if choices is not None:
            domain = lift.lift(list(choices), span)
        elif range is not None:
            domain = n.Interval(*(lift.lift(end, span) for end in range), span=span)
        kind = kinds.get(type(default), "choice")
        self._declare(n.Knob(name, kind, lift.lift(default, span), domain, span=span))
        return lift.RecordedValue(n.Name((name,)), lambda: self._state.names)

    def mesh(self, on: str | None = None, *more: object, **axes: object) -> None:
        """Declare named axes, slowest first; the size "_" is the rest of the ranks."""
        span = python_span()
        if more or not isinstance(on, str | None):
            title = f"the axes of a mesh are named, not {kind_of(more[0] if more else on)}"
            raise Refusal.of("S111", title, Label(span), helps=("for example `sch.mesh(tp=2)`",))
        self._declare(lift.mesh(axes, on, span))

    def view(self, name: str, of: str | Sequence[str], size: object | None = None) -> None:
        """Declare a second name for several axes folded together."""
        span = python_span()
        size_node = lift.lift(size, span) if size is not None else None
        self._declare(
            n.View(name, size_node, (of,) if isinstance(of, str) else tuple(of), span=span)
        )

    def require(self, test: lift.RecordedValue | str | bool) -> None:
        """Declare a condition on knobs, mesh and model; a plain bool is checked and not
        recorded."""
        span = python_span()
        if isinstance(test, bool):
            if not test:
                raise Refusal.of("S104", "`require` fails", Label(span))
            return
        node = parse_expr(test, span) if isinstance(test, str) else lift.lift(test, span)
        self._declare(n.Require(node, span=span))

    def pattern(self, text: str) -> None:
        """Declare a named subgraph: `sch.pattern("bias_gelu(x, b) { gelu(x + b) }")`."""
        span = python_span()
        self._declare(n.with_spans(patterns.parse_declaration(text), span))

    def use(self, path: str, as_: str | None = None, **knobs: object) -> None:
        """Use a library's definitions or a base's steps, relative to the working directory."""
        span = python_span()
        args = tuple(n.Keyword(k, lift.lift(v, span), span=span) for k, v in knobs.items())
        self._declare(n.Use(path, as_, args or None, span=NOWHERE))

    def expect(self, test: str, on: str | None = None) -> None:
        """Declare a bound on the plan's costs; `plan`, `verify`, `run` and `build` check it."""
        span = python_span()
        self._declare(n.Expect(parse_expr(test, span), on, span=span))

    def set(self, **knobs: object) -> None:
        """Set knobs and plan everything again; refused settings change nothing."""
        values = {k: v.value if isinstance(v, lift.RecordedValue) else v for k, v in knobs.items()}
        refuse_unknown_settings(values, self._state.knobs, python_span())
        merged = {**self._settings.knobs, **values}
        self._replay(self._stack[0], replace(self._settings, knobs=merged))

    @contextmanager
    def step(self, name: str, relax: str | Sequence[str] = ()) -> Iterator[Schedule]:
        """Open a step that may give up the properties in `relax`; if the block raises, all is
        undone."""
        span = python_span()
        relaxed: tuple[Any, ...] = (
            tuple(relax) if isinstance(relax, Iterable) and relax != str(relax) else (relax,)
        )
        if not all(isinstance(relaxation, str) for relaxation in relaxed):
            title = f"`relax` takes names, not {relax!r}"
            helps = ('name what may differ: `relax="dtype"`',)
            raise Refusal.of("S303", title, Label(span), helps=helps)
        node = n.Step(name, relaxed, n.Block((), span=span), span=span)
        if self._state.step is not None or len(self._stack) > 1:
            title = "a step cannot stand inside a step or block"
            helps = ("close the block above first: steps are not nested",)
            raise Refusal.of("S113", title, Label(span), helps=helps)
        opened = replace(open_step(node, self._state), step=node)
        with self._block(lambda body: replace(node, block=body), opened):
            yield self

    def undo(self, to: str | int | None = None) -> None:
        """Undo the last row, the last `to` rows, or all from the start of the step `to` on.

        More rows than exist leave only mesh, knobs and other declarations; `redo` restores.
        """
        if len(self._stack) > 1:
            title = "`undo` inside an open step or scope"
            raise Refusal.of("S113", title, Label(python_span()), helps=("close it first",))
        items = self._stack[0]
        if to is None or isinstance(to, int) and to >= 0:
            for count in range(1 if to is None else to):
                rows = any(isinstance(x, (n.Step, n.Override, *get_args(n.Stmt))) for x in items)
                if not items or count and not rows:
                    break
                items = drop_last_row(items)
            self._undo_to(items)
            return
        if not isinstance(to, str):
            title = f"`undo` takes a number of rows or the name of a step, not {to!r}"
            help_ = "take back the last row: `sch.undo()`, the last two: `sch.undo(2)`"
            raise Refusal.of("S113", title, Label(python_span()), helps=(help_,))
        steps = [item.name for item in items if isinstance(item, n.Step)]
        if to not in steps:
            title, label = f"there is no step `{to}`", Label(python_span())
            raise Refusal.unknown("S113", title, to, steps, primary=label)
        start = next(i for i, x in enumerate(items) if isinstance(x, n.Step) and x.name == to)
        self._undo_to(items[:start])

    def redo(self) -> None:
        """Restore what the last `undo` removed, unless something was added since."""
        if not self._undone or len(self._stack) > 1:
            title = "`redo` inside an open step or scope" if self._undone else "nothing was undone"
            helps = ("close it first",) if self._undone else ("rows added since `undo` end it",)
            raise Refusal.of("S113", title, Label(python_span()), helps=helps)
        self._replay(self._undone[-1], self._settings)
        self._undone.pop()

    def _undo_to(self, items: Sequence[Any]) -> None:
        before = self._stack[0]
        self._replay(items, self._settings)
        if len(items) != len(before) or items != before:
            self._undone.append(before)

    # ---- recording ------------------------------------------------------------------------

    def _select(self, path: n.Path, roots: Sequence[str]) -> tuple[str, ...]:
        return current_selector(self._selector, self._state).select(path, roots, self._state.names)

    def _scope(self, node: n.At, roots: Sequence[str]) -> tuple[str, ...]:
        return current_selector(self._selector, self._state).select_scope(
            node, roots, self._state.names
        )

    def _run(self, action: Callable[[Expander], None], span: Span) -> None:
        """Execute on the state; a refusal leaves the state unchanged and gets a place."""
        runner = Expander(self._state, self._selector)
        action(runner)
        if runner.problems:
            raise Refusal(*runner.problems).at(span)
        self._state = runner.state
        self._undone.clear()

    def _declare(self, node: n.Item) -> None:
        span = node.span or python_span()
        if len(self._stack) > 1:
            keyword = type(node).__name__.lower()
            title = f"`{keyword}` must stand outside of steps and blocks"
            helps = ("call it above the first `with sch.step(...)`",)
            raise Refusal.of("S113", title, Label(span), helps=helps)
        self._run(lambda runner: runner.execute_item(node), span)
        self._stack[-1].append(node)

    def _record_call(self, roots: Sequence[str], path: n.Path | None, call: n.Call) -> None:
        node = lift.row((path,) if path is not None else (), call)
        self._run(
            lambda runner: runner.execute_statement(node, roots, self._state.names), call.span
        )
        self._stack[-1].append(node)

    @contextmanager
    def _block(
        self, close: Callable[[n.Block], Any], opened: State | None = None
    ) -> Iterator[None]:
        """Collect the rows of a block; `close` makes its node; an exception undoes them."""
        before, depth = self._state, len(self._stack)
        self._state = opened or before
        self._stack.append([])
        try:
            yield
        except BaseException:
            self._state = before
            del self._stack[depth:]
            raise
        body = self._stack.pop()
        if opened is not None:
            self._state = replace(self._state, step=None)
        self._stack[-1].append(close(n.Block(tuple(body))))

    def _replay(self, items: Sequence[Any], settings: Settings) -> None:
        """Execute all items anew; only on success they become this schedule."""
        self._state = expand(self._file_of(items), self._facts, settings)
        self._stack, self._settings = [list(items)], settings

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *registry()})
