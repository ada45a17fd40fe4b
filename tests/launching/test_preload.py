"""Modules that ranks need are imported once, before ranks are forked."""

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
    """A job that names a pass preloads all of its modules, others only those that they name; all
    exist."""
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


def state_at_start(_: Any) -> tuple[set[str], int]:
    """On a new rank: return its modules, and the number of the server's threads."""
    tasks = Path(f"/proc/{os.getppid()}/task")
    return set(sys.modules), len(list(tasks.iterdir())) if tasks.exists() else 1


@pytest.mark.deep
def test_ranks_are_born_with_it_and_the_server_has_one_thread() -> None:
    """A new rank has all modules imported, and none of them started a thread."""
    with Pool() as pool:
        modules, threads = pool.run(state_at_start, 1, build)[0]
    assert set(PROGRAM_MODULES) <= modules and "torch.distributed.fsdp" in modules
    assert threads == 1
