"""Time per operation over torch's runtime: python -m tests.benchmarks.executor_overhead [--ranks N]

The same tiny stages (a Linear and a tanh each), the same order, the same microbatches, in the same
gloo processes, step by step in turn: this executor, which replays the model's forward in each
stage, against `torch.distributed.pipelining` with stages written by hand. Stages compute next to
nothing, so what is compared is the cost of running a row: Python, headers, messages, waits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from schedlang.passes.partition import stage_assignment as cuts
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.table import Timeline
from schedlang.runtime.launch.pool import Pool, report_progress
from schedlang.runtime.pipeline.executor import Pipeline
from schedlang.runtime.pipeline.stage import Stage, Stub
from schedlang.runtime.tracing.recording import record_forward
from schedlang.runtime.tracing.stage_graph import split_graph
from schedlang.runtime.tracing.units import CallSwitch, units_of
from tests.benchmarks.pairs import Ratio, interleaved

WIDTH, ROWS = 8, 4  # of a Linear, and of a microbatch
TORCH = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved1f1b": pipelining.ScheduleInterleaved1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "bfs": pipelining.ScheduleLoopedBFS,
}


class Chain(nn.Module):
    """Equal blocks one after the other, and a mean of squares."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        for block in self.blocks:
            x = block(x)
        return loss(x, y)


def loss(x: Tensor, y: Tensor) -> Tensor:
    """The mean over a batch."""
    return (x - y).square().mean()


def batch(rows: int) -> dict[str, Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    return {"x": x, "y": y}


def ours(model: Chain, plan: Timeline, data: dict[str, Tensor]) -> Callable[[], object]:
    """A step of this executor, which leaves its gradients in `model`."""
    names = units_of(model, data)
    graph = record_forward(model, names, data)
    made = split_graph(
        graph, cuts.even_stages([cuts.ChainUnit(name, 0) for name in names], plan.stages)
    )
    switch, stub, place = (
        CallSwitch(model, names),
        Stub(Chain(plan.stages).to("meta"), made),
        rank(),
    )
    mine = [s for s, at in enumerate(plan.stage_rank.tolist()) if at == place]
    stages = {s: Stage(model, made, s, switch=switch, stub=stub) for s in mine}
    world = range(dist.get_world_size())
    pipe = Pipeline(stages, plan, world, place, group=dist.group.WORLD)
    parts = [
        dict(zip(data, pair)) for pair in zip(*(v.chunk(plan.microbatches) for v in data.values()))
    ]
    scale = [1 / len(parts)] * len(parts)

    def step() -> None:
        model.zero_grad()
        pipe.run(parts, scale)

    return step


def theirs(
    model: Chain, name: str, plan: Timeline, data: dict[str, Tensor]
) -> Callable[[], object]:
    """A step of torch's runtime, which leaves its gradients in `model`."""
    mine = [s for s, at in enumerate(plan.stage_rank.tolist()) if at == rank()]
    device = torch.device("cpu")
    stages: Any = [pipelining.PipelineStage(model.blocks[s], s, plan.stages, device) for s in mine]
    several = issubclass(TORCH[name], pipelining.schedules.PipelineScheduleMulti)
    schedule: Any = TORCH[name](stages if several else stages[0], plan.microbatches, loss_fn=loss)
    first, last = 0 in mine, plan.stages - 1 in mine

    def step() -> None:
        model.zero_grad()  # torch divides what was there before, too
        given = (data["x"],) if first else ()
        target = data["y"] if last else None
        schedule.step(*given, target=target, losses=[] if last else None, return_outputs=False)

    return step


def rank() -> int:
    """This process's rank."""
    return dist.get_rank()


def work(name: str, chunks: int, micro: int, pairs: int) -> tuple[Ratio, Ratio, int] | None:
    """On each rank: the ratios of wall and CPU time; also how many rows of the timeline it runs."""
    plan = make_order(name, dist.get_world_size(), micro, chunks)
    data = batch(micro * ROWS)
    one, two = Chain(plan.stages), Chain(plan.stages)
    mine, other = ours(one, plan, data), theirs(two, name, plan, data)
    wall, cpu = interleaved(mine, other, pairs)
    report_progress()
    for p, q in zip(one.parameters(), two.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    return wall, cpu, len(plan.rows(rank()))


def main() -> None:
    """Print the ratio for each order."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=60)
    arguments = parser.parse_args()
    with Pool() as pool:
        for name, chunks in (("1f1b", 1), ("interleaved1f1b", 2), ("gpipe", 1)):
            ranks, micro = arguments.ranks, arguments.micro
            wall, cpu, rows = pool.run(work, ranks, name, chunks, micro, arguments.pairs)[0]
            each = f"{wall.ours / rows * 1e6:.0f} and {wall.theirs / rows * 1e6:.0f} us a row"
            print(f"{name:16} wall {wall}  cpu {cpu}  {each}  (rank 0, {rows} rows)", flush=True)


if __name__ == "__main__":
    main()
