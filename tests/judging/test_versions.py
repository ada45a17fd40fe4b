"""Bugs in the code of the versions that had them: a version with one fails, one without it passes.

What is installed decides which are run: `PYTHONPATH` may name a folder that another version was
installed to (`pip install --no-deps --target FOLDER transformers==4.46.3`).
"""

import importlib
import re
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

import schedlang
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool

FOLDER = Path(__file__).with_name("versions")
THREADS = [file.stem for file in sorted(FOLDER.glob("*.py")) if "\nNAMED = " in file.read_text()]
ORDINARY = ("megatron_sinks", "zero_accumulated")  # one of each library that is installed apart
ALONE = ("megatron_gated_norm", "megatron_gathered", "megatron_sinks", "megatron_smoothing")


def known(name: str) -> Any:
    """The thread of a name, where a version that it knows is installed; others are skipped."""
    thread = importlib.import_module(f"tests.judging.versions.{name}")
    try:
        installed = version(thread.PACKAGE).partition("+")[0]
    except PackageNotFoundError:
        pytest.skip(f"{thread.PACKAGE} is not installed")
    if installed not in thread.WITH + thread.WITHOUT:
        pytest.skip(f"nothing is known of {thread.PACKAGE} {installed}")
    return thread


def verdict(thread: Any, program: Any, ranks: Pool) -> Report:
    """The report on one of its programs."""
    return schedlang.verify_program(
        program,
        model=thread.model(),
        batch=thread.batch,
        loss=thread.loss,
        ranks=thread.RANKS,
        pool=ranks,
        vary=False,
    )


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Where a thread's library is installed apart, it is run with those of `others`."""
    if not name.startswith(("megatron_", "zero_")):
        return []
    return [pytest.mark.others, *([] if name in ORDINARY else [pytest.mark.deep])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in THREADS])
def test_a_version_is_judged_by_whether_it_has_the_bug(name, pool) -> None:
    """The library's own code differs in a version with the bug, and is equal in one without."""
    thread = known(name)
    alone = thread.PACKAGE != "transformers"  # others leave groups and patches in their process
    with Pool() if alone else nullcontext(pool) as ranks:
        report = verdict(thread, thread.program, ranks)
    installed = version(thread.PACKAGE).partition("+")[0]
    assert report.ok == (installed in thread.WITHOUT), str(report)
    if not report.ok:
        _, _, said = str(report).partition("first difference")
        assert re.search(thread.NAMED, said), str(report)


MENDED = [name for name in THREADS if name.startswith("megatron_") and name not in ALONE]
MENDED += ["zero_boundary"]


@pytest.mark.others
@pytest.mark.deep
@pytest.mark.parametrize("name", MENDED)
def test_the_code_without_the_cause_passes(name) -> None:
    """The same program is right where the line that is to blame is another."""
    thread = known(name)
    with Pool() as ranks:
        assert verdict(thread, thread.mended, ranks).ok


@pytest.mark.others
@pytest.mark.deep
def test_a_count_that_is_overwritten() -> None:
    """What 7452 (10) calls doubled is what the original has: with a mask of padding it is right."""
    thread = known("megatron_tokens")
    with Pool() as ranks:
        assert verdict(thread, thread.masked, ranks).ok
