"""Programs on ranks with simulated devices: what they send lies where it has to, and nothing waits.

The worlds are of NCCL's kind alone (`simccl`), of two kinds ("cpu:gloo,sim:simccl"), or none, as
torchrun leaves it.  A program trains as the untouched model does on one CPU.
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
from tests.accelerator.trained import Block
from tests.proofs import planned

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

WORLDS = ("simccl", "cpu:gloo,sim:simccl")
STEPS = 3


class Blocks(nn.Module):
    """Some of them, and a head."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


def made() -> Blocks:
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
CUT, ORDER = "blocks[2]  pipeline_split(over=pp)\n", 'pipeline(order="1F1B", micro=4)'
PIPE = CUT + ORDER
ROWS = {
    "tensor": ("tp=2", TENSOR),
    "replicas": ("dp=2", "zero(stage=0, over=dp)"),
    "zero 3": ("dp=2", "zero(stage=3, over=dp)"),
    "pipeline": ("pp=2", PIPE),
}
MORE = {
    "sums begun early": ("dp=2", "zero(stage=0, over=dp)\noverlap(gradients)"),
    "gradients on the host": ("dp=2", "zero(stage=0, over=dp)\noffload(gradients)"),
    "state on the host": ("dp=2", "zero(stage=0, over=dp)\noffload(optimizer)"),
    "parked on a partner": ("pp=2", "blocks.*  offload(activations, to=peer, over=pp)\n" + PIPE),
    "slices and stages": ("dp=2, pp=2", CUT + "zero(stage=2, over=dp)\n" + ORDER),
    "three dimensions": ("dp=2, tp=2, pp=2", TENSOR + CUT + "zero(stage=1, over=dp)\n" + ORDER),
}


def part(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of this rank."""
    return {k: v.chunk(world.size())[world.rank()] for k, v in whole.items()}


def program(rows: str, device: str | None = None, **more: Any) -> Any:
    """Built from some rows, on a model that lies on a device or, with None, on the CPU."""
    mesh, text = {**ROWS, **MORE}[rows]
    model = made() if device is None else made().to(device)
    given = {"optimizer": sgd, "clip": CLIP, "batch": batch(0), **more}
    return build(planned(model, text, mesh, relax="lossy"), given.pop("batch"), **given)


def alone() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and parameters of the untouched model, on the CPU."""
    model, losses, norms = made(), [], []
    optimizer = sgd(model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss))
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def trained(rows: str, device: str | None, local: bool = False, lies: str = "cpu") -> Any:
    """On a rank: what the same steps give, and where the program computes; where batches lie."""
    made = (
        program(rows, device, local=local)
        if not local
        else program(rows, device, local=True, batch=part(batch(0)))
    )
    losses, norms = [], []
    for step in range(STEPS):
        given = part(batch(step)) if local else batch(step)
        loss = made.train_step({k: v.to(lies) for k, v in given.items()}, local=local)
        losses.append(float(loss))
        norms.append(made.grad_norm)
    return losses, norms, made.state_dict(), str(made.assembly.ranks.device), str(loss.device)


def check(found: Any) -> None:
    """As the model alone, on each rank's own device."""
    losses, norms, parameters = alone()
    for rank, (mine, told, state, device, lies) in enumerate(found):
        assert device == lies == f"sim:{rank}"
        assert mine == pytest.approx(losses, rel=1e-9) and told == pytest.approx(norms, rel=1e-9)
        for name, value in parameters.items():
            assert state[name].device.type == "cpu"
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", WORLDS)
@pytest.mark.parametrize("rows", ROWS)
def test_as_on_a_cpu(rows: str, backend: str) -> None:
    """Loss, norm and parameters are those of the model alone, in worlds of either kind."""
    check(spawn(trained, rows, "sim", backend=backend))


