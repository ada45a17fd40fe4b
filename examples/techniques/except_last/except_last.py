"""except_last: recompute modules in the backward of each microbatch but the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedlang.ir.features import Copy, Recomputing, Settled, check_called
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse


class except_last(Recomputing, Settled):  # noqa: N801
    """Recompute a module in backward, but for the last microbatch of a step, which keeps all.

    before   every microbatch keeps what its backward needs
    after    of m microbatches m - 1 keep the module's input alone, and run it again

    In GPipe's order the last microbatch's backward follows on its forward: what it saved need not
    wait, and nothing is gained by its recomputation.  It is the default of torchgpipe.

    torchgpipe (Kim et al. 2020), after GPipe (Huang et al. 2019).
    """

    example = "layers.*  except_last()"
    reads = frozenset({"structure", "placement"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse what is never called."""
        check_called(self, site, plan)

    def settled(self, site: Site, plan: Plan, traced: Any) -> None:
        """Refuse a single microbatch, of which nothing would be recomputed."""
        if plan.micro < 2:
            refuse(
                "S840",
                "the only microbatch is the last one: nothing would be recomputed",
                helps=('cut the batch: `pipeline(order="GPipe", micro=4)`', "or `checkpoint()`"),
            )

    def lower(self, site: Site, copy: Copy) -> None:
        """Recompute the module, but where the last microbatch runs."""
        from schedlang.runtime.activation_memory.recompute import checkpoint
        from schedlang.runtime.forward import layer_of, wrap

        module = copy.at(site.fqn)
        checkpoint(module)
        recomputed, last = layer_of(module, "checkpoint"), copy.plan.micro - 1
        wrap(module, "checkpoint", Unless(recomputed, last))


class Unless:
    """A layer that is left out while one microbatch runs."""

    def __init__(self, layer: Callable[..., Any], microbatch: int) -> None:
        self.layer, self.microbatch = layer, microbatch

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module itself, or the layer around it."""
        from schedlang.runtime.scope import current

        scope = current()
        if scope is not None and scope.microbatch == self.microbatch:
            return inner(*args, **kwargs)
        return self.layer(inner, *args, **kwargs)
