"""tile: a product of matrices as loops over blocks that fit into caches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from typing import Any

from schedlang.ir.features import Rewrite
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse


class tile(Rewrite):  # noqa: N801
    """Compute a linear layer block by block; its parameters and their names stay.

    before   y = x w'
    after    for j in blocks(n), for k in blocks(m), for i in blocks(rows):
                 y[i, j] += x[i, k] w[j, k]'

    `outputs` and `inputs` are the most columns of y and of x in a block, `rows` the most rows.
    Panels of x and w are packed: each is contiguous, and a panel of w is read for all rows.  It is
    not faster where the library's own product has blocks already.

    The loops of BLIS (Van Zee and van de Geijn 2015), after Goto and van de Geijn (2008).
    """

    outputs: int = field(kw_only=True)
    inputs: int = field(kw_only=True)
    rows: int = field(kw_only=True)

    example = "layers.*.up  tile(outputs=256, inputs=128, rows=64)"
    gives_up = frozenset({"rounding"})

    def agree(self, axes: Collection[str]) -> None:
        """Refuse empty blocks."""
        if min(self.outputs, self.inputs, self.rows) < 1:
            refuse("S304", "a block has one row and one column at least", helps=("use 1 or more",))

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse what is no linear layer."""
        if not plan.model.computes_as(site.fqn, "Linear"):
            title = f"`{site}` is a `{site.class_name}`, not a linear layer"
            refuse("S401", title, helps=("select the linear layers inside it: `**:Linear`",))

    def rewrite(self, module: Any) -> None:
        """Put the loops in the place of the product."""
        module.forward = lambda x: self.product(x, module.weight, module.bias)

    def product(self, x: Any, weight: Any, bias: Any) -> Any:
        """The loops of BLIS from the outside in; the innermost two are those of torch's product."""
        import torch

        flat, columns = x.reshape(-1, x.shape[-1]), []
        for w in weight.split(self.outputs):
            rows: list[Any] = [None] * len(flat.split(self.rows))
            for left, right in zip(flat.split(self.inputs, 1), w.split(self.inputs, 1)):
                panel = right.t().contiguous()
                for index, block in enumerate(left.split(self.rows)):
                    part = block.contiguous() @ panel
                    rows[index] = part if rows[index] is None else rows[index] + part
            columns.append(torch.cat(rows))
        y = torch.cat(columns, 1).reshape(*x.shape[:-1], len(weight))
        return y if bias is None else y + bias
