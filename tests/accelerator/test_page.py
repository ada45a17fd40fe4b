"""The page of the simulated accelerator: its test fails with the words that it shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from schedlang.testing.accelerator import unavailable
from tests import forks
from tests.accelerator import replicated_ways
from tests.accelerator import test_mutations as fsdp
from tests.accelerator import test_mutations_copies as copies
from tests.accelerator import test_mutations_ddp as ddp
from tests.accelerator import test_mutations_messages as messages
from tests.accelerator.mutants import ours, sites, users, works
from tests.book import ROOT

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

PAGE = (ROOT / "docs" / "accelerator.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)


def played(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_page.py").write_text(text)
    words = ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "test_page.py"]
    return forks.run(*words, cwd=folder)


def test_the_page_runs(tmp_path: Path) -> None:
    """The fixture fails a test that forgot a wait, with this report; with the wait it passes."""
    (source,), (report,) = blocks("python"), blocks("text")
    done = played(tmp_path, source)
    assert done.returncode == 1
    told = re.sub(r"^E +(?=race)|^E {10}", "", done.stdout, flags=re.M)
    for line in report.splitlines():
        assert line.strip() in told, done.stdout
    mended = source.replace(
        "    print(y + 1)  # the wait for `side` was forgotten\n",
        "    torch.sim.current_stream().wait_stream(side)\n    print(y + 1)\n",
    )
    assert mended != source
    assert played(tmp_path, mended).returncode == 0


@fsdp.LISTED
def test_how_much_is_left_out() -> None:
    """The table counts the calls that are there, and those that are listed with a reason; that all
    others are found is what the deep tests show."""
    copying = [one for name in users() for one in sites(name, chosen=ours)]
    told = {
        "FSDP2": (sites(*fsdp.MODULES), fsdp.REDUNDANT, fsdp.UNREACHED),
        "DDP and its reducer": (
            [*sites(*replicated_ways.MODULES), *ddp.COLLECTIVES],
            ddp.REDUNDANT,
            ddp.UNREACHED,
        ),
        "schedlang's copies, and its device": (
            [*copying, *sites(copies.DEVICE)],
            copies.REDUNDANT,
            copies.UNREACHED,
        ),
        "schedlang's messages and sums": (
            sites(*messages.MODULES, chosen=works),
            {*messages.REDUNDANT, *messages.SENT},
            (),
        ),
    }
    for name, (every, redundant, unreached) in told.items():
        calls = [(one.function, one.text) for one in every]
        spare, far = (sum(one in known for one in calls) for known in (redundant, unreached))
        row = (len(calls), len(calls) - spare - far, spare, far)
        assert f"| {name} | {' | '.join(map(str, row))} |" in PAGE, (name, row)
