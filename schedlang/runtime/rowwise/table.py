"""ATen's operators by their names, and what the pointwise ones are in Triton, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# near zero the formula loses digits, and the series has them
_TANH = (
    "tl.where(tl.abs({0}) < 0.2,"
    " {0} * (1.0 - {0} * {0} * (0.33333333333 - {0} * {0} * (0.13333333333"
    " - {0} * {0} * (0.05396825397 - {0} * {0} * 0.02186948854)))),"
    " 1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0})))"
)
# after Kahan: the rounding of 1 + x, and of exp(x), is taken out again
_LOG1P = "tl.where(1.0 + {0} == 1.0, {0}, tl.log(1.0 + {0}) * ({0} / ((1.0 + {0}) - 1.0)))"
_EXPM1 = (
    "tl.where(tl.exp({0}) == 1.0, {0}, tl.where(({0} < -16.0) | ({0} > 16.0), tl.exp({0}) - 1.0,"
    " (tl.exp({0}) - 1.0) * ({0} / tl.log(tl.exp({0})))))"
)
# what is not a number stays so, as in torch
_LARGER = "tl.where(({0} != {0}) | ({0} > {1}), {0}, {1})"
_SMALLER = "tl.where(({0} != {0}) | ({0} < {1}), {0}, {1})"

POINTWISE: Mapping[str, str] = {
    "aten.add.Tensor": "{0} + {1}", "aten.add.Scalar": "{0} + {1}",
    "aten.sub.Tensor": "{0} - {1}", "aten.sub.Scalar": "{0} - {1}",
    "aten.rsub.Scalar": "{1} - {0}",
    "aten.mul.Tensor": "{0} * {1}", "aten.mul.Scalar": "{0} * {1}",
    "aten.div.Tensor": "{0} / {1}", "aten.div.Scalar": "{0} / {1}",
    "prims.fma.default": "{0} * {1} + {2}",
    "aten.addcmul.default": "{0} + {1} * {2}",
    "aten.neg.default": "-{0}", "aten.abs.default": "tl.abs({0})",
    "aten.exp.default": "tl.exp({0})",
    "aten.exp2.default": "tl.exp2({0})", "aten.expm1.default": _EXPM1,
    "aten.log.default": "tl.log({0})",
    "aten.log2.default": "tl.log2({0})", "aten.log1p.default": _LOG1P,
    "aten.sqrt.default": "tl.sqrt({0})", "aten.rsqrt.default": "tl.rsqrt({0})",
    "aten.sin.default": "tl.sin({0})", "aten.cos.default": "tl.cos({0})",
    "aten.tanh.default": _TANH, "aten.erf.default": "tl.erf({0})",
    "aten.sigmoid.default": "1.0 / (1.0 + tl.exp(-{0}))",
    "aten.reciprocal.default": "1.0 / {0}", "aten.square.default": "{0} * {0}",
    "aten.relu.default": _LARGER.replace("{1}", "0.0"),
    "aten.maximum.default": _LARGER, "aten.minimum.default": _SMALLER,
    "aten.clamp_min.default": _LARGER, "aten.clamp_max.default": _SMALLER,
    "aten.where.self": "tl.where({0}, {1}, {2})",
    "aten.sign.default": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, {0}))",
    "aten.floor.default": "tl.floor({0})", "aten.ceil.default": "tl.ceil({0})",
    **{f"aten.{name}.{kind}": f"{{0}} {sign} {{1}}"
       for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="), ("eq", "=="),
                          ("ne", "!="))
       for kind in ("Tensor", "Scalar")},
    "aten.logical_and.default": "{0} & {1}", "aten.bitwise_and.Tensor": "{0} & {1}",
    "aten.logical_or.default": "{0} | {1}", "aten.bitwise_or.Tensor": "{0} | {1}",
    "aten.logical_not.default": "{0} == 0", "aten.bitwise_not.default": "{0} == 0",
    "aten.isnan.default": "{0} != {0}",
}  # fmt: skip

# the same values under another shape, or another name
SAME = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "reshape.default", "_unsafe_view.default", "unsqueeze.default",
        "squeeze.default", "squeeze.dim", "squeeze.dims", "expand.default", "alias.default",
        "clone.default", "detach.default", "_reshape_alias.default", "lift_fresh_copy.default",
    )
)  # fmt: skip
CASTS = frozenset(("prims.convert_element_type.default", "aten._to_copy.default"))
FULL = frozenset(
    f"aten.{name}.default"
    for name in ("full", "full_like", "zeros_like", "ones_like", "zeros", "ones", "scalar_tensor",
                 "new_zeros", "new_full")
)  # fmt: skip
IDLE = frozenset(("aten._assert_tensor_metadata.default",))
POWERS: Mapping[float, str] = {
    -2.0: "1.0 / ({0} * {0})", -1.0: "1.0 / {0}", -0.5: "tl.rsqrt({0})", 0.0: "1.0",
    0.5: "tl.sqrt({0})", 1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}",
    4.0: "({0} * {0}) * ({0} * {0})",
}  # fmt: skip
SUMS = frozenset(("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default"))
EXTREMES: Mapping[str, str] = {"aten.amax.default": "max", "aten.amin.default": "min"}
VARIANCES = frozenset(("aten.var_mean.correction", "aten.var.correction"))


def value_of(target: str, args: tuple[Any, ...]) -> float:
    """The number that a tensor of one number holds."""
    name = target.split(".")[1]
    if name.startswith("zeros") or name == "new_zeros":
        return 0.0
    if name.startswith("ones"):
        return 1.0
    return float(args[0] if name == "scalar_tensor" else args[2 if name == "new_full" else 1])
