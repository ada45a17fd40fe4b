"""context_parallel: split sequences over ranks; attention meets the keys of the other ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from typing import Literal

from schedlang.ir.annotations import ContextSplit
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse
from schedlang.language.kinds import Axes

TWO_LEVEL_METHODS = ("double_ring", "usp", "nbody")


class context_parallel(Primitive):  # noqa: N801
    """Split sequences over the ranks of `over`; only attention exchanges tokens between ranks.

    before   y = attention(q, k, v)            of the full sequence
    after    y = attention(q, k of all, v of all)   for the queries of this rank's tokens

      gather       all-gather of keys and values, reduce-scatter of their gradients
      ring         blocks of keys and values go around a ring, softmax is merged block by block
      double_ring  rings over the last axis of `over`, inside a ring over its first axis
      ulysses      all-to-all: full sequences of some of the heads, and back
      usp          ulysses over the last axis of `over`, inside a ring over its first axis
      nbody        teams over the last axis of `over` share queries and the steps of a ring of teams

    Two rows at one module, one of them `ulysses`, also make `usp`.  `layout` sets the tokens of a
    rank: one run (`contiguous`), two of 2n chunks from both ends (`zigzag`), or every n-th token
    (`striped`).

    Tensors of the batch with a sequence dim are split, also labels.  Positions are those of the
    full sequence.  A small stand-in of the model runs first: a model that mixes tokens outside of
    attention is refused.  Parameters are replicated and their gradients all-reduced;
    `zero(..., over=(dp, cp))` may slice them over both axes.

    Llama 3 (2024) for gather; Liu et al., Ring Attention (2023), Brandon et al., Striped Attention
    (2023); Jacobs et al., DeepSpeed-Ulysses (2023); Fang and Zhao, USP (2024); Gu et al.,
    LoongTrain (2024); Sun et al., BurstAttention (2024); WallFacer (2024), after Driscoll et al.,
    A communication-optimal n-body algorithm (2013).
    """

    method: Literal["gather", "ring", "double_ring", "ulysses", "usp", "nbody"]
    over: Axes = field(kw_only=True)
    layout: Literal["contiguous", "zigzag", "striped"] | None = None

    example = "layers.*.attn  context_parallel(gather, over=cp)"
    reads = frozenset({"structure"})
    writes = frozenset({"placement"})
    gives_up = frozenset({"rounding"})

    def agree(self, axes: Collection[str]) -> None:
        """Refuse a method of two levels without two axes."""
        if self.method in TWO_LEVEL_METHODS and len(self.over) != 2:
            refuse(
                "S303",
                f"`{self.method}` needs two axes",
                "`over` names one axis",
                helps=(
                    f"name both, the outer one first: `{self.method}, over=(nodes, gpus)`",
                    "or use one axis: `ring`, `ulysses`",
                ),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse axes with another use, and sequences that would be split in two ways."""
        order = list(plan.mesh.sizes)
        places = [order.index(plan.mesh.fold(axis)[0]) for axis in self.over]
        if self.method in TWO_LEVEL_METHODS and places != sorted(places):
            refuse(
                "S504",
                "the second axis must be the one that varies fastest",
                "not in the order of the mesh",
                helps=("name them in the order of the mesh",),
            )
        split = {
            a for layout in plan.layouts.values() for n in layout.axes for a in plan.mesh.fold(n)
        }
        stage_axes = {a for cut in plan.cuts for a in plan.mesh.fold(cut.axis)}
        own_axes = plan.mesh.fold(self.over)
        for axis in sorted(set(own_axes) & (split | stage_axes)):
            purpose = "splits parameters" if axis in split else "holds pipeline stages"
            refuse(
                "S504",
                f"`{axis}` cannot split sequences: it already {purpose}",
                helps=("name another axis of the mesh",),
            )
        self._check_other_rows(site, plan)

    def _check_other_rows(self, site: Site, plan: Plan) -> None:
        existing = plan.contexts.get(site.fqn, ())
        own_axes = set(plan.mesh.fold(self.over))
        methods = {self.method, *(split.method for split in existing)}
        compatible = len(existing) == 1 and methods == {"ulysses", "ring"}
        if existing and (not compatible or own_axes & set(plan.mesh.fold(existing[0].axes))):
            refuse(
                "S501",
                f"`{site}` has a `context_parallel` row already",
                f"by `{existing[0].method}` over {', '.join(existing[0].axes)}",
                helps=(
                    "write one row for each module, or `ulysses` over one axis and `ring`"
                    " over"
                    " another",
                ),
            )
        layouts = {split.layout for rows in plan.contexts.values() for split in rows} - {None}
        if self.layout and layouts - {self.layout}:
            layout = next(iter(layouts))
            refuse(
                "S504",
                f"two layouts of the sequence: `{layout}` in a row above, `{self.layout}` here",
                helps=(f"write `layout={layout}` in all rows, or leave it out",),
            )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the attention method of this module to the plan."""
        from dataclasses import replace

        split = ContextSplit(
            tuple(map(str, self.over)), self.method, self.layout, row=plan.next_row
        )
        rows = (*plan.contexts.get(site.fqn, ()), split)
        return replace(plan, contexts={**plan.contexts, site.fqn: rows})
