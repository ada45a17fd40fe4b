"""The timeline of a pipeline: one table of operations that is proven, timed, drawn and run."""

from schedlang.pipeline.timeline.memory import peak, peak_live, with_holds, with_parks
from schedlang.pipeline.timeline.proof import check, check_queues, with_transfers
from schedlang.pipeline.timeline.sharded_weights import runs, with_gathers
from schedlang.pipeline.timeline.simulation import Timing, timing
from schedlang.pipeline.timeline.table import (
    COLUMNS,
    TRANSFERS,
    UNIT,
    Column,
    Edge,
    Kind,
    Op,
    Rows,
    Timeline,
    TimelineError,
    chain,
    halved,
    timeline,
)

__all__ = [
    "COLUMNS",
    "TRANSFERS",
    "UNIT",
    "Column",
    "Edge",
    "Kind",
    "Op",
    "Rows",
    "Timeline",
    "TimelineError",
    "Timing",
    "chain",
    "check",
    "check_queues",
    "halved",
    "peak",
    "peak_live",
    "runs",
    "timeline",
    "timing",
    "with_gathers",
    "with_holds",
    "with_parks",
    "with_transfers",
]
