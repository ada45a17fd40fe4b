"""Proposed rows: written as steps of a schedule, and tried on a model with few blocks.

Used by `complete`, by passes/autoshard (`init`) and by the planner.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source, Span
from schedlang.ir.mesh import Mesh
from schedlang.ir.model import ModelFacts
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet, find
from schedlang.language import lift, printer
from schedlang.language import nodes as n
from schedlang.passes.elaborate.expand import plan_of_calls
from schedlang.passes.elaborate.rows import PLAIN, path_of, selector_path
from schedlang.passes.partition.staging import stages_of
from schedlang.passes.propagate.batch_refusals import batch_refusal
from schedlang.passes.propagate.loss_sums import with_statistics
from schedlang.passes.propagate.propagate import propagate
from schedlang.passes.propagate.sequence_trials import is_on_meta, tokens_of
from schedlang.passes.reduce_model.blocks import (
    TABLES,
    Blocks,
    can_split_module,
    leaf_kind,
    shorten_model,
)

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts
    from schedlang.runtime.propagation.sources import ProjectionCalls


def make_call(verb: str, *words: str, **named: object) -> n.Call:
    """Return the call of a primitive; arguments that are texts become names of the language."""
    return lift.call(verb, words, named)


@dataclass(frozen=True)
class ProposedRow:
    """A primitive at the modules of one or several common names; without names at the model."""

    names: tuple[str, ...]
    call: n.Call
    comment: str = ""

    def __str__(self) -> str:
        return f"{', '.join(self.names)}  {printer.expr(self.call)}".strip()

    def at_paths(self, *paths: n.Path) -> n.Rule | n.Do:
        """Return the row as a statement at other paths; paths without segments are left out."""
        return lift.row([path for path in paths if path.segs], self.call, self.comment)

    @property
    def statement(self) -> n.Rule | n.Do:
        """Return the row as a statement of a schedule."""
        return self.at_paths(*map(path_of, self.names))

    def changes_facet(self, facet: Facet) -> bool:
        """Return whether the primitive changes a facet of the plan."""
        kind = find(self.call.name.text)
        return kind is not None and facet in kind.writes

    @property
    def style(self) -> str:
        """Return the first argument if it is positional: the style of a `shard`; else ""."""
        return next((arg.text for arg in self.call.args[:1] if isinstance(arg, n.Name)), "")

    def argument(self, name: str) -> n.Expr | None:
        """Return the value of a keyword argument, or None."""
        keywords = (arg for arg in self.call.args if isinstance(arg, n.Keyword))
        return next((arg.value for arg in keywords if arg.name == name), None)

    def with_argument(self, name: str, value: object) -> ProposedRow:
        """Return the row with one more argument, before `over`; an existing one does not change."""
        if self.argument(name) is not None:
            return self
        args = [*self.call.args]
        over_index = (
            k for k, arg in enumerate(args) if isinstance(arg, n.Keyword) and arg.name == "over"
        )
        expression = value if isinstance(value, n.Call) else lift.lift(value)
        args.insert(next(over_index, len(args)), n.Keyword(name, expression))
        return replace(self, call=replace(self.call, args=tuple(args)))


# path of the blocks of a row, and its path inside a block
RowPlace = tuple[n.Path, n.Path, ProposedRow]


def fold_statements(rows: Sequence[ProposedRow], blocks: Blocks) -> tuple[n.Stmt, ...]:
    """Return rows as statements: one `at` per list of blocks, one row per group of equal calls."""
    statements: list[n.Stmt] = []
    placed = _group_by_list(_place_rows(_fold_rows(rows, blocks), blocks))
    for head, head_rows in groupby(placed, lambda row_place: row_place[0]):
        inner = tuple(row.at_paths(tail) for _, tail, row in head_rows)
        statements += [n.At((head,), None, (), n.Block(inner))] if head.segs else inner
    return tuple(statements)


def make_step(
    name: str, rows: Iterable[n.Stmt], proof: n.Call | None = None, relax: str = ""
) -> n.Step:
    """Return a step of rows with a `verify` row (`proof`); it relaxes what `relax` names."""
    check = () if proof is None else (lift.row((), proof),)
    return n.Step(name, (relax,) * bool(relax), n.Block((*rows, *check)))


def precision_rows(dtype: str, blocks: Blocks) -> list[ProposedRow]:
    """Return the rows that cast the full model to a dtype; stored parameters stay as masters.

    Batch norms stay in float32 as their running statistics do: torch refuses to mix the two.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    modules = blocks.facts.model.named_modules()
    norms = [fqn for fqn, m in modules if isinstance(m, _BatchNorm) and m.running_mean is not None]
    names: dict[str, None] = {}
    for fqn in norms:
        common = blocks.common_name(fqn)
        names[common if set(blocks.modules_of(common)) <= set(norms) else fqn] = None
    call = make_call("cast", "fp32")
    return [
        ProposedRow((), make_call("cast", dtype, params=True)),
        *(ProposedRow((name,), call, "as its statistics") for name in names),
    ]


