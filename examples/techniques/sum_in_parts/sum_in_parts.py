"""sum_in_parts: the sum after a row-parallel product, beside the product of the next rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from schedlang.ir.features import Copy, Lowered
from schedlang.ir.model import Site
from schedlang.ir.placement import R
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse


class sum_in_parts(Lowered):  # noqa: N801
    """Sum the product of a row-parallel layer over its ranks part by part, while it is computed.

    before   y = sum over ranks of x w'
    after    for part in parts of the rows: start the sum of x[part] w' over ranks
             y = all parts, when they have arrived

    It stands below `shard(row, ...)`, whose one sum waits for the whole product.  Backward is that
    of the layer, which sends nothing.

    CoCoNeT (Jangda et al. 2022); Wang et al., Overlap communication with dependent computation via
    decomposition (2023).
    """

    parts: int

    example = "layers.*.down  sum_in_parts(4)"
    reads = frozenset({"structure", "placement"})
    writes = frozenset({"order"})
    gives_up = frozenset({"rounding"})

    def agree(self, axes: Collection[str]) -> None:
        """Refuse a number of parts that changes nothing."""
        if self.parts < 2:
            refuse("S304", f"{self.parts} parts of the rows", helps=("use 2 or more",))

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse what is no linear layer, and what does not end in one sum."""
        if not plan.model.computes_as(site.fqn, "Linear"):
            title = f"`{site}` is a `{site.class_name}`, not a linear layer"
            refuse("S401", title, helps=("select the linear layers inside it",))
        known = plan.boundaries.get(site.fqn, ())
        if len(known) != 1 or known[0].output != R or not plan.layout(f"{site.fqn}.weight").splits:
            refuse(
                "S401",
                f"`{site}` does not end in one sum over ranks",
                helps=(f"split its inputs above: `{site}  shard(row, over=tp)`",),
            )

    def lower(self, site: Site, copy: Copy) -> None:
        """Put the loop in the place of the sharded product; on one rank there is none."""
        from schedlang.runtime.forward import layer_of, wrap

        module = copy.at(site.fqn)
        sharded = layer_of(module, "sharded")
        if sharded is not None:
            wrap(module, "sharded", InParts(module, sharded.edges[0], self.parts))


class InParts:
    """The layer of a row-parallel product that is summed part by part."""

    def __init__(self, module: Any, edge: Any, parts: int) -> None:
        self.module, self.edge, self.parts = module, edge, parts

    def __deepcopy__(self, memo: dict[int, Any]) -> InParts:
        import copy

        return InParts(copy.deepcopy(self.module, memo), self.edge, self.parts)  # groups stay

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a part of the rows, start its sum, and go on with the next."""
        from torch.nn.functional import linear

        from schedlang.runtime.comm import world
        from schedlang.runtime.comm.collectives import count
        from schedlang.runtime.forward import the_input
        from schedlang.runtime.sharding.edges import mask_padding

        edge, group = self.edge, self.edge.group
        x = edge.enter(the_input(self.module, args, kwargs))
        x = mask_padding(x, edge.input_after, group)
        parts, started = [], []
        for rows in x.flatten(0, -2).chunk(self.parts):
            part = linear(rows, self.module.weight)
            total = part.detach().clone()
            count("all-reduce", group, total)
            started.append((total, world.all_reduce(total, group.pg, wait=False)))
            parts.append(part)
        y = arrived(started, parts).view(*x.shape[:-1], len(self.module.weight))
        return y if self.module.bias is None else y + self.module.bias


def arrived(started: list[Any], parts: list[Any]) -> Any:
    """The sums one below the other; their gradient is that of each rank's own part."""
    import torch

    class Arrived(torch.autograd.Function):
        """A sum over ranks that was started elsewhere: each rank's gradient is the sum's."""

        @staticmethod
        def forward(ctx: Any, *parts: Any) -> Any:
            ctx.sizes = [len(part) for part in parts]
            for _, work in started:
                if work is not None:
                    work.wait()
            return torch.cat([total for total, _ in started])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.split(ctx.sizes)

    return Arrived.apply(*parts)  # type: ignore[no-untyped-call]
