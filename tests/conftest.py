"""Shared fixtures and hooks: warm ranks of both engines, test tiers, garbage collection."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings
from typer import testing as typer_testing
from typer.main import get_command

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.garbage_collection import ProcessState, collect_less_often, without_collector
from schedlang.runtime.launch.pool import Pool
from tests import forks
from tests.properties.profiles import register
from tests.tiers import in_part, mark_deep, parse_part

if TYPE_CHECKING:
    from tests.engine import Threads

# torch, not imported yet, reads it: models are small, and a second thread that waits for work while
# ranks and other tests compute costs ten times what it saves
os.environ.setdefault("OMP_NUM_THREADS", "1")
register()
Pool._executed = staticmethod(forks.start_server)  # type: ignore[method-assign]
# the parser of the command line is made once, and not for each command that a test runs
vars(typer_testing)["_get_command"] = functools.cache(get_command)
# a dry run need not count what is frozen, which takes longer than many a step; and it freezes what
# is there, as in a command: its collections, one for each operation, would visit all of it
ProcessState.keeps_frozen, ProcessState.left_frozen = True, 0
MOST_LEFT = 50  # dry runs, before a collection that visits the imports, too: a third of a second

# imported once, before the ranks are forked
PRELOAD = (
    *("torch", "torch.distributed", "cloudpickle", "schedlang.passes.prove"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part 3/8`, which divides a long tier into parts of less than half an hour."""
    parser.addoption("--part", metavar="K/N", type=parse_part, help="run the K-th of N parts")


def pytest_configure(config: pytest.Config) -> None:
    """`-m deep` loads the hypothesis profile `deep`, unless another one is given."""
    # everything is collected after each file of tests and after each job of ranks
    collect_less_often()
    profile = config.getoption("--hypothesis-profile", None)
    if config.option.markexpr == "deep" and not profile:
        settings.load_profile("deep")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects deep ones
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases of long lists as deep; `--part` selects a part of all tests."""
    mark_deep(items, whole=not any("::" in item for item in config.args))
    if selected_part := config.getoption("--part"):
        selected = [item for item in items if in_part(item.nodeid, *selected_part)]
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = selected


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Freeze imported objects, so that the garbage collector does not visit them repeatedly."""
    with without_collector():
        with contextlib.suppress(Exception):  # an error in a file shows at its import
            _rewrite_asserts(session.config)
        result = yield
    gc.freeze()
    return result


def _rewrite_asserts(config: pytest.Config) -> None:
    """Rewrite assertions in this worker's share of the files, unless they are cached.

    All workers import all files, and would all rewrite them: one second for eighty files.
    """
    worker_input = getattr(config, "workerinput", None)
    folders = all(Path(path).is_dir() for path in config.args)  # else only some are imported
    if worker_input is None or sys.dont_write_bytecode or not folders:
        return
    share = slice(
        int(worker_input["workerid"].removeprefix("gw")), None, worker_input["workercount"]
    )
    for file in sorted(Path(__file__).parent.rglob("test_*.py"))[share]:
        cache_file = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, cache_file) is None:
            file_stat, code = rewrite._rewrite_test(file, config)
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, file_stat, cache_file)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """Collect garbage after the last test of a file."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze_survivors()
    return result


def _freeze_survivors() -> None:
    """Collect garbage, then freeze what remains: later collections visit only newer objects.

    Between two files no object of a test is alive: modules and caches remain. Of a running test
    only a dry run freezes objects, so that a test sees what it leaks.
    """
    if (ProcessState.left_frozen or 0) >= MOST_LEFT:
        gc.unfreeze()
        ProcessState.left_frozen = 0
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Local ranks, started by the first test that needs them; after a crash they start again."""
    with Pool(preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="session")
def threads() -> Iterator[Threads]:
    """Ranks as threads of this process, for many small programs."""
    from tests.engine import Threads  # imports torch, if a test needs it

    with Threads() as threads:
        yield threads


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Skip a test that is refused (S831) because inductor has no C++ compiler here."""
    try:
        return (yield)
    except Refusal as refusal:
        from schedlang.runtime.fusion.fuse import why_unavailable

        missing = why_unavailable()
        if missing and {d.code for d in refusal.diagnostics} == {"S831"}:
            pytest.skip(f"inductor cannot compile here: {missing}")
        raise
