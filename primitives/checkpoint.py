"""checkpoint: trade memory for a second forward."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from schedlang.plan import Plan
from schedlang.primitive import Primitive, refuse
from schedlang.regions import Tree, groups, regions, root, runs

if TYPE_CHECKING:
    from schedlang.model import Site


class checkpoint(Primitive):  # noqa: N801
    """Forget a module's activations in forward and recompute them in backward.

    before   y = f(x)                  backward finds every intermediate of f
    after    y = checkpoint(f)(x)      backward finds x and what `save` names, and runs f again

    `save` keeps the results of whole classes of operators: `linear` (matrix products), `attention`
    (fused attention), `collective` (communication, which is then not repeated).  Random numbers are
    replayed, so dropout gives the same masks.

    `group=4` recomputes elements of a list that follow each other four at a time, so that one input
    is kept for four of them; `group=sqrt` takes the square root of their number.  `every=2` leaves
    every second module (or group) as it is.

    Chen et al., Training deep nets with sublinear memory cost (2016); selective recomputation:
    Korthikanti et al. (2022).
    """

    save: tuple[Literal["linear", "attention", "collective"], ...] = field(default=(), kw_only=True)
    group: int | Literal["sqrt"] = field(default=1, kw_only=True)
    every: int = field(default=1, kw_only=True)

    example = "layers.*  checkpoint()"
    reads = frozenset({"structure", "placement"})
    writes = frozenset({"recompute"})
    takes = "selection"

    def taken(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Each module alone, where they are recomputed alone."""
        return [(site,) for site in sites] if self._alone else [sites]

    def together(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The regions, of which each is recomputed as one."""
        if self._alone:
            return [(site,) for site in sites]
        found = ((run, places) for run in runs(sites) for places in regions(self._tree(run)))
        return [tuple(run[place] for place in places) for run, places in found]

    def check(self, sites: tuple[Site, ...], plan: Plan) -> None:
        """Refuse sizes that mean nothing, and modules that do not follow each other."""
        names = tuple(site.fqn for site in sites)
        for word, size in (("group", self.group), ("every", self.every)):
            if size != "sqrt" and size < 1:
                refuse("S840", f"`{word}={size}` is no number of modules", f"`{word}` counts them",
                       helps=(f"use `{word}=1` or more",))  # fmt: skip
        inner = next((n for n in names for m in names if n != m and _inside(n, m)), None)
        if inner is not None:
            refuse("S502", "nested checkpoints recompute the inner module twice",
                   f"`{inner}` lies inside another module that this row selects",
                   helps=("select one of the two: a `*` in a path matches one level",))  # fmt: skip
        if self.group != 1 and len(names) > 1 and all(len(run) == 1 for run in runs(names)):
            refuse("S840", f"no two of these {len(names)} modules follow each other in a list",
                   f"`{names[0]}` and `{names[1]}` are not neighbours",
                   notes=("a group is recomputed from the input of its first module on",),
                   helps=("select elements of one list, as in `layers.*  checkpoint(group=4)`",
                          "or recompute each alone: `checkpoint()`"))  # fmt: skip

    def apply(self, sites: tuple[Site, ...], build: Any) -> None:
        """Recompute modules of the copy."""
        from schedlang.runtime.recompute import checkpoint as recompute
        from schedlang.runtime.region import regions as recompute_as

        if self._alone:
            for site in sites:
                recompute(build.at(site.fqn), self.save)
            return
        for run in runs([site.fqn for site in sites]):
            recompute_as([build.at(name) for name in run], self._tree(run), self.save)

    @property
    def _alone(self) -> bool:
        return self.group == 1 and self.every == 1

    def _tree(self, run: tuple[str, ...]) -> Tree:
        size = root(len(run)) if self.group == "sqrt" else self.group
        return groups(len(run), size, self.every)


def _inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}." if other else "")
