"""offload: keep what a module saves for backward in host memory."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from schedlang.plan import Plan
from schedlang.primitive import Primitive, refuse

if TYPE_CHECKING:
    from schedlang.model import Site


class offload(Primitive):  # noqa: N801
    """Move a module's activations to the host after its forward, and back before its backward.

    before   backward finds what f saved on the device
    after    backward finds it on the host, and reloads it `prefetch` modules ahead

    With a checkpoint on the same module its inputs are what moves.  On a GPU copies are pinned and
    run on a stream of their own.  Rhu et al., vDNN (2016); Ren et al., ZeRO-Offload (2021).
    """

    what: Literal["activations"]
    to: Literal["cpu"] = field(default="cpu", kw_only=True)
    prefetch: int = field(default=1, kw_only=True)

    example = "layers.*  offload(activations, to=cpu)"
    reads = frozenset({"structure", "placement", "recompute"})
    writes = frozenset({"residence"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse a distance that means nothing."""
        if self.prefetch < 0:
            refuse("S304", f"nothing can be reloaded {self.prefetch} modules ahead",
                   helps=("use 0 to reload on demand, 1 to reload one module ahead",))  # fmt: skip

    def apply(self, site: Site, build: Any) -> None:
        """Put the module's saved tensors into the program's store."""
        from schedlang.runtime.offload import Store
        from schedlang.runtime.offload import offload as move

        move(
            build.at(site.fqn),
            build.shared(("offload", self.prefetch), lambda: Store(self.prefetch)),
        )
