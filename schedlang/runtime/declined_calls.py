"""Record calls that a kernel does not support and that run the module's own computation instead.

A layer with a kernel records each such call at its module, with the reason. The result is correct,
but no faster, so the user gets the warning W703.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.tables import DEFAULT_COLUMNS

# of a module: (kernel, reason) -> number of calls, and arguments of the first
_DECLINED = "_schedlang_left"
# of a module: its name, and the reasons already warned about, shared by all modules
_WARNED = "_schedlang_told"

ProgramT = TypeVar("ProgramT", bound=Any)  # a Program: that module is above this one


@dataclass(frozen=True)
class DeclinedCalls:
    """Calls that one kernel declined for one reason: modules, number, and arguments of the
    first."""

    kernel: str
    reason: str
    sites: tuple[str, ...]
    calls: int
    first_arguments: str = ""

    def __str__(self) -> str:
        others = f" and {len(self.sites) - 1} more" if len(self.sites) > 1 else ""
        first = f" (first {self.first_arguments})" if self.first_arguments else ""
        return (
            f"`{self.kernel}` leaves some calls of"
            f" `{self.sites[0] or 'the model'}`{others} to the"
            f" model: {self.reason}{first}"
        )

    @property
    def warning(self) -> Diagnostic:
        """The diagnostic W703."""
        row = "fuse()" if self.kernel == "fuse" else f"replace_kernel({self.kernel})"
        helps = (f"drop the row `{row}` there, or change what the message names",)
        return Diagnostic("W703", str(self), helps=helps, level="warning")


def note_declined(module: nn.Module, kernel: str, reason: str, **given: object) -> None:
    """Record at a module that `kernel` declined a call; `first_arguments` are its arguments by
    name.

    Inside a graph of torch.compile nothing is recorded.
    """
    if torch.compiler.is_compiling():
        return
    declined = vars(module).setdefault(_DECLINED, {})
    calls, first = declined.get((kernel, reason), (0, ""))
    first = first or ", ".join(f"{name} {_shape(value)}" for name, value in given.items())
    declined[kernel, reason] = (calls + 1, first)
    name, warned = vars(module).get(_WARNED, ("", None))
    if warned is not None and (kernel, reason) not in warned:
        warned.add((kernel, reason))
        warnings.warn(
            DeclinedCalls(kernel, reason, (name,), 1, first).warning.render(DEFAULT_COLUMNS),
            stacklevel=2,
        )


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def warn_declined(program: ProgramT) -> ProgramT:
    """Let the modules of a program issue a Python warning for each reason, once; return the
    program."""
    warned: set[tuple[str, str]] = set()
    for name, module in program.assembly.module.named_modules():
        vars(module)[_WARNED] = (name, warned)
    return program


def declined_in(module: nn.Module) -> tuple[DeclinedCalls, ...]:
    """Return the calls that kernels declined so far in a module and all inside it.

    Recomputed calls count.
    """
    return merge_declined(
        DeclinedCalls(kernel, reason, (name,), calls, first)
        for name, child in module.named_modules()
        for (kernel, reason), (calls, first) in vars(child).get(_DECLINED, {}).items()
    )


def merge_declined(declined: Iterable[DeclinedCalls]) -> tuple[DeclinedCalls, ...]:
    """Merge the records of several modules, ranks or runs: one for each kernel and reason."""
    groups: dict[tuple[str, str], list[DeclinedCalls]] = {}
    for entry in declined:
        groups.setdefault((entry.kernel, entry.reason), []).append(entry)
    return tuple(
        DeclinedCalls(
            kernel, reason, _sites(group), sum(c.calls for c in group), group[0].first_arguments
        )
        for (kernel, reason), group in groups.items()
    )


def _sites(declined: Sequence[DeclinedCalls]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(site for entry in declined for site in entry.sites))
