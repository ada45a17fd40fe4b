"""What ranks would import one by one while they run a program, imported once before the forks.

Named are files that import the rest: the program with torch's DTensor, FSDP and checkpoints, what
sharding, recomputation and offloading run, and dynamo, which torch's optimizers and its checkpoint
import at their first call.  None of them starts a thread: forking after that deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterable

BASE = ("torch", "torch.distributed", "cloudpickle")
PROGRAMS = (
    "schedlang.passes.running.build",
    "schedlang.runtime.program",
    "schedlang.runtime.following.narrowed",
    "schedlang.runtime.keeping.offload",
    "schedlang.runtime.keeping.recompute",
    "schedlang.runtime.keeping.tipped",
    "schedlang.runtime.routing.choices",
    "schedlang.runtime.sharding.leaf",
    "schedlang.runtime.staging.arguments",
    "schedlang.runtime.summing.scaled",
    "torch._dynamo",
)
_PASSES = "schedlang.passes."  # a job that names one of these will build a program


def wanted(names: Iterable[str]) -> tuple[str, ...]:
    """The modules that a server imports where these are named: them, and what programs need."""
    named = tuple(names)
    return named + PROGRAMS * any(name.startswith(_PASSES) for name in named)
