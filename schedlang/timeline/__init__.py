"""The timeline of a pipeline: one table of operations that is proven, timed, drawn and run."""

from schedlang.timeline.gathers import runs, with_gathers
from schedlang.timeline.halves import halved
from schedlang.timeline.holds import with_holds
from schedlang.timeline.memory import peak, peak_live
from schedlang.timeline.parks import with_parks
from schedlang.timeline.proof import check
from schedlang.timeline.queues import check_queues
from schedlang.timeline.table import (
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
    timeline,
)
from schedlang.timeline.timing import Timing, timing
from schedlang.timeline.transfers import with_transfers

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
