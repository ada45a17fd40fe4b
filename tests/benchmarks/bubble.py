"""Bubble measured against simulated: python -m tests.benchmarks.bubble [--ranks P] [--micro M]

A model whose blocks sleep a known time in forward and in both halves of backward is trained on CPU
under every order of the registry that fits (or those of --orders), by the same executor as any
model.  A sleeping rank needs no core, so that ranks do not slow each other down.  Printed are

* the measured bubble, over the time from the first operation of all ranks to the last,
* the bubble that the simulator gives for the times that the blocks were told to sleep, without any
  fitting, and what it gives with the means that were measured,
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
from tests.proofs import planned, sgd

WIDTH, STEPS = 4, 3


@dataclass(frozen=True)
class Sizes:
    """Times are seconds of one microbatch on one rank's whole share."""

    ranks: int = 4
    micro: int = 8
    f: float = 0.09
    i: float = 0.09
    w: float = 0.06
    blocks: int = field(default=8, metadata={"help": "of the model, cut evenly"})


class Slow(torch.autograd.Function):
    """The identity, which sleeps: in forward, and in the backward to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        """Sleep, and hand on a copy."""
        ctx.backward_seconds = backward
        if not x.is_meta:
            time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sleep, and hand back the gradient."""
        time.sleep(ctx.backward_seconds)
        return grads[0], None, None


class Block(nn.Module):
    """Scales its input; forward, input gradient and weight gradient take a given time each."""

    def __init__(self, f: float, i: float, w: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.f, self.i, self.w = f, i, w

    def forward(self, x: Tensor) -> Tensor:
        """One product, slowly."""
        return Slow.apply(x, self.f, self.i) * Slow.apply(self.scale, 0.0, self.w)


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
        """The mean of what comes out."""
        x = x + self.bias
        for block in self.blocks:
            x = block(x)
        return x.mean()


def watched(plan: Any, batch: Any) -> Any:
    """On this rank: a step to warm up, and some that are watched."""
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


def told(found: MeasuredStep, sizes: Sizes) -> Any:
    """The times that the blocks of each row's stage were told to sleep.

    The first stage gets no input from another one, so nothing is left for its input gradient: its
    I is empty, and its W does all of the backward.
    """
    t = found.timeline
    of = {
        Kind.F: sizes.f,
        Kind.RECOMPUTE: sizes.f,
        Kind.B: sizes.i + sizes.w,
        Kind.I: sizes.i,
        Kind.W: sizes.w,
    }
    rows = []
    for kind, stage in zip(t.kind.tolist(), t.stage.tolist()):
        cost = of.get(Kind(kind), 0.0)
        if stage == 0 and Kind(kind) in (Kind.I, Kind.W):
            cost = 0.0 if Kind(kind) is Kind.I else sizes.i + sizes.w
        rows.append(cost * t.ranks / t.stages)
    return simulate_timeline(t, rows)


def fits(name: str, sizes: Sizes) -> str:
    """Why an order cannot be measured with these blocks, or nothing."""
    known = find_order(name)
    if known.sliced or known.relaxed:
        return "needs a model with sequences" if known.sliced else "updates inside the step"
    try:
        size = checked_size(known, sizes.ranks, sizes.micro)
    except OrderError as error:
        return error.reason
    stages = known.make(size).stages
    return "" if sizes.blocks % stages == 0 else f"{stages} stages of {sizes.blocks} blocks"


def main() -> None:
    """Every order in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--orders", nargs="*", default=[known.name for known in ORDERS])
    given = vars(parser.parse_args())
    names = given.pop("orders")
    sizes = Sizes(**given)
    print(f"torch {torch.__version__}, {sizes}, {STEPS} steps, the median one\n")
    heads = ("measured", "simulated", "fitted", "makespan, over simulated")
    print("order".ljust(20) + "".join(h.rjust(w) for h, w in zip(heads, (10, 11, 9, 27))))
    batch = {"x": torch.zeros(sizes.micro, WIDTH)}
    with Pool() as pool:
        for name in names:
            if why := fits(name, sizes):
                print(f"{name:<20}left out: {why}")
                continue
            rows = f'blocks  pipeline_split(over=pp)\npipeline(order="{name}", micro={sizes.micro})'
            try:
                plan = planned(Sleeper(sizes), rows, f"pp={sizes.ranks}")
                seen, timeline = pool.run(watched, sizes.ranks, plan, batch, hang_after=120.0)[0]
            except (Refusal, RankDied) as error:
                said = error.diagnostics[0].title if isinstance(error, Refusal) else str(error)
                print(f"{name:<20}not run: {said.strip().splitlines()[-1]}")
                continue
            found = median_step(timeline, seen)
            ideal = told(found, sizes)
            shares = [float(x.bubble) for x in (found.times, ideal, found.planned)]
            took = float(found.times.makespan), float(ideal.makespan)
            said = f"{took[0] * 1e3:.0f} / {took[1] * 1e3:.0f} ms = {took[0] / took[1]:.3f}"
            cells = [f"{share:.2%}".rjust(w) for share, w in zip(shares, (10, 11, 9))]
            print(name.ljust(20) + "".join(cells) + said.rjust(27), flush=True)


if __name__ == "__main__":
    main()
