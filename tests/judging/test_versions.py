"""Bugs in released libraries: a version with the bug fails, a version without it passes.

The installed versions decide which tests run; `PYTHONPATH` may name a folder with another
version (`pip install --no-deps --target FOLDER transformers==4.46.3`).
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
ORDINARY = ("megatron_sinks", "zero_accumulated")  # one of each library apart
UNFIXED = ("megatron_gated_norm", "megatron_gathered", "megatron_sinks", "megatron_smoothing")


def load_thread(name: str) -> Any:
    """Return the module of a thread, or skip if no version that it knows is installed."""
    thread = importlib.import_module(f"tests.judging.versions.{name}")
    try:
        installed = version(thread.PACKAGE).partition("+")[0]
    except PackageNotFoundError:
        pytest.skip(f"{thread.PACKAGE} is not installed")
    if installed not in thread.WITH + thread.WITHOUT:
        pytest.skip(f"nothing is known of {thread.PACKAGE} {installed}")
    return thread


def judge_thread(thread: Any, program: Any, ranks: Pool) -> Report:
    """Judge one of a thread's programs, and return the report."""
    return schedlang.verify_program(
        program,
        model=thread.model(),
        batch=thread.batch,
        loss=thread.loss,
        ranks=thread.RANKS,
        pool=ranks,
        vary=False,
    )


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a thread whose library needs its own environment."""
    if not name.startswith(("megatron_", "zero_")):
        return []
    return [pytest.mark.others, *([] if name in ORDINARY else [pytest.mark.deep])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in THREADS])
def test_a_version_is_judged_by_whether_it_has_the_bug(name, pool) -> None:
    """The library's code fails in a version with the bug, and passes in one without."""
    thread = load_thread(name)
    own_pool = thread.PACKAGE != "transformers"  # others leave groups and patches
    with Pool() if own_pool else nullcontext(pool) as ranks:
        report = judge_thread(thread, thread.program, ranks)
    installed = version(thread.PACKAGE).partition("+")[0]
    assert report.ok == (installed in thread.WITHOUT), str(report)
    if not report.ok:
        _, _, difference = str(report).partition("first difference")
        assert re.search(thread.NAMED, difference), str(report)


MENDED = [name for name in THREADS if name.startswith("megatron_") and name not in UNFIXED]
MENDED += ["zero_boundary"]


@pytest.mark.others
@pytest.mark.deep
@pytest.mark.parametrize("name", MENDED)
def test_the_code_without_the_cause_passes(name) -> None:
    """The program passes with the faulty line replaced."""
    thread = load_thread(name)
    with Pool() as ranks:
        assert judge_thread(thread, thread.mended, ranks).ok


@pytest.mark.others
@pytest.mark.deep
def test_a_count_that_is_overwritten() -> None:
    """With a padding mask the balance is right, unlike what issue 7452 (10) says."""
    thread = load_thread("megatron_tokens")
    with Pool() as ranks:
        assert judge_thread(thread, thread.masked, ranks).ok
