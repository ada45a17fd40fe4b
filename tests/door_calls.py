"""Count the functions that two rows call, from text to a step: `python -m tests.door_calls`.

It counts the functions of schedlang that are called at each door, and their files, for a network of
two layers that is sharded over two ranks (`shard(col)`, `shard(row)`). Modules are imported before,
so that imports do not count. `--list` names the functions.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

import schedlang
from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.language.syntax import parse
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.lower.build import Options, build
from tests.engine import Threads

TEXT = "schedule 1 for TwoLayers\nmesh(tp=2)\nup shard(col, over=tp)\ndown shard(row, over=tp)\n"
APART = ("kernels", "testing", "pytest_plugin", "__main__")  # these are never called here

Called = set[tuple[str, str]]  # file and function


class TwoLayers(nn.Module):
    """A network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both layers with a ReLU between them."""
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


@dataclass
class DoorCalls:
    """The functions that each door calls, in order of doors."""

    doors: dict[str, Called] = field(default_factory=dict)

    def through(self, door: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function of a door, note all functions that it calls, and return its result."""
        called = self.doors.setdefault(door, set())

        def note(frame: FrameType, event: str, argument: object) -> None:
            code = frame.f_code
            name = code.co_qualname
            inside = code.co_filename.partition("/schedlang/")[2]
            # comprehensions, lambdas and module bodies do not count as functions
            if event == "call" and inside and not name.endswith(">"):
                called.add((inside.rpartition("schedlang/")[2], name))

        sys.setprofile(note)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(None)

    def until(self, door: str) -> Called:
        """The functions of all doors up to this one."""
        names = list(self.doors)
        return set().union(*(self.doors[name] for name in names[: names.index(door) + 1]))


def count_files(called: Called) -> int:
    """The number of files of these functions."""
    return len({file for file, _ in called})


def trace_doors() -> DoorCalls:
    """Trace the doors on rank 0."""
    for module in pkgutil.walk_packages(schedlang.__path__, "schedlang."):
        if not any(part in module.name.split(".") for part in APART):
            importlib.import_module(module.name)
    calls: DoorCalls = Threads().run(_trace_rank, 2)[0]
    return calls


def _trace_rank() -> DoorCalls:
    torch.manual_seed(0)
    calls, batch = DoorCalls(), {"x": torch.ones(4, 8)}
    model_facts = calls.through("facts", ModelFacts, TwoLayers())
    file = calls.through("parse", parse, Source("walk.sched", TEXT))
    plan = calls.through("expand", expand, file, model_facts).plan
    prepared = calls.through("prepare", prepare, plan, batch, _loss)
    program = calls.through("build", build, plan, batch, Options(loss=_loss, prepared=prepared))
    calls.through("step", program.train_step, batch)
    return calls


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def report(walk: DoorCalls, show_names: bool = False) -> str:
    """A line for each door: numbers of functions and files, also of all doors up to it."""
    lines = ["door       functions  files   up to here"]
    for door, called in walk.doors.items():
        so_far = walk.until(door)
        numbers = f"{len(called):9}  {count_files(called):5}"
        lines.append(f"{door:<10} {numbers}   {len(so_far)} in {count_files(so_far)} files")
        lines += [f"  {file}: {name}" for file, name in sorted(called)] if show_names else []
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(trace_doors(), "--list" in sys.argv))
