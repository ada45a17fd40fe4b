"""Schedules for PyTorch models: the public names, imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
    from schedlang.equivalence import assert_equivalent, verify, verify_program
    from schedlang.ir.placement import P, R, S
    from schedlang.passes.judge.program import TrainingProgram
    from schedlang.report import Report
    from schedlang.runtime.checkpointing.checkpoint_folders import last_checkpoint
    from schedlang.runtime.initial.recorded_init import deferred_init
    from schedlang.runtime.transfer.transfer import transfer
    from schedlang.schedule import create_schedule, load
    from schedlang.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Diagnostic",
    "P",
    "R",
    "Refusal",
    "Report",
    "S",
    "Trainer",
    "TrainingProgram",
    "__version__",
    "assert_equivalent",
    "create_schedule",
    "deferred_init",
    "last_checkpoint",
    "load",
    "transfer",
    "verify",
    "verify_program",
]

_HOMES = {
    "Diagnostic": "diagnostics.diagnostic",
    "P": "ir.placement",
    "R": "ir.placement",
    "Refusal": "diagnostics.diagnostic",
    "Report": "report",
    "S": "ir.placement",
    "Trainer": "trainer",
    "TrainingProgram": "passes.judge.program",
    "assert_equivalent": "equivalence",
    "create_schedule": "schedule",
    "deferred_init": "runtime.initial.recorded_init",
    "last_checkpoint": "runtime.checkpointing.checkpoint_folders",
    "load": "schedule",
    "transfer": "runtime.transfer.transfer",
    "verify": "equivalence",
    "verify_program": "equivalence",
}


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it; `import schedlang` alone is cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module `schedlang` has no `{name}`")
    value = getattr(importlib.import_module(f"schedlang.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
