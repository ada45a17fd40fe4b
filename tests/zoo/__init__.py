"""The bug zoo: known bugs of distributed training, injected into this runtime on purpose."""

# importing these modules registers their bugs
from tests.zoo import (  # noqa: F401
    adapted,
    away,
    casts,
    coded,
    context,
    draws,
    experts,
    fused,
    grids,
    heads,
    kernels,
    late,
    memory,
    orders,
    pipeline,
    plans,
    replicas,
    saved,
    stale,
    steps,
    tensor,
    trained,
    written_kernels,
)
from tests.zoo.bug import ZOO, Bug, Operator, Site, mutate
from tests.zoo.pool import Mutated

__all__ = ["ZOO", "Bug", "Mutated", "Operator", "Site", "mutate"]