def precision_step(dtype: str, blocks: Blocks, proof: n.Call | None = None) -> n.Step:
    """Return the step of `precision_rows`."""
    model, *norms = precision_rows(dtype, blocks)
    rows = [model.at_paths(), *fold_statements(norms, blocks)]
    return make_step("precision", rows, proof, "dtype")


def make_schedule_file(
    source: str, class_name: str, mesh: n.Mesh, steps: Iterable[n.Step], *remarks: str
) -> n.File:
    """Return the schedule of some steps for models of a class, with spans in its printed text.

    `source` is the name of the text; `remarks` are comment lines at its end.
    """
    file = n.File(lift.header(class_name), (mesh, *steps), remarks=remarks)
    return printer.with_printed_spans(file, source)


def _place_rows(rows: Sequence[ProposedRow], blocks: Blocks) -> Iterator[RowPlace]:
    """Yield each row with the path of its blocks and its path inside a block."""
    for row in rows:
        name = row.names[0] if row.names else ""
        for head in block_paths(name, blocks):
            tail = _inner_path(row.names)
            single = sum(head in block_paths(r.names[0], blocks) for r in rows if r.names) == 1
            if not head.segs or single:
                yield n.Path(()), n.Path((*head.segs, *tail.segs)), row
            else:
                yield head, tail, row


def _group_by_list(placed: Iterable[RowPlace]) -> Iterator[RowPlace]:
    """Yield the rows, sorted such that consecutive rows in blocks of one list are adjacent."""
    list_rows: list[RowPlace] = []
    for row_place in [*placed, None]:
        if row_place is not None and any("*" in name for name in row_place[2].names):
            list_rows.append(row_place)
            continue
        order = list(dict.fromkeys(head for head, _, _ in list_rows))
        yield from sorted(list_rows, key=lambda place: order.index(place[0]))
        list_rows = []
        if row_place is not None:
            yield row_place


def block_paths(name: str, blocks: Blocks) -> tuple[n.Path, ...]:
    """Return the paths of the blocks with modules of a common name; the empty path for none."""
    root, star, _ = name.rpartition("*")
    if not star:
        return (n.Path(()),)
    depth = name[: len(root)].count(".")
    all_blocks = blocks.modules_by_name.get(root + star, ())
    names = dict.fromkeys(
        ".".join(fqn.split(".")[: depth + 1]) for fqn in blocks.modules_by_name.get(name, ())
    )
    block_names = tuple(names)
    if len(block_names) == len(all_blocks):  # numbers other than blocks' stay: `up.1.blocks.*`
        relative_path = path_of(root.rpartition("*")[2].strip("."), star)
        outer = block_paths(root.rstrip("."), blocks)  # a list may be in some outer blocks only
        return tuple(n.Path((*head.segs, *relative_path.segs)) for head in outer)
    path = selector_path(block_names, all_blocks)
    return tuple(map(path_of, block_names)) if path is None else (path,)


def _inner_path(names: Sequence[str]) -> n.Path:
    """Return the path of one or several common names inside their blocks."""
    tails = [name.rpartition("*")[2].lstrip(".") for name in names]
    if len(tails) <= 1:
        return path_of(*tails)
    parent = tails[0].rpartition(".")[0]
    if parent and all(name.rpartition(".")[2].isdigit() for name in tails):
        path = selector_path(tails, ())
        assert path is not None  # names of one parent
        return path
    last_segment = n.Seg(brace_names([name.rpartition(".")[2] for name in tails]))
    return n.Path((*path_of(parent).segs, last_segment))


