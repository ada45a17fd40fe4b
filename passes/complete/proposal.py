"""Rows of a proposal: tried on a model with as few blocks as show all, folded, and in steps.

* Rows tried on a model.
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
from schedlang.passes.elaborate.expand import of_calls
from schedlang.passes.elaborate.rows import PLAIN, path_of, selector
from schedlang.passes.partition.staging import stages_of
from schedlang.passes.propagate.context import tokens_of
from schedlang.passes.propagate.original import rejected
from schedlang.passes.propagate.propagate import propagate
from schedlang.passes.reduce_model.blocks import TABLES, Blocks, leaf_kind, shorter, splits

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts
    from schedlang.runtime.propagation.feeds import Fed


def call(verb: str, *words: str, **named: object) -> n.Call:
    """A call of these arguments, in this order; a text is a name."""
    return lift.call(verb, words, named)


@dataclass(frozen=True)
class Row:
    """One primitive at the modules of one or several common names; none: at the model itself."""

    names: tuple[str, ...]
    call: n.Call
    comment: str = ""

    def __str__(self) -> str:
        return f"{', '.join(self.names)}  {printer.expr(self.call)}".strip()

    def at(self, *paths: n.Path) -> n.Rule | n.Do:
        """The row as a schedule has it, at other paths; those without names are left out."""
        return lift.row([path for path in paths if path.segs], self.call, self.comment)

    @property
    def statement(self) -> n.Rule | n.Do:
        """The row as a schedule has it."""
        return self.at(*map(path_of, self.names))

    def changes(self, facet: Facet) -> bool:
        """Return whether its primitive writes a part of the plan."""
        kind = find(self.call.name.text)
        return kind is not None and facet in kind.writes

    @property
    def style(self) -> str:
        """The first argument, if it stands without a name: the style of a `shard`."""
        return next((one.text for one in self.call.args[:1] if isinstance(one, n.Name)), "")

    def argument(self, name: str) -> n.Expr | None:
        """The value of an argument, if the call names it."""
        named = (one for one in self.call.args if isinstance(one, n.Keyword))
        return next((one.value for one in named if one.name == name), None)

    def with_argument(self, name: str, value: object) -> Row:
        """The row with one more argument, before the axis; one that it has stays."""
        if self.argument(name) is not None:
            return self
        given = [*self.call.args]
        over = (
            k for k, one in enumerate(given) if isinstance(one, n.Keyword) and one.name == "over"
        )
        given.insert(next(over, len(given)), n.Keyword(name, lift.lift(value)))
        return replace(self, call=replace(self.call, args=tuple(given)))


Place = tuple[n.Path, n.Path, Row]  # the blocks where a row stands, and its path inside them


def statements(rows: Sequence[Row], blocks: Blocks) -> tuple[n.Stmt, ...]:
    """Rows folded: one block for each list of blocks, one row for names that are done the same."""
    found: list[n.Stmt] = []
    placed = _together(_placed(_folded(rows, blocks), blocks))
    for head, several in groupby(placed, lambda place: place[0]):
        inner = tuple(row.at(tail) for _, tail, row in several)
        found += [n.At((head,), None, (), n.Block(inner))] if head.segs else inner
    return tuple(found)


def step(name: str, rows: Iterable[n.Stmt], proof: n.Call | None = None, relax: str = "") -> n.Step:
    """A step of rows, and of the `verify` that proves them; it gives up what `relax` names."""
    check = () if proof is None else (lift.row((), proof),)
    return n.Step(name, (relax,) * bool(relax), n.Block((*rows, *check)))


def precision(dtype: str, proof: n.Call | None = None) -> n.Step:
    """The step in which a whole model computes in a dtype, beside masters as they are stored."""
    cast = lift.row((), call("cast", dtype, params=True))
    return step("precision", [cast], proof, "dtype")


def file_of(
    source: str, class_name: str, mesh: n.Mesh, steps: Iterable[n.Step], *remarks: str
) -> n.File:
    """The schedule of some steps for models of a class; it stands in its own text.

    `source` names that text; `remarks` are the lines below all.
    """
    file = n.File(lift.header(class_name), (mesh, *steps), remarks=remarks)
    return printer.standing(file, source)


def _placed(rows: Sequence[Row], blocks: Blocks) -> Iterator[Place]:
    """Each row with the blocks where it stands and its path inside them."""
    for row in rows:
        name = row.names[0] if row.names else ""
        for head in heads(name, blocks):
            tail = _tail(row.names)
            alone = sum(head in heads(r.names[0], blocks) for r in rows if r.names) == 1
            if not head.segs or alone:
                yield n.Path(()), n.Path((*head.segs, *tail.segs)), row
            else:
                yield head, tail, row


def _together(placed: Iterable[Place]) -> Iterator[Place]:
    """The same rows; among consecutive rows in blocks, those of one list side by side."""
    run: list[Place] = []
    for one in [*placed, None]:
        if one is not None and any("*" in name for name in one[2].names):
            run.append(one)
            continue
        order = list(dict.fromkeys(head for head, _, _ in run))
        yield from sorted(run, key=lambda place: order.index(place[0]))
        run = []
        if one is not None:
            yield one


def heads(name: str, blocks: Blocks) -> tuple[n.Path, ...]:
    """The blocks in which modules of a common name stand; the empty path where it is in none."""
    root, star, _ = name.rpartition("*")
    if not star:
        return (n.Path(()),)
    depth = name[: len(root)].count(".")
    everyone = blocks.named.get(root + star, ())
    held = dict.fromkeys(
        ".".join(fqn.split(".")[: depth + 1]) for fqn in blocks.named.get(name, ())
    )
    found = tuple(held)
    if len(found) == len(everyone):  # numbers beside those of blocks stay: `up.1.blocks.*`
        own = path_of(root.rpartition("*")[2].strip("."), star)
        outer = heads(root.rstrip("."), blocks)  # a list may stand in some of the outer blocks only
        return tuple(n.Path((*head.segs, *own.segs)) for head in outer)
    one = selector(found, everyone)
    return tuple(map(path_of, found)) if one is None else (one,)


def _tail(names: Sequence[str]) -> n.Path:
    """The path of one or several common names below their blocks."""
    below = [name.rpartition("*")[2].lstrip(".") for name in names]
    if len(below) <= 1:
        return path_of(*below)
    parent = below[0].rpartition(".")[0]
    if parent and all(name.rpartition(".")[2].isdigit() for name in below):
        found = selector(below, ())
        assert found is not None  # names of one parent
        return found
    together = n.Seg(braces([name.rpartition(".")[2] for name in below]))
    return n.Path((*path_of(parent).segs, together))


def braces(names: Sequence[str]) -> str:
    """`{q,k,v}_proj`: what names have in common at a `_` stands once."""
    front = os.path.commonprefix(list(names))
    front = front[: front.rfind("_") + 1]
    back = os.path.commonprefix([name[len(front) :][::-1] for name in names])[::-1]
    back = back[back.find("_") :] if "_" in back else ""
    middle = (name[len(front) : len(name) - len(back)] for name in names)
    return f"{front}{{{','.join(middle)}}}{back}"


def names_text(names: Sequence[str]) -> str:
    """Common names in few words: those of one parent in braces."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return ", ".join(
        ".".join(filter(None, (parent, braces([n.rpartition(".")[2] for n in group]))))
        if len(group) > 1
        else group[0]
        for parent, group in groups.items()
    )


