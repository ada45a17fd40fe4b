"""untie: a parameter of its own for one module that shares it."""

from __future__ import annotations

from dataclasses import replace

from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse
from schedlang.language.kinds import Many


class untie(Primitive):  # noqa: N801
    """Give a module its own copy of a parameter that it shares with others.

    before   one parameter under two names; its gradient is the sum over both uses
    after    two parameters of the same values, each with the gradient of its own use

    Without names, all shared parameters of the module are copied.  State dicts have the same names
    as before, with different values from the first update on; a configuration that ties them
    (`tie_word_embeddings`) must be changed before a model is loaded with this state.

    Results are those of training the original without these ties: `relax(model)`.
    """

    names: Many[str] = ()

    example = "side  untie(weight)"
    reads = frozenset({"structure"})
    writes = frozenset({"trained"})
    foremost = True
    gives_up = frozenset({"model"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse parameters that are not shared, and a module that has two names itself."""
        for name in self.names:
            if name not in site.parameters:
                names = ", ".join(f"`{n}`" for n in site.parameters) or "none"
                refuse("S305", f"`{site}` has no parameter `{name}`", helps=(f"it has {names}",))
        if not self._shared(site):
            refuse(
                "S416",
                f"`{site}` shares no parameter with another module",
                notes=("the selected parameters are not tied",),
                helps=("drop the row; `schedlang tree` shows tied parameters",),
            )
        module = plan.model.model.get_submodule(site.fqn)
        twice = [
            n
            for n, child in plan.model.model.named_modules(remove_duplicate=False)
            if child is module and n != site.fqn
        ]
        if twice:
            refuse(
                "S416",
                f"`{site}` is one module under two names",
                f"it is `{twice[0]}` as well",
                notes=("its own parameter would still be shared by both names",),
                helps=("build the model with two modules",),
            )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Return the plan of a copy of the model in which the module has its own parameters."""
        from schedlang.runtime.parameter_changes import Untie

        return replace(plan, model=plan.model.with_change(Untie(self._shared(site))))

    def _shared(self, site: Site) -> tuple[str, ...]:
        """Return the full names of the parameters that become the module's own."""
        shared = (n for n in self.names or site.parameters if len(site.parameters[n].names) > 1)
        return tuple(f"{site.fqn}.{name}".lstrip(".") for name in shared)
