"""Whole weights that are exported: the names of their files, and what is refused before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal

MARK = "model.safetensors"
MARKS = (MARK, f"{MARK}.index.json")  # of one file, of several


def check(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse another model than that of a state (S634)."""
    if not isinstance(model, nn.Module):
        raise Refusal.of(
            "S634",
            f"this is a {type(model).__name__}, not the model that was scheduled",
            helps=("give the module that was passed to `create_schedule`",),
        )
    if odd := sorted(model.state_dict().keys() ^ state.keys()):
        raise Refusal.of(
            "S634",
            f"this is not the model that was scheduled: `{odd[0]}`",
            helps=("give the model that the schedule was made for",),
        )


def unwritten(target: Path, why: str, *helps: str) -> Diagnostic:
    """Describe why weights cannot be written (S631)."""
    return Diagnostic("S631", f"cannot write the weights to `{target}`", notes=(why,), helps=helps)
