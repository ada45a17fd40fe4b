"""replace_kernel: a named kernel computes what a module computes, where probing shows it does."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.ir.features import Injected, Settled, Trial, Tried
from schedlang.ir.primitive import Facet, refuse
from schedlang.language.value import Bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from schedlang.ir.features import Copy
    from schedlang.ir.model import Site
    from schedlang.ir.plan import Plan


# kernel -> its package, how to install it, a row that needs no package
PACKAGES = {
    "flash_attention": (
        "flash_attn",
        "pip install flash-attn --no-build-isolation",
        "replace_kernel(flex_attention)",
    ),
    "liger.rms_norm": ("liger_kernel", "pip install liger-kernel", "replace_kernel(rms_norm)"),
    "liger.layer_norm": ("liger_kernel", "pip install liger-kernel", "replace_kernel(layer_norm)"),
}

# kernels that replace a part of their module's computation -> the part
PARTS = {"rope": "rotation"} | dict.fromkeys(
    ("sdpa", "flex_attention", "flash_attention"), "attention"
)


class replace_kernel(Injected, Tried, Settled):  # noqa: N801
    """Compute a module with another kernel; its parameters, children and names stay.

    before   y = w * (x / rms(x))          several kernels of torch
    after    y = rms_norm(x, w)            one kernel forward, one backward

      rms_norm, layer_norm   our Triton kernels, forward and backward; offset, epsilon and rounding
                             order are found by probing, and the function and place of the gate of a
                             gated RMSNorm (Mamba-2, Qwen3-Next)
      gated                  SwiGLU and similar gates between the projections of an MLP, split or
                             packed
      add_norm               residual sums and the norms after them, in a module that has both
      rope                   rotary embeddings of an attention's queries and keys, in one launch
      cross_entropy          a head and the loss after it: logits are stored once, and overwritten
                             by their gradient
      linear_cross_entropy   a head and the loss after it, `chunk` bytes of logits at a time; loss,
                             casts, scale and soft cap are taken from the model's own code
      sdpa                   attention by torch's scaled_dot_product_attention, for transformers'
                             modules
      flex_attention         attention by torch's FlexAttention, with its soft cap, sinks and masks;
      flash_attention        by the package flash_attn, where it is installed: in transformers'
                             modules, and in others that call scaled_dot_product_attention
      grouped                experts by grouped matrix products: tokens sorted by expert, one
                             product for all experts, without padding or dropped tokens
      liger.rms_norm, liger.layer_norm     those of the package liger_kernel, where it is installed

    An attention may have `rope` and one attention kernel, in rows of any order.

    A module is replaced only if a copy of it, in float64 on random input, computes what the kernel
    computes; otherwise the refusal gives the measured difference.
    """

    kernel: Literal[
        "rms_norm",
        "layer_norm",
        "add_norm",
        "gated",
        "rope",
        "cross_entropy",
        "linear_cross_entropy",
        "sdpa",
        "flex_attention",
        "flash_attention",
        "grouped",
        "liger.rms_norm",
        "liger.layer_norm",
    ]
    chunk: Bytes | None = None

    example = "layers.*.norm  replace_kernel(rms_norm)"
    reads = frozenset()
    writes = frozenset({"structure"})
    gives_up = frozenset({"rounding"})

    @property
    def waits(self) -> bool:
        """Whether the kernel needs the module's parameters after the module's forward."""
        return self.kernel in ("cross_entropy", "linear_cross_entropy")

    @property
    def part(self) -> str:
        """Return the replaced part of an attention ("rotation", "attention"), or "" for all."""
        return PARTS.get(self.kernel, "")

    def agree(self, axes: Collection[str]) -> None:
        """Refuse `chunk` for kernels that have no chunks."""
        if self.chunk is not None and self.kernel != "linear_cross_entropy":
            refuse(
                "S870",
                f"`{self.kernel}` takes no `chunk`: only `linear_cross_entropy` does",
                helps=(f"leave it out: `replace_kernel({self.kernel})`",),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse a module that computes something else than the kernel, with the mismatch."""
        self._check_package()
        result = self._probe(site, plan)
        if type(result).__name__ == "Mismatch":
            refuse(
                "S410",
                f"`{site}` does not compute what `{self.kernel}` does",
                str(result.reason),
                helps=("leave this module as it is",),
            )

    def _check_package(self) -> None:
        """Refuse a kernel of a package that is not installed (S876)."""
        package = PACKAGES.get(self.kernel)
        if package is not None and find_spec(package[0]) is None:
            refuse(
                "S876",
                f"`{self.kernel}` is a kernel of the package `{package[0]}`, not installed here",
                helps=(f"install it: `{package[1]}`", f"or use another kernel: `{package[2]}`"),
            )

    def settled(self, site: Site, plan: Plan, traced: Any) -> None:
        """Refuse (S875, S878) a kernel that would not run, because another row replaces it."""
        if plan.context_axes and self.kernel in ("flex_attention", "flash_attention"):
            refuse(
                "S878",
                f"`{self.kernel}` and `context_parallel` both compute the attention of `{site}`",
                notes=("attention over a split sequence has its own kernels",),
                helps=(f"drop the row `{site} {self}`",),
            )
        edges = traced.edges.get(site.fqn, ())
        if not self.waits or not edges or [edge.is_head for edge in edges] == [True]:
            return
        rows = [a for a in plan.rows_changing(Facet.PLACEMENT) if site.fqn in a.sites]
        axis = edges[0].group.axes[0]
        diagnostic = Diagnostic(
            "S875",
            f"`{site}` is sharded in a way that computes its logits before the loss",
            also=tuple(Label(a.span, f"by `{a.primitive}`") for a in rows if a.span),
            notes=(
                "the kernel needs a head that is replicated, or sharded along `vocab` over one"
                " axis",
            ),
            helps=(
                f"shard it along `vocab`: `{site} shard(vocab, over={axis})`",
                f"or drop the row `{site} replace_kernel({self.kernel})`",
            ),
        )
        raise Refusal(diagnostic)

    def lower(self, site: Site, copy: Copy) -> None:
        """Put the kernel into the module of the copy."""
        from schedlang.runtime.kernel_injection.kernel import replace

        replace(copy.at(site.fqn), self._probe(site, copy.plan), int(self.chunk or 0))

    def trial(self, site: Site, plan: Plan, calls: Mapping[str, Any]) -> list[Trial]:
        """Run the Triton kernel, on a GPU or in Triton's interpreter, and compare it."""
        from schedlang.kernels.check import run_kernel_check
        from schedlang.runtime.kernel_injection.kernel import cases_of

        cases = cases_of(self._probe(site, plan))
        return [
            Trial(
                f"{k.case.dtype} {list(k.case.shape)} {comparison.name} by {k.backend}",
                comparison.error,
                comparison.allowed,
                comparison.ok,
                k.backend != "reference",
            )
            for k in (run_kernel_check(cases) if cases else ())
            for comparison in k.comparisons
        ]

    def _probe(self, site: Site, plan: Plan) -> Any:
        """Return the result of probing a module; cached for equal modules."""
        from schedlang.kernels.probe import probe_once
        from schedlang.runtime.kernel_injection.kernel import match

        module = plan.model.model.get_submodule(site.fqn)
        probe = partial(match, kernel=self.kernel)
        return probe_once(module, probe, plan.model.cache, self.kernel)
