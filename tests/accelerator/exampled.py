"""The schedules of `examples/` on ranks with simulated devices: what a training there gives."""

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
    """A schedule, on so many ranks, with its knobs."""

    file: str
    ranks: int
    knobs: dict[str, int] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The path of its model, which lies beside it."""
        return str((EXAMPLES / self.file).parent / "model.py")

    def __str__(self) -> str:
        knobs = "".join(f", {name}={value}" for name, value in self.knobs.items())
        return f"{self.file} on {self.ranks}{knobs}"


def ranks(path: Path) -> int:
    """The ranks of a mesh that is written with its sizes."""
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
RUN = tuple(Example(file, ranks, knobs) for file, some in SETTINGS.items() for ranks, knobs in some)


def doubled(value: Any) -> Any:
    """Tensors of floats in float64."""
    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


def tuned(model: nn.Module) -> nn.Module:
    """With experts as a CPU's kernels can compute them: transformers goes by a device's name."""
    if hasattr(model, "config") and hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "batched_mm"
    return model


@contextmanager
def graphs_run_eagerly() -> Iterator[None]:
    """What inductor would compile for a device that it knows runs operator by operator here."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    torch._dynamo.reset()  # of other programs that this process has run
    with (
        mock.patch.object(compile_fx, "compile_fx", aot_eager),
        mock.patch.object(fuse, "why_unavailable", lambda device="cpu": None),
    ):
        yield


def built(
    example: Example, device: str, exact: bool, given: str = ""
) -> tuple[Any, list[dict[str, Any]]]:
    """On a rank: the program, and a batch for each step, there or where it is `given`.

    `exact`: in float64, and drawn alike wherever it runs.
    """
    file = load_model_file(example.model)
    torch.manual_seed(0)
    model = tuned(file.model())
    change = doubled if exact else lambda value: value
    if exact:
        model = model.double()
    sch = schedlang.load(EXAMPLES / example.file, model.to(device), **example.knobs)
    batches = [{k: change(v) for k, v in file.batch(step).items()} for step in range(2 * STEPS)]
    drawn: dict[str, Any] = {"seed": 1} if exact else {}
    program = build(
        sch.plan(),
        batches[0],
        loss=file.loss,
        weight=file.weight,
        clip=1.0,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9),
        wait=120,
        **drawn,
    )
    return program, [{k: v.to(given or device) for k, v in one.items()} for one in batches]


def trained(example: Example, device: str, exact: bool = True) -> Any:
    """On a rank: losses, norms, parameters, where it computed, and how far copies are apart."""
    losses, norms = [], []
    with graphs_run_eagerly():
        program, batches = built(example, device, exact)
        for given in batches[:STEPS]:
            losses.append(float(program.train_step(given).detach()))
            norms.append(program.grad_norm)
    where = str(program.assembly.ranks.device)
    return losses, norms, program.state_dict(), where, max(program.replica_errors().values())


def on_ranks(example: Example, device: str, exact: bool = True) -> Any:
    """What `trained` gives on each rank: on a simulated device, or in a world of the CPU."""
    backend = "cpu:gloo,sim:simccl" if device == "cpu" else "simccl"
    return spawn(trained, example, device, exact, ranks=example.ranks, backend=backend, timeout=300)


CASES = tuple((there, read) for there in (False, True) for read in (False, True))


def waits(example: Example) -> list[list[list[str]]]:
    """On a rank, for each case: where the host waited for the device in each of three steps.

    `there`: batches lie on the device; `read`: the loss is read behind a step.
    """
    with graphs_run_eagerly():
        return _waits(*built(example, "sim", False, "cpu"))


def _waits(program: Any, batches: list[dict[str, Any]]) -> list[list[list[str]]]:
    cases, seen = [], current()
    for given in batches[:STEPS]:
        program.train_step(given)
    for there, read in CASES:
        given = [{k: v.to("sim") if there else v for k, v in one.items()} for one in batches]
        program.train_step(given[0])
        found = []
        for one in given[STEPS:]:
            seen.reset()
            loss = program.train_step(one)
            if read:
                float(loss.detach())
            found.append([str(wait) for wait in seen.synchronisations()])
        cases.append(found)
    return cases


def plainly(example: Example) -> list[str]:
    """On a rank: where the host waits in one step of the untouched model, whole on one device."""
    file = load_model_file(example.model)
    model = tuned(file.model()).to("sim")
    found, seen = [], current()
    for step in range(3):
        given = {k: v.to("sim") for k, v in file.batch(step).items()}
        seen.reset()
        output = model(**given)
        loss = output["loss"] if file.loss is None else file.loss(output, given)
        loss.backward()
        found = [str(one) for one in seen.synchronisations()]
    return found
