"""A simulated process group: all ranks run as threads of this process (tests only).

    pool = Threads()
    results = pool.run(function, 4, argument, ...)     # as schedlang.runtime.launch.pool.Pool

It is a torch.distributed backend, so DTensor, fully_shard and the pipeline run on it unchanged.
Only one rank computes at a time (baton) and sums are taken in rank order (arithmetic), so every
run gives bitwise equal results.  A mismatched collective, or one that other ranks never join, is
an error at once (exchange).  `Threads(faults=Faults())` completes communication as late as allowed
and poisons buffers: a missing wait or an early overwrite fails.
"""

from tests.engine.exchange import Mismatch
from tests.engine.faults import Faults
from tests.engine.threads import Threads

__all__ = ["Faults", "Mismatch", "Threads"]
