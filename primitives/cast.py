"""cast: compute in fewer bits than parameters are stored in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, replace
from typing import Literal

from schedlang.ir.annotations import Cast
from schedlang.ir.features import Uniform, check_called
from schedlang.ir.model import Site, is_inside
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse
from schedlang.ir.sharing import as_shared_values, values_near

HALVES = ("bfloat16", "float16")


class cast(Uniform):  # noqa: N801
    """Compute inside a module in `bf16` or `fp16`; parameters stay as they are stored.

    before   y = w x                       all in float32
    after    y = bf16(w) bf16(x)           w, its gradient and its moments in float32

      bf16, fp16      torch.autocast: each operation in the dtype of torch's lists
      params=true     all operations: inputs are cast, and each parameter at its use
      fp32            a module inside such a module: computed in float32

    Outputs of a module have the dtype of its inputs.  Without a selector the row is for the full
    model and the loss.  Gradients of parameters are accumulated in the dtype in which parameters
    are stored, over microbatches and over ranks.

    An `fp16` row scales the loss, as torch.amp.GradScaler does: the scale starts at `scale`, is
    halved if any rank finds an infinite gradient (then no rank steps), and doubled after `growth`
    steps without one.

    Float64 tensors are never cast: in float64 the program computes what the original computes.

    Micikevicius et al., Mixed precision training (2018); torch.amp; FSDP2's MixedPrecisionPolicy.
    """

    dtype: Literal["bf16", "fp16", "fp32"]
    params: bool = field(default=False, kw_only=True)
    scale: int = field(default=65536, kw_only=True)
    growth: int = field(default=2000, kw_only=True)

    example = "layers.*  cast(bf16)"
    reads = frozenset({"structure"})
    writes = frozenset({"dtype"})
    gives_up = frozenset({"rounding", "dtype"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse uncalled modules, nested casts, and weights stored in 16 bits."""
        check_called(self, site, plan)
        self._check_others(site, plan)
        names = plan.model.names_below(site.fqn)
        half_name = next((n for n in names if plan.model.parameters[n].dtype in HALVES), None)
        if half_name is not None and self.dtype != "fp32":
            refuse(
                "S891",
                f"`{half_name}` is stored in {plan.model.parameters[half_name].dtype}",
                "there is no float32 master weight to update",
                notes=("updates smaller than its rounding would be lost silently",),
                helps=(
                    "build the model in float32; `cast` chooses the dtype of its computation",
                    "or drop this row: the model computes in this dtype already",
                ),
            )

    def agree(self, axes: Collection[str]) -> None:
        """Refuse arguments without meaning for this dtype, and loss scales out of range."""
        if self.dtype == "fp32" and self.params:
            refuse(
                "S890",
                "`cast(fp32)` takes no `params`: it uses parameters as they are stored",
                helps=("`cast(fp32)`",),
            )
        if self.dtype != "fp16" and (self.scale, self.growth) != (65536, 2000):
            refuse(
                "S890",
                f"`{self.dtype}` takes no loss scaling",
                notes=("it has the range of float32: gradients neither underflow nor overflow",),
                helps=(f"`cast({self.dtype})`",),
            )
        if self.scale < 1 or self.scale & (self.scale - 1) or self.growth < 1:
            refuse(
                "S890",
                "`scale` must be a power of two, `growth` a number of steps",
                notes=("other scales would round gradients a second time",),
                helps=("leave them out: `scale=65536`, `growth=2000`",),
            )

    def _check_others(self, site: Site, plan: Plan) -> None:
        """Refuse a second cast of a module (S892), and a second loss scale (S893)."""
        for other in values_near(plan.casts, site.fqn):
            if is_inside(other.fqn, site.fqn):
                refuse(
                    "S892",
                    f"`{other.fqn}`, inside `{site}`, is cast by a row above",
                    helps=("put the row of the outer module first",),
                )
            if is_inside(site.fqn, other.fqn) and (self.dtype != "fp32" or other.dtype == "fp32"):
                refuse(
                    "S892",
                    f"`{site}` is inside a module that is cast to {other.dtype} already",
                    notes=("inside a lower dtype only `cast(fp32)` may stand, once",),
                    helps=(
                        f"`{site}  cast(fp32)`",
                        "or select modules that do not contain each other",
                    ),
                )
        for other in (part.value for part in as_shared_values(plan.casts)):
            scales = (other.scale, other.growth), (self.scale, self.growth)
            if other.dtype == self.dtype == "fp16" and scales[0] != scales[1]:
                refuse(
                    "S893",
                    "the rows name two loss scales",
                    f"{other.scale} and {self.scale}",
                    helps=("give all `fp16` rows the same `scale` and `growth`",),
                )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the cast to the plan."""
        new_cast = Cast(
            site.fqn, self.dtype, self.params, self.scale, self.growth, row=plan.next_row
        )
        return replace(plan, casts=(*plan.casts, new_cast))
