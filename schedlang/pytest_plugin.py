"""pytest plugin: schedule files are tests; each is checked, and proven to equal its model.

`pytest --schedlang examples` collects every `*.sched` below; a file that is named is collected
without the option. Nothing else of schedlang is imported before a schedule is collected.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from schedlang.report import Report
    from schedlang.testing.accelerator import Simulation
    from schedlang.verbs.examine import Outcome, ProofTerms, RankPool

LEVELS = ("static", "step3")
RANKS = pytest.StashKey["RankPool"]()


@pytest.fixture
def accelerator() -> Iterator[Simulation]:
    """Simulated devices `sim:0` and more; a race found at the end fails the test.

    Skipped, with the reason, if the devices cannot be compiled.
    """
    from schedlang.testing.accelerator import Unavailable, simulated

    try:
        with simulated() as simulation:
            yield simulation
            simulation.check()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def verify_program(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Return `schedlang.verify_program`, which fails the test with the report unless all is
    equal."""
    from schedlang.equivalence import verify_program as judge

    def judged(program: Any, **options: Any) -> Report:
        options.setdefault("timeout", request.config.getoption("schedlang_timeout"))
        report = judge(program, **options)
        if not report.ok:
            pytest.fail(f"the program differs from its model\n{report}", pytrace=False)
        return report

    return judged


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options and ini values."""
    group = parser.getgroup("schedlang", "schedules, proven equal to their models")
    add = group.addoption
    add("--schedlang", action="store_true", help="collect *.sched files")
    add(
        "--schedlang-level",
        choices=LEVELS,
        default="step3",
        help="static: prove without a run; step3: compare three steps too (default)",
    )
    add("--schedlang-dtype", metavar="DTYPE", help="working dtype that is checked beside float64")
    add(
        "--schedlang-world",
        type=int,
        default=8,
        metavar="N",
        help="most ranks to start; a schedule with more is skipped (default 8)",
    )
    add(
        "--schedlang-shrink",
        action="store_true",
        help="reduce model and mesh of a schedule with more, instead",
    )
    add(
        "--schedlang-seed", type=int, default=0, metavar="N", help="of weights, batches and dropout"
    )
    add(
        "--schedlang-timeout",
        type=float,
        metavar="SECONDS",
        help="for each proof that runs; one that takes longer is an error",
    )
    add("--schedlang-locked", action="store_true", help="every schedule with rows needs its lock")
    parser.addini(
        "schedlang_model_paths",
        "model files, or folders with a model.py, for schedules that have none beside them",
        type="paths",
    )
    parser.addini(
        "schedlang_refused",
        "FILE: CODE, for schedules that are meant to be refused",
        type="linelist",
    )
    parser.addini(
        "schedlang_mesh", "FILE: dp=2,tp=2, the mesh to verify a schedule on", type="linelist"
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a schedule, if schedules are requested or this one is named."""
    if file_path.suffix != ".sched":
        return None
    if not parent.config.getoption("schedlang") and not parent.session.isinitpath(file_path):
        return None
    file: SchedFile = SchedFile.from_parent(parent, path=file_path)
    return file


class SchedFile(pytest.File):
    """A schedule, with the examinations to run on it."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield `check` for every file; `lock`, `static` and `verify` for a file with rows."""
        from schedlang.diagnostics.diagnostic import Refusal
        from schedlang.verbs import examine
        from schedlang.verbs.lockfile import lock_path

        terms = self._make_wish()
        questions = [examine.CHECK]
        try:
            line = examine.first_row(self.path)
        except Refusal:
            line = 0  # `check` reports the mistake
        if line and not terms.refused:
            needs_lock = self.config.getoption("schedlang_locked") or lock_path(self.path).exists()
            questions += [examine.LOCK] if needs_lock else []
        questions += [examine.STATIC] if line else []
        if line and self.config.getoption("schedlang_level") != "static":
            questions.append(examine.VERIFY)
        for question in questions:
            start_line = line if question in (examine.STATIC, examine.VERIFY) else 1
            yield SchedItem.from_parent(self, name=question, wish=terms, line=start_line)

    def _make_wish(self) -> ProofTerms:
        from schedlang.verbs.examine import ProofTerms

        option = self.config.getoption
        return ProofTerms(
            model=self._model(),
            mesh=self._ini_value("schedlang_mesh") or None,
            seed=option("schedlang_seed"),
            dtype=option("schedlang_dtype"),
            world=option("schedlang_world"),
            shrink=option("schedlang_shrink"),
            refused=self._ini_value("schedlang_refused"),
            timeout=option("schedlang_timeout"),
        )

    def _model(self) -> str | None:
        """Return None if a model file is beside the schedule; else the first of the ini value."""
        from schedlang.ir.modelfile import model_beside

        if model_beside(self.path).is_file():
            return None
        for path in self.config.getini("schedlang_model_paths"):
            file = path if path.suffix == ".py" else path / "model.py"
            if file.is_file():
                return _relative_path(file)
        return None

    def _ini_value(self, ini: str) -> str:
        """Look up this file in an ini value of lines; names are relative to the rootdir."""
        own_path = Path(os.path.relpath(self.path, self.config.rootpath)).as_posix()
        for line in self.config.getini(ini):
            name, colon, value = (part.strip() for part in line.partition(":"))
            if not colon or not value:
                raise pytest.UsageError(f"{ini}: `{line}` is not FILE: VALUE")
            if fnmatch.fnmatch(own_path, name):
                return str(value)
        return ""


