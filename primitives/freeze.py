"""freeze: parameters that are not trained."""

from __future__ import annotations

from dataclasses import field, replace

from schedlang.ir.model import ParameterFact, Site, matches
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse
from schedlang.language.kinds import Many


class freeze(Primitive):  # noqa: N801
    """Freeze parameters: no gradient, no optimizer state, no all-reduce, no update.

    before   w' = w - lr g      for every parameter that requires a gradient
    after    w' = w             for those of the module; the gradients of all others do not change

    Names select parameters of a module: by full name (`"attn.bias"`), last part (`bias`) or with
    `*`; `keep` excepts some: `freeze(keep="*lora*")` trains only adapters.  A tied parameter is
    frozen under all its names.  Backward ends where no earlier parameter is trained: a pipeline
    sends no gradient to frozen stages at the start of the model.

    Results are those of training the original with the same parameters frozen: `relax(updates)`.

    BitFit (Ben Zaken et al. 2021); PipeTransformer (He et al. 2021) for layers from the start.
    """

    names: Many[str] = ()
    keep: str | tuple[str, ...] = field(default=(), kw_only=True)

    example = "layers[:2]  freeze()"
    writes = frozenset({"trained"})
    takes = "selection"
    gives_up = frozenset({"updates"})

    def check(self, sites: tuple[Site, ...], plan: Plan) -> None:
        """Refuse a row that freezes nothing, and a row that leaves nothing to train."""
        for site in sites:
            for pattern in (*self.names, *self._keep_patterns):
                if not any(matches(name, pattern) for name, _ in _below(site, plan)):
                    examples = ", ".join(f"`{name}`" for name, _ in _below(site, plan)[:4])
                    refuse(
                        "S305",
                        f"`{site}` has no parameter `{pattern}`",
                        helps=(f"it has {examples or 'none'}, ...",),
                    )
        frozen = self._chosen(sites, plan)
        trained = {
            name for name, fact in plan.model.unique_parameters.items() if fact.requires_grad
        }
        if not frozen & trained:
            refuse(
                "S413",
                "nothing is left to freeze",
                notes=("the selected parameters are all frozen already",),
                helps=("drop the row, or select other modules",),
            )
        if not trained - frozen:
            refuse(
                "S413",
                "this row freezes every parameter: none is left to train",
                helps=('except some: `freeze(keep="*bias")`',),
            )

    def transform(self, sites: tuple[Site, ...], plan: Plan) -> Plan:
        """Return the plan of a copy of the model, on the same storage, with frozen parameters."""
        from schedlang.runtime.parameter_changes import Freeze

        return replace(plan, model=plan.model.with_change(Freeze(self._chosen(sites, plan))))

    @property
    def _keep_patterns(self) -> tuple[str, ...]:
        return (self.keep,) if isinstance(self.keep, str) else self.keep

    def _chosen(self, sites: tuple[Site, ...], plan: Plan) -> frozenset[str]:
        """Return the first names of the parameters that the row freezes."""
        frozen, kept = set(), set()
        for site in sites:
            for name, fact in _below(site, plan):
                if not self.names or any(matches(name, pattern) for pattern in self.names):
                    frozen.add(fact.name)
                if any(matches(name, pattern) for pattern in self._keep_patterns):
                    kept.add(fact.name)
        return frozenset(frozen - kept)


def _below(site: Site, plan: Plan) -> list[tuple[str, ParameterFact]]:
    """Return (name inside the module, parameter) of a module and all modules inside it."""
    prefix = f"{site.fqn}." if site.fqn else ""
    parameters = plan.model.parameters
    return [(n.removeprefix(prefix), parameters[n]) for n in plan.model.names_below(site.fqn)]
