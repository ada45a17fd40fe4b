"""Time per operation against torch's: python -m tests.benchmarks.executor_overhead [--ranks N]

The same tiny stages (a Linear and a tanh each), order and microbatches, in the same gloo
processes, alternately: schedlang's executor, which replays the model's forward in each stage,
against `torch.distributed.pipelining` with hand-written stages. Stages compute almost nothing, so
the comparison is of the cost of a row: Python, headers, messages, waits.
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
from tests.benchmarks.pairs import Ratio, interleaved_ratios

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
        """Return the loss of a batch."""
        for block in self.blocks:
            x = block(x)
        return loss(x, y)


def loss(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean square error."""
    return (x - y).square().mean()


def batch(rows: int) -> dict[str, Tensor]:
    """Return the same random batch on every rank."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    return {"x": x, "y": y}


def schedlang_runtime(
    model: Chain, plan: Timeline, data: dict[str, Tensor]
) -> Callable[[], object]:
    """Return a step of schedlang's executor, which leaves gradients in `model`."""
    names = units_of(model, data)
    graph = record_forward(model, names, data)
    stage_graph = split_graph(
        graph, cuts.even_stages([cuts.ChainUnit(name, 0) for name in names], plan.stages)
    )
    switch, stub, local_rank = (
        CallSwitch(model, names),
        Stub(Chain(plan.stages).to("meta"), stage_graph),
        rank(),
    )
    local_stages = [s for s, owner in enumerate(plan.stage_rank.tolist()) if owner == local_rank]
    stages = {s: Stage(model, stage_graph, s, switch=switch, stub=stub) for s in local_stages}
    world = range(dist.get_world_size())
    pipe = Pipeline(stages, plan, world, local_rank, group=dist.group.WORLD)
    parts = [
        dict(zip(data, pair)) for pair in zip(*(v.chunk(plan.microbatches) for v in data.values()))
    ]
    scale = [1 / len(parts)] * len(parts)

    def step() -> None:
        model.zero_grad()
        pipe.run(parts, scale)

    return step


def torch_runtime(
    model: Chain, name: str, plan: Timeline, data: dict[str, Tensor]
) -> Callable[[], object]:
    """Return a step of torch's pipeline runtime, which leaves gradients in `model`."""
    local_stages = [s for s, owner in enumerate(plan.stage_rank.tolist()) if owner == rank()]
    device = torch.device("cpu")
    stages: Any = [
        pipelining.PipelineStage(model.blocks[s], s, plan.stages, device) for s in local_stages
    ]
    is_multi = issubclass(TORCH[name], pipelining.schedules.PipelineScheduleMulti)
    schedule: Any = TORCH[name](stages if is_multi else stages[0], plan.microbatches, loss_fn=loss)
    has_first, has_last = 0 in local_stages, plan.stages - 1 in local_stages

    def step() -> None:
        model.zero_grad()  # torch would also divide older gradients
        inputs = (data["x"],) if has_first else ()
        target = data["y"] if has_last else None
        schedule.step(*inputs, target=target, losses=[] if has_last else None, return_outputs=False)

    return step


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank()


def compare_on_rank(
    name: str, chunks: int, micro: int, pairs: int
) -> tuple[Ratio, Ratio, int] | None:
    """Return the ratios of wall and CPU time on this rank, and its number of timeline rows."""
    plan = make_order(name, dist.get_world_size(), micro, chunks)
    data = batch(micro * ROWS)
    left_model, right_model = Chain(plan.stages), Chain(plan.stages)
    schedlang_step, torch_step = (
        schedlang_runtime(left_model, plan, data),
        torch_runtime(right_model, name, plan, data),
    )
    wall, cpu = interleaved_ratios(schedlang_step, torch_step, pairs)
    report_progress()
    for p, q in zip(left_model.parameters(), right_model.parameters()):
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
            wall, cpu, rows = pool.run(
                compare_on_rank, ranks, name, chunks, micro, arguments.pairs
            )[0]
            per_row = f"{wall.ours / rows * 1e6:.0f} and {wall.theirs / rows * 1e6:.0f} us a row"
            print(f"{name:16} wall {wall}  cpu {cpu}  {per_row}  (rank 0, {rows} rows)", flush=True)


if __name__ == "__main__":
    main()
