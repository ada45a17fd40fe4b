"""Built programs against the untouched model: on one rank, on several, compiled, offloaded."""

from __future__ import annotations

import atexit
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.kernels.check import compare_tensor
from schedlang.kernels.kernel_device import INTERPRETED, backend_runs, triton
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.runtime import device as devices
from schedlang.runtime.comm import world
from schedlang.schedule import Schedule
from schedlang.testing.gpu.case import Case, Setup, Skipped, Told, Wrong
from schedlang.testing.gpu.contests import cleared

# ---- A small language model, its batches, and how it is trained untouched.


STEPS = 3
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; `rate`: dropout of the blocks' outputs."""

    width: int = 256
    depth: int = 4
    heads: int = 8
    words: int = 1000
    rows: int = 8
    length: int = 128
    rate: float = 0.0


TINY = Shape(16, 4, 4, 24, 8, 8)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        # a bias of keys has no effect: its gradient would be rounding alone
        self.q, self.k, self.v = (
            nn.Linear(shape.width, shape.width, bias=name != "k") for name in "qkv"
        )
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position to the earlier ones."""
        projected = (one(x).unflatten(-1, (self.heads, -1)) for one in (self.q, self.k, self.v))
        q, k, v = (one.transpose(1, 2) for one in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


class Gated(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of a gate and a projection, projected back."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.calm, self.attn = nn.LayerNorm(shape.width), Attention(shape)
        self.norm, self.mlp = nn.RMSNorm(shape.width, eps=1e-6), Gated(shape.width)
        self.drop = nn.Dropout(shape.rate)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after both."""
        x = x + self.drop(self.attn(self.calm(x)))
        output: Tensor = x + self.drop(self.mlp(self.norm(x)))
        return output


class Words(nn.Module):
    """Embedding, blocks, and a head with its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def model(shape: Shape, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the model with equal weights at every call, rounded to a dtype, in host memory."""
    torch.manual_seed(0)
    return Words(shape).to(dtype)


