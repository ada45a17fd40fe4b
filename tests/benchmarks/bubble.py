"""Measured against simulated bubble: python -m tests.benchmarks.bubble [--ranks P] [--micro M]

A model whose blocks sleep a known time in forward and in both halves of backward is trained on CPU
under every order of the registry that fits (or those of --orders), by the same executor as any
model.  A sleeping rank needs no core, so that ranks do not slow each other down.  Printed are

* the measured bubble, over the time from the first operation of any rank to the last,
* the bubble that the simulator gives for the nominal sleep times, without any fitting, and for the
measured means,
* the ratio of the measured makespan to the first of the two.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.passes.lower.train import MeasuredStep, median_step
from schedlang.pipeline.schedules import ORDERS, OrderError, checked_size, find_order
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import Kind
from schedlang.runtime.launch.pool import Pool, RankDied, report_progress
from schedlang.runtime.pipeline.measured_times import StepTimer, gather_times
from tests.proofs import make_plan, sgd

WIDTH, STEPS = 4, 3


@dataclass(frozen=True)
class Sizes:
    """Times are seconds of one microbatch on one rank's full share of blocks."""

    ranks: int = 4
    micro: int = 8
    f: float = 0.09
    i: float = 0.09
    w: float = 0.06
    blocks: int = field(default=8, metadata={"help": "of the model, cut evenly"})


class SleepOp(torch.autograd.Function):
    """The identity, which sleeps: in forward, and in the backward to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        """Sleep, and return a copy."""
        ctx.backward_seconds = backward
        if not x.is_meta:
            time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sleep, and return the gradient."""
        time.sleep(ctx.backward_seconds)
        return grads[0], None, None


class Block(nn.Module):
    """Scales its input; forward, input gradient and weight gradient take a given time each."""

    def __init__(self, f: float, i: float, w: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.f, self.i, self.w = f, i, w

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input, slowly."""
        return SleepOp.apply(x, self.f, self.i) * SleepOp.apply(self.scale, 0.0, self.w)


class Sleeper(nn.Module):
    """A chain of blocks; a bias before the first, so that its input needs a gradient too."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        share = sizes.blocks // sizes.ranks
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(
            Block(sizes.f / share, sizes.i / share, sizes.w / share) for _ in range(sizes.blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the output."""
        x = x + self.bias
        for block in self.blocks:
            x = block(x)
        return x.mean()


def watch_steps(plan: Any, batch: Any) -> Any:
    """Run a warm-up step and some timed steps on this rank, and return the times."""
    program = build(plan, batch, optimizer=sgd)
    program.train_step(batch)
    report_progress()
    watch = StepTimer(program.assembly.pipeline, torch.device("cpu"))
    program.watch = watch
    for _ in range(STEPS):
        with watch.step():
            program.train_step(batch)
        report_progress()
    return gather_times(watch), program.assembly.pipeline.timeline


def simulate_sleeps(measured: MeasuredStep, sizes: Sizes) -> Any:
    """Simulate the timeline with the nominal sleep times.

    The first stage needs no input gradient: its I is empty, and its W does all of the backward.
    """
    t = measured.timeline
    cost_of = {
        Kind.F: sizes.f,
        Kind.RECOMPUTE: sizes.f,
        Kind.B: sizes.i + sizes.w,
        Kind.I: sizes.i,
        Kind.W: sizes.w,
    }
    rows = []
    for kind, stage in zip(t.kind.tolist(), t.stage.tolist()):
        cost = cost_of.get(Kind(kind), 0.0)
        if stage == 0 and Kind(kind) in (Kind.I, Kind.W):
            cost = 0.0 if Kind(kind) is Kind.I else sizes.i + sizes.w
        rows.append(cost * t.ranks / t.stages)
    return simulate_timeline(t, rows)


def misfit(name: str, sizes: Sizes) -> str:
    """Return why an order cannot be measured with these blocks, or ""."""
    order = find_order(name)
    if order.sliced or order.relaxed:
        return "needs a model with sequences" if order.sliced else "updates inside the step"
    try:
        size = checked_size(order, sizes.ranks, sizes.micro)
    except OrderError as error:
        return error.reason
    stages = order.make(size).stages
    return "" if sizes.blocks % stages == 0 else f"{stages} stages of {sizes.blocks} blocks"


def main() -> None:
    """Measure every order, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--orders", nargs="*", default=[order.name for order in ORDERS])
    arguments = vars(parser.parse_args())
    names = arguments.pop("orders")
    sizes = Sizes(**arguments)
    print(f"torch {torch.__version__}, {sizes}, {STEPS} steps, the median one\n")
    heads = ("measured", "simulated", "fitted", "makespan, over simulated")
    print("order".ljust(20) + "".join(h.rjust(w) for h, w in zip(heads, (10, 11, 9, 27))))
    batch = {"x": torch.zeros(sizes.micro, WIDTH)}
    with Pool() as pool:
        for name in names:
            if reason := misfit(name, sizes):
                print(f"{name:<20}left out: {reason}")
                continue
            rows = f'blocks  pipeline_split(over=pp)\npipeline(order="{name}", micro={sizes.micro})'
            try:
                plan = make_plan(Sleeper(sizes), rows, f"pp={sizes.ranks}")
                events, timeline = pool.run(
                    watch_steps, sizes.ranks, plan, batch, hang_after=120.0
                )[0]
            except (Refusal, RankDied) as error:
                message = error.diagnostics[0].title if isinstance(error, Refusal) else str(error)
                print(f"{name:<20}not run: {message.strip().splitlines()[-1]}")
                continue
            step_times = median_step(timeline, events)
            ideal = simulate_sleeps(step_times, sizes)
            shares = [float(x.bubble) for x in (step_times.times, ideal, step_times.planned)]
            spans = float(step_times.times.makespan), float(ideal.makespan)
            message = f"{spans[0] * 1e3:.0f} / {spans[1] * 1e3:.0f} ms = {spans[0] / spans[1]:.3f}"
            cells = [f"{share:.2%}".rjust(w) for share, w in zip(shares, (10, 11, 9))]
            print(name.ljust(20) + "".join(cells) + message.rjust(27), flush=True)


if __name__ == "__main__":
    main()
