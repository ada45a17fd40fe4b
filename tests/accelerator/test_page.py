"""docs/accelerator.md: its test fails with the report that the page shows; its table is right."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from schedlang.testing.accelerator import unavailable
from tests import forks
from tests.accelerator import ddp_variants
from tests.accelerator import test_mutations as fsdp
from tests.accelerator import test_mutations_copies as copies
from tests.accelerator import test_mutations_ddp as ddp
from tests.accelerator import test_mutations_messages as messages
from tests.accelerator.mutations import call_sites, calling_modules, is_copy_order, is_work_wait
from tests.doc_snippets import ROOT

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

PAGE = (ROOT / "docs" / "accelerator.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)


def run_page(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_page.py").write_text(text)
    arguments = ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "test_page.py"]
    return forks.run(*arguments, cwd=folder)


def test_the_page_runs(tmp_path: Path) -> None:
    """The fixture fails a test that has no wait, with this report; with the wait it passes."""
    (source,), (report,) = code_blocks("python"), code_blocks("text")
    result = run_page(tmp_path, source)
    assert result.returncode == 1
    output = re.sub(r"^E +(?=race)|^E {10}", "", result.stdout, flags=re.M)
    for line in report.splitlines():
        assert line.strip() in output, result.stdout
    fixed = source.replace(
        "    print(y + 1)  # the wait for `side` was forgotten\n",
        "    torch.sim.current_stream().wait_stream(side)\n    print(y + 1)\n",
    )
    assert fixed != source
    assert run_page(tmp_path, fixed).returncode == 0


@fsdp.LISTED
def test_how_much_is_left_out() -> None:
    """The table counts the calls, and those listed with a reason; that all others are found is what
    the deep tests show."""
    copy_sites = [
        site for name in calling_modules() for site in call_sites(name, chosen=is_copy_order)
    ]
    expected_rows = {
        "FSDP2": (call_sites(*fsdp.MODULES), fsdp.REDUNDANT, fsdp.UNREACHED),
        "DDP and its reducer": (
            [*call_sites(*ddp_variants.MODULES), *ddp.COLLECTIVES],
            ddp.REDUNDANT,
            ddp.UNREACHED,
        ),
        "schedlang's copies, and its device": (
            [*copy_sites, *call_sites(copies.DEVICE_MODULE)],
            copies.REDUNDANT,
            copies.UNREACHED,
        ),
        "schedlang's messages and sums": (
            call_sites(*messages.MODULES, chosen=is_work_wait),
            {*messages.REDUNDANT, *messages.UNCHECKED},
            messages.UNREACHED,
        ),
    }
    for name, (all_sites, redundant, unreached) in expected_rows.items():
        calls = [(site.function, site.text) for site in all_sites]
        redundant_count, unreached_count = (
            sum(site in listed for site in calls) for listed in (redundant, unreached)
        )
        row = (
            len(calls),
            len(calls) - redundant_count - unreached_count,
            redundant_count,
            unreached_count,
        )
        assert f"| {name} | {' | '.join(map(str, row))} |" in PAGE, (name, row)