def wrapped(text: str, width: int = 88) -> list[str]:
    """The lines of a comment."""
    lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return [f"#{'  ' if number else ''} {line}" for number, line in enumerate(lines)]


def _folded(rows: Sequence[Row], blocks: Blocks) -> list[Row]:
    """Rows of one parent and one call that follow each other, in the same blocks, as one row."""
    out: list[Row] = []
    before: object = None
    for row in rows:
        parent, _, last = row.names[0].rpartition(".") if row.names else ("", "", "")
        foldable = PLAIN.fullmatch(last) is not None and bool(parent or not last.isdigit())
        where = heads(row.names[0], blocks) if foldable else ()
        key = (parent, where, row.call, row.comment, last.isdigit()) if foldable else None
        if key is not None and key == before:
            out[-1] = replace(out[-1], names=(*out[-1].names, *row.names))
        else:
            out.append(row)
        before = key
    return out


Loss = Callable[..., Any]
ROWS = 8  # of the batch are enough to see what is legal
NUMBERS = 1 << 17  # of each of its integer tensors: what a model asks of more is not followed


def planned(
    rows: Sequence[Row],
    blocks: Blocks,
    mesh: Mapping[str, int],
    step: str = "trial",
    *relax: str,
) -> Plan:
    """The plan of rows on a mesh, at all modules of their names, in a step that gives up `relax`.

    Each stands at a line of its own of what a refusal shows.  Raises Refusal where one is refused.
    """
    source = Source(step, "\n".join(map(str, rows)))
    calls: list[tuple[n.Call, Sequence[str]]] = []
    for line, (row, text) in enumerate(zip(rows, source.lines), 1):
        made = n.placed(row.call, Span(source, line, 1, line, len(text) + 1))
        sites = [fqn for name in row.names for fqn in blocks.sites(name)]
        calls.append((made, tuple(dict.fromkeys(sites))))  # together: one row cuts several lists
    return of_calls(calls, blocks.facts, Mesh(tuple(mesh.items())), step, relax)


