"""Programs in worlds of different backends: what is sent is on the right device, and nothing waits.

The worlds have NCCL's kind of backend alone (`simccl`), two backends ("cpu:gloo,sim:simccl"), or
none, as torchrun leaves it. A program trains as the original model on one CPU.
"""

from __future__ import annotations

import math
import os
import socket
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.pipeline.timeline.table import TimelineError
from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import RankGroups
from schedlang.testing.accelerator import close, current, spawn, unavailable
from tests.accelerator.torch_training import Block
from tests.proofs import make_plan

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

WORLDS = ("simccl", "cpu:gloo,sim:simccl")
STEPS = 3


class Blocks(nn.Module):
    """Some blocks, and a head."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


def build_model() -> Blocks:
    torch.manual_seed(0)
    return Blocks().double()


def batch(seed: int, rows: int = 8) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=draw, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(8, (rows,), generator=draw)}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


CLIP = 0.05
TENSOR = """
blocks.*.up    shard(col, over=tp)
blocks.*.down  shard(row, over=tp)
"""
STAGE_SPLIT, ORDER = "blocks[2]  pipeline_split(over=pp)\n", 'pipeline(order="1F1B", micro=4)'
PIPELINE = STAGE_SPLIT + ORDER
SCHEDULES = {
    "tensor": ("tp=2", TENSOR),
    "replicas": ("dp=2", "zero(stage=0, over=dp)"),
    "zero 3": ("dp=2", "zero(stage=3, over=dp)"),
    "pipeline": ("pp=2", PIPELINE),
}
MORE_SCHEDULES = {
    "sums begun early": ("dp=2", "zero(stage=0, over=dp)\noverlap(gradients)"),
    "gradients on the host": ("dp=2", "zero(stage=0, over=dp)\noffload(gradients)"),
    "state on the host": ("dp=2", "zero(stage=0, over=dp)\noffload(optimizer)"),
    "parked on a partner": (
        "pp=2",
        "blocks.*  offload(activations, to=peer, over=pp)\n" + PIPELINE,
    ),
    "slices and stages": ("dp=2, pp=2", STAGE_SPLIT + "zero(stage=2, over=dp)\n" + ORDER),
    "three dimensions": (
        "dp=2, tp=2, pp=2",
        TENSOR + STAGE_SPLIT + "zero(stage=1, over=dp)\n" + ORDER,
    ),
}


def local_rows(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of this rank."""
    return {k: v.chunk(world.size())[world.rank()] for k, v in full.items()}


def build_program(rows: str, device: str | None = None, **more: Any) -> Any:
    """Build a program of SCHEDULES, on a model that is on a device or, with None, on the CPU."""
    mesh, text = {**SCHEDULES, **MORE_SCHEDULES}[rows]
    model = build_model() if device is None else build_model().to(device)
    options = {"optimizer": sgd, "clip": CLIP, "batch": batch(0), **more}
    return build(make_plan(model, text, mesh, relax="lossy"), options.pop("batch"), **options)


def single_process() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, norms and parameters of the original model in one process on the CPU."""
    model, losses, norms = build_model(), [], []
    optimizer = sgd(model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss))
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def train(rows: str, device: str | None, local: bool = False, batch_device: str = "cpu") -> Any:
    """Train on a rank for the same steps; return its results, and the devices of program and
    loss."""
    built = (
        build_program(rows, device, local=local)
        if not local
        else build_program(rows, device, local=True, batch=local_rows(batch(0)))
    )
    losses, norms = [], []
    for step in range(STEPS):
        inputs = local_rows(batch(step)) if local else batch(step)
        loss = built.train_step({k: v.to(batch_device) for k, v in inputs.items()}, local=local)
        losses.append(float(loss))
        norms.append(built.grad_norm)
    return losses, norms, built.state_dict(), str(built.assembly.ranks.device), str(loss.device)


def check_training(results: Any) -> None:
    """Compare with the model in one process; each rank must use its own device."""
    losses, norms, parameters = single_process()
    for rank, (actual, actual_norms, state, device, loss_device) in enumerate(results):
        assert device == loss_device == f"sim:{rank}"
        assert actual == pytest.approx(losses, rel=1e-9) and actual_norms == pytest.approx(
            norms, rel=1e-9
        )
        for name, value in parameters.items():
            assert state[name].device.type == "cpu"
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", WORLDS)
@pytest.mark.parametrize("rows", SCHEDULES)
def test_as_on_a_cpu(rows: str, backend: str) -> None:
    """Loss, norm and parameters are those of the model in one process, with either backend."""
    check_training(spawn(train, rows, "sim", backend=backend))


@pytest.mark.parametrize("rows", MORE_SCHEDULES)
def test_whatever_is_sent_lies_on_the_device(rows: str) -> None:
    """Sums, messages and state of every kind, in a world without a backend for the host."""
    sizes = [int(axis.split("=")[1]) for axis in MORE_SCHEDULES[rows][0].split(",")]
    check_training(spawn(train, rows, "sim", ranks=math.prod(sizes)))


@pytest.mark.parametrize("backend", WORLDS)
def test_each_rank_with_rows_of_its_own(backend: str) -> None:
    """Weights of parts are exchanged among hosts: the device is not read."""
    check_training(spawn(train, "replicas", "sim", True, backend=backend))


@pytest.mark.parametrize("device", [None, "sim"])
def test_a_script_sets_nothing(device: str | None) -> None:
    """Under torchrun LOCAL_RANK chooses the device, wherever the model was created."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    check_training(spawn(train, "zero 3", device, backend=None, set_device=False, environ=environ))


