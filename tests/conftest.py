"""What all tests share: warm ranks of both engines, and what is skipped without a C++ compiler."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.garbage_collection import collect_less_often, without_collector
from schedlang.runtime.launch.pool import Pool
from tests import forks
from tests.properties.profiles import register
from tests.tiers import in_part, part, spread

if TYPE_CHECKING:
    from tests.engine import Threads

# read by torch, which nothing has imported yet: models are small, and a second thread, that waits
# for work where ranks and other tests compute, takes ten times as long as it saves
os.environ.setdefault("OMP_NUM_THREADS", "1")
register()
Pool._executed = staticmethod(forks.server)  # type: ignore[method-assign]

# imported once, before the ranks are forked
PRELOAD = (
    *("torch", "torch.distributed", "cloudpickle", "schedlang.passes.prove"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`-m deep --part 3/8`: a long tier in pieces that end within half an hour each."""
    parser.addoption("--part", metavar="K/N", type=part, help="run the K-th of N parts")


def pytest_configure(config: pytest.Config) -> None:
    """`-m deep` takes the profile of that name, unless another was asked for."""
    # behind each file of tests, and each job of ranks, all of it is looked for
    collect_less_often()
    asked = config.getoption("--hypothesis-profile", None)
    if config.option.markexpr == "deep" and not asked:
        settings.load_profile("deep")


@pytest.hookimpl(tryfirst=True)  # before deep ones are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of long lists of cases some are ordinary and the others deep; `--part` takes some of all."""
    spread(items, whole=not any("::" in one for one in config.args))
    if asked := config.getoption("--part"):
        ours = [one for one in items if in_part(one.nodeid, *asked)]
        config.hook.pytest_deselected(items=[one for one in items if one not in ours])
        items[:] = ours


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Keep the garbage collector from all that is imported: it would walk it again and again."""
    with without_collector():
        with contextlib.suppress(Exception):  # what is wrong with a file shows at its import
            _rewrite(session.config)
        result = yield
    gc.freeze()
    return result


def _rewrite(config: pytest.Config) -> None:
    """Rewrite the assertions of this worker's share of the files, where they are not kept yet.

    Workers import all files, and would rewrite each at the same time: a second of a processor for
    eighty of them.
    """
    given = getattr(config, "workerinput", None)
    folders = all(Path(one).is_dir() for one in config.args)  # else it imports some files only
    if given is None or sys.dont_write_bytecode or not folders:
        return
    share = slice(int(given["workerid"].removeprefix("gw")), None, given["workercount"])
    for file in sorted(Path(__file__).parent.rglob("test_*.py"))[share]:
        kept = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, kept) is None:
            found, code = rewrite._rewrite_test(file, config)
            kept.parent.mkdir(parents=True, exist_ok=True)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, found, kept)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """Behind the tests of a file the collector takes what they left, and keeps from the rest."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        _settled()
    return result


def _settled() -> None:
    """Collect, and let later collections walk only what comes from now on.

    Between two files nothing of a test is alive: what is kept here are modules and caches. What a
    test makes is never kept before it ends, so that a test sees what it leaks.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Local ranks, started by the first test that runs some; a job that dies leaves new ones."""
    with Pool(preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="session")
def threads() -> Iterator[Threads]:
    """The same ranks as threads of this process: where many small programs are run."""
    from tests.engine import Threads  # with torch, which whoever hands the tests out never needs

    with Threads() as threads:
        yield threads


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Where inductor has no C++ compiler, a test that is refused for it is skipped, and says so."""
    try:
        return (yield)
    except Refusal as refusal:
        from schedlang.runtime.fusion.fuse import why_unavailable

        missing = why_unavailable()
        if missing and {d.code for d in refusal.diagnostics} == {"S831"}:
            pytest.skip(f"inductor cannot compile here: {missing}")
        raise
