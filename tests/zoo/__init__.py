"""The bug zoo: mistakes that such systems have made, made on purpose in this runtime."""

# entering its bugs is all that such a module does
from tests.zoo import (  # noqa: F401
    adapted,
    away,
    context,
    experts,
    grids,
    heads,
    kernels,
    late,
    memory,
    orders,
    pipeline,
    replicas,
    saved,
    stale,
    steps,
    tensor,
    trained,
)
from tests.zoo.bug import ZOO, Bug, Operator, Site, mutate
from tests.zoo.pool import Mutated

__all__ = ["ZOO", "Bug", "Mutated", "Operator", "Site", "mutate"]
