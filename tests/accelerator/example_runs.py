"""Train the schedules of `examples/` on ranks with simulated devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import schedlang
from schedlang.ir.modelfile import load_model_file
from schedlang.passes.lower.build import build
from schedlang.runtime.fusion import fuse
from schedlang.testing.accelerator import current, spawn

EXAMPLES = Path(__file__).parents[2] / "examples"
TECHNIQUES = sorted(EXAMPLES.glob("techniques/*/*.sched"))
STEPS = 3


@dataclass(frozen=True)
class Example:
    """A schedule with its number of ranks and its knobs."""

    file: str
    ranks: int
    knobs: dict[str, int] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The path of its model, which is beside it."""
        return str((EXAMPLES / self.file).parent / "model.py")

    def __str__(self) -> str:
        knobs = "".join(f", {name}={value}" for name, value in self.knobs.items())
        return f"{self.file} on {self.ranks}{knobs}"


def ranks(path: Path) -> int:
    """Return the number of ranks of a mesh that is written with its sizes."""
    mesh = path.read_text().partition("mesh(")[2].partition(")")[0]
    return math.prod(int(axis.partition("=")[2]) for axis in mesh.split(","))


# ranks, and knobs that differ from their defaults
SETTINGS: Mapping[str, Sequence[tuple[int, dict[str, int]]]] = {
    "bert/one_device.sched": [(1, {})],
    "finetune/dp.sched": [(2, {}), (4, {}), (8, {})],
    "finetune/lora.sched": [(2, {}), (4, {}), (8, {})],
    "gpt2/memory.sched": [(1, {"memory": 8})],
    "gpt2/3d.sched": [(2, {"tp": 1}), (4, {}), (8, {})],
    "gpt2/tp.sched": [(2, {}), (4, {"tp": 4})],
    "gpt2/grid.sched": [(4, {})],
    "llama/3d.sched": [(2, {"tp": 1}), (4, {}), (8, {})],
    "llama/complete.sched": [(2, {}), (4, {"tp": 4})],
    "llama/kernels.sched": [(2, {})],
    "llama/long_context.sched": [(2, {"ring": 1}), (2, {"ulysses": 1}), (4, {}), (8, {"ring": 4})],
    "llama/seq1f1b.sched": [(2, {}), (4, {"pp": 4})],
    "llama/tp_sp.sched": [(2, {})],
    "llama/v_half.sched": [(2, {})],
    "mixtral/ep.sched": [(4, {})],
    "pretrain/3d.sched": [(4, {}), (8, {})],
    "resnet/channels.sched": [(2, {})],
    "resnet/spatial.sched": [(2, {})],
    "t5/pipeline.sched": [(2, {"pp": 2}), (4, {})],
    "unet/pipeline.sched": [(2, {"pp": 2}), (4, {})],
    "vit/pipeline.sched": [(2, {})],
    "custom/2d.sched": [(6, {})],
    **{str(path.relative_to(EXAMPLES)): [(ranks(path), {})] for path in TECHNIQUES},
}
EXAMPLE_RUNS = tuple(
    Example(file, ranks, knobs) for file, some in SETTINGS.items() for ranks, knobs in some
)


def to_float64(value: Any) -> Any:
    """Return floating-point tensors in float64, other values unchanged."""
    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


def with_cpu_experts(model: nn.Module) -> nn.Module:
    """Let experts use a kernel that runs on a CPU: transformers chooses by the device's name."""
    if hasattr(model, "config") and hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "batched_mm"
    return model


@contextmanager
def graphs_run_eagerly() -> Iterator[None]:
    """Run operator by operator what inductor would compile for a known device."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    torch._dynamo.reset()  # of other programs that this process has run
    with (
        mock.patch.object(compile_fx, "compile_fx", aot_eager),
        mock.patch.object(fuse, "why_unavailable", lambda device="cpu": None),
    ):
        yield


def build_program(
    example: Example, device: str, exact: bool, batch_device: str = ""
) -> tuple[Any, list[dict[str, Any]]]:
    """Build the program on a rank, and return it with a batch for each step.

    `batch_device`: where batches are, if not on `device`. `exact`: in float64, with the same random
    numbers on every device.
    """
    file = load_model_file(example.model)
    torch.manual_seed(0)
    model = with_cpu_experts(file.model())
    convert = to_float64 if exact else lambda value: value
    if exact:
        model = model.double()
    sch = schedlang.load(EXAMPLES / example.file, model.to(device), **example.knobs)
    batches = [{k: convert(v) for k, v in file.batch(step).items()} for step in range(2 * STEPS)]
    options: dict[str, Any] = {"seed": 1} if exact else {}
    program = build(
        sch.plan(),
        batches[0],
        loss=file.loss,
        weight=file.weight,
        clip=1.0,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9),
        wait=120,
        **options,
    )
    return program, [
        {k: v.to(batch_device or device) for k, v in batch.items()} for batch in batches
    ]


def train(example: Example, device: str, exact: bool = True) -> Any:
    """Train on a rank; return losses, norms, parameters, device and differences between
    replicas."""
    losses, norms = [], []
    with graphs_run_eagerly():
        program, batches = build_program(example, device, exact)
        for batch in batches[:STEPS]:
            losses.append(float(program.train_step(batch).detach()))
            norms.append(program.grad_norm)
    computed_on = str(program.assembly.ranks.device)
    return losses, norms, program.state_dict(), computed_on, max(program.replica_errors().values())


def train_on_ranks(example: Example, device: str, exact: bool = True) -> Any:
    """Return what `train` gives on each rank: on simulated devices, or in a world of the CPU."""
    backend = "cpu:gloo,sim:simccl" if device == "cpu" else "simccl"
    return spawn(train, example, device, exact, ranks=example.ranks, backend=backend, timeout=300)


CASES = tuple((there, read) for there in (False, True) for read in (False, True))


def host_waits(example: Example) -> list[list[list[str]]]:
    """Return for each case where the host waited for the device, in each of three steps.

    `on_device`: batches are on the device; `read_loss`: the loss is read after a step.
    """
    with graphs_run_eagerly():
        return _host_waits(*build_program(example, "sim", False, "cpu"))


def _host_waits(program: Any, batches: list[dict[str, Any]]) -> list[list[list[str]]]:
    cases, simulation = [], current()
    for inputs in batches[:STEPS]:
        program.train_step(inputs)
    for on_device, read_loss in CASES:
        inputs = [
            {k: v.to("sim") if on_device else v for k, v in batch.items()} for batch in batches
        ]
        program.train_step(inputs[0])
        lines = []
        for batch in inputs[STEPS:]:
            simulation.reset()
            loss = program.train_step(batch)
            if read_loss:
                float(loss.detach())
            lines.append([str(wait) for wait in simulation.synchronisations()])
        cases.append(lines)
    return cases


def model_waits(example: Example) -> list[str]:
    """Return where the host waits in one step of the original model, complete on one device."""
    file = load_model_file(example.model)
    model = with_cpu_experts(file.model()).to("sim")
    lines, simulation = [], current()
    for step in range(3):
        batch = {k: v.to("sim") for k, v in file.batch(step).items()}
        simulation.reset()
        output = model(**batch)
        loss = output["loss"] if file.loss is None else file.loss(output, batch)
        loss.backward()
        lines = [str(wait) for wait in simulation.synchronisations()]
    return lines