class SchedItem(pytest.Item):
    """One examination of one schedule."""

    def __init__(self, *, wish: ProofTerms, line: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.wish, self.line = wish, line
        self.outcome: Outcome | None = None

    def setup(self) -> None:
        """Run the examination. An unchecked outcome is an error of the setup: neither passed nor
        failed."""
        from schedlang.verbs.exits import UNCHECKED

        self.outcome = self._examine()
        self.user_properties += self.outcome.facts
        if self.outcome.skipped:
            pytest.skip(self.outcome.skipped)
        if self.outcome.code == UNCHECKED:
            self._fail()

    def runtest(self) -> None:
        """Fail unless the outcome holds."""
        assert self.outcome is not None
        if self.outcome.code:
            self._fail()
        if self.outcome.text:
            self.add_report_section("call", "schedlang", self.outcome.text)

    def _examine(self) -> Outcome:
        from schedlang.verbs import examine

        file = Path(_relative_path(self.path))
        if self.name != examine.VERIFY:
            examinations = {examine.CHECK: examine.check, examine.LOCK: examine.lock}
            return examinations.get(self.name, examine.static)(file, self.wish)
        with _session_ranks(self.config) as ranks:
            return examine.verify(file, self.wish, ranks)

    def _fail(self) -> NoReturn:
        """Fail with the place in an editor's format and the full text, without lines of this
        file."""
        outcome = self.outcome
        assert outcome is not None
        text = f"{outcome.where}: {self.name} {outcome.word}\n{outcome.text}"
        pytest.fail(text, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the schedule, and the first line of the examination."""
        return self.path, self.line - 1, f"{self.name} of {self.path.name}"


def _relative_path(path: Path) -> str:
    """Return a path below the working directory relative to it, as a user would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


@contextmanager
def _session_ranks(config: pytest.Config) -> Iterator[RankPool]:
    """Return the ranks of this session; workers of pytest-xdist take turns, and end their ranks."""
    from schedlang.verbs.examine import RankPool

    ranks = config.stash.get(RANKS, None)
    if ranks is None:
        ranks = config.stash[RANKS] = RankPool()
        config.add_cleanup(ranks.close)
    if not hasattr(config, "workerinput"):
        yield ranks
        return
    import fcntl

    lock = os.open(config.rootpath, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield ranks
    finally:
        ranks.end_ranks()
        os.close(lock)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the outcome as plain values to the deciding report, also from a worker."""
    report = yield
    decides = call.when == "call" or (call.when == "setup" and not report.passed)
    if decides and isinstance(item, SchedItem) and item.outcome is not None:
        report.schedlang = item.outcome.to_json()  # type: ignore[attr-defined]
        if item.outcome.skipped:  # the skipped place is in the schedule, not in this file
            report.longrepr = (str(item.path), item.line, f"Skipped: {item.outcome.skipped}")
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write, on GitHub, annotations on the lines to blame and a table in the job's summary."""
    if hasattr(config, "workerinput"):
        return  # the terminal of a pytest-xdist worker is not shown
    reports = [report for group in terminalreporter.stats.values() for report in group]
    results = [report.schedlang for report in reports if hasattr(report, "schedlang")]
    if not results:
        return
    from schedlang.diagnostics.annotate import Note, annotation, on_github, summarize
    from schedlang.verbs.examine import summary

    if not on_github():
        return
    terminalreporter.ensure_newline()
    for result in results:
        if result["note"] is not None:
            terminalreporter.write_line(annotation(Note(**result["note"])))
    summarize(summary(results))
