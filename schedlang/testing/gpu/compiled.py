"""Regions that inductor compiles, in training: as the untouched model, and compiled indeed."""

from __future__ import annotations

from functools import partial
from typing import Any

from schedlang.testing.gpu import models
from schedlang.testing.gpu.case import Case, Setup, Skipped, Told, Wrong
from schedlang.testing.gpu.programs import Subject, against, plan_of, shape_of
from schedlang.testing.gpu.timing import cleared

REGIONS = {
    "MLPs": Subject("blocks.*.mlp  fuse()", dtype="float32"),
    "blocks": Subject("blocks.*  fuse()", dtype="float32"),
    "blocks, recomputed": Subject("blocks.*  fuse()\nblocks.*  checkpoint()", dtype="float32"),
    "blocks in bfloat16": Subject(
        "blocks.*  fuse()\ncast(bf16)",
        dtype="float32",
        low="bfloat16",
        relax="dtype",
    ),
    "blocks with kernels of ours": Subject(
        "blocks.*.norm  replace_kernel(rms_norm)\nblocks.*  fuse()",
        dtype="float32",
    ),
}


def cases(setup: Setup) -> list[Case]:
    """Each kind of region."""
    return [Case(name, partial(_fused, one, setup)) for name, one in REGIONS.items()]


def _fused(subject: Subject, setup: Setup) -> Told:
    import torch

    from schedlang.passes.lower.build import build
    from schedlang.runtime.fusion.fuse import graphs, unavailable

    if setup.device == "sim":
        raise Skipped("inductor does not compile for this device")
    if (reason := unavailable()) and not setup.timed:
        raise Skipped(reason)
    cleared(setup.device)  # what a case before has compiled would be taken again
    shape = shape_of(setup)
    program = build(
        plan_of(subject, shape, setup.device), models.batch(shape, 0), optimizer=subject.make
    )
    found: models.Seen = {}
    for step, given in enumerate(models.batches(shape, setup.device)):
        found[f"loss {step}"] = program.train_step(given).detach().cpu()
    made: Any = [graphs(module) for module in program.assembly.module.modules()]
    if not sum(made):
        raise Wrong("nothing was compiled: the regions ran eagerly")
    found |= models.moved(shape, getattr(torch, subject.dtype), program.state_dict())
    told = against(subject, shape, setup.device, found)
    return Told(f"{sum(made)} graphs, {told.note}", {**told.numbers, "graphs": sum(made)})
