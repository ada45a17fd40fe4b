"""replace: a module of the user's own takes the place of one of the model's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from schedlang.ir.features import Renewing
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import FACETS, Facet, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from schedlang.ir.model import Site


class replace(Renewing):  # noqa: N801
    """Compute with a module of your own, which takes over the parameters and their names.

    before   y = f(x; w)
    after    y = g(x; w)        g is yours; w keeps its names, its values and its gradient

    A schedule runs no code: `replacements` of the model file (or of the model's class) says what a
    name stands for, `replacements = {"my_mlp": MyMLP}`.  That is a function of the module that is
    replaced, which gives the new one; it may take over children, `self.up = old.up`, and rows below
    act on what it holds.  In Python the function or a module itself is given.

    Parameters and buffers of the state dict have the same names and shapes in both, and `forward`
    takes the same arguments.  Where names differ the function gives a pair: `return module,
    {"qkv.weight": ["q.weight", "k.weight", "v.weight"]}`, several being joined along their first
    dim.  The state keeps the model's names either way, and `verify` compares with the model as it
    was.

    Slapo (Chen et al. 2024): `.replace`.
    """

    module: str

    example = "layers.*.mlp  replace(my_mlp)"
    takes = "selection"
    reads = frozenset()
    writes = frozenset({"structure"})
    gives_up = frozenset({"rounding"})

    def check(self, site: tuple[Site, ...], plan: Plan) -> None:
        """Refuse an unknown name, the root module, and rows above at modules inside."""
        known = plan.model.replacements
        if self.module not in known:
            there = ", ".join(f"`{name}`" for name in known)
            notes = (f"there are {there}",) if known else ("no replacements are known",)
            help_ = f'define it in the model file: `replacements = {{"{self.module}": ...}}`'
            refuse("S880", f"no replacement is called `{self.module}`", notes=notes, helps=(help_,))
        for one in site:
            if not one.fqn:
                refuse(
                    "S408",
                    "the model itself cannot be replaced",
                    helps=("select a module: `layers.*.mlp  replace(my_mlp)`",),
                )
            self._check_rows_above(one, plan)

    def _check_rows_above(self, site: Site, plan: Plan) -> None:
        """Refuse (S503) rows above at modules inside: such rows must act on the new module."""
        for action in plan.actions:
            inside = any(s == site.fqn or s.startswith(f"{site.fqn}.") for s in action.sites)
            if inside and action.changes(*(FACETS - {Facet.TRAINED})):
                refuse(
                    "S503",
                    f"`replace` must stand above `{action.name}`",
                    helps=(f"move `replace` above this `{action.name}`",),
                )

    def transform(self, site: tuple[Site, ...], plan: Plan) -> Plan:
        """Return the plan of a copy of the model in which the modules are replaced."""
        from schedlang.runtime.kernel_injection.replaced_module import Replace

        known: Mapping[str, Any] = plan.model.replacements
        sites = tuple(one.fqn for one in site)
        change = Replace(sites, self.module, known[self.module])
        return dataclasses.replace(plan, model=plan.model.changed(change))
