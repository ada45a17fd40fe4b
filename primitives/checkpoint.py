"""checkpoint: trade memory for a second forward."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from schedlang.ir.features import Grouping, Recomputing, Uniform, check_called
from schedlang.ir.primitive import refuse
from schedlang.language.value import Bytes
from schedlang.remat import Tree, groups, places, regions, root, runs
from schedlang.remat.again import Again

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from schedlang.ir.features import Copy
    from schedlang.ir.model import Site
    from schedlang.ir.plan import Plan
    from schedlang.remat.pofo import Mixed
    from schedlang.remat.rotor import Cost

TFLOPS = 100.0  # trillion operations per second of a device that nobody said more about

MIXED = "write `checkpoint(plan=pofo, memory=2GiB, bandwidth=25GiB)`: 25 GiB copied in a second"


class checkpoint(Recomputing, Grouping, Uniform):  # noqa: N801
    """Forget a module's activations in forward and recompute them in backward.

    before   y = f(x)                  backward finds every intermediate of f
    after    y = checkpoint(f)(x)      backward finds x and what `save` names, and runs f again

    `save` keeps the results of whole classes of operators: `linear` (matrix products), `attention`
    (fused attention of torch, flash_attn and other packages), `collective` (communication, which is
    then not repeated).  Random numbers are replayed, so dropout gives the same masks.

    `group=4` recomputes elements of a list that follow each other four at a time, so that one input
    is kept for four of them; `group=sqrt` takes the square root of their number.  `every=2` leaves
    every second module (or group) as it is.

    `plan=rotor, memory=2GiB` chooses regions, and regions within regions, that keep at most so many
    bytes on a rank and compute least again; operations and bytes of each module are counted with
    the first batch, before anything runs.  In a pipeline microbatches in flight share the memory.
    `plan=pofo, memory=2GiB, bandwidth=25GiB` also moves what modules save to the host: so many
    bytes per second are copied, while `tflops` (100) trillion operations per second are done.

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

    def taken(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Each module alone, where they are recomputed alone."""
        return [(site,) for site in sites] if self._alone else [sites]

    def together(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The regions, of which each is recomputed as one."""
        if self._alone or self.plan is not None:  # a plan keeps within stages
            return [(site,) for site in sites]
        found = ((run, places) for run in runs(sites) for places in regions(self._tree(run)))
        return [tuple(run[place] for place in places) for run, places in found]

    def agree(self, axes: Collection[str]) -> None:
        """Refuse half of a plan, what a plan chooses by itself, and sizes that mean nothing."""
        self._check_plan()
        for word, size in (("group", self.group), ("every", self.every)):
            if size != "sqrt" and size < 1:
                refuse(
                    "S840",
                    f"`{word}` must be 1 or more, not {size}",
                    f"`{word}` is a number of modules",
                    helps=(f"use `{word}=1` or more",),
                )

    def check(self, sites: tuple[Site, ...], plan: Plan) -> None:
        """Refuse modules that are never called, or do not follow each other."""
        for site in sites:
            check_called(self, site, plan)
        names = tuple(site.fqn for site in sites)
        if self.plan in ("rotor", "pofo") and len(runs(names)) > 1:
            refuse(
                "S842",
                "a plan needs consecutive modules of one list",
                f"`{runs(names)[0][-1]}` and `{runs(names)[1][0]}` are not consecutive",
                helps=("write one row for each list, each with its own `memory`",),
            )
        if self.group != 1 and len(names) > 1 and all(len(run) == 1 for run in runs(names)):
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
        from schedlang.runtime.activation_memory.dynamic import dynamic
        from schedlang.runtime.activation_memory.recompute import checkpoint as recompute
        from schedlang.runtime.activation_memory.recompute_region import regions as recompute_as

        if self._alone:
            for site in sites:
                recompute(copy.at(site.fqn), self.save)
            return
        names = tuple(site.fqn for site in sites)
        if self.plan is None:
            for run in runs(names):
                recompute_as([copy.at(name) for name in run], self._tree(run), self.save)
            return
        if self.plan == "dtr":
            dynamic([copy.at(name) for name in names], copy.chains[names][0][1])
            return
        for run, found in copy.chains[names]:
            if self.plan == "rotor":
                recompute_as([copy.at(name) for name in run], found)
                continue
            if self.plan == "pofo":
                _mix([copy.at(name) for name in run], found)
                continue
            for name, choice in zip(run, found):
                if choice.kept is not None:
                    recompute(copy.at(name), chosen=choice.kept)

    @property
    def limit(self) -> int | None:
        """The memory that a plan fits its modules into."""
        return self.memory if self.plan is not None else None

    def reruns(self, sites: tuple[str, ...], found: Sequence[Any]) -> Sequence[Again] | None:
        """Regions, and what is kept for them; of a plan those that it chose."""
        if self.plan is None:
            return [Again(names, self.save, once=not self._alone) for names in self.together(sites)]
        if self.plan == "dtr":
            return None
        return [again for run, chosen in found for again in self._chosen(run, chosen)]

    def _chosen(self, run: tuple[str, ...], found: Any) -> list[Again]:
        """What a plan lets run again of one chain."""
        if self.plan == "rotor":
            chosen = [tuple(run[place] for place in region) for region in regions(found)]
            return [Again(names, once=True) for names in chosen]
        if self.plan == "pofo":
            return [Again((name,)) for name, way in zip(run, found.ways) if way == "recompute"]
        return [
            Again((name,), chosen=frozenset(choice.kept))
            for name, choice in zip(run, found)
            if choice.kept is not None
        ]

    @property
    def cuts(self) -> bool:
        """Whether the stages of a pipeline are cut by what the plan repeats on each."""
        return self.plan == "adapipe"

    @property
    def keeps(self) -> bool:
        """Whether the plan drops and makes again while it runs."""
        return self.plan == "dtr"

    @property
    def moves(self) -> bool:
        """Whether the plan says what is moved to the host, and when."""
        return self.plan == "pofo"

    def fit(self, chain: Sequence[Cost], memory: int, play: Callable[[Any], Any]) -> Any:
        """What a plan does with modules of these costs; refuses memory that is too little."""
        from schedlang.remat.operators import needed, pareto
        from schedlang.remat.rotor import least, rotor

        if self.plan == "dtr":
            return self._budget(len(chain), memory, play)
        if self.plan == "pofo":
            return self._mixed(chain, memory)
        found = rotor(chain, memory) if self.plan == "rotor" else pareto(chain, memory)
        if found is None:
            largest, whole = max(c.saved for c in chain), sum(c.saved for c in chain)
            _too_little(
                memory,
                least(chain)[0] if self.plan == "rotor" else needed(chain),
                len(chain),
                f"recomputing the largest module saves {largest} bytes; all modules without"
                f" recomputation save {whole}",
            )
        return found

    def said(self, found: Any) -> str:
        """What a plan chose, in words."""
        from schedlang.remat import pofo
        from schedlang.remat.operators import words

        if self.plan == "dtr":
            return f"at most {found} bytes, dropped and made again while it runs"
        if self.plan == "pofo":
            return pofo.words(found)
        if self.plan != "rotor":
            return words(found)
        inside = [len(region) for region in regions(found)]
        return f"{len(places(found)) - sum(inside)} kept whole, {sum(inside)} in" + (
            f" {len(inside)} regions, which may hold regions: {inside}" if inside else " no region"
        )

    def _mixed(self, chain: Sequence[Cost], memory: int) -> Any:
        """Which modules are kept, recomputed or moved, with copies as quick as the row says."""
        from schedlang.remat.pofo import needed, pofo

        assert self.bandwidth is not None
        found = pofo(chain, memory, self.tflops * 1e12 / self.bandwidth)
        if found is None:
            _too_little(
                memory,
                needed(chain),
                len(chain),
                f"the backward of the largest module needs {max(c.saved for c in chain)}"
                f" bytes; all modules without recomputation save"
                f" {sum(c.saved for c in chain)}",
            )
        return found

    def _budget(self, count: int, memory: int, play: Callable[[Any], Any]) -> int:
        """The bytes that all modules share while they run; tried with a share of them first."""
        from schedlang.runtime.activation_memory.dynamic import pools

        def peak(budget: int) -> int:
            return max(pool.peak for pool in pools(play(budget)))

        if peak(memory) > memory:
            _too_little(
                memory,
                peak(0),
                count,
                "the inputs of modules are kept, and so is what one operator needs"
                " while it is recomputed",
            )
        assert self.memory is not None
        return self.memory

    def _check_plan(self) -> None:
        """A plan needs its memory, and chooses groups by itself."""
        if (self.plan is None) != (self.memory is None):
            given, missing = ("plan", "memory") if self.plan else ("memory", "plan")
            refuse(
                "S842",
                f"`{given}` needs `{missing}`",
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
                    MIXED
                    if self.moves
                    else f"drop them: `checkpoint(plan={self.plan}, memory=2GiB)`",
                ),
            )

    def _check_copies(self) -> None:
        """What is copied and computed in a second is said to the plan that weighs them."""
        if (self.plan == "pofo") != (self.bandwidth is not None) or (
            self.plan != "pofo" and self.tflops != TFLOPS
        ):
            refuse(
                "S842",
                "`plan=pofo` and `bandwidth` must be given together",
                "one of them is missing",
                notes=("only this plan compares copies with recomputation",),
                helps=(MIXED,),
            )
        if self.tflops <= 0 or (self.bandwidth is not None and self.bandwidth <= 0):
            refuse(
                "S842",
                "`bandwidth` and `tflops` must be above 0",
                "they are bytes copied and operations computed in a second",
                helps=(MIXED,),
            )

    @property
    def _alone(self) -> bool:
        return self.group == 1 and self.every == 1 and self.plan is None

    def _tree(self, run: tuple[str, ...]) -> Tree:
        size = root(len(run)) if self.group == "sqrt" else self.group
        return groups(len(run), size, self.every)


def _mix(modules: Sequence[Any], found: Mixed) -> None:
    """Recompute some modules of a chain, and move to the host what others save."""
    from schedlang.runtime.activation_memory.recompute import checkpoint as recompute
    from schedlang.runtime.offload.saved_tensors import Store, offload

    store = Store(paced=True)
    for module, way in zip(modules, found.ways, strict=True):
        if way == "recompute":
            recompute(module)
        elif way == "offload":
            offload(module, store)


def _too_little(memory: int, need: int, count: int, why: str) -> NoReturn:
    refuse(
        "S841",
        f"no plan for these {count} modules fits into {memory} bytes",
        "too little for one microbatch",
        notes=(why,),
        helps=(
            f"each microbatch needs {need} bytes at least",
            "or recompute smaller modules, inside these",
        ),
    )
