"""How long the way of two rows is, from text to a running module: `python -m tests.walk`.

Counted are the functions of schedlang that are called at each door, and the files that they stand
in, for a network of two layers that is split over two ranks (`shard(col)`, `shard(row)`). Modules
are imported before, so that nothing of them counts. `--list` names the functions.
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
APART = ("kernels", "testing", "pytest_plugin", "__main__")  # nothing of these is on the way

Called = set[tuple[str, str]]  # file and function


class TwoLayers(nn.Module):
    """A network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As its name says."""
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


@dataclass
class Walk:
    """The functions that were called at each door, in order."""

    doors: dict[str, Called] = field(default_factory=dict)

    def through(self, door: str, function: Callable[..., Any], *given: Any) -> Any:
        """What the function of a door gives; who is called on the way is noted."""
        called = self.doors.setdefault(door, set())

        def note(frame: FrameType, event: str, argument: object) -> None:
            code = frame.f_code
            name = code.co_qualname
            inside = code.co_filename.partition("/schedlang/")[2]
            # comprehensions, lambdas and bodies of modules are no functions of their own
            if event == "call" and inside and not name.endswith(">"):
                called.add((inside.rpartition("schedlang/")[2], name))

        sys.setprofile(note)
        try:
            return function(*given)
        finally:
            sys.setprofile(None)

    def until(self, door: str) -> Called:
        """Those of the doors up to this one."""
        names = list(self.doors)
        return set().union(*(self.doors[name] for name in names[: names.index(door) + 1]))


def files(called: Called) -> int:
    """In how many files these functions stand."""
    return len({file for file, _ in called})


def walked() -> Walk:
    """The way of the rows on rank 0."""
    for module in pkgutil.walk_packages(schedlang.__path__, "schedlang."):
        if not any(part in module.name.split(".") for part in APART):
            importlib.import_module(module.name)
    found: Walk = Threads().run(_on_a_rank, 2)[0]
    return found


def _on_a_rank() -> Walk:
    torch.manual_seed(0)
    walk, batch = Walk(), {"x": torch.ones(4, 8)}
    facts = walk.through("facts", ModelFacts, TwoLayers())
    file = walk.through("parse", parse, Source("walk.sched", TEXT))
    plan = walk.through("expand", expand, file, facts).plan
    ready = walk.through("prepare", prepare, plan, batch, _loss)
    program = walk.through("build", build, plan, batch, Options(loss=_loss, prepared=ready))
    walk.through("step", program.train_step, batch)
    return walk


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def report(walk: Walk, listed: bool = False) -> str:
    """A line for each door: its functions and files, and those of all doors up to it."""
    lines = ["door       functions  files   up to here"]
    for door, called in walk.doors.items():
        before = walk.until(door)
        numbers = f"{len(called):9}  {files(called):5}"
        lines.append(f"{door:<10} {numbers}   {len(before)} in {files(before)} files")
        lines += [f"  {file}: {name}" for file, name in sorted(called)] if listed else []
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(walked(), "--list" in sys.argv))