class Trial:
    """One model and one batch on which rows are tried; nothing of the model itself is changed.

    `beside` are axes of the mesh along which rows that stand already split.
    """

    beside: Mapping[str, int] = {}

    def __init__(
        self,
        facts: ModelFacts,
        blocks: Blocks,
        batch: Mapping[str, Any],
        loss: Loss | None,
        weight: Loss | None = None,
    ) -> None:
        self.facts, self.all, self.batch, self.loss, self.weight = (
            facts,
            blocks,
            batch,
            loss,
            weight,
        )

    # -- the model with fewer blocks ---------------------------------------------------------------

    @cached_property
    def _followed(self) -> tuple[Blocks, Fed]:
        """The blocks of the shortest model that runs, and what its projections read."""
        try:
            short = self.shorter(1)
            return short, self._uses(short)
        except Exception as error:
            # a model may count its layers by itself, and no longer run with fewer: then it is
            # followed whole, and what fails there too is told below, with this as its cause
            fewer = error
        try:
            return self.all, self._uses(self.all)
        except Refusal as refusal:
            raise refusal from fewer
        except Exception as error:
            error.__cause__ = fewer
            raise rejected(error) from error

    @property
    def blocks(self) -> Blocks:
        """The model that rows are tried on."""
        return self._followed[0]

    @property
    def fed(self) -> Fed:
        """The feeds of that model: what each projection reads."""
        return self._followed[1]

    def shorter(self, stages: int) -> Blocks:
        """The model with as few blocks as stages need, whether or not it runs with so few."""
        known: Any = self.facts.cache.setdefault("shorter", {})
        if stages not in known:
            known[stages] = self.all.of(ModelFacts(shorter(self.facts.model, self.all, stages)))
        found: Blocks = known[stages]
        return found

    def _uses(self, blocks: Blocks) -> Fed:
        from schedlang.runtime.propagation.feeds import feeds
        from schedlang.runtime.tracing.meta import meta_model

        sites = blocks.facts.sites
        return feeds(
            meta_model(blocks.facts.model, {}),
            self.sample,
            leaves=lambda fqn: splits(blocks.facts, fqn),
            blocks=blocks.is_block,
            outside=lambda fqn: leaf_kind(sites[fqn]) in TABLES and not blocks.inside(fqn),
        )

    @cached_property
    def sample(self) -> Mapping[str, Any]:
        """A few rows of the batch: with all of them a mask may be too large to be followed."""
        from schedlang.runtime.batch import named_tensors, rows_of, split

        rows = rows_of(self.batch)
        whole = [t for t in named_tensors(self.batch).values() if not t.is_floating_point()]
        longest = max((tensor.numel() // rows for tensor in whole), default=0)
        few = max(2, min(ROWS, NUMBERS // max(1, longest)))  # one row is not told from none
        return split(self.batch, max(1, rows // few), 1)[0][0].inputs

    @property
    def shortened(self) -> bool:
        """Whether the model runs with fewer blocks."""
        return self.blocks is not self.all

    # -- trials ------------------------------------------------------------------------------------

    def on(self, beside: Mapping[str, int]) -> Trial:
        """The same on a mesh of more axes."""
        found = copy(self)
        found.beside = beside
        return found

    def refusal(self, rows: Sequence[Row], axis: str, ranks: int) -> tuple[Refusal, int] | None:
        """Return the refusal of rows, and the number of the row to blame (-1: none); None: they are
        legal."""
        try:
            propagate(self.plan(rows, axis, ranks), self.sample, self.loss)
        except Refusal as refusal:
            return refusal, refusal.diagnostic.primary.span.line - 1
        except Exception as error:  # what fails on the way is no proposal either
            said = f"{type(error).__name__}: {error}".split("\n")[0]
            return Refusal.of("S405", said), -1
        return None

    def plan(self, rows: Sequence[Row], axis: str, ranks: int) -> Plan:
        """The plan of rows on a mesh; raises Refusal where one is refused."""
        return planned(rows, self.blocks, {**self.beside, axis: ranks})

    def cut(self, row: Row, axis: str, stages: int) -> Refusal | None:
        """Return the refusal of cutting the model into stages by a row; None if it can be cut."""
        for blocks in (self.shorter(stages), self.all):
            try:
                plan = planned([row], blocks, {axis: stages})
                if stages > 1:
                    sample = self.sample
                    stages_of(plan, propagate(plan, sample, self.loss), sample, self.loss)
                return None
            except Refusal as error:
                refusal = error
            except Exception as error:
                said = f"{type(error).__name__}: {error}".split("\n")[0]
                refusal = Refusal.of("S612", said)
        return refusal

    def by_tokens(self, rows: Sequence[Row], axis: str, ranks: int) -> Refusal | None:
        """Return the refusal of running on some of the tokens; None if it runs, or has no
        values."""
        try:
            plan = planned(rows, self.all, {axis: ranks})
            traced = propagate(plan, self.sample, self.loss)
            tokens_of(plan, traced, self.sample, self.loss, self.weight)
        except Refusal as refusal:
            return refusal
        return None
