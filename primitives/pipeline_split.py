"""pipeline_split: cut the model into stages along one mesh axis."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal

from schedlang.diagnostics.diagnostic import Label
from schedlang.ir.annotations import StageCut
from schedlang.ir.features import Recomputing
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse
from schedlang.language.kinds import Axis


class pipeline_split(Primitive):  # noqa: N801
    """Cut the model into stages: a list into equal parts, or before the selected modules.

    before   every rank runs every module
    after    rank k of the axis runs the k-th stage (with chunks, further stages in turn)

    A list (`transformer.h`) is cut into as many parts as the pipeline needs; several lists and
    modules (`encoder.block, decoder.block`) are one trunk, in the order in which the model calls
    them.  Stages start at single modules (`transformer.h[4, 8]`).  Modules before and after the
    trunk belong to the first and the last stage.

    `balance` minimizes the weight of the heaviest stage:
      even    elements of the trunk, in equal numbers
      params  parameters; a parameter that units share counts once in a stage
      time    floating-point operations, counted on the meta device
      memory  bytes of parameters, gradients, AdamW's state, and of activations of the microbatches
              that are in flight on the stage

    A tied weight that several stages use is replicated on these stages, and its gradients are
    summed; `tied=refuse` makes this an error.  Each stage replays the model's own forward; nothing
    is rewritten or traced.  To cut a module that is called in a loop between its calls, write an
    `unroll` row above.
    """

    over: Axis = field(kw_only=True)
    balance: Literal["even", "params", "time", "memory"] = field(default="even", kw_only=True)
    tied: Literal["replicate", "refuse"] = field(default="replicate", kw_only=True)

    example = "layers  pipeline_split(over=pp)"
    reads = frozenset({"structure", "placement", "recompute", "residence"})
    writes = frozenset({"stage"})
    gives_up = frozenset({"rounding"})  # sums over stages: of a tied weight, of the norm
    takes = "selection"

    def check(self, sites: tuple[Site, ...], plan: Plan) -> None:
        """Refuse a second axis, cuts at the root module, and ties under `tied=refuse`."""
        axis = next((cut.axis for cut in plan.cuts if cut.axis != self.over), None)
        if axis is not None:
            refuse("S509", f"the model is already cut over `{axis}`", helps=(f"use `over={axis}`",))
        if any(not site.fqn for site in sites):
            refuse(
                "S408",
                "no stage can start at the whole model",
                helps=("select its list of blocks: `layers  pipeline_split(over=...)`",),
            )
        lists = [site for site in sites if self._is_trunk(site, plan)]
        if not lists and self.balance != "even":
            refuse(
                "S409",
                "`balance` needs a list of modules; this row selects single modules",
                helps=("leave out `balance`", "or select the list of modules to cut"),
            )
        rows = plan.rows_with(Recomputing)
        row = next((action for action, verb in rows if verb.budget and verb.budget.cuts), None)
        if row is not None and (not lists or self.balance != "even"):
            refuse(
                "S845",
                "two rows choose where stages start",
                "cuts the model, too",
                helps=(
                    "leave out `balance`, and select the list of modules to cut",
                    "or use a plan that keeps the cuts: `checkpoint(plan=pareto, memory=...)`",
                ),
                also=(Label(row.span, "balances the stages by their recomputation"),),
            )
        if plan.cuts and (lists or plan.cuts[0].trunks):
            refuse("S509", "the model is already cut", helps=("only one row may cut a list",))
        self._check_count(lists, plan)
        if self.tied == "refuse" and plan.model.ties and plan.mesh.size(self.over) > 1:
            names = plan.model.ties[0]
            refuse(
                "S602",
                "this cut puts a tied weight on two stages",
                notes=(f"`{names[0]}` and `{names[-1]}` are the same tensor",),
                helps=("keep a copy on each stage and sum their gradients: `tied=replicate`",),
            )

    def _check_count(self, lists: list[Site], plan: Plan) -> None:
        """Refuse (S613) more stages than modules."""
        times, ranks = dict(plan.unrolled), plan.mesh.size(self.over)
        parts = sum(times.get(site.fqn) or len(plan.model.children(site.fqn)) for site in lists)
        if lists and parts < ranks:
            names = ", ".join(f"`{site.fqn}`" for site in lists)
            refuse(
                "S613",
                f"{parts} module{'s' * (parts != 1)} cannot be cut into {ranks} stages",
                f"`{self.over}` has {ranks} ranks",
                notes=(f"these are all modules of {names}",),
                helps=(
                    f"`{self.over}` may be 1 to {parts}",
                    "or, for modules called in a loop, make each call a module: `unroll`,"
                    " in a"
                    " row above",
                ),
            )

    def transform(self, sites: tuple[Site, ...], plan: Plan) -> Plan:
        """Add the cut to the plan; stages are numbered when the number of chunks is known."""
        axis = str(self.over)
        names = tuple(site.fqn for site in sites)
        trunk = any(self._is_trunk(site, plan) for site in sites)
        cut = StageCut(
            axis, () if trunk else names, names if trunk else (), self.balance, row=plan.next_row
        )
        return replace(plan, cuts=(*plan.cuts, cut))

    def _is_trunk(self, site: Site, plan: Plan) -> bool:
        return site.fqn in dict(plan.unrolled) or site.is_list
