"""Several ranks on one device against the untouched model there: gloo carries its tensors.

NCCL refuses two ranks on one device, so this shows streams, transfers and sums, not that library.
On the simulated device each rank has a device of its own, and a library by NCCL's rules.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

from schedlang.testing.gpu.case import Case, Setup, Told
from schedlang.testing.gpu.models import Seen, adamw
from schedlang.testing.gpu.programs import Subject, against, shape_of, trained

CUT = "blocks  pipeline_split(over=pp)\n"
TENSOR = "blocks.*.mlp.{gate,up}  shard(col, over=tp)\nblocks.*.mlp.down  shard(row, over=tp)\n"
SEVERAL = {
    "data": Subject("zero(stage=0, over=dp)\noverlap(gradients)", "dp=2"),
    "zero 1": Subject("zero(stage=1, over=dp)", "dp=2", make=adamw),
    "zero 2": Subject("zero(stage=2, over=dp)", "dp=2"),
    "zero 3": Subject("zero(stage=3, over=dp)", "dp=2", make=adamw),
    "tensor": Subject(TENSOR, "tp=2"),
    "pipeline, 1F1B": Subject(CUT + 'pipeline(order="1F1B", micro=4)', "pp=2"),
    "pipeline, ZB-V": Subject(CUT + 'pipeline(order="ZB-V", micro=4)', "pp=2"),
    "pipeline, activations on the host": Subject(
        "blocks.*  offload(activations)\n" + CUT + 'pipeline(order="1F1B", micro=4)',
        "pp=2",
    ),
    "context, ring": Subject(
        "blocks.*.attn  context_parallel(ring, over=cp)\nzero(stage=0, over=cp)",
        "cp=2",
    ),
    "data, tensor and pipeline": Subject(
        TENSOR + CUT + 'zero(stage=1, over=dp)\npipeline(order="1F1B", micro=2)',
        "dp=2, tp=2, pp=2",
    ),
}


def cases(setup: Setup) -> list[Case]:
    """Each way to split the model."""
    return [Case(name, partial(_several, subject, setup)) for name, subject in SEVERAL.items()]


def _several(subject: Subject, setup: Setup) -> Told:
    shape = shape_of(setup)
    count = math.prod(int(size.split("=")[1]) for size in subject.mesh.split(","))
    if setup.device == "sim":
        from schedlang.testing.accelerator import spawn

        found: Any = spawn(trained, subject, shape, setup.device, ranks=count)
    else:
        found = _pool().run(trained, count, subject, shape, setup.device)
    first: Seen = found[0]
    return against(subject, shape, setup.device, first)


@cache
def _pool() -> Any:
    from schedlang.runtime.launch.forkserver import BASE, PROGRAMS
    from schedlang.runtime.launch.pool import Pool

    return Pool(preload=(*BASE, *PROGRAMS))
