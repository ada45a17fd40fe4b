"""replace: a module of the user's own takes the place of one of the model's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from schedlang.ir.features import Renewing
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import FACETS, Facet, refuse


class replace(Renewing):  # noqa: N801
    """Replace a module by one of your own; parameters and their names stay the same.

    before   y = f(x; w)
    after    y = g(x; w)        g is yours; w keeps its names, its values and its gradient

    A schedule runs no code: `replacements` of the model file (or of the model's class) maps a name
    to a function, `replacements = {"my_mlp": MyMLP}`.  The function gets the old module and returns
    the new one, which may use its children, `self.up = old.up`; rows below act on children of the
    new module.  In Python the function or a module is given directly.

    Both modules must have the same names and shapes of parameters and buffers in the state dict,
    and the same arguments of `forward`.  If names differ, the function returns a pair: `return
    module, {"qkv.weight": ["q.weight", "k.weight", "v.weight"]}`; several tensors are concatenated
    along their first dim.  The state dict has the model's names in both cases, and `verify`
    compares with the unmodified model.

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
        replacements = plan.model.replacements
        if self.module not in replacements:
            names = ", ".join(f"`{name}`" for name in replacements)
            notes = (f"there are {names}",) if replacements else ("no replacements are known",)
            help_ = f'define it in the model file: `replacements = {{"{self.module}": ...}}`'
            refuse("S880", f"no replacement is called `{self.module}`", notes=notes, helps=(help_,))
        for module in site:
            if not module.fqn:
                refuse(
                    "S408",
                    "the model itself cannot be replaced",
                    helps=("select a module: `layers.*.mlp  replace(my_mlp)`",),
                )
            self._check_rows_above(module, plan)

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
        from schedlang.runtime.kernel_injection.replaced_module import ReplaceModules

        replacements: Mapping[str, Any] = plan.model.replacements
        sites = tuple(module.fqn for module in site)
        change = ReplaceModules(sites, self.module, replacements[self.module])
        return dataclasses.replace(plan, model=plan.model.with_change(change))
