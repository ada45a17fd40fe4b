"""The rows that split a model's projections, tables and output layer over one axis."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.passes.blocks import leaf_kind
from schedlang.passes.flows import Flow, flows, variants
from schedlang.passes.proposal_text import Row

if TYPE_CHECKING:
    from schedlang.diagnostic import Refusal
    from schedlang.passes.proposal_trial import Trial

REMEDY = re.compile(r"`((?:blocks|uneven)=(?:\[[^`]*\]|[^`, ]+))`")
MOST = 8  # remedies for one flow
PADDED = 128


def tensor_rows(trial: Trial, axis: str, ranks: int, notes: list[str]) -> list[Row]:
    """Rows that are legal together; what is refused is left out, and noted."""
    finder = _Finder(trial, axis, ranks)
    for flow in flows(trial.uses, trial.blocks):
        why = finder.flow(flow)
        if why:
            notes.append(f"whole: {', '.join(sorted(flow.names))}: {why}")
    why = finder.vocabulary()
    if why:
        notes.append(why)
    return finder.rows


class _Finder:
    def __init__(self, trial: Trial, axis: str, ranks: int) -> None:
        self.trial, self.axis, self.ranks = trial, axis, ranks
        self.rows: list[Row] = []

    def flow(self, flow: Flow) -> str:
        """Add the rows of a flow in the first form that is legal; else say why none is."""
        said = ""
        for one in variants(flow):
            for gathered in (False, True):
                made = self._mended(self._rows(one, gathered))
                if isinstance(made, list):
                    self.rows += [replace(r, comment=said) if gathered else r for r in made]
                    return ""
                said = said or made
        return said

    def _rows(self, flow: Flow, gathered: bool) -> list[Row]:
        over = f"over={self.axis}"
        inside = "heads" if flow.mixed else "inner width"
        out = []
        for name in flow.sources:
            if self._kind(name) == "Embedding":
                if not gathered:
                    out.append(Row((name,), f"shard(weight=S(hidden), {over})"))
                continue
            leave = "output=R, " if gathered else ""
            out.append(
                Row((name,), f"shard(col, {leave}{over})", f"{inside} split over {self.axis}")
            )
        for name in flow.sinks:
            out.append(Row((name,), f"shard(row, {over})"))
        return out

    def _kind(self, name: str) -> str:
        blocks = self.trial.blocks
        return leaf_kind(blocks.facts.sites[blocks.named[name][0]])

    def _mended(self, rows: list[Row]) -> list[Row] | str:
        """The rows with what their refusals ask for; else the first reason."""
        first = ""
        for _ in range(MOST):
            found = self.trial.refusal([*self.rows, *rows], self.axis, self.ranks)
            if found is None:
                return rows
            refusal, place = found
            first = first or refusal.diagnostic.title
            place -= len(self.rows)
            remedy = _remedy(refusal)
            if remedy is None or not 0 <= place < len(rows):
                return first
            better = rows[place].with_argument(remedy)
            if better == rows[place]:
                return first
            rows = [*rows[:place], better, *rows[place + 1 :]]
        return first

    # -- the vocabulary ----------------------------------------------------------------------------

    def vocabulary(self) -> str:
        """Add rows for the table of tokens and the output layer; else say why they stay whole."""
        tables, heads = self._tables()
        if not tables and not heads:
            return ""
        over = f"over={self.axis}"
        table = [Row((name,), f"shard(vocab, {over})") for name in tables]
        split = [Row((name,), f"shard(vocab, {over})") for name in heads]
        gathered = [Row((name,), f"shard(col, output=R, {over})") for name in heads]
        pads = self._pads((*tables, *heads))
        first = ""
        for tried in ([*table, *split], [*table, *gathered], table, gathered):
            made = self._mended([*pads, *tried])
            if isinstance(made, list):
                self.rows += made
                left = heads if tried is table else tables if tried is gathered else []
                return f"whole: {', '.join(left)}: {first}" if left else ""
            first = first or made
        return f"whole: {', '.join((*tables, *heads))}: {first}"

    def _tables(self) -> tuple[list[str], list[str]]:
        """The embeddings with the most rows outside of blocks, and layers of as many outputs."""
        blocks = self.trial.blocks
        sites = blocks.facts.sites
        outside = [fqn for fqn in self.trial.uses if not blocks.inside(fqn)]
        rows = {
            fqn: sites[fqn].parameters["weight"].shape[0]
            for fqn in outside if leaf_kind(sites[fqn]) == "Embedding"
        }  # fmt: skip
        if not rows:
            return [], []
        most = max(rows.values())
        tables = [fqn for fqn, count in rows.items() if count == most]
        heads = [
            fqn for fqn in outside
            if leaf_kind(sites[fqn]) in ("Linear", "Conv1D") and self._outputs(fqn) == most
        ]  # fmt: skip
        return tables, heads

    def _outputs(self, fqn: str) -> int:
        site = self.trial.blocks.facts.sites[fqn]
        return site.parameters["weight"].shape[site.dims["weight"].index("out")]

    def _pads(self, names: Sequence[str]) -> list[Row]:
        facts = self.trial.blocks.facts
        out, seen = [], set()
        for name in names:
            site = facts.sites[name]
            weight = site.parameters["weight"]
            dim = "vocab" if "vocab" in site.dims["weight"] else "out"
            size = weight.shape[site.dims["weight"].index(dim)]
            if size % self.ranks and weight.name not in seen:
                seen.add(weight.name)
                multiple = PADDED if PADDED % self.ranks == 0 and size > 16 * PADDED else self.ranks
                said = f"{size} rows do not divide by {self.ranks}"
                out.append(Row((name,), f"pad({dim}, multiple={multiple})", said))
        return out


def _remedy(refusal: Refusal) -> str | None:
    """An argument that a refusal asks for."""
    helps = (text for d in refusal.diagnostics for text in d.helps)
    found = (REMEDY.search(text) for text in helps)
    return next((match.group(1) for match in found if match), None)
