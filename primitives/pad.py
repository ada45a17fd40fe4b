"""pad: make a vocabulary divisible by adding rows that nothing reads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, replace
from typing import Literal

from schedlang.ir.annotations import PaddedDim
from schedlang.ir.features import Uniform
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse


class pad(Uniform):  # noqa: N801
    """Pad a dim of a weight with zeros up to a multiple; no result depends on the zeros.

    before   weight[50257, 768]
    after    weight[50304, 768]        the last 47 rows are zero and stay zero

    The padding exists only if a later `shard` splits the dim; logits are cut to the true size, and
    the state dict has no padding.  A tied weight is padded under all its names.
    """

    dim: Literal["vocab", "out"]
    multiple: int = field(kw_only=True)

    example = "embed  pad(vocab, multiple=8)"
    reads = frozenset({"structure"})
    writes = frozenset({"shape"})

    def agree(self, axes: Collection[str]) -> None:
        """Refuse a multiple below 1."""
        if self.multiple < 1:
            refuse(
                "S304",
                f"`multiple` must be 1 or more, not {self.multiple}",
                helps=("use 1 or more",),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse modules whose weight has no such dim."""
        names = site.dims.get("weight", ())
        if self.dim not in names:
            dims = ", ".join(f"`{name}`" for name in names) or "none with a name"
            refuse(
                "S401",
                f"`{site}` is a `{site.class_name}`, whose weight has no dim `{self.dim}`",
                helps=(f"its dims are {dims}",),
            )
        # a `pad` below a `shard` of the same weight was refused by the facets of both
        assert not plan.layout(site.parameters["weight"].name).splits

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Round up the dim in the layouts of the weight, and of a bias along the same dim."""
        for name, dims in site.dims.items():
            if self.dim in dims and name in site.parameters:
                layout = plan.layout(site.parameters[name].name)
                dim = dims.index(self.dim)
                size = -(-layout.shape[dim] // self.multiple) * self.multiple
                if layout.padded[dim] < size:
                    plan = plan.with_layout(site.parameters[name].name, layout.pad(dim, size))
        size = site.parameters["weight"].shape[site.dims["weight"].index(self.dim)]
        padded_dim = PaddedDim(site.fqn, size, self.multiple, row=plan.next_row)
        return replace(plan, padded=(*plan.padded, padded_dim))
