"""expert_parallel: spread the experts of a layer over ranks, and send tokens to their experts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import field
from typing import Any, Literal

from schedlang.ir.annotations import Boundary
from schedlang.ir.model import Site
from schedlang.ir.placement import Layout, R
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse
from schedlang.language.kinds import Axis


class expert_parallel(Primitive):  # noqa: N801
    """Shard the experts of a layer over ranks; tokens are sent to their experts and back.

    before   y = experts(tokens, index, weights)         every rank holds all experts
    after    the same, with 1/n of the experts on each of n ranks

    The module is called like the experts of transformers: with tokens, the experts of each token,
    and their routing weights.  Its own forward computes the experts of a rank.  Along an axis that
    splits the batch, tokens are sent by all-to-all; along any other axis ranks have the same
    tokens, each computes its experts' tokens, and the results are all-reduced.  `over` may be a
    view of both kinds.

    dispatch  `all_to_all`; `gather`: all-gather of tokens; `fetch`: weights of experts are sent to
              the tokens, and gradients back to the experts.  Default: `all_to_all`; with a
              `capacity` it is `gather`, which never waits for the device to learn message sizes
    capacity  the most tokens of an expert, as a multiple of its even share of the batch's tokens;
              the first tokens stay, the others are dropped.  The step must allow this:
              `relax(routing)`.  Default: no limit
    chunks    number of chunks in which tokens are sent; each is sent while the one before is
              computed
    shadow    experts whose weights are sent to all ranks; tokens of the other experts are sent
    inner     an axis that splits each expert along its hidden dim, like Megatron's column and row
              pairs; its ranks have the same tokens

    GShard (Lepikhin et al. 2020), FastMoE (He et al. 2021), DeepSpeed-MoE (Rajbhandari et al.
    2022), FasterMoE (He et al. 2022), PipeMoE (Shi et al. 2023), Janus (Liu et al. 2023).
    """

    over: Axis = field(kw_only=True)
    dispatch: Literal["all_to_all", "gather", "fetch"] | None = field(default=None, kw_only=True)
    capacity: float | None = field(default=None, kw_only=True)
    chunks: int = field(default=1, kw_only=True)
    shadow: tuple[int, ...] = field(default=(), kw_only=True)
    inner: Axis | None = field(default=None, kw_only=True)

    example = "moe.experts  expert_parallel(over=ep)"
    reads = frozenset({"structure", "shape", "dtype"})
    writes = frozenset({"placement"})

    @property
    def gives_up(self) -> frozenset[str]:
        """Return what the row relaxes: rounding, and routing where a capacity drops tokens."""
        return frozenset({"rounding"} | ({"routing"} if self.capacity is not None else set()))

    def agree(self, axes: Collection[str]) -> None:
        """Refuse numbers out of range, and arguments that exclude each other."""
        if self.chunks < 1:
            refuse("S422", "`chunks` must be 1 or more", helps=("`chunks=1`",))
        if self.capacity is not None and self.capacity <= 0:
            refuse("S422", "`capacity` must be above 0", helps=("`capacity=1.25`",))
        if self.dispatch == "fetch" and (self.shadow or self.chunks > 1):
            refuse(
                "S422",
                "`dispatch=fetch` sends expert weights to the tokens, not tokens to experts",
                helps=("leave out `shadow=` and `chunks=`",),
            )
        if self.dispatch == "gather" and (self.shadow or self.chunks > 1):
            refuse(
                "S422",
                "`dispatch=gather` brings all tokens to all experts at once",
                helps=("leave out `shadow=` and `chunks=`",),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse modules that are no experts, and numbers of experts that ranks do not divide."""
        experts = self._probe_experts(site, plan)
        if hasattr(experts, "reason"):
            notes, helps = (experts.message,), experts.helps
            refuse(
                "S421",
                f"`{site}` does not have the form of an experts module",
                notes=notes,
                helps=helps,
            )
        self._check_options(site, experts.count)
        self._check_inner(site, plan)
        ranks = plan.mesh.size(self.over)
        if experts.count % ranks:
            legal = [n for n in range(1, experts.count + 1) if experts.count % n == 0]
            help_ = f"`{self.over}` may be {', '.join(map(str, legal))}"
            title = f"cannot split {experts.count} experts evenly over {ranks} ranks"
            refuse("S402", title, f"`{self.over}` has {ranks} ranks", helps=(help_,))
        if site.fqn in plan.boundaries:
            refuse("S501", f"`{site}` is sharded already", helps=("drop one of the rows",))
        for name, layout in self._layouts(site, plan):
            if plan.layout(name).splits and plan.layout(name) != layout:
                refuse(
                    "S504",
                    f"`{name}` is sharded already, in another way than by this row",
                    helps=(
                        "tied experts must be sharded over the same axes, by one row for"
                        " all of them",
                    ),
                )

    def _check_options(self, site: Site, count: int) -> None:
        """Refuse (S422) numbers of experts that do not exist."""
        beyond = [number for number in self.shadow if not 0 <= number < count]
        if beyond:
            refuse(
                "S422",
                f"`{site}` has no expert {beyond[0]}",
                helps=(f"its experts are 0 to {count - 1}",),
            )

    def _check_inner(self, site: Site, plan: Plan) -> None:
        """Refuse (S428) experts that cannot be sharded inside, or not over this axis."""
        if self.inner is None:
            return
        shared = set(plan.mesh.fold(self.inner)) & set(plan.mesh.fold(self.over))
        if shared:
            action = f"both distribute and shard the experts of `{site}`"
            free = [axis for axis in plan.mesh.names if axis not in plan.mesh.fold(self.over)]
            hint = f"name another axis: `inner={free[0]}`" if free else "leave out `inner=`"
            refuse("S428", f"`{sorted(shared)[0]}` cannot {action}", helps=(hint,))
        split = self._inner_split(site, plan)
        if split is None:
            refuse(
                "S428",
                f"the experts of `{site}` cannot be sharded inside",
                notes=(
                    "a small copy was tried: no way to split it in two gives outputs that"
                    " sum to its own",
                ),
                helps=("leave out `inner=`",),
            )
        ranks = plan.mesh.size(self.inner)
        for name, dim, blocks in split.cuts:
            size = site.parameters[name].shape[dim] // blocks
            if size % ranks:
                legal = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
                refuse(
                    "S428",
                    f"cannot split an inner dim of {size} evenly over {ranks} ranks",
                    notes=(f"of `{site}.{name}`",),
                    helps=(f"`{self.inner}` may be {legal}",),
                )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Split the experts over each mesh axis of `over`, and add the routing."""
        from schedlang.runtime.moe.experts import Routing

        experts = self._probe_experts(site, plan)
        axes = plan.mesh.fold(self.over)
        for name, layout in self._layouts(site, plan):
            plan = plan.with_batch_split_layout(name, layout)
        for axis in axes if self.inner is None else (*axes, str(self.inner)):
            plan = plan.with_boundary(site.fqn, Boundary(axis, R, R))
        hot = tuple(sorted(set(self.shadow)))
        inner = self._inner_split(site, plan) if self.inner is not None else None
        # sizes of messages are known if tokens are not split into chunks or by shadowed experts
        static = self.capacity is not None and self.chunks == 1 and not hot
        dispatch = self.dispatch or ("gather" if static else "all_to_all")
        routing = Routing(
            experts, dispatch, self.capacity, self.chunks, hot, inner, str(self.inner or "")
        )
        return plan.with_kind(site.fqn, "experts", routing)

    def _layouts(self, site: Site, plan: Plan) -> Iterator[tuple[str, Layout]]:
        """Yield the layout of each parameter that has a slice for each expert.

        A tied parameter has its layout from the row's first site: it is split once.
        """
        inner = self._inner_split(site, plan) if self.inner is not None else None
        cuts = {name: (dim, blocks) for name, dim, blocks in inner.cuts} if inner else {}
        for name in self._probe_experts(site, plan).split:
            first = site.parameters[name].name
            layout = Layout.whole(plan.layout(first).shape)
            for axis in plan.mesh.fold(self.over):
                layout = layout.split(axis, 0)
            if name in cuts:
                dim, blocks = cuts[name]
                sizes = [layout.shape[dim] // blocks] * blocks
                layout = layout.split(str(self.inner), dim, sizes)
            yield first, layout

    def _inner_split(self, site: Site, plan: Plan) -> Any:
        """Return how each expert is split inside, or None; cached for equal modules."""
        from schedlang.kernels.probe import module_key

        module = plan.model.model.get_submodule(site.fqn)
        key = ("inner of experts", module_key(module))
        if key not in plan.model.cache:
            from schedlang.runtime.moe.probe import probe_inner

            plan.model.cache[key] = probe_inner(module, self._probe_experts(site, plan))
        return plan.model.cache[key]

    def _probe_experts(self, site: Site, plan: Plan) -> Any:
        """Return the experts of the module, or the reason why not; cached for equal modules."""
        from schedlang.kernels.probe import module_key

        module = plan.model.model.get_submodule(site.fqn)
        key = ("experts", module_key(module))
        if key not in plan.model.cache:
            from schedlang.runtime.moe.probe import probe_experts

            plan.model.cache[key] = probe_experts(module)
        return plan.model.cache[key]
