"""Calls that a kernel does not take, and leaves to the module's own computation: noted, and told.

A layer that holds a kernel notes each of them at its module, with the reason.  Nothing is wrong
then, and nothing is faster either: whoever asked for the kernel is to know it (W703).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.tables import PLAIN

_NOTED = "_schedlang_left"  # of a module: (kernel, reason) -> how often, what the first was given
_TOLD = "_schedlang_told"  # of a module: its name, and the reasons that all have told

Made = TypeVar("Made", bound=Any)  # a Program, which stands above


@dataclass(frozen=True)
class Left:
    """Calls of one kernel that were left for one reason: where, how many, what the first was
    given."""

    kernel: str
    why: str
    sites: tuple[str, ...]
    calls: int
    given: str = ""

    def __str__(self) -> str:
        more = f" and {len(self.sites) - 1} more" if len(self.sites) > 1 else ""
        first = f" (first {self.given})" if self.given else ""
        return (
            f"`{self.kernel}` leaves some calls of `{self.sites[0] or 'the model'}`{more} to the"
            f" model: {self.why}{first}"
        )

    @property
    def warning(self) -> Diagnostic:
        """W703."""
        row = "fuse()" if self.kernel == "fuse" else f"replace_kernel({self.kernel})"
        helps = (f"drop the row `{row}` there, or change what the message names",)
        return Diagnostic("W703", str(self), helps=helps, level="warning")


def leave(module: nn.Module, kernel: str, why: str, **given: object) -> None:
    """Note that `kernel` left a call to `module`, which was given these tensors.

    Inside a graph of torch.compile nothing is noted.
    """
    if torch.compiler.is_compiling():
        return
    noted = vars(module).setdefault(_NOTED, {})
    calls, first = noted.get((kernel, why), (0, ""))
    first = first or ", ".join(f"{name} {_shape(value)}" for name, value in given.items())
    noted[kernel, why] = (calls + 1, first)
    name, told = vars(module).get(_TOLD, ("", None))
    if told is not None and (kernel, why) not in told:
        told.add((kernel, why))
        warnings.warn(Left(kernel, why, (name,), 1, first).warning.render(PLAIN), stacklevel=2)


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def telling(program: Made) -> Made:
    """A program of whose modules each reason is from now on a Python warning, once."""
    told: set[tuple[str, str]] = set()
    for name, part in program.assembly.module.named_modules():
        vars(part)[_TOLD] = (name, told)
    return program


def left_in(module: nn.Module) -> tuple[Left, ...]:
    """Return what kernels left in a module and in all inside of it so far; recomputed calls
    count."""
    return merged(
        Left(kernel, why, (name,), calls, given)
        for name, part in module.named_modules()
        for (kernel, why), (calls, given) in vars(part).get(_NOTED, {}).items()
    )


def merged(found: Iterable[Left]) -> tuple[Left, ...]:
    """Merge notes of several modules, ranks or runs: one for each kernel and reason."""
    groups: dict[tuple[str, str], list[Left]] = {}
    for one in found:
        groups.setdefault((one.kernel, one.why), []).append(one)
    return tuple(
        Left(kernel, why, _sites(of), sum(each.calls for each in of), of[0].given)
        for (kernel, why), of in groups.items()
    )


def _sites(found: Sequence[Left]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(site for one in found for site in one.sites))