def batch(shape: Shape, step: int) -> dict[str, Tensor]:
    """Return the batch of a step, in host memory; some rows end early."""
    draw = torch.Generator().manual_seed(100 + step)
    size = (shape.rows, shape.length)
    ids, labels = (torch.randint(shape.words, size, generator=draw) for _ in range(2))
    labels[1, shape.length // 2 :] = labels[-1, 2:] = -100
    return {"ids": ids, "labels": labels}


def batches(shape: Shape, device: str) -> list[dict[str, Tensor]]:
    """Return the batches of all steps, on a device."""
    return [{k: v.to(device) for k, v in batch(shape, step).items()} for step in range(STEPS)]


def sgd(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Make SGD with momentum."""
    return torch.optim.SGD([p for _, p in named_params], lr=0.05, momentum=0.9)


def adamw(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Make AdamW."""
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3, eps=1e-5)


Optimizer = Callable[..., torch.optim.Optimizer]
Seen = dict[str, Tensor]  # losses, and the change of each parameter


def moved(shape: Shape, dtype: torch.dtype, after: Mapping[str, Tensor]) -> Seen:
    """Return the change of each parameter by training, where small errors show."""
    first = dict(model(shape, dtype).named_parameters())
    return {f"change of {n}": after[n].cpu() - first[n].detach() for n in first}


def untouched(
    shape: Shape,
    device: str,
    dtype: torch.dtype = torch.float64,
    make: Optimizer = sgd,
    low: torch.dtype | None = None,
) -> Seen:
    """Train the untouched model for some steps; `low`: under autocast to it. Dropout is seeded by
    1."""
    module = model(shape, dtype).to(device)
    optimizer = make(module.named_parameters())
    seen: Seen = {}
    torch.manual_seed(1)
    for step, inputs in enumerate(batches(shape, device)):
        optimizer.zero_grad()
        kind = torch.device(device).type
        with torch.autocast(kind, low, enabled=low is not None):
            loss: Any = module(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        seen[f"loss {step}"] = loss.detach().cpu()
    return seen | moved(shape, dtype, {n: p.detach() for n, p in module.named_parameters()})


# ---- Programs against the untouched model on the same device: on one rank, on several, compiled,
# and offloaded.
# In float64 they are equal to the last digits; in other dtypes a program may err, against float64,
# a few times as much as the untouched model does in that dtype.


EXACT = 1e-9
TIMES = 6.0  # times eager's error: gradients pass several kernels, and there are three steps


@dataclass(frozen=True)
class Subject:
    """A schedule, and how its program is compared.

    low       the dtype that the untouched model is cast to, under autocast
    rate      the rate of dropout
    kernels   Triton kernels of ours must run
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
        "blocks.*.norm  fuse(backend=rowwise)", dtype="float32", kernels=True
    ),
    "kernels of norms": Subject(
        "blocks.*.norm  replace_kernel(rms_norm)\nblocks.*.calm  replace_kernel(layer_norm)",
        dtype="float32",
        kernels=True,
    ),
    "kernels of MLPs": Subject(
        "blocks.*.mlp  replace_kernel(gated)", dtype="float32", kernels=True
    ),
    "kernel of the head with its loss": Subject(
        "head  replace_kernel(linear_cross_entropy)", dtype="float32", kernels=True
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
        "blocks.*  offload(parameters)\noffload(optimizer)", make=adamw
    ),
}


def on_one_rank(setup: Setup) -> list[Case]:
    """Return the cases in a world of one rank: its collectives, and each schedule."""
    return [Case("collectives of one rank", partial(_check_collectives, setup))] + [
        Case(name, partial(_run_on_one_rank, subject, setup)) for name, subject in ONE.items()
    ]


def shape_of(setup: Setup, rate: float = 0.0) -> Shape:
    """Return the sizes of the model."""
    shape: Shape = setup.pick(Shape(), Shape(), TINY)
    return replace(shape, rate=rate)


def plan_of(subject: Subject, shape: Shape, device: str) -> Plan:
    """Return the plan of a model on a device."""
    mesh = f"mesh({subject.mesh})\n\n" if subject.mesh else ""
    relax = f"relax({subject.relax}) " if subject.relax else ""
    text = f'schedule 1\n\n{mesh}step "all" {relax}{{\n{subject.rows}\n}}\n'
    module = model(shape, getattr(torch, subject.dtype)).to(device)
    return Schedule(module, parse(Source("rows.sched", text)), Settings()).plan()


def trained(subject: Subject, shape: Shape, device: str) -> Seen:
    """Train some steps on a rank, and return losses and parameter changes."""
    plan = plan_of(subject, shape, device)
    program = build(plan, batch(shape, 0), optimizer=subject.make)
    seen: Seen = {}
    torch.manual_seed(1)
    for step, inputs in enumerate(batches(shape, device)):
        seen[f"loss {step}"] = program.train_step(inputs).detach().cpu()
    errors = program.replica_errors()
    largest = max(errors.values())
    if largest != 0.0:
        raise Wrong(f"copies of `{max(errors, key=errors.__getitem__)}` are {largest:.2g} apart")
    dtype = getattr(torch, subject.dtype)
    return seen | moved(shape, dtype, program.state_dict())


def against(subject: Subject, shape: Shape, device: str, seen: Seen) -> Told:
    """Compare with the untouched model on that device; raises `Wrong`."""
    dtype = getattr(torch, subject.dtype)
    low = getattr(torch, subject.low) if subject.low else None
    eager = untouched(shape, device, dtype, subject.make, low)
    if dtype == torch.float64:
        return _check_equal(seen, eager)
    if subject.rate:  # another dtype would draw other masks
        return _check_equal(seen, eager, 1e-4)
    exact = untouched(shape, device, torch.float64, subject.make)
    worst, worst_name = 0.0, ""
    for name, value in seen.items():
        judged = compare_tensor(
            name, _cast_like(value, eager[name]), eager[name], exact[name], times=TIMES
        )
        if not judged.ok:
            raise Wrong(f"{name} is {judged.error:.2g} off, allowed {judged.allowed:.2g}")
        share = judged.error / judged.allowed
        worst, worst_name = max((worst, worst_name), (share, name))
    return Told(f"{worst:.2f} of the allowed error, at {worst_name}", {"share": worst})


def _cast_like(value: Tensor, reference: Tensor) -> Tensor:
    return value.to(reference.dtype).reshape(reference.shape)


def _check_equal(seen: Seen, expected: Mapping[str, Tensor], tolerance: float = EXACT) -> Told:
    """Compare each tensor by its norm; raise `Wrong` above `tolerance`."""
    worst, worst_name = 0.0, ""
    for name, value in expected.items():
        scale = float(value.double().norm()) or 1.0
        gap = float((_cast_like(seen[name], value).double() - value.double()).norm()) / scale
        worst, worst_name = max((worst, worst_name), (gap if gap == gap else float("inf"), name))
    if worst > tolerance:
        raise Wrong(f"{worst_name} differs by {worst:.2g}, allowed {tolerance:.0e}")
    return Told(f"equal to {worst:.1g}", {"error": worst})


def _run_on_one_rank(subject: Subject, setup: Setup) -> Told:
    if subject.kernels and not (triton and (setup.timed or INTERPRETED)):
        raise Skipped("Triton compiles nothing for this device, and is not interpreted here")
    world_of_one(setup)
    before = _count_kernel_runs()
    result = _compare_program(subject, setup)
    if subject.kernels and _count_kernel_runs() == before:
        raise Wrong("no kernel ran: the torch references did")
    return result


def _compare_program(subject: Subject, setup: Setup) -> Told:
    shape = shape_of(setup, subject.rate)
    return against(subject, shape, setup.device, trained(subject, shape, setup.device))


def _count_kernel_runs() -> int:
    return sum(count for name, count in backend_runs().items() if name in ("triton", "interpreter"))


# -- a world of one rank ---------------------------------------------------------------------------


def world_of_one(setup: Setup) -> None:
    """Join a world of this process alone, with torch's backend for the device."""
    if dist.is_initialized():
        return
    device = torch.device(setup.device, 0) if setup.device != "cpu" else None
    kind = dist.get_default_backend_for_device(setup.device)
    from torch._C._distributed_c10d import FileStore

    store = FileStore(f"{tempfile.mkdtemp(prefix='schedlang-')}/store", 1)
    dist.init_process_group(kind, store=store, rank=0, world_size=1, device_id=device)
    atexit.register(dist.destroy_process_group)


def _check_collectives(setup: Setup) -> Told:
    """Run every collective that programs use, in a group of one: the input must come back."""
    world_of_one(setup)
    x = torch.arange(8.0, device=setup.device)
    group = dist.group.WORLD
    assert group is not None
    kind = group._get_backend(x.device).name()
    results: dict[str, Tensor] = {}
    reduced = x.clone()
    world.all_reduce(reduced, group)
    results["all_reduce"] = reduced
    reduced = x.clone()
    world.all_reduce(reduced, group, largest=True, wait=False).wait()
    results["all_reduce of the largest"] = reduced
    for name, call in (("all_gather", world.ALL_GATHER), ("reduce_scatter", world.REDUCE_SCATTER)):
        results[name] = torch.empty_like(x)
        getattr(dist, call)(results[name], x, group=group)
    results["all_to_all_single"] = torch.empty_like(x)
    world.all_to_all_single(results["all_to_all_single"], x, [8], [8], group).wait()
    results["broadcast"] = x.clone()
    dist.broadcast(results["broadcast"], 0, group)
    if differing := [name for name, value in results.items() if not torch.equal(value, x)]:
        raise Wrong(f"{', '.join(differing)} in a world of {kind}")
    dist.barrier()
    return Told(f"{len(results)} kinds, by {kind}")


# -- several ranks on one device -------------------------------------------------------------------
# Gloo carries the tensors: NCCL refuses two ranks on one device, so this shows streams, transfers
# and sums, not that library. On the simulated device each rank has a device of its own, and a
# library by NCCL's rules.


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
        "blocks.*  offload(activations)\n" + CUT + 'pipeline(order="1F1B", micro=4)', "pp=2"
    ),
    "context, ring": Subject(
        "blocks.*.attn  context_parallel(ring, over=cp)\nzero(stage=0, over=cp)", "cp=2"
    ),
    "data, tensor and pipeline": Subject(
        TENSOR + CUT + 'zero(stage=1, over=dp)\npipeline(order="1F1B", micro=2)', "dp=2, tp=2, pp=2"
    ),
}