@pytest.mark.parametrize("rows", MORE)
def test_whatever_is_sent_lies_on_the_device(rows: str) -> None:
    """Sums, messages and state of every kind, in a world that knows nothing of the host."""
    sizes = [int(size.split("=")[1]) for size in MORE[rows][0].split(",")]
    check(spawn(trained, rows, "sim", ranks=math.prod(sizes)))


@pytest.mark.parametrize("backend", WORLDS)
def test_each_rank_with_rows_of_its_own(backend: str) -> None:
    """What parts weigh is told among hosts: the device is not asked."""
    check(spawn(trained, "replicas", "sim", True, backend=backend))


@pytest.mark.parametrize("device", [None, "sim"])
def test_a_script_sets_nothing(device: str | None) -> None:
    """Under torchrun LOCAL_RANK chooses the device, wherever the model was made."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    check(spawn(trained, "zero 3", device, backend=None, set_device=False, environ=where))


def test_batches_where_the_model_was_made() -> None:
    """On the first device, as `model.device` tells: they come to the rank's, and weigh there."""
    check(spawn(trained, "pipeline", "sim", False, "sim:0", set_device=False))


def unled(own: bool) -> Any:
    """On a rank: what `trained` gives where nobody tells which rank of its machine this is."""
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_RANK"]
        return trained("zero 3", f"sim:{world.rank()}" if own else "sim")


@pytest.mark.parametrize("own", [True, False])
def test_ranks_that_no_launcher_started(own: bool) -> None:
    """As `mp.spawn` starts them, in a world of the user's: the model's device, or the rank's."""
    check(spawn(unled, own, set_device=False))


def test_a_world_with_its_device() -> None:
    """A world that was joined with a device computes there, whatever is current."""
    check(spawn(trained, "tensor", "sim", bind=True))


def on_the_host(rows: str) -> Any:
    made = program(rows)
    return [float(made.train_step(batch(step))) for step in range(STEPS)], made


def stays(rows: str) -> Any:
    losses, made = on_the_host(rows)
    return losses, str(made.assembly.ranks.device)


def test_a_model_of_the_host_stays_there() -> None:
    """A world that somebody joined for both is taken as it is: nobody moves a model to a device."""
    for losses, device in spawn(stays, "pipeline", backend="cpu:gloo,sim:simccl"):
        assert device == "cpu" and losses == pytest.approx(alone()[0], rel=1e-9)


def waits(rows: str, device: str) -> list[str]:
    """On a rank: where the host waited for the device in two steps whose loss nobody looks at."""
    made = program(rows, "sim")
    seen = current()
    given = [{k: v.to(device) for k, v in batch(step).items()} for step in range(4)]
    for step in given[:2]:
        made.train_step(step)
    seen.reset()
    for step in given[2:]:
        made.train_step(step)
    return [str(one) for one in seen.synchronisations()]


@pytest.mark.parametrize("rows", [*ROWS, "sums begun early", "slices and stages"])
def test_a_step_waits_for_nothing(rows: str) -> None:
    """Whose loss and norm nobody reads: gradients are summed and clipped, and the host goes on."""
    ranks = 4 if rows == "slices and stages" else 2
    for rank, found in enumerate(spawn(waits, rows, "cpu", ranks=ranks)):
        assert not found, (rank, found)


def test_labels_on_the_device_are_asked_once() -> None:
    """What parts weigh is known to the host before they are computed."""
    for found in spawn(waits, "pipeline", "sim"):
        assert len(found) <= 2


def in_one_queue(rows: str) -> str:
    """On a rank: what is said where messages both ways go through one communicator."""
    RankGroups.messages_may_deadlock = property(lambda self: False)  # type: ignore[assignment]
    made = program(rows, "sim")
    with pytest.raises(TimelineError) as refused:
        made.train_step(batch(0))
    return str(refused.value)


def test_messages_that_would_block_are_refused() -> None:
    """The order is proven under the rule of the backend before anything is sent."""
    close()  # the ranks that were patched are not used again
    try:
        for said in spawn(in_one_queue, "pipeline"):
            assert "messages block each other" in said and "stands before its message" in said
    finally:
        close()
