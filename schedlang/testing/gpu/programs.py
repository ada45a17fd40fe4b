"""Programs of one rank, and their world, against the untouched model on the same device.

In float64 they are equal to the last digits; in other types a program may err, against float64, a
few times as much as the untouched model does in that type.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.kernels.check import compare
from schedlang.kernels.device import INTERPRETED, runs, triton
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.runtime.comm import world
from schedlang.schedule import Schedule
from schedlang.testing.gpu import models
from schedlang.testing.gpu.case import Case, Setup, Skipped, Told, Wrong
from schedlang.testing.gpu.models import Optimizer, Seen, Shape, adamw, sgd

EXACT = 1e-9
TIMES = 6.0  # as often as eager's error: gradients pass several kernels, and three steps follow


@dataclass(frozen=True)
class Subject:
    """A schedule, and how its program is compared.

    low       the type that the untouched model is cast to, under autocast
    rate      of what is dropped
    kernels   kernels of ours have to run, those of Triton
    """

    rows: str
    mesh: str = ""
    dtype: str = "float64"
    relax: str = ""
    low: str = ""
    rate: float = 0.0
    kernels: bool = False
    make: Optimizer = sgd


ONE = {
    "zero 3": Subject("zero(stage=3, over=dp)", "dp=1"),
    "checkpoint": Subject("blocks.*  checkpoint()"),
    "checkpoint, with dropout": Subject("blocks.*  checkpoint()", dtype="float32", rate=0.2),
    "checkpoint of attention alone": Subject("blocks.*.attn  checkpoint()", make=adamw),
    "cast to bfloat16": Subject("cast(bf16)", dtype="float32", low="bfloat16", relax="dtype"),
    "fuse into rowwise kernels": Subject(
        "blocks.*.norm  fuse(backend=rowwise)",
        dtype="float32",
        kernels=True,
    ),
    "kernels of norms": Subject(
        "blocks.*.norm  replace_kernel(rms_norm)\nblocks.*.calm  replace_kernel(layer_norm)",
        dtype="float32",
        kernels=True,
    ),
    "kernels of MLPs": Subject(
        "blocks.*.mlp  replace_kernel(gated)",
        dtype="float32",
        kernels=True,
    ),
    "kernel of the head with its loss": Subject(
        "head  replace_kernel(linear_cross_entropy)",
        dtype="float32",
        kernels=True,
    ),
    "kernels under casts and recomputation": Subject(
        "blocks.*.norm  replace_kernel(rms_norm)\nblocks.*.mlp  replace_kernel(gated)\ncast(bf16)\n"
        "blocks.*  checkpoint()",
        dtype="float32",
        low="bfloat16",
        relax="dtype",
        kernels=True,
    ),
    "offload of activations": Subject("blocks.*  offload(activations)"),
    "offload of parameters and optimizer": Subject(
        "blocks.*  offload(parameters)\noffload(optimizer)",
        make=adamw,
    ),
}


def cases(setup: Setup) -> list[Case]:
    """The world of one rank, and each schedule in it."""
    return [Case("collectives of one rank", partial(_collectives, setup))] + [
        Case(name, partial(_alone, subject, setup)) for name, subject in ONE.items()
    ]


def shape_of(setup: Setup, rate: float = 0.0) -> Shape:
    """Return the sizes of the model."""
    shape: Shape = setup.pick(Shape(), Shape(), models.TINY)
    return replace(shape, rate=rate)


def plan_of(subject: Subject, shape: Shape, device: str) -> Plan:
    """The plan of a model that lies on a device."""
    mesh = f"mesh({subject.mesh})\n\n" if subject.mesh else ""
    relax = f"relax({subject.relax}) " if subject.relax else ""
    text = f'schedule 1\n\n{mesh}step "all" {relax}{{\n{subject.rows}\n}}\n'
    model = models.model(shape, getattr(torch, subject.dtype)).to(device)
    return Schedule(model, parse(Source("rows.sched", text)), Settings()).plan()


def trained(subject: Subject, shape: Shape, device: str) -> Seen:
    """On a rank: what a program leaves after some steps."""
    plan = plan_of(subject, shape, device)
    program = build(plan, models.batch(shape, 0), optimizer=subject.make)
    seen: Seen = {}
    torch.manual_seed(1)
    for step, given in enumerate(models.batches(shape, device)):
        seen[f"loss {step}"] = program.train_step(given).detach().cpu()
    errors = program.replica_errors()
    apart = max(errors.values())
    if apart != 0.0:
        raise Wrong(f"copies of `{max(errors, key=errors.__getitem__)}` are {apart:.2g} apart")
    dtype = getattr(torch, subject.dtype)
    return seen | models.moved(shape, dtype, program.state_dict())


def against(subject: Subject, shape: Shape, device: str, found: Seen) -> Told:
    """Compare with the untouched model on that device; raises `Wrong`."""
    dtype = getattr(torch, subject.dtype)
    low = getattr(torch, subject.low) if subject.low else None
    eager = models.untouched(shape, device, dtype, subject.make, low)
    if dtype == torch.float64:
        return _equal(found, eager)
    if subject.rate:  # another type would draw other masks
        return _equal(found, eager, 1e-4)
    exact = models.untouched(shape, device, torch.float64, subject.make)
    worst, where = 0.0, ""
    for name, value in found.items():
        judged = compare(name, _as(value, eager[name]), eager[name], exact[name], times=TIMES)
        if not judged.ok:
            raise Wrong(f"{name} is {judged.error:.2g} off, allowed {judged.allowed:.2g}")
        share = judged.error / judged.allowed
        worst, where = max((worst, where), (share, name))
    return Told(f"{worst:.2f} of the allowed error, at {where}", {"share": worst})


def _as(value: Tensor, like: Tensor) -> Tensor:
    return value.to(like.dtype).reshape(like.shape)


def _equal(found: Seen, wanted: Mapping[str, Tensor], most: float = EXACT) -> Told:
    """Each by its norm."""
    worst, where = 0.0, ""
    for name, value in wanted.items():
        scale = float(value.double().norm()) or 1.0
        gap = float((_as(found[name], value).double() - value.double()).norm()) / scale
        worst, where = max((worst, where), (gap if gap == gap else float("inf"), name))
    if worst > most:
        raise Wrong(f"{where} differs by {worst:.2g}, allowed {most:.0e}")
    return Told(f"equal to {worst:.1g}", {"error": worst})


def _alone(subject: Subject, setup: Setup) -> Told:
    if subject.kernels and not (triton and (setup.timed or INTERPRETED)):
        raise Skipped("Triton compiles nothing for this device, and is not interpreted here")
    world_of_one(setup)
    shape = shape_of(setup, subject.rate)
    before = _kernels()
    found = trained(subject, shape, setup.device)
    if subject.kernels and _kernels() == before:
        raise Wrong("no kernel ran: the torch references did")
    return against(subject, shape, setup.device, found)


def _kernels() -> int:
    return sum(count for name, count in runs().items() if name in ("triton", "interpreter"))


# -- a world of one rank ---------------------------------------------------------------------------


def world_of_one(setup: Setup) -> None:
    """Join a world of this process alone, by the library that torch has for the device."""
    if dist.is_initialized():
        return
    device = torch.device(setup.device, 0) if setup.device != "cpu" else None
    kind = dist.get_default_backend_for_device(setup.device)
    from torch._C._distributed_c10d import FileStore

    store = FileStore(f"{tempfile.mkdtemp(prefix='schedlang-')}/store", 1)
    dist.init_process_group(kind, store=store, rank=0, world_size=1, device_id=device)
    atexit.register(dist.destroy_process_group)


def _collectives(setup: Setup) -> Told:
    """Everything that programs send with, in a group of one: what is given comes back."""
    world_of_one(setup)
    kind = dist.get_backend_config()
    x = torch.arange(8.0, device=setup.device)
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, Tensor] = {}
    one = x.clone()
    world.all_reduce(one, group)
    found["all_reduce"] = one
    one = x.clone()
    world.all_reduce(one, group, largest=True, wait=False).wait()
    found["all_reduce of the largest"] = one
    for name, call in (
        ("all_gather", world.GATHER),
        ("reduce_scatter", world.SCATTER),
    ):
        found[name] = torch.empty_like(x)
        getattr(dist, call)(found[name], x, group=group)
    found["all_to_all_single"] = torch.empty_like(x)
    world.begin_exchange(found["all_to_all_single"], x, [8], [8], group).wait()
    found["broadcast"] = x.clone()
    dist.broadcast(found["broadcast"], 0, group)
    if wrong := [name for name, value in found.items() if not torch.equal(value, x)]:
        raise Wrong(f"{', '.join(wrong)} in a world of {kind}")
    dist.barrier()
    return Told(f"{len(found)} kinds, by {kind}")
