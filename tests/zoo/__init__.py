"""The bug zoo: mistakes that such systems have made, made on purpose in this runtime."""

from tests.zoo import heads, pipeline, replicas, steps, tensor  # noqa: F401  (entering a bug is all that a module does)
from tests.zoo.bug import ZOO, Bug, Operator, Site, mutate
from tests.zoo.pool import Mutated

__all__ = ["ZOO", "Bug", "Mutated", "Operator", "Site", "mutate"]