def test_batches_where_the_model_was_made() -> None:
    """Batches on the first device (`model.device`) are copied to the rank's, and are weighed
    there."""
    check_training(spawn(train, "pipeline", "sim", False, "sim:0", set_device=False))


def without_local_rank(own_device: bool) -> Any:
    """Return what `train` gives on a rank without LOCAL_RANK."""
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_RANK"]
        return train("zero 3", f"sim:{world.rank()}" if own_device else "sim")


@pytest.mark.parametrize("own", [True, False])
def test_ranks_that_no_launcher_started(own: bool) -> None:
    """As `mp.spawn` starts them, in the user's world: the model's device, or the rank's."""
    check_training(spawn(without_local_rank, own, set_device=False))


def test_a_world_with_its_device() -> None:
    """A world that was initialized with a device computes there, whatever device is current."""
    check_training(spawn(train, "tensor", "sim", bind=True))


def train_on_host(rows: str) -> Any:
    built = build_program(rows)
    return [float(built.train_step(batch(step))) for step in range(STEPS)], built


def host_device(rows: str) -> Any:
    losses, built = train_on_host(rows)
    return losses, str(built.assembly.ranks.device)


def test_a_model_of_the_host_stays_there() -> None:
    """In a world with both backends a model on the host is not moved to a device."""
    for losses, device in spawn(host_device, "pipeline", backend="cpu:gloo,sim:simccl"):
        assert device == "cpu" and losses == pytest.approx(single_process()[0], rel=1e-9)


def host_waits(rows: str, device: str) -> list[str]:
    """Return on a rank where the host waited for the device in two steps whose loss is not read."""
    built = build_program(rows, "sim")
    simulation = current()
    batches = [{k: v.to(device) for k, v in batch(step).items()} for step in range(4)]
    for step in batches[:2]:
        built.train_step(step)
    simulation.reset()
    for step in batches[2:]:
        built.train_step(step)
    return [str(wait) for wait in simulation.synchronisations()]


@pytest.mark.parametrize("rows", [*SCHEDULES, "sums begun early", "slices and stages"])
def test_a_step_waits_for_nothing(rows: str) -> None:
    """A step whose loss and norm are not read: gradients are summed and clipped, and nothing
    waits."""
    ranks = 4 if rows == "slices and stages" else 2
    for rank, lines in enumerate(spawn(host_waits, rows, "cpu", ranks=ranks)):
        assert not lines, (rank, lines)


def test_labels_on_the_device_are_asked_once() -> None:
    """The host knows the weights of parts before they are computed."""
    for lines in spawn(host_waits, "pipeline", "sim"):
        assert len(lines) <= 2


def refusal_in_one_queue(rows: str) -> str:
    """Return the refusal on a rank where messages in both directions share one communicator."""
    RankGroups.messages_may_deadlock = property(lambda self: False)  # type: ignore[assignment]
    built = build_program(rows, "sim")
    with pytest.raises(TimelineError) as error:
        built.train_step(batch(0))
    return str(error.value)


def test_messages_that_would_block_are_refused() -> None:
    """The order is checked by the backend's rule before anything is sent."""
    close()  # the patched ranks are not used again
    try:
        for message in spawn(refusal_in_one_queue, "pipeline"):
            assert "messages block each other" in message and "stands before its message" in message
    finally:
        close()
