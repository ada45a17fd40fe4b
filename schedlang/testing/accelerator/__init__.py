"""A simulated accelerator: what is wrong with streams, devices and collectives shows on a CPU.

    from schedlang.testing.accelerator import simulated, spawn

    with simulated() as accelerator:            # torch.device("sim"), torch.sim, torch.accelerator
        train(model.to("sim"))
        accelerator.check()                     # raises if something was not ordered

    spawn(function, argument, ranks=2)          # the same on ranks, with a library like NCCL

It knows nothing of schedules. The first use compiles it (a minute or two); `unavailable()` says why
it cannot be used where there is no compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedlang.testing.accelerator.device import Unavailable, unavailable
    from schedlang.testing.accelerator.group import Deadlock, Mismatch
    from schedlang.testing.accelerator.simulation import (
        Operation,
        Raced,
        Report,
        Simulation,
        Synchronisation,
        close,
        could_overlap,
        current,
        simulated,
        spawn,
    )

__all__ = [
    "Deadlock",
    "Mismatch",
    "Operation",
    "Raced",
    "Report",
    "Simulation",
    "Synchronisation",
    "Unavailable",
    "close",
    "could_overlap",
    "current",
    "simulated",
    "spawn",
    "unavailable",
]

_HOMES = {"device": ("Unavailable", "unavailable"), "group": ("Deadlock", "Mismatch")}


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it: importing this compiles nothing."""
    if name not in __all__:
        raise AttributeError(f"module `{__name__}` has no `{name}`")
    import importlib

    module = next((module for module, names in _HOMES.items() if name in names), "simulation")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