def brace_names(names: Sequence[str]) -> str:
    """Return names as one segment: `{q,k,v}_proj`, with common parts at `_` written once."""
    prefix = os.path.commonprefix(list(names))
    prefix = prefix[: prefix.rfind("_") + 1]
    suffix = os.path.commonprefix([name[len(prefix) :][::-1] for name in names])[::-1]
    suffix = suffix[suffix.find("_") :] if "_" in suffix else ""
    middles = (name[len(prefix) : len(name) - len(suffix)] for name in names)
    return f"{prefix}{{{','.join(middles)}}}{suffix}"


def names_text(names: Sequence[str]) -> str:
    """Return common names as short text: names of one parent in braces."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return ", ".join(
        ".".join(filter(None, (parent, brace_names([n.rpartition(".")[2] for n in group]))))
        if len(group) > 1
        else group[0]
        for parent, group in groups.items()
    )


def wrap_comment(text: str, width: int = 88) -> list[str]:
    """Return a text as lines of a comment."""
    lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return [f"#{'  ' if number else ''} {line}" for number, line in enumerate(lines)]


def _fold_rows(rows: Sequence[ProposedRow], blocks: Blocks) -> list[ProposedRow]:
    """Return rows in which consecutive rows of one parent, call and blocks are merged."""
    folded: list[ProposedRow] = []
    last_key: object = None
    for row in rows:
        parent, _, last = row.names[0].rpartition(".") if row.names else ("", "", "")
        foldable = PLAIN.fullmatch(last) is not None and bool(parent or not last.isdigit())
        paths = block_paths(row.names[0], blocks) if foldable else ()
        key = (parent, paths, row.call, row.comment, last.isdigit()) if foldable else None
        if key is not None and key == last_key:
            folded[-1] = replace(folded[-1], names=(*folded[-1].names, *row.names))
        else:
            folded.append(row)
        last_key = key
    return folded


Loss = Callable[..., Any]
SAMPLE_ROWS = 8  # rows of the batch that suffice to check legality
# elements of each integer tensor: values of larger tensors are not traced
SAMPLE_ELEMENTS = 1 << 17


def plan_of_proposal(
    rows: Sequence[ProposedRow],
    blocks: Blocks,
    mesh: Mapping[str, int],
    step: str = "trial",
    *relax: str,
) -> Plan:
    """Return the plan of rows on a mesh, at all modules of their names, in one step.

    The step relaxes `relax`. In refusals each row has its own line. Raises Refusal for an illegal
    row.
    """
    source = Source(step, "\n".join(map(str, rows)))
    calls: list[tuple[n.Call, Sequence[str]]] = []
    for line, (row, text) in enumerate(zip(rows, source.lines), 1):
        call = n.with_spans(row.call, Span(source, line, 1, line, len(text) + 1))
        sites = [fqn for name in row.names for fqn in blocks.modules_of(name)]
        calls.append((call, tuple(dict.fromkeys(sites))))  # in one call: one row cuts several lists
    return plan_of_calls(calls, blocks.facts, Mesh(tuple(mesh.items())), step, relax)


class RowTrial:
    """A model and a batch on which rows are tried, without changing the model.

    `other_axes` are further axes of the mesh, used by rows that exist already.
    """

    other_axes: Mapping[str, int] = {}

    def __init__(
        self,
        facts: ModelFacts,
        blocks: Blocks,
        batch: Mapping[str, Any],
        loss: Loss | None,
        weight: Loss | None = None,
    ) -> None:
        self.facts = facts
        self.full_blocks = blocks
        self.batch = batch
        self.loss = loss
        self.weight = weight

    # -- the model with fewer blocks ---------------------------------------------------------------

    @cached_property
    def _traced_blocks(self) -> tuple[Blocks, ProjectionCalls]:
        """Return the blocks of the shortest model that runs, and the feeds of its projections."""
        try:
            short_blocks = self.with_fewer_blocks(1)
            return short_blocks, self._uses(short_blocks)
        except Exception as error:
            # a model with its own count of layers may not run with fewer: then the full model is
            # traced, and its errors are raised below with this error as cause
            short_error = error
        try:
            return self.full_blocks, self._uses(self.full_blocks)
        except Refusal as refusal:
            raise refusal from short_error
        except Exception as error:
            error.__cause__ = short_error
            raise batch_refusal(error) from error

    @property
    def blocks(self) -> Blocks:
        """Return the blocks of the model on which rows are tried."""
        return self._traced_blocks[0]

    @property
    def feeds(self) -> ProjectionCalls:
        """Return the feeds of that model: what each projection reads."""
        return self._traced_blocks[1]

    def with_fewer_blocks(self, stages: int) -> Blocks:
        """Return the model with the fewest blocks for some stages; it may not run."""
        cached: Any = self.facts.cache.setdefault("shorter", {})
        if stages not in cached:
            cached[stages] = self.full_blocks.in_model(
                ModelFacts(shorten_model(self.facts.model, self.full_blocks, stages))
            )
        blocks: Blocks = cached[stages]
        return blocks

    def _uses(self, blocks: Blocks) -> ProjectionCalls:
        from schedlang.runtime.propagation.sources import trace_sources
        from schedlang.runtime.tracing.meta_runs import meta_model

        sites = blocks.facts.sites
        return trace_sources(
            meta_model(blocks.facts.model, {}),
            self.sample,
            leaves=lambda fqn: can_split_module(blocks.facts, fqn),
            blocks=blocks.is_block,
            outside=lambda fqn: leaf_kind(sites[fqn]) in TABLES and not blocks.is_inside(fqn),
        )

    @cached_property
    def sample(self) -> Mapping[str, Any]:
        """Return a few rows of the batch: with all rows a mask may be too large for the trace."""
        from schedlang.runtime.batch import named_tensors, row_count, split_batch

        rows = row_count(self.batch)
        integer_tensors = [
            t for t in named_tensors(self.batch).values() if not t.is_floating_point()
        ]
        longest = max((tensor.numel() // rows for tensor in integer_tensors), default=0)
        # a dim of size 1 is ambiguous
        row_limit = max(2, min(SAMPLE_ROWS, SAMPLE_ELEMENTS // max(1, longest)))
        return split_batch(self.batch, max(1, rows // row_limit), 1)[0][0].inputs

    @property
    def is_shortened(self) -> bool:
        """Return whether the model runs with fewer blocks."""
        return self.blocks is not self.full_blocks

    # -- trials ------------------------------------------------------------------------------------

    def with_axes(self, axes: Mapping[str, int]) -> RowTrial:
        """Return the trial on a mesh with further axes."""
        trial = copy(self)
        trial.other_axes = axes
        return trial

    def find_refusal(
        self, rows: Sequence[ProposedRow], axis: str, ranks: int
    ) -> tuple[Refusal, int] | None:
        """Return the refusal of rows and the index of the blamed row (-1: none); None if legal."""
        try:
            propagate(self.plan_rows(rows, axis, ranks), self.sample, self.loss)
        except Refusal as refusal:
            return refusal, refusal.diagnostic.primary.span.line - 1
        except Exception as error:  # rows whose trace fails are not proposed either
            title = f"{type(error).__name__}: {error}".split("\n")[0]
            return Refusal.of("S405", title), -1
        return None

    def plan_rows(self, rows: Sequence[ProposedRow], axis: str, ranks: int) -> Plan:
        """Return the plan of rows on a mesh; raise Refusal for an illegal row."""
        return plan_of_proposal(rows, self.blocks, {**self.other_axes, axis: ranks})

    def cut_refusal(self, row: ProposedRow, axis: str, stages: int) -> Refusal | None:
        """Return the refusal of a row that splits the model into stages; None if it is legal."""
        for blocks in (self.with_fewer_blocks(stages), self.full_blocks):
            try:
                plan = plan_of_proposal([row], blocks, {axis: stages})
                if stages > 1:
                    sample = self.sample
                    stages_of(plan, propagate(plan, sample, self.loss), sample, self.loss)
                return None
            except Refusal as error:
                refusal = error
            except Exception as error:
                title = f"{type(error).__name__}: {error}".split("\n")[0]
                refusal = Refusal.of("S612", title)
        return refusal

    def token_split_refusal(
        self, rows: Sequence[ProposedRow], axis: str, ranks: int
    ) -> Refusal | None:
        """Return the refusal of rows that split sequences; None if legal or without values.

        All blocks are needed where values are tried; a guess without values needs few.
        """
        blocks = self.blocks if is_on_meta(self.facts.model) else self.full_blocks
        try:
            plan = plan_of_proposal(rows, blocks, {axis: ranks})
            traced = propagate(plan, self.sample, self.loss)
            weighed = self.weight is not None
            traced = with_statistics(plan, traced, self.sample, self.loss, weighed)
            tokens_of(plan, traced, self.sample, self.loss, self.weight)
        except Refusal as refusal:
            return refusal
        return None
