"""offload: keep activations, parameters, gradients or optimizer state off the device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, replace
from math import prod
from typing import Literal

from schedlang.diagnostics.diagnostic import Label
from schedlang.diagnostics.tables import format_bytes
from schedlang.ir.annotations import OffloadedTensors
from schedlang.ir.features import Recomputing, Uniform, check_called
from schedlang.ir.mesh import offer_row
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse
from schedlang.language.kinds import Axis

RELOADED = ("activations", "parameters")  # reloaded module by module
PEER_ROW = "offload(activations, to=peer, over={})"
# tensors that cannot be sent to a peer: the reason, and a row that shards them over replicas
NOT_ON_PEERS = {
    "parameters": (
        "each microbatch would fetch them twice, {}, from a rank that works on another microbatch",
        "zero(stage=3, over={})",
    ),
    "gradients": (
        "each microbatch would send them, {}; the sum, the norm and the step need all of them back",
        "zero(stage=2, over={})",
    ),
}


class offload(Uniform):  # noqa: N801
    """Move tensors of a module to host memory, disk or a peer while the module does not use them.

    activations  leave the device after the module's forward, and are reloaded before its backward
    parameters   are loaded for the forward and again for the backward; their gradients leave when
                 they are computed, and the optimizer steps on the host: the device holds the
                 parameters of a few modules at a time
    gradients    leave the device when they are computed, until the step
    optimizer    state stays off the device; the step runs there, some parameters at a time

    A row without a selector is about the full model; parameters are then loaded for each element of
    the trunk.  `prefetch` modules are loaded ahead.  With `checkpoint` on the same module only its
    inputs are offloaded.  On a GPU copies are pinned and run on a separate stream.  Files have no
    name and vanish with the process (folder: `TMPDIR`); if they do not fit, the step is refused and
    undone.

    `offload(optimizer, to=peer, over=pp)` stores state in the memory of the next rank of the
    pipeline (for the last rank: of the first). It returns for the step, some parameters at a time,
    so a stage without free memory can use that of another stage: select its layers. Each step sends
    twice the bytes of this state. An axis of size 1 has no peer, and the row does nothing.

    `offload(activations, to=peer, over=pp)` sends saved activations of these modules to that rank
    after the forward of a microbatch, and gets them back `prefetch` operations of the pipeline
    before its backward. Activations that would return at once stay. With 1F1B the first stages save
    most; they then hold one microbatch instead of one for each later stage.

    Rhu et al., vDNN (2016); Pudipeddi et al., L2L (2020); Ren et al., ZeRO-Offload (2021);
    Rajbhandari et al., ZeRO-Infinity (2021); Kim et al., BPipe (2023).
    """

    what: Literal["activations", "parameters", "gradients", "optimizer"]
    to: Literal["cpu", "disk", "peer"] = field(default="cpu", kw_only=True)
    prefetch: int = field(default=1, kw_only=True)

    over: Axis | None = field(default=None, kw_only=True)

    example = "layers.*  offload(activations, to=cpu)"
    reads = frozenset({"structure", "placement", "recompute"})
    writes = frozenset({"residence"})

    def agree(self, axes: Collection[str]) -> None:
        """Refuse a `prefetch` without effect, and a peer without its axis or the reverse."""
        if self.prefetch < 0:
            refuse(
                "S304",
                f"`prefetch` must be 0 or more, not {self.prefetch}",
                helps=("use 0 to reload on demand, 1 to reload one module ahead",),
            )
        if self.what not in RELOADED and self.prefetch != 1:
            refuse(
                "S306",
                f"{self.what} are not reloaded module by module: `prefetch` has no effect",
                helps=("leave out `prefetch`",),
            )
        if (self.to == "peer") != (self.over is not None):
            self._refuse_incomplete_peer(axes)

    def _refuse_incomplete_peer(self, axes: Collection[str]) -> None:
        """Refuse (S851) `to=peer` without `over` or the reverse.

        For tensors that no peer can hold, `check` refuses with the reason.
        """
        row = offer_row(f"offload({self.what}, to=peer, over={{}})", axes, "stages")
        example, none = f"name both: {row}", f"`offload({self.what})`"
        if self.what not in NOT_ON_PEERS or self.over is not None:
            refuse(
                "S851",
                "`to=peer` and `over` must be given together: a peer is the next"
                " rank along an axis",
                helps=(f"leave `over` out: {none}",)
                if self.what in NOT_ON_PEERS
                else (example, f"or neither: {none}"),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse uncalled modules, tensors that no peer can hold, and conflicts with plans."""
        if self.what == "activations":
            check_called(self, site, plan)
        self._check_peer(site, plan)
        self._check_plans(site, plan)

    def _check_plans(self, site: Site, plan: Plan) -> None:
        """Refuse (S844, S847) a row at modules whose plan of recomputation decides itself."""
        nearby = [
            (a, a.primitive) for a in plan.rows_near(site.fqn) if _are_nested(a.sites, site.fqn)
        ]
        plans = [
            (a, row.budget) for a, row in nearby if isinstance(row, Recomputing) and row.budget
        ]
        row = next((a for a, budget in plans if budget.keeps), None)
        if row is not None and self.what in RELOADED:
            refuse(
                "S844",
                f"`{row.name}` decides while it runs what these modules save",
                "nothing is left to offload",
                helps=(
                    "drop one of the two",
                    "or use a plan that is made before the run: `checkpoint(plan=rotor, ...)`",
                ),
                also=(Label(row.span, "drops and recomputes activations"),),
            )

        row = next((a for a, budget in plans if budget.moves), None)
        if row is not None and self.what == "activations":
            refuse(
                "S847",
                f"the plan of `{row.name}` already chooses which modules to offload",
                "would offload the same activations",
                helps=(
                    "drop this row",
                    "or use a plan that offloads nothing: `checkpoint(plan=rotor, ...)`",
                ),
                also=(Label(row.span, "offloads activations of these modules"),),
            )

    def _check_peer(self, site: Site, plan: Plan) -> None:
        """Refuse (S851) tensors that cannot be sent to a peer."""
        if self.to == "peer" and self.what in NOT_ON_PEERS:
            reason, slices = NOT_ON_PEERS[self.what]
            over = plan.mesh.names if self.over is None else (self.over,)
            parameters = {
                fact.name: fact for fact in plan.model.parameters_below(site.fqn)
            }.values()
            size = format_bytes(sum(prod(fact.shape) * fact.itemsize for fact in parameters))
            refuse(
                "S851",
                f"{self.what} cannot be sent to a peer",
                notes=(reason.format(size),),
                helps=(
                    f"keep them in host memory: `offload({self.what}, to=cpu)`",
                    f"or keep a shard of them on each replica:"
                    f" {offer_row(slices, plan.mesh.names, 'replicas')}",
                    f"or send what a peer can store: {offer_row(PEER_ROW, over, 'stages')}",
                ),
            )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the offload to the plan; a peer along an axis of one rank changes nothing."""
        if self.over is not None and plan.mesh.size(self.over) == 1:
            return plan
        offloaded = OffloadedTensors(
            site.fqn, self.what, self.to, self.prefetch, self.over, row=plan.next_row
        )
        return replace(plan, stores=(*plan.stores, offloaded))


def _are_nested(sites: tuple[str, ...], fqn: str) -> bool:
    """Return whether a module is equal to, inside or around one of `sites`."""
    return any(
        f"{site}.".startswith(f"{fqn}." if fqn else "") or f"{fqn}.".startswith(f"{site}.")
        for site in sites
    )
