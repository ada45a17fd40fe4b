"""Rows tried on a model with as few blocks as show all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.complete.proposal_text import Row, heads, quoted
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.propagate.original import rejected
from schedlang.passes.reduce_model.blocks import TABLES, Blocks, leaf_kind, shorter, splits

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts
    from schedlang.runtime.propagation.feeds import Fed

Loss = Callable[..., Any]
HEAD = 4  # lines of a trial above its rows
ROWS = 8  # of the batch are enough to see what is legal
NUMBERS = 1 << 17  # of each of its integer tensors: what a model asks of more is not followed


class Trial:
    """One model and one batch on which rows are tried; nothing of the model itself is changed."""

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
        """What each projection of that model reads."""
        return self._followed[1]

    def shorter(self, stages: int) -> Blocks:
        """The model with as few blocks as stages need, whether or not it runs with so few."""
        from schedlang.ir.model import ModelFacts

        return self.all.of(ModelFacts(shorter(self.facts.model, self.all, stages)))

    def _uses(self, blocks: Blocks) -> Fed:
        from schedlang.runtime.propagation.feeds import feeds
        from schedlang.runtime.tracing.meta import hollow_model

        sites = blocks.facts.sites
        return feeds(
            hollow_model(blocks.facts.model, {}),
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
        """Does the model run with fewer blocks?"""
        return self.blocks is not self.all

    # -- trials ------------------------------------------------------------------------------------

    def refusal(self, rows: Sequence[Row], axis: str, ranks: int) -> tuple[Refusal, int] | None:
        """Why rows are refused, and the number of the row that is to blame (-1: none); or None."""
        from schedlang.passes.propagate.propagate import propagate

        lines = self._lines(rows)
        try:
            propagate(self.plan(rows, axis, ranks), self.sample, self.loss)
        except Refusal as refusal:
            place = refusal.diagnostic.primary.span.line - HEAD - 1
            return refusal, lines[place][1] if 0 <= place < len(lines) else -1
        except Exception as error:  # what fails on the way is no proposal either
            said = f"{type(error).__name__}: {error}".split("\n")[0]
            return Refusal(Diagnostic("S405", said)), -1
        return None

    def plan(self, rows: Sequence[Row], axis: str, ranks: int) -> Plan:
        """The plan of rows on a mesh of one axis; raises Refusal where one is refused."""
        lines = [line for line, _ in self._lines(rows)]
        return self._plan(lines, f"{axis}={ranks}", self.blocks.facts)

    def _lines(self, rows: Sequence[Row]) -> list[tuple[str, int]]:
        """Rows as text, one for each selector, with the number of the row."""
        return [
            (f"{path}  {row.call}".strip(), number)
            for number, row in enumerate(rows)
            for path in paths(row, self.blocks) or [""]
        ]

    def cut(self, row: Row, axis: str, stages: int) -> Refusal | None:
        """Why the model cannot be cut into stages by a row; None if it can."""
        from schedlang.passes.partition.staging import stages_of
        from schedlang.passes.propagate.propagate import propagate

        lines = [f"{', '.join(row.names)}  {row.call}"]
        for blocks in (self.shorter(stages), self.all):
            try:
                plan = self._plan(lines, f"{axis}={stages}", blocks.facts)
                if stages > 1:
                    sample = self.sample
                    stages_of(plan, propagate(plan, sample, self.loss), sample, self.loss)
                return None
            except Refusal as error:
                refusal = error
            except Exception as error:
                said = f"{type(error).__name__}: {error}".split("\n")[0]
                refusal = Refusal(Diagnostic("S612", said))
        return refusal

    def by_tokens(self, rows: Sequence[Row], axis: str, ranks: int) -> Refusal | None:
        """Why the model cannot run on some of its tokens; None if it can, or has no values."""
        from schedlang.passes.propagate.context import tokens_of
        from schedlang.passes.propagate.propagate import propagate

        lines = [f"{path}  {row.call}" for row in rows for path in paths(row, self.all)]
        try:
            plan = self._plan(lines, f"{axis}={ranks}", self.all.facts)
            traced = propagate(plan, self.sample, self.loss)
            tokens_of(plan, traced, self.sample, self.loss, self.weight)
        except Refusal as refusal:
            return refusal
        return None

    @staticmethod
    def _plan(lines: Sequence[str], mesh: str, facts: ModelFacts) -> Plan:
        body = "\n".join(lines)
        text = f'schedule 1\nmesh({mesh})\n\nstep "trial" {{\n{body}\n}}\n'
        made = expand(parse(Source("trial", text)), facts).plan
        assert made is not None
        return made


def paths(row: Row, blocks: Blocks) -> list[str]:
    """One selector for each common name of a row."""
    return [
        ".".join(filter(None, (head, quoted(name.rpartition("*")[2].lstrip(".")))))
        for name in row.names
        for head in heads(name, blocks)
    ]
