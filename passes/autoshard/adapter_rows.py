"""Rows that add adapters to the projections of a model's blocks, for `schedlang init --adapt`."""

from __future__ import annotations

from dataclasses import dataclass

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.complete.proposed_rows import ProposedRow, make_call, plan_of_proposal
from schedlang.passes.reduce_model.blocks import PROJECTIONS, Blocks, leaf_kind


@dataclass(frozen=True)
class Adapters:
    """Adapters to propose: `lora` or `dora`, and their rank."""

    kind: str
    rank: int

    def rows(self, blocks: Blocks, notes: list[str]) -> list[ProposedRow]:
        """Propose rows for all projections within lists of blocks that can have an adapter.

        Appends to `notes` each projection that cannot, with the reason.  Raises Refusal S212 where
        none can.
        """
        names_by_parent: dict[str, list[str]] = {}  # by the module that holds them
        refusals: list[str] = []
        for name, group in blocks.modules_by_name.items():
            if "*" not in name or leaf_kind(blocks.facts.sites[group[0]]) not in PROJECTIONS:
                continue
            if (refused := self._refused(blocks, name)) is None:
                names_by_parent.setdefault(name.rpartition(".")[0], []).append(name)
            else:
                refusals.append(f"no adapter: {name}: {refused.diagnostic.title}")
        if not names_by_parent:
            title = "no projection of this model's blocks takes an adapter"
            helps = ("leave `--adapt` out",)
            raise Refusal.of("S212", title, notes=tuple(refusals[:8]), helps=helps)
        notes += refusals
        return [self._row(*names) for names in names_by_parent.values()]

    def _row(self, *names: str) -> ProposedRow:
        return ProposedRow(names, make_call("adapt", self.kind, rank=self.rank))

    def _refused(self, blocks: Blocks, name: str) -> Refusal | None:
        """Return the refusal of the row at these modules alone, or None."""
        try:
            plan_of_proposal([self._row(name)], blocks, {}, "adapters", "model")
        except Refusal as refused:
            return refused
        return None
