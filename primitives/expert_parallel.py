"""expert_parallel: spread the experts of a layer over ranks, and send tokens to their experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from schedlang.kinds import Axis
from schedlang.placement import Layout, R
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
    axis that splits the batch tokens are sent by all-to-all; along any other axis all ranks see the
    same tokens, each takes those of its experts, and the sum is reduced.  `over` may be a view of
    both.

    dispatch  `all_to_all`, or `fetch`: experts come to the tokens, gradients go back to the experts
    capacity  an expert takes so many times its even share of the batch's tokens, the first ones;
              the rest is dropped, which the step has to allow: `relax(routing)`.  Default: all
    chunks    tokens are sent in so many parts, each under way while the one before is computed
    shadow    numbers of experts that come to all tokens, while the tokens of the others are sent

    GShard (Lepikhin et al. 2020), FastMoE (He et al. 2021), DeepSpeed-MoE (Rajbhandari et al.
    2022), FasterMoE (He et al. 2022), PipeMoE (Shi et al. 2023), Janus (Liu et al. 2023).
    """

    over: Axis = field(kw_only=True)
    dispatch: Literal["all_to_all", "fetch"] = field(default="all_to_all", kw_only=True)
    capacity: float | None = field(default=None, kw_only=True)
    chunks: int = field(default=1, kw_only=True)
    shadow: tuple[int, ...] = field(default=(), kw_only=True)

    example = "moe.experts  expert_parallel(over=ep)"
    reads = frozenset({"structure", "shape", "dtype"})
    writes = frozenset({"placement"})

    @property
    def gives_up(self) -> frozenset[str]:
        """Rounding; and which experts a token meets, where some are dropped."""
        return frozenset({"rounding"} | ({"routing"} if self.capacity is not None else set()))

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse what is no module of experts, and numbers of experts that do not divide."""
        found = self._experts(site, plan)
        if isinstance(found, str):
            helps = ("name the module that is called with tokens, experts of each, and weights",)
            refuse("S421", f"`{site}` is no module of experts", notes=(found,), helps=helps)
        self._check_options(site, found.count)
        ranks = plan.mesh.size(self.over)
        if found.count % ranks:
            legal = [n for n in range(1, found.count + 1) if found.count % n == 0]
            help_ = f"`{self.over}` may be {', '.join(map(str, legal))}"
            title = f"cannot spread {found.count} experts evenly over {ranks} ranks"
            refuse("S402", title, f"`{self.over}` has {ranks} ranks", helps=(help_,))
        if site.fqn in plan.boundaries:
            refuse(
                "S501", f"`{site}` is spread or sharded already", helps=("drop one of the rows",)
            )
        for name, layout in self._layouts(site, plan):
            if plan.layout(name).splits and plan.layout(name) != layout:
                refuse("S504", f"`{name}` is split already, and not as this row would split it",
                       helps=("tied experts lie over the same axes: one row for all of them",),
                       )  # fmt: skip

    def _check_options(self, site: Site, count: int) -> None:
        """Refuse numbers out of range, and arguments that exclude each other."""
        if self.chunks < 1:
            refuse("S422", "tokens are sent in at least one part", helps=("`chunks=1`",))
        if self.capacity is not None and self.capacity <= 0:
            refuse("S422", "a capacity is more than nothing", helps=("`capacity=1.25`",))
        beyond = [number for number in self.shadow if not 0 <= number < count]
        if beyond:
            refuse("S422", f"`{site}` has no expert {beyond[0]}",
                   helps=(f"its experts are 0 to {count - 1}",))  # fmt: skip
        if self.dispatch == "fetch" and (self.shadow or self.chunks > 1):
            refuse("S422", "with `dispatch=fetch` all experts come to the tokens, none is sent",
                   helps=("leave out `shadow=` and `chunks=`",))  # fmt: skip

    def effect(self, site: Site, plan: Plan) -> Plan:
        """Split the experts over every plain axis of `over`."""
        from schedlang.runtime.experts import Routing

        found = self._experts(site, plan)
        axes = plan.mesh.fold(self.over)
        for name, layout in self._layouts(site, plan):
            plan = plan.with_spread(name, layout)
        for axis in axes:
            plan = plan.with_boundary(site.fqn, Boundary(axis, R, R))
        hot = tuple(sorted(set(self.shadow)))
        routing = Routing(found, self.dispatch, self.capacity, self.chunks, hot)
        return plan.with_kind(site.fqn, "experts", routing)

    def apply(self, site: Site, build: Any) -> None:
        """Nothing of its own: `build` puts the exchange in place once the whole plan is traced."""

    def _layouts(self, site: Site, plan: Plan) -> Iterator[tuple[str, Layout]]:
        """Each parameter that has a part for each expert, as this row lays it out.

        A tied one has been laid out by the row's first site: it is split once.
        """
        for name in self._experts(site, plan).split:
            first = site.parameters[name].name
            layout = Layout.whole(plan.layout(first).shape)
            for axis in plan.mesh.fold(self.over):
                layout = layout.split(axis, 0)
            yield first, layout

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
