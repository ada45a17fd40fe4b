"""fuse: compile a region, so that chains of small operators become few kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from schedlang.diagnostics.diagnostic import Refusal, facts_of_unknown, find_closest
from schedlang.diagnostics.other_systems import ARGUMENTS
from schedlang.ir.features import (
    Gain,
    Gaining,
    Lowered,
    Renewing,
    Resolved,
    Trial,
    Tried,
    check_called,
)
from schedlang.ir.primitive import Facet, refuse
from schedlang.language.patterns import parse_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping

    from schedlang.ir.features import Copy
    from schedlang.ir.model import Site
    from schedlang.ir.plan import Plan
    from schedlang.language.patterns import Pattern
    from schedlang.runtime.fusion.fuse import FuseRequest


class fuse(Lowered, Tried, Gaining, Resolved):  # noqa: N801
    """Compile a module, or matches of a pattern in it, into fewer kernels with torch's inductor.

    before   y = f(x)               one kernel for each operator of f
    after    y = compiled(f)(x)     as few kernels as inductor finds

    `fuse()` compiles the full module, forward and backward.  It must be one graph: a graph break is
    an error, not a silent fallback to eager.  So are more recompilations, for new shapes and
    numbers, than the limit.

    `fuse(name)` compiles the matches of a pattern, `pattern bias_gelu(x, b) { gelu(x + b) }`,
    anywhere in the data flow of the module's forward.  The rest of the forward, and children, run
    unchanged, also if they are sharded.  Matches may extend into children; a linear layer is one
    call unless a row above selects it with `decompose(bias)`.  Arguments that a pattern leaves out
    (a rate, a dim) match any value.  Dropout masks are drawn as the model draws them.  Equal
    regions of several modules are compiled once.

    `backend=rowwise` makes a Triton kernel of a chain of pointwise operators and reductions along
    rows (sums, means, extremes of the last dim): one kernel forward and one backward, for a pattern
    or for a module that has no other operators.  Reductions over rows are refused by name (S887).
    `auto` is inductor.

      rounding   `eager`: intermediate results are rounded as the model rounds them; `fp32`: they
                 stay in float32 until they leave the region

    `verify` runs regions uncompiled in float64, and checks the compiled regions separately in
    their working dtype, with several values, masks and shapes: generated kernels on a GPU, or in
    Triton's interpreter.

    Slapo (Chen et al. 2024): `.find` and `.fuse`.
    """

    pattern: str = ""
    backend: Literal["auto", "inductor", "rowwise"] = "auto"
    rounding: Literal["eager", "fp32"] = "fp32"

    example = "layers.*.mlp  fuse()"
    reads = frozenset()
    writes = frozenset({"structure"})
    gives_up = frozenset({"rounding"})
    apart = "compiled"

    def resolved(self, patterns: Mapping[str, Pattern]) -> fuse:
        """Return the row with the text of the pattern's declaration in place of its name (S885)."""
        if not self.pattern:
            return self
        if self.pattern in patterns:
            return replace(self, pattern=patterns[self.pattern].text)
        if "{" in self.pattern:
            return replace(self, pattern=parse_pattern(self.pattern).text)
        spec = ARGUMENTS["fuse"].get(f"with={self.pattern}")
        if spec is not None:
            refuse(
                "S885",
                f"there is no pattern `{self.pattern}`",
                "this is a backend, not a pattern",
                helps=(f"write `fuse({spec.argument})`",),
            )
        closest = find_closest(self.pattern, patterns)
        help_ = (
            f"did you mean `{closest}`?"
            if closest
            else f"declare it: `pattern {self.pattern}(x) {{ ... }}`, above the step"
        )
        title = f"there is no pattern `{self.pattern}`"
        facts = facts_of_unknown(self.pattern, patterns)
        refuse("S885", title, helps=(help_,), facts=facts)

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse the root module, modules without a match, and modules that are one kernel."""
        if not site.fqn:
            refuse(
                "S408",
                "`fuse` needs a module, and this row selects the whole model",
                helps=("select a module: `layers.*  fuse()`",),
            )
        check_called(self, site, plan)
        _check_not_inside(site, plan)
        if self.pattern or self.backend == "rowwise":
            _check_match(site, plan, self)
        elif _count_kernels(site, plan) == 1:
            refuse(
                "S884",
                f"`{site}` is one kernel already",
                "nothing is there to fuse it with",
                helps=("select a module around it",),
            )

    def lower(self, site: Site, copy: Copy) -> None:
        """Compile the module of the copy."""
        self._compile(copy.at(site.fqn), site, copy.plan)

    def _compile(self, module: Any, site: Site, plan: Plan) -> None:
        from schedlang.runtime.fusion import fuse

        if self.pattern or self.backend == "rowwise":
            fuse.fuse_pattern(module, _pattern_request(site, plan, self))
        else:
            fuse.fuse(module, rounding=self.rounding)

    def trial(self, site: Site, plan: Plan, calls: Mapping[str, tuple[Any, Any]]) -> list[Trial]:
        """Run the compiled region in the working dtype, on the arguments of real calls."""
        import copy
        from contextlib import nullcontext

        from schedlang.runtime.device import device_of
        from schedlang.runtime.fusion.check_fused import check_fused
        from schedlang.runtime.rowwise_kernels.launch import run_for_device

        module = copy.deepcopy(plan.model.model.get_submodule(site.fqn))
        self._compile(module, site, plan)
        device = device_of(module.parameters()).type
        generated = self.backend == "rowwise"
        first, later = calls[""], {label: call for label, call in calls.items() if label}
        with run_for_device(device) if generated else nullcontext("inductor") as by:
            checks = check_fused(module, *first, later=later)
        return [
            Trial(f"{check.name} by {by}", check.error, check.allowed, check.ok, by != "reference")
            for check in checks
        ]

    def gain(self, site: Site, plan: Plan, call: tuple[Any, Any]) -> Gain:
        """Return the gain of fusing the regions of a module, or the full module."""
        from schedlang.runtime.kernel_injection.fusion_gain import gain_of_module, gain_of_regions
        from schedlang.runtime.tracing.meta_runs import meta_model

        module = meta_model(plan.model.model.get_submodule(site.fqn), {})
        if self.pattern or self.backend == "rowwise":
            return gain_of_regions(module, _pattern_request(site, plan, self), *call)
        return gain_of_module(module, *call)

    def __str__(self) -> str:
        arguments = [parse_pattern(self.pattern).name] if self.pattern else []
        arguments += [f"backend={self.backend}"] if self.backend != "auto" else []
        arguments += [f"rounding={self.rounding}"] if self.rounding != "fp32" else []
        return f"fuse({', '.join(arguments)})"


def _pattern_request(site: Site, plan: Plan, row: fuse) -> FuseRequest:
    """Return the pattern of a row, with the changes that rows above make to children."""
    from schedlang.runtime.fusion.dataflow import TraceDepth
    from schedlang.runtime.fusion.fuse import FuseRequest
    from schedlang.runtime.fusion.rewrite import RegionOptions

    pattern = parse_pattern(row.pattern) if row.pattern else None
    inside: dict[str, set[str]] = {"decompose": set(), "": set()}
    for action in plan.rows_changing(Facet.STRUCTURE):
        if not isinstance(action.primitive, Renewing):
            inside[action.name if action.name in inside else ""].update(
                fqn.removeprefix(f"{site.fqn}.")
                for fqn in action.sites
                if fqn.startswith(f"{site.fqn}.")
            )
    body = str(pattern.body) if pattern is not None else ""
    products = any(f"{name}(" in body for name in ("linear", "matmul"))
    depth = TraceDepth(frozenset(inside[""]), frozenset(inside["decompose"]), products)
    backend = "inductor" if row.backend == "auto" else row.backend
    return FuseRequest(pattern, depth, RegionOptions(row.rounding, backend), site.fqn)


def _check_not_inside(site: Site, plan: Plan) -> None:
    """Refuse (S503) a module inside a module that a row above fuses by its data flow."""
    for action in plan.actions:
        row: Any = action.primitive
        looked = isinstance(row, fuse) and (row.pattern or row.backend == "rowwise")
        around = next((s for s in action.sites if site.fqn.startswith(f"{s}.")), None)
        if looked and around is not None:
            refuse(
                "S503",
                f"`{site}` is inside `{around}`, which the row `{row}` above fuses",
                helps=(f"move this row above `{row}`, or drop it",),
            )


def _check_match(site: Site, plan: Plan, row: fuse) -> None:
    """Refuse a pattern without a match (S882) or of one call (S884)."""
    from schedlang.runtime.fusion.dataflow import invented_arguments
    from schedlang.runtime.fusion.fuse import matches_in_module

    request = _pattern_request(site, plan, row)
    if request.pattern is not None and request.pattern.body.size == 1:
        refuse(
            "S884",
            f"`{request.pattern.name}` is one kernel already",
            helps=("name the module before or after it",),
        )
    module = plan.model.model.get_submodule(site.fqn)
    matches_in_module(module, request, invented_arguments(module))


def _count_kernels(site: Site, plan: Plan) -> int:
    """Return the number of kernels of a module; 0 if unknown."""
    from schedlang.runtime.fusion.dataflow import (
        TraceDepth,
        count_kernels,
        invented_arguments,
        trace_flow,
    )

    module = plan.model.model.get_submodule(site.fqn)
    try:
        return count_kernels(
            trace_flow(module, invented_arguments(module), TraceDepth(products=True)), module
        )
    except Refusal:
        return 0