def on_ranks(setup: Setup) -> list[Case]:
    """Return a case for each way to split the model."""
    return [Case(name, partial(_run_on_ranks, subject, setup)) for name, subject in SEVERAL.items()]


def _run_on_ranks(subject: Subject, setup: Setup) -> Told:
    shape = shape_of(setup)
    count = math.prod(int(size.split("=")[1]) for size in subject.mesh.split(","))
    if setup.device == "sim":
        from schedlang.testing.accelerator import spawn

        results: Any = spawn(trained, subject, shape, setup.device, ranks=count)
    else:
        results = _pool().run(trained, count, subject, shape, setup.device)
    first: Seen = results[0]
    return against(subject, shape, setup.device, first)


@cache
def _pool() -> Any:
    from schedlang.runtime.launch.forkserver import BASE_MODULES, PROGRAM_MODULES
    from schedlang.runtime.launch.pool import Pool

    return Pool(preload=(*BASE_MODULES, *PROGRAM_MODULES))


# -- regions that inductor compiles, in training ---------------------------------------------------


REGIONS = {
    "MLPs": Subject("blocks.*.mlp  fuse()", dtype="float32"),
    "blocks": Subject("blocks.*  fuse()", dtype="float32"),
    "blocks, recomputed": Subject("blocks.*  fuse()\nblocks.*  checkpoint()", dtype="float32"),
    "blocks in bfloat16": Subject(
        "blocks.*  fuse()\ncast(bf16)", dtype="float32", low="bfloat16", relax="dtype"
    ),
    "blocks with kernels of ours": Subject(
        "blocks.*.norm  replace_kernel(rms_norm)\nblocks.*  fuse()", dtype="float32"
    ),
}


def compiled(setup: Setup) -> list[Case]:
    """Return a case for each kind of region."""
    return [Case(name, partial(_run_compiled, subject, setup)) for name, subject in REGIONS.items()]


