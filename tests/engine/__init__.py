"""A second engine for the same runtime: all ranks as threads of this process (tests only).

    pool = Threads()
    results = pool.run(function, 4, argument, ...)     # as schedlang.runtime.launch.pool.Pool

It is a backend of torch.distributed, so DTensor, fully_shard and the pipeline run on it unchanged.
One rank computes at a time (baton), sums are taken in the order of ranks (arithmetic), so results
are the same to the last bit in every run; a collective that does not match, or that nobody else
will ever join, is an error at once (exchange).  `Threads(faults=Faults())` completes everything as
late as it may be, over poisoned buffers: a missing wait or an early overwrite fails.
"""

from tests.engine.exchange import Mismatch
from tests.engine.faults import Faults
from tests.engine.threads import Threads

__all__ = ["Faults", "Mismatch", "Threads"]
