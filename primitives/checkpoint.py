"""checkpoint: trade memory for a second forward.

The classes at the end are the plans (`plan=rotor`, ...): each chooses what is recomputed in a chain
of modules under a memory limit, and lowers the choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from schedlang.ir.features import Budgeted, Grouping, Recomputing, Uniform, check_called
from schedlang.ir.primitive import refuse
from schedlang.language.value import Bytes
from schedlang.remat import (
    RecomputedRegion,
    RematTree,
    group_consecutive,
    group_places,
    outer_regions,
    places_of,
    sqrt_region_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from schedlang.ir.features import Copy
    from schedlang.ir.model import Site
    from schedlang.ir.plan import Plan
    from schedlang.remat.pofo import MixedPlan
    from schedlang.remat.rotor import ModuleCost

TFLOPS = 100.0  # trillion operations per second of a device; the default

HELP_POFO = "write `checkpoint(plan=pofo, memory=2GiB, bandwidth=25GiB)`: 25 GiB copied in a second"


class checkpoint(Recomputing, Grouping, Uniform):  # noqa: N801
    """Drop a module's activations after its forward and recompute them in backward.

    before   y = f(x)                  every intermediate of f is saved for backward
    after    y = checkpoint(f)(x)      only x and what `save` names are saved; backward runs f again

    `save` saves the results of classes of operators: `linear` (matrix products), `attention`
    (fused attention of torch, flash_attn and other packages), `collective` (communication, which is
    then not repeated).  Random numbers are replayed, so that dropout draws the same masks.

    `group=4` recomputes four consecutive elements of a list together, so that only the input of the
    first is saved; `group=sqrt` uses the square root of their number.  `every=2` recomputes only
    every second module (or group).

    `plan=rotor, memory=2GiB` chooses the nested regions with the least recomputation that save at
    most this number of bytes on a rank.  Operations and bytes of each module are counted with the
    first batch, before anything runs.  In a pipeline microbatches in flight share the memory.
    `plan=pofo, memory=2GiB, bandwidth=25GiB` may also offload saved tensors to the host, copied at
    `bandwidth` bytes per second, while the device does `tflops` (100) trillion operations per
    second.

    Chen et al., Training deep nets with sublinear memory cost (2016); selective recomputation:
    Korthikanti et al. (2022); chains: Beaumont et al., Rotor (2019); stages: AdaPipe (2024);
    with copies to the host: Beaumont et al., POFO (2021).
    """

    save: tuple[Literal["linear", "attention", "collective"], ...] = field(default=(), kw_only=True)
    group: int | Literal["sqrt"] = field(default=1, kw_only=True)
    every: int = field(default=1, kw_only=True)
    plan: Literal["rotor", "pareto", "adapipe", "pofo", "dtr"] | None = field(
        default=None, kw_only=True
    )
    memory: Bytes | None = field(default=None, kw_only=True)
    bandwidth: Bytes | None = field(default=None, kw_only=True)
    tflops: float = field(default=TFLOPS, kw_only=True)

    example = "layers.*  checkpoint()"
    reads = frozenset({"structure", "placement"})
    takes = "selection"

    def group_sites(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the sites that belong together: each alone, or all in groups and plans."""
        return [(site,) for site in sites] if self._is_single else [sites]

    def inseparable_groups(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the regions, each of which is recomputed as one."""
        if self._is_single or self.plan is not None:  # a plan's regions are inside stages
            return [(site,) for site in sites]
        groups = (
            (run, places)
            for run in group_consecutive(sites)
            for places in outer_regions(self._tree(run))
        )
        return [tuple(run[index] for index in places) for run, places in groups]

    def agree(self, axes: Collection[str]) -> None:
        """Refuse incomplete plans, arguments that a plan chooses itself, and sizes below 1."""
        self._check_plan()
        for name, size in (("group", self.group), ("every", self.every)):
            if size != "sqrt" and size < 1:
                refuse(
                    "S840",
                    f"`{name}` must be 1 or more, not {size}",
                    f"`{name}` is a number of modules",
                    helps=(f"use `{name}=1` or more",),
                )

    def check(self, sites: tuple[Site, ...], plan: Plan) -> None:
        """Refuse modules that are never called, or are not consecutive where they must be."""
        for site in sites:
            check_called(self, site, plan)
        names = tuple(site.fqn for site in sites)
        if self.plan in ("rotor", "pofo") and len(group_consecutive(names)) > 1:
            refuse(
                "S842",
                "a plan needs consecutive modules of one list",
                f"`{group_consecutive(names)[0][-1]}` and `{group_consecutive(names)[1][0]}` are"
                " not consecutive",
                helps=("write one row for each list, each with its own `memory`",),
            )
        if (
            self.group != 1
            and len(names) > 1
            and all(len(run) == 1 for run in group_consecutive(names))
        ):
            refuse(
                "S840",
                f"no two of these {len(names)} modules are consecutive in a list",
                f"`{names[0]}` and `{names[1]}` are not consecutive",
                notes=("a group is recomputed from the input of its first module",),
                helps=(
                    "select elements of one list, as in `layers.*  checkpoint(group=4)`",
                    "or recompute each module by itself: `checkpoint()`",
                ),
            )

    def lower(self, sites: tuple[Site, ...], copy: Copy) -> None:
        """Recompute modules of the copy."""
        from schedlang.runtime.activation_memory import recompute

        names = tuple(site.fqn for site in sites)
        if self.budget is not None:
            self.budget.lower(copy.chains[names], copy)
        elif self._is_single:
            for name in names:
                recompute.checkpoint(copy.at(name), self.save)
        else:
            for run in group_consecutive(names):
                recompute.checkpoint_regions(
                    [copy.at(name) for name in run], self._tree(run), self.save
                )

    @property
    def budget(self) -> _Plan | None:
        """Return the plan that fits its modules into memory; None without `plan`."""
        if self.plan is None or self.memory is None:
            return None
        if self.bandwidth is not None:
            return _Pofo(self.plan, self.memory, self.tflops * 1e12 / self.bandwidth)
        return _PLANS[self.plan](self.plan, self.memory)

    def reruns(
        self, sites: tuple[str, ...], solutions: Sequence[Any]
    ) -> Sequence[RecomputedRegion] | None:
        """Return the recomputed regions, and what is saved for them; `solutions`: a plan's
        choice."""
        if self.budget is None:
            return [
                RecomputedRegion(names, self.save, dedupe_inputs=not self._is_single)
                for names in self.inseparable_groups(sites)
            ]
        return self.budget.reruns(solutions)

    def _check_plan(self) -> None:
        """Refuse (S842) a plan without memory, and arguments that a plan chooses itself."""
        if (self.plan is None) != (self.memory is None):
            present, missing = ("plan", "memory") if self.plan else ("memory", "plan")
            refuse(
                "S842",
                f"`{present}` needs `{missing}`",
                f"`{missing}` is not given",
                notes=("a plan chooses what to recompute so that it fits into `memory`",),
                helps=("write `checkpoint(plan=rotor, memory=2GiB)`",),
            )
        self._check_copies()
        if self.plan is None:
            return
        if self.group != 1 or self.every != 1 or self.save:
            refuse(
                "S842",
                "a plan chooses what is recomputed together",
                "`group`, `every` and `save` choose it as well",
                helps=(
                    HELP_POFO
                    if self.plan == "pofo"
                    else f"drop them: `checkpoint(plan={self.plan}, memory=2GiB)`",
                ),
            )

    def _check_copies(self) -> None:
        """Refuse (S842) `bandwidth` and `tflops` without `plan=pofo`, or not above 0."""
        if (self.plan == "pofo") != (self.bandwidth is not None) or (
            self.plan != "pofo" and self.tflops != TFLOPS
        ):
            refuse(
                "S842",
                "`plan=pofo` and `bandwidth` must be given together",
                "one of them is missing",
                notes=("only this plan compares copies with recomputation",),
                helps=(HELP_POFO,),
            )
        if self.tflops <= 0 or (self.bandwidth is not None and self.bandwidth <= 0):
            refuse(
                "S842",
                "`bandwidth` and `tflops` must be above 0",
                "they are bytes copied and operations computed in a second",
                helps=(HELP_POFO,),
            )

    @property
    def _is_single(self) -> bool:
        return self.group == 1 and self.every == 1 and self.plan is None

    def _tree(self, run: tuple[str, ...]) -> RematTree:
        size = sqrt_region_size(len(run)) if self.group == "sqrt" else self.group
        return group_places(len(run), size, self.every)


@dataclass(frozen=True)
class _Plan(Budgeted):
    """A plan: its name, and the bytes that modules may save."""

    name: str
    memory: int

    def reruns(
        self, solutions: Sequence[tuple[tuple[str, ...], Any]]
    ) -> Sequence[RecomputedRegion] | None:
        """Return the recomputed regions of chains; None: they are known only at run time."""
        return [region for run, solution in solutions for region in self.chosen(run, solution)]

    def chosen(self, run: tuple[str, ...], solution: Any) -> list[RecomputedRegion]:
        """Return the recomputed regions of one chain, as far as they are known before the run."""
        return []


class _Rotor(_Plan):
    """Nested regions (Rotor)."""

    def fit(
        self, chain: Sequence[ModuleCost], memory: int, simulate: Callable[[Any], Any]
    ) -> RematTree:
        """Return the tree with the least recomputation (S841 where memory is too small)."""
        from schedlang.remat.rotor import rotor, smallest_tree

        tree = rotor(chain, memory)
        if tree is None:
            _largest(memory, smallest_tree(chain)[0], chain)
        return tree

    def chosen(self, run: tuple[str, ...], solution: RematTree) -> list[RecomputedRegion]:
        """Return the outermost regions."""
        return [
            RecomputedRegion(tuple(run[k] for k in region), dedupe_inputs=True)
            for region in outer_regions(solution)
        ]

    def lower(self, chains: Sequence[tuple[tuple[str, ...], RematTree]], copy: Copy) -> None:
        """Install the recomputation of the trees."""
        from schedlang.runtime.activation_memory.recompute import checkpoint_regions

        for run, tree in chains:
            checkpoint_regions([copy.at(name) for name in run], tree)

    def describe(self, solution: RematTree) -> str:
        """Return a text with the numbers of modules outside and inside recomputed regions."""
        inside = [len(region) for region in outer_regions(solution)]
        return f"{len(places_of(solution)) - sum(inside)} kept whole, {sum(inside)} in" + (
            f" {len(inside)} regions, which may hold regions: {inside}" if inside else " no region"
        )


class _Pareto(_Plan):
    """Choices of operators whose results are saved, for each module."""

    def fit(self, chain: Sequence[ModuleCost], memory: int, simulate: Callable[[Any], Any]) -> Any:
        """Return the choices with the least recomputation (S841 where memory is too small)."""
        from schedlang.remat.operators import choose_saved, min_memory

        solution = choose_saved(chain, memory)
        if solution is None:
            _largest(memory, min_memory(chain), chain)
        return solution

    def chosen(self, run: tuple[str, ...], solution: Any) -> list[RecomputedRegion]:
        """Return the modules that are recomputed."""
        return [
            RecomputedRegion((name,), saved_operators=frozenset(choice.kept))
            for name, choice in zip(run, solution)
            if choice.kept is not None
        ]

    def lower(self, chains: Sequence[tuple[tuple[str, ...], Any]], copy: Copy) -> None:
        """Install recomputation, except for the results of the chosen operators."""
        from schedlang.runtime.activation_memory import recompute

        for run, solution in chains:
            for region in self.chosen(run, solution):
                recompute.checkpoint(copy.at(region.modules[0]), chosen=region.saved_operators)

    def describe(self, solution: Any) -> str:
        """Return a description of what is saved."""
        from schedlang.remat.operators import describe_choices

        return describe_choices(solution)


class _AdaPipe(_Pareto):
    """The choices of `_Pareto`, with stages of equal time (AdaPipe)."""

    cuts = True


@dataclass(frozen=True)
class _Pofo(_Plan):
    """Modules that are saved, recomputed, or offloaded to the host (POFO)."""

    rate: float = 0.0  # operations in the time of copying a byte
    moves = True

    def fit(
        self, chain: Sequence[ModuleCost], memory: int, simulate: Callable[[Any], Any]
    ) -> MixedPlan:
        """Return the choices that take the least time (S841 where memory is too small)."""
        from schedlang.remat.pofo import min_memory, pofo

        solution = pofo(chain, memory, self.rate)
        if solution is None:
            _too_little(
                memory,
                min_memory(chain),
                len(chain),
                f"the backward of the largest module needs {max(module.saved for module in chain)}"
                f" bytes; all modules without recomputation save"
                f" {sum(module.saved for module in chain)}",
            )
        return solution

    def chosen(self, run: tuple[str, ...], solution: MixedPlan) -> list[RecomputedRegion]:
        """Return the modules that are recomputed."""
        return [
            RecomputedRegion((name,))
            for name, treatment in zip(run, solution.treatments)
            if treatment == "recompute"
        ]

    def lower(self, chains: Sequence[tuple[tuple[str, ...], MixedPlan]], copy: Copy) -> None:
        """Install recomputation of some modules, and offload of saved tensors of others."""
        from schedlang.runtime.activation_memory import recompute
        from schedlang.runtime.offload.offloaded_activations import (
            ActivationStore,
            offload_activations,
        )

        for run, solution in chains:
            store = ActivationStore(paced=True)
            for name, treatment in zip(run, solution.treatments, strict=True):
                if treatment == "recompute":
                    recompute.checkpoint(copy.at(name))
                elif treatment == "offload":
                    offload_activations(copy.at(name), store)

    def describe(self, solution: MixedPlan) -> str:
        """Return a description of the choice for each module."""
        from schedlang.remat.pofo import describe_plan

        return describe_plan(solution)


class _Dtr(_Plan):
    """The plan that evicts and recomputes results at run time (DTR); `found`: its bytes."""

    keeps = True

    def fit(self, chain: Sequence[ModuleCost], memory: int, simulate: Callable[[Any], Any]) -> int:
        """Return the full memory, shared by all microbatches; refuse (S841) if one needs more."""
        from schedlang.runtime.activation_memory.dynamic import budget_pools

        def peak(budget: int) -> int:
            return max(pool.peak for pool in budget_pools(simulate(budget)))

        if peak(memory) > memory:
            _too_little(
                memory,
                peak(0),
                len(chain),
                "the inputs of modules are kept, and so is what one operator needs"
                " while it is recomputed",
            )
        return self.memory

    def reruns(self, solutions: Sequence[tuple[tuple[str, ...], Any]]) -> None:
        """Return None: recomputed operators are known only at run time."""

    def lower(self, chains: Sequence[tuple[tuple[str, ...], int]], copy: Copy) -> None:
        """Install one memory pool for the modules of all chains."""
        from schedlang.runtime.activation_memory.dynamic import limit_saved_bytes

        limit_saved_bytes([copy.at(name) for run, _ in chains for name in run], chains[0][1])

    def describe(self, solution: int) -> str:
        """Return a description of the limit in bytes."""
        return f"at most {solution} bytes, dropped and made again while it runs"


_PLANS: dict[str, Callable[[str, int], _Plan]] = {
    "rotor": _Rotor,
    "pareto": _Pareto,
    "adapipe": _AdaPipe,
    "dtr": _Dtr,
}


def _largest(memory: int, minimum: int, chain: Sequence[ModuleCost]) -> NoReturn:
    largest, total = max(c.saved for c in chain), sum(c.saved for c in chain)
    _too_little(
        memory,
        minimum,
        len(chain),
        f"recomputing the largest module saves {largest} bytes; all modules without"
        f" recomputation save {total}",
    )


def _too_little(memory: int, minimum: int, count: int, note: str) -> NoReturn:
    refuse(
        "S841",
        f"no plan for these {count} modules fits into {memory} bytes",
        "too little for one microbatch",
        notes=(note,),
        helps=(
            f"each microbatch needs {minimum} bytes at least",
            "or recompute smaller modules, inside these",
        ),
    )
