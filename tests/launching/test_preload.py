"""What ranks need of torch and of us is imported once, before they are forked."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from schedlang.passes.lower.build import build
from schedlang.runtime.launch.forkserver import PROGRAM_MODULES, modules_to_import
from schedlang.runtime.launch.pool import Pool


def test_a_job_that_builds_programs_wants_what_they_need() -> None:
    """Whoever names a pass gets all of it, other jobs what they name; and all of it exists."""
    assert modules_to_import(("torch", build.__module__)) == (
        "torch",
        build.__module__,
        *PROGRAM_MODULES,
    )
    assert modules_to_import(("torch", "schedlang.diagnostics.diagnostic")) == (
        "torch",
        "schedlang.diagnostics.diagnostic",
    )
    assert all(importlib.util.find_spec(name) is not None for name in PROGRAM_MODULES)


def _at_birth(_: Any) -> tuple[set[str], int]:
    """On a rank that has run nothing: its modules, and how many threads the server has."""
    tasks = Path(f"/proc/{os.getppid()}/task")
    return set(sys.modules), len(list(tasks.iterdir())) if tasks.exists() else 1


@pytest.mark.deep
def test_ranks_are_born_with_it_and_the_server_has_one_thread() -> None:
    """A fresh rank imports none of it by itself, and none of it has started a thread."""
    with Pool() as pool:
        modules, threads = pool.run(_at_birth, 1, build)[0]
    assert set(PROGRAM_MODULES) <= modules and "torch.distributed.fsdp" in modules
    assert threads == 1
