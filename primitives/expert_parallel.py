"""expert_parallel: spread the experts of a layer over ranks, and send tokens to their experts."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from schedlang.kinds import Axis
from schedlang.placement import R
from schedlang.plan import Boundary, Plan
from schedlang.primitive import Primitive, refuse

if TYPE_CHECKING:
    from schedlang.model import Site


class expert_parallel(Primitive):  # noqa: N801
    """Give each rank some of a layer's experts; tokens go where their experts are, and come back.

    before   y = experts(tokens, index, weights)         every rank holds all experts
    after    the same, with 1/n of the experts on each of n ranks

    The module is called with tokens, the experts of each token, and their weights, as
    transformers' modules of experts are; its own forward computes the experts of a rank.  Along an
    axis that splits the batch tokens are sent by all-to-all, none is dropped; along any other axis
    all ranks see the same tokens, each takes those of its experts, and the sum is reduced.  `over`
    may be a view of both.

    GShard (Lepikhin et al. 2020), FastMoE (He et al. 2021), DeepSpeed-MoE (Rajbhandari et al.
    2022).
    """

    over: Axis = field(kw_only=True)
    dispatch: Literal["all_to_all"] = field(default="all_to_all", kw_only=True)

    example = "moe.experts  expert_parallel(over=ep)"
    reads = frozenset({"structure", "shape", "dtype"})
    writes = frozenset({"placement"})
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse what is no module of experts, and numbers of experts that do not divide."""
        found = self._experts(site, plan)
        if isinstance(found, str):
            refuse(
                "S421",
                f"`{site}` is no module of experts",
                found,
                helps=(
                    "name the module that is called with tokens, the experts of each, and weights",
                ),
            )
        ranks = plan.mesh.size(self.over)
        if found.count % ranks:
            legal = [n for n in range(1, found.count + 1) if found.count % n == 0]
            refuse("S402", f"cannot spread {found.count} experts evenly over {ranks} ranks",
                   f"`{self.over}` has {ranks} ranks",
                   helps=(f"`{self.over}` may be {', '.join(map(str, legal))}",))  # fmt: skip

    def effect(self, site: Site, plan: Plan) -> Plan:
        """Split the experts over every plain axis of `over`."""
        from schedlang.runtime.experts import Routing

        found = self._experts(site, plan)
        axes = plan.mesh.fold(self.over)
        for name in found.split:
            first = f"{site.fqn}.{name}" if site.fqn else name
            layout = plan.layout(first)
            for axis in axes:
                layout = layout.split(axis, 0)
            plan = plan.with_spread(first, layout)
        for axis in axes:
            plan = plan.with_boundary(site.fqn, Boundary(axis, R, R))
        return plan.with_kind(site.fqn, "experts", Routing(found, self.dispatch))

    def apply(self, site: Site, build: Any) -> None:
        """Nothing of its own: `build` puts the exchange in place once the whole plan is traced."""

    def _experts(self, site: Site, plan: Plan) -> Any:
        """The experts of the module, or why it has none; tried once for each kind of module."""
        key = ("experts", site.kind)
        if key not in plan.model.cache:
            from schedlang.runtime.expert_probe import NoExperts, probe_experts

            found = probe_experts(plan.model.model.get_submodule(site.fqn))
            if isinstance(found, NoExperts):
                far = f" (by {found.error:.1e})" if found.error is not None else ""
                plan.model.cache[key] = found.reason + far
            else:
                plan.model.cache[key] = found
        return plan.model.cache[key]
