"""The four meshes of the table, and the schedule of a model on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

MESHES: Mapping[str, str] = {"tp": "tp=2", "zero": "dp=2", "pp": "pp=2", "3d": "dp=2, pp=2, tp=2"}
PIPELINE = 'pipeline(order="1F1B", micro=2)'


def schedule(model: nn.Module, batch: Mapping[str, Any], mesh: str) -> str:
    """The text of a schedule for a model on a mesh of the table."""
    if mesh == "zero":
        return _text(mesh, "  zero(stage=3, over=dp)")
    if mesh == "pp" and trunks(model):
        cut = f"  {', '.join(trunks(model))}  pipeline_split(over=pp)"
        return _text(mesh, f"{cut}\n  {PIPELINE}")
    return proposed(model, batch, mesh)


def proposed(model: nn.Module, batch: Mapping[str, Any], mesh: str) -> str:
    """The schedule that `init` writes."""
    from schedlang.passes.autoshard.propose import propose

    axes = dict(axis.split("=") for axis in MESHES[mesh].split(", "))
    return propose(model, batch, {name: int(size) for name, size in axes.items()}).text


def relaxed(text: str) -> str:
    """The same rows where statistics of parts may stand for those of the whole batch."""
    head, _, rest = text.partition(" {\n")
    return f"{head} relax(batch_stats) {{\n{rest}"


def _text(mesh: str, rows: str) -> str:
    return f'schedule 1\n\nmesh({MESHES[mesh]})\n\nstep "all" {{\n{rows}\n}}\n'


def trunks(model: nn.Module) -> list[str]:
    """The outermost lists of modules that hold at least half as much as the largest."""
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= 2
    }
    outer = [n for n in sizes if not any(n.startswith(f"{other}.") for other in sizes)]
    most = max((sizes[name] for name in outer), default=0)
    return [name for name in outer if 3 * sizes[name] >= most]


def rows(text: str) -> int:
    """How many rows the schedule has."""
    inside = [line.split("#")[0].strip() for line in text.split("{\n", 1)[-1].split("\n")]
    return sum(line not in ("", "}") and not line.endswith("{") for line in inside)
