"""The four meshes of the table, and the schedule of a model on each mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

MESHES: Mapping[str, str] = {"tp": "tp=2", "zero": "dp=2", "pp": "pp=2", "3d": "dp=2, pp=2, tp=2"}
PIPELINE = 'pipeline(order="1F1B", micro=2)'


def schedule(model: nn.Module, batch: Mapping[str, Any], mesh: str) -> str:
    """Return the text of a schedule for a model on a mesh of the table."""
    if mesh == "zero":
        return _schedule_text(mesh, "  zero(stage=3, over=dp)")
    if mesh == "pp" and trunks(model):
        cut = f"  {', '.join(trunks(model))}  pipeline_split(over=pp)"
        return _schedule_text(mesh, f"{cut}\n  {PIPELINE}")
    return init_schedule(model, batch, mesh)


def init_schedule(model: nn.Module, batch: Mapping[str, Any], mesh: str) -> str:
    """Return the schedule that `init` writes."""
    from schedlang.passes.autoshard.propose import propose

    axes = dict(axis.split("=") for axis in MESHES[mesh].split(", "))
    return propose(model, batch, {name: int(size) for name, size in axes.items()}).text


def relax_statistics(text: str) -> str:
    """Return the schedule with `relax(batch_stats)`: statistics may be per part of the batch."""
    head, _, body = text.partition(" {\n")
    return f"{head} relax(batch_stats) {{\n{body}"


def _schedule_text(mesh: str, rows: str) -> str:
    return f'schedule 1\n\nmesh({MESHES[mesh]})\n\nstep "all" {{\n{rows}\n}}\n'


def trunks(model: nn.Module) -> list[str]:
    """Return the outermost module lists with at least a third of the parameters of the largest."""
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= 2
    }
    outermost = [n for n in sizes if not any(n.startswith(f"{prefix}.") for prefix in sizes)]
    largest = max((sizes[name] for name in outermost), default=0)
    return [name for name in outermost if 3 * sizes[name] >= largest]


def count_rows(text: str) -> int:
    """Return the number of rows of the schedule."""
    lines = [line.split("#")[0].strip() for line in text.split("{\n", 1)[-1].split("\n")]
    return sum(line not in ("", "}") and not line.endswith("{") for line in lines)
