"""Draws of a model that evaluates: they lie on ranks as those of training do, or are refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime import scope
from schedlang.runtime.drawing.random import LogicalDropout, here

Tags = Mapping[str, Any]  # by axis, how a dim lies on it
Masks = Mapping[tuple[str, int], tuple[tuple[int, ...], Tags]]


def of_evaluation(masks: Masks, site: str, dims: int, split: bool) -> Tags:
    """How a tensor of so many dims a sample, drawn at a site in evaluation, lies on the ranks.

    `masks` are the draws of training, of which evaluation makes some only, so that calls are
    counted otherwise: all of its site have to lie alike.  `split`: the plan splits modules at all.
    """
    known = [
        tags
        for (where, _), (whole, tags) in masks.items()
        if where == site and len(whole) in (dims, dims + 1)
    ]
    if known and all(tags == known[0] for tags in known):
        return known[0]
    if split:
        raise _unlike(site, "draws there" if known else "does not draw so")
    return {}


class Undrawn(LogicalDropout):
    """Around the evaluation of a program that draws nothing in training: refuses every draw."""

    def _drawn(self, shape: Sequence[int]) -> Any:
        raise _unlike(scope.site(), "does not draw")

    def bits(self, shape: Sequence[int], device: torch.device) -> Any:
        """See LogicalDropout."""
        return self._drawn(shape)


def _unlike(site: str, trains: str) -> Refusal:
    """Of a draw that evaluation alone makes so (S812), at the line of the model."""
    drawn = f"{here(site)} draws random numbers in evaluation ({_line()})"
    return Refusal(
        Diagnostic(
            "S812",
            drawn,
            notes=(
                f"in training it {trains}: the layout of its random numbers is known from"
                f" training only",
            ),
            helps=(
                "draw there in training, too, or switch this randomness off in the model's"
                " configuration",
            ),
        )
    )


def _line() -> str:
    """The line that draws: the innermost outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_OURS = ("schedlang", "torch.")
