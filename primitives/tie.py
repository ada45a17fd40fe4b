"""tie: one set of parameters for several modules."""

from __future__ import annotations

from dataclasses import replace

from schedlang.ir.model import ParameterFact, Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse
from schedlang.language.kinds import Many


class tie(Primitive):  # noqa: N801
    """Let modules share parameters: those of the module that comes first in the model's order.

    before   y = f(f(x; w1); w2)       two parameters, a gradient for each
    after    y = f(f(x; w1); w1)       one parameter; its gradient is the sum of both

    The modules must have parameters of the same names, shapes and dtypes.  Names select some of
    them: `embed, head  tie(weight)`.  State dicts have all names, with equal values for tied ones;
    gradients of copies on several stages are summed, and count once in the norm.

    Results are those of training the original with these ties: `relax(model)`.

    ALBERT (Lan et al. 2020); Press, Wolf (2017) for the embedding and the output layer.
    """

    names: Many[str] = ()

    example = "layers[2:]  tie()"
    reads = frozenset({"structure"})
    writes = frozenset({"trained"})
    foremost = True
    takes = "selection"
    gives_up = frozenset({"model"})

    def check(self, sites: tuple[Site, ...], plan: Plan) -> None:
        """Refuse modules with different parameters, and parameters that are tied already."""
        if len(sites) < 2:
            refuse(
                "S416",
                "`tie` needs at least two modules",
                f"`{sites[0]}` is selected",
                helps=("select the modules that share parameters: `layers.*  tie()`",),
            )
        first = self._chosen(sites[0], plan)
        for site in sites[1:]:
            _check_same_parameters(sites[0], first, site, self._chosen(site, plan))
        groups = self._groups(sites, plan)
        if all(len({plan.model.parameters[n].name for n in group}) == 1 for group in groups):
            refuse(
                "S416",
                "nothing is left to tie",
                notes=("the selected parameters are tied already, or there are none",),
                helps=("drop the row, or select other modules",),
            )

    def transform(self, sites: tuple[Site, ...], plan: Plan) -> Plan:
        """Return the plan of a copy of the model, on the same storage, with tied parameters."""
        from schedlang.runtime.parameter_changes import Tie

        return replace(plan, model=plan.model.with_change(Tie(self._groups(sites, plan))))

    def _chosen(self, site: Site, plan: Plan) -> dict[str, ParameterFact]:
        """Return the parameters of a module to be shared, by their names inside the module."""
        prefix = f"{site.fqn}." if site.fqn else ""
        parameters = {
            n.removeprefix(prefix): fact
            for n, fact in plan.model.parameters.items()
            if n.startswith(prefix)
        }
        for name in self.names:
            if name not in parameters:
                examples = ", ".join(f"`{n}`" for n in list(parameters)[:4]) or "none"
                refuse("S305", f"`{site}` has no parameter `{name}`", helps=(f"it has {examples}",))
        return {n: fact for n, fact in parameters.items() if not self.names or n in self.names}

    def _groups(self, sites: tuple[Site, ...], plan: Plan) -> tuple[tuple[str, ...], ...]:
        """Return groups of names to be tied, one group per parameter of the first module."""
        return tuple(
            tuple(f"{site.fqn}.{name}" for site in sites) for name in self._chosen(sites[0], plan)
        )


def _check_same_parameters(
    first_site: Site, first: dict[str, ParameterFact], site: Site, second: dict[str, ParameterFact]
) -> None:
    """Refuse (S416) two modules whose parameters differ in name, shape or dtype."""
    for name in (*first, *second):
        shapes = [_shape(parameters.get(name)) for parameters in (first, second)]
        if shapes[0] != shapes[1]:
            refuse(
                "S416",
                f"the parameters of `{first_site}` and `{site}` differ in shape or dtype",
                notes=(f"`{name}` is {shapes[0]} in the one and {shapes[1]} in the other",),
                helps=("tie modules of one class, or only some parameters: `tie(weight)`",),
            )


def _shape(fact: ParameterFact | None) -> str:
    return "missing" if fact is None else f"{fact.dtype}[{', '.join(map(str, fact.shape))}]"