def _run_compiled(subject: Subject, setup: Setup) -> Told:
    from schedlang.runtime.fusion.fuse import count_graphs, why_unavailable

    if setup.device == "sim":
        raise Skipped("inductor does not compile for this device")
    if (reason := why_unavailable()) and not setup.timed:
        raise Skipped(reason)
    cleared(setup.device)  # else regions compiled by an earlier case would be reused
    shape = shape_of(setup)
    program = build(plan_of(subject, shape, setup.device), batch(shape, 0), optimizer=subject.make)
    seen: Seen = {}
    for step, inputs in enumerate(batches(shape, setup.device)):
        seen[f"loss {step}"] = program.train_step(inputs).detach().cpu()
    graphs: Any = [count_graphs(module) for module in program.assembly.module.modules()]
    if not sum(graphs):
        raise Wrong("nothing was compiled: the regions ran eagerly")
    seen |= moved(shape, getattr(torch, subject.dtype), program.state_dict())
    result = against(subject, shape, setup.device, seen)
    plural = "s" if sum(graphs) != 1 else ""
    return Told(
        f"{sum(graphs)} graph{plural}, {result.note}", {**result.numbers, "graphs": sum(graphs)}
    )


# -- offloading during a step ----------------------------------------------------------------------


MOVED = {
    "activations": Subject("blocks.*  offload(activations)"),
    "parameters": Subject("blocks.*  offload(parameters)"),
    "parameters, gradients and optimizer": Subject(
        "blocks.*  offload(parameters)\nblocks.*  offload(gradients)\noffload(optimizer)",
        make=adamw,
    ),
}

STAYS = "verify(train)"  # a row that changes nothing


def offloaded(setup: Setup) -> list[Case]:
    """Return the cases of copies, of offloading steps, and of the saved memory."""
    return [
        Case("copies to the host and back", partial(_check_copies, setup)),
        *(Case(name, partial(_compare_program, subject, setup)) for name, subject in MOVED.items()),
        Case("bytes at the peak", partial(_check_peak, setup)),
    ]


def _check_copies(setup: Setup) -> Told:
    """Copy a tensor to the pinned host memory and back, on a side stream."""
    if setup.device == "cpu":
        raise Skipped("a CPU has no memory apart from the host's")
    device = torch.device(setup.device, 0)
    x = torch.randn(setup.pick(2**26, 2**24, 2**8), device=device)
    host_copy = devices.host_empty(x.shape, x.dtype, beside=device)
    if not host_copy.is_pinned():
        raise Wrong("host memory beside the device is not pinned")
    returned = torch.zeros_like(x)
    side = devices.new_stream(device)
    main_stream = devices.current_stream(device)
    assert side is not None and main_stream is not None
    side.wait_stream(main_stream)
    spans = []
    for into, source in ((host_copy, x), (returned, host_copy)):
        start, end = (torch.Event(device, enable_timing=setup.timed) for _ in range(2))
        with side:
            side.record_event(start)
            into.copy_(source, non_blocking=True)
            side.record_event(end)
        side.synchronize()
        if setup.timed:
            spans.append(start.elapsed_time(end) / 1e3)
    main_stream.wait_stream(side)
    for tensor in (x, returned):
        tensor.record_stream(side)
    if not torch.equal(returned, x):
        raise Wrong("what came back is not what went")
    rates = [x.nbytes / span / 1e9 for span in spans]
    names = ("to the host", "back")
    note = ", ".join(f"{rate:.1f} GB/s {name}" for rate, name in zip(rates, names, strict=False))
    return Told(note, {"bytes_per_second": [rate * 1e9 for rate in rates]})


def _check_peak(setup: Setup) -> Told:
    """Compare the peak bytes of a step, with activations on the device and on the host."""
    device = torch.device(setup.device)
    if devices.peak_bytes(device) is None:
        raise Skipped("nobody counts the bytes of this device")
    shape = replace(shape_of(setup), rows=4 * shape_of(setup).rows, depth=8)
    peak = [_step_peak(rows, shape, setup.device) for rows in (STAYS, MOVED["activations"].rows)]
    if peak[1] >= peak[0]:
        raise Wrong(f"{peak[1]} bytes with activations on the host, {peak[0]} without")
    return Told(f"{peak[1] / peak[0]:.2f} of those without", {"peak": peak})


def _step_peak(rows: str, shape: Shape, device: str) -> int:
    subject = Subject(rows)
    program = build(plan_of(subject, shape, device), batch(shape, 0), optimizer=subject.make)
    inputs = batches(shape, device)
    program.train_step(inputs[0])
    devices.reset_peak(torch.device(device))
    program.train_step(inputs[1])
    return devices.peak_bytes(torch.device(device)) or 0
