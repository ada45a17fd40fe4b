"""The command that checks a GPU, rehearsed without one: its parts, page, failures, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from schedlang.testing.accelerator import unavailable
from schedlang.testing.gpu import driver, page
from schedlang.testing.gpu.__main__ import main
from schedlang.testing.gpu.case import PARTS, Found, Part, Setup
from schedlang.testing.gpu.programs import ONE, SEVERAL
from tests import forks

ROOT = Path(__file__).parents[2]
CPU = Setup("cpu", "tiny")
TIMEOUT_S = "12"


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a subprocess."""
    # what other tests compiled is reused
    inherited = {"TORCHINDUCTOR_CACHE_DIR": default_cache_dir(), **os.environ}
    environment = {**inherited, "PYTHONPATH": str(ROOT)}
    arguments = ("-m", "schedlang.testing.gpu", "--patience", TIMEOUT_S, *arguments)
    return forks.run(*arguments, env=environment, cwd=ROOT, timeout=1500)


def outcomes_by_part(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """Return outcomes by part and case, from the JSON."""
    by_part: dict[str, dict[str, str]] = {}
    for case in json.loads(result.stdout)["found"]:
        by_part.setdefault(case["part"], {})[case["name"]] = case["outcome"]
    return by_part


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """It says so, exits with 2, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2 and main(["--quick", "--json", "--out", "there.md"]) == 2
    output = capsys.readouterr()
    assert "no GPU is here" in output.err and not output.out and not list(tmp_path.iterdir())


def test_the_page_claims_nothing_that_was_not_run() -> None:
    """The page says that no GPU has run it, or names device, driver, torch and date."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    if "No GPU has run this yet" in text:
        assert text == page.untold()
    else:
        assert all(f"\n| {name} | " in text for name in ("device", "driver", "torch", "date"))
        assert "rehearsal" not in text


def test_parts_fit_into_ten_minutes_and_three() -> None:
    """The time limits of all parts, with start-up."""
    assert sum(part.limit for part in PARTS) <= 585 and sum(part.quick for part in PARTS) <= 172


CPU_CASES = (
    "kernels:rms_norm float32 1x",
    "programs:co",
    "ranks:zero 1",
    "compiled:MLPs",
    "offload:act",
    "contests:swiglu",
    "layers:llama, tiny, untied, eager",
)


def test_each_part_on_the_cpu(tmp_path: Path) -> None:
    """A few cases of each part, in its own process; the page says that it is no GPU."""
    page_path = tmp_path / "inside" / "gpu.md"
    result = run_command("--device", "cpu", "--json", "--out", str(page_path), "--only", *CPU_CASES)
    assert result.returncode == 0, result.stdout + result.stderr
    by_part = outcomes_by_part(result)
    assert list(by_part) == [part.name for part in PARTS]
    for part, cases in by_part.items():
        may_skip = part in ("compiled", "kernels")  # without a C++ compiler, without Triton
        assert set(cases.values()) <= ({"ok", "skipped"} if may_skip else {"ok"}), (part, cases)
    text = page_path.read_text()
    assert "A rehearsal on `cpu`" in text and "it says nothing of a GPU" in text
    assert all(f"\n## {part.title}\n" in text for part in PARTS)
    assert "Nothing was wrong, and nothing failed." in text and "us |" not in text


SIM_CASES = (
    "kernels:rms_norm float32 1x",
    "programs:co",
    "ranks:zero 1",
    "compiled:MLPs",
    "offload",
    "contests:swiglu",
    "layers:llama, tiny, untied, ours",
)


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")
def test_each_part_on_a_simulated_device(tmp_path: Path) -> None:
    """The same on a simulated device: copies between memories have no race."""
    page_path = tmp_path / "gpu.md"
    result = run_command("--device", "sim", "--json", "--out", str(page_path), "--only", *SIM_CASES)
    assert result.returncode == 0, result.stdout + result.stderr
    by_part = outcomes_by_part(result)
    assert list(by_part) == [part.name for part in PARTS]
    for part in ("programs", "ranks", "offload"):
        assert set(by_part[part].values()) == {"ok"}, by_part[part]
    for part in ("kernels", "compiled", "contests"):
        assert set(by_part[part].values()) == {"skipped"}
    assert "compiles nothing for this device" in page_path.read_text()


@pytest.mark.deep
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_whole_rehearsal(device: str, tmp_path: Path) -> None:
    """Every case of every part."""
    result = run_command("--device", device, "--json", "--out", str(tmp_path / "gpu.md"))
    assert result.returncode == 0, result.stdout + result.stderr
    by_part = outcomes_by_part(result)
    assert len(by_part["programs"]) == len(ONE) + 1 and len(by_part["ranks"]) == len(SEVERAL)


BAD_KERNEL = '''"""A kernel that is a little wrong, in each process that this folder is shown to."""
import schedlang.kernels.norm as home

right = home.norm
home.norm = lambda x, *more: right(x, *more) * 1.01
'''


def test_a_wrong_kernel_is_told(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Its case and error come first on the page; the command exits with 1."""
    pytest.importorskip("triton")
    (tmp_path / "sitecustomize.py").write_text(BAD_KERNEL)
    page_path = tmp_path / "gpu.md"
    options = ("--only", "kernels:rms_norm float32 1x", "--out", str(page_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert main(["--patience", TIMEOUT_S, "--device", "cpu", *options]) == 1
    assert "wrong    kernels: rms_norm float32 1x" in capsys.readouterr().out
    text = page_path.read_text()
    assert "## Wrong or failed" in text and "output is 0.01 off" in text
    assert text.index("## Wrong or failed") < text.index("## Kernels against")


FAILURES = '''"""A part in which things go wrong, in each process that this folder is shown to."""
import os
import sys
import time
import types

for name in ("schedlang.kernels", "schedlang.kernels.kernel_device"):  # with torch
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].environment = dict

import schedlang.testing.gpu.case as parts
from schedlang.testing.gpu.case import Case, Skipped, Told, Wrong

def fine():
    return Told("here")

def off():
    raise Wrong("it is off")

def unable():
    raise Skipped("it cannot")

def raises():
    raise ValueError("\\n  what\\nmore")

def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def crashes():
    print("the last word", flush=True)
    os.kill(os.getpid(), 11)

def hangs():
    time.sleep(600)

names = os.environ.get("SCHEDLANG_TROUBLE", "fine off crashes unable lost hangs raises fine")
every = [globals()[name] for name in names.split()]
module = types.ModuleType("schedlang.testing.gpu.trouble")
module.cases = lambda setup: [
    Case(f"{place} {one.__name__}", one) for place, one in enumerate(every)
]
sys.modules[module.__name__] = module
parts.PARTS = (parts.Part("trouble", "Trouble", "trouble", 0, 0),)
'''


def _run_failing_cases(tmp_path: Path, monkeypatch: Any, each: float, limit: float) -> list[Found]:
    (tmp_path / "sitecustomize.py").write_text(FAILURES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    part = Part("trouble", "Trouble", "trouble", limit, limit, each)
    messages: list[str] = []
    cases = driver.examine(CPU, [(part, "")], messages.append)
    assert len(messages) == 1 + len(cases)
    return cases


def test_what_ends_a_process_ends_no_part(tmp_path: Path, monkeypatch: Any) -> None:
    """A crash, a hang and a lost device are reported, and later cases run in a new process."""
    cases = _run_failing_cases(tmp_path, monkeypatch, 4.0, 300.0)
    assert [(case.name.partition(" ")[2], case.outcome) for case in cases] == [
        ("fine", "ok"),
        ("off", "wrong"),
        ("crashes", "failed"),
        ("unable", "skipped"),
        ("lost", "failed"),
        ("hangs", "failed"),
        ("raises", "failed"),
        ("fine", "ok"),
    ]
    notes = {case.name.partition(" ")[2]: case.note for case in cases}
    assert notes["crashes"] == "its process was ended by SIGSEGV: the last word"
    assert notes["hangs"] == "not done in 4 seconds" and notes["raises"] == "ValueError: what"
    assert sum(case.bad for case in cases) == 5


def test_what_there_is_no_time_for_is_late(tmp_path: Path, monkeypatch: Any) -> None:
    """If a part's time is spent, its other cases are reported as left out."""
    cases = _run_failing_cases(tmp_path, monkeypatch, 300.0, 0.0)
    assert [case.outcome for case in cases] == ["late"]
    assert cases[0].note == "no time was left for it"


def test_what_is_not_done_when_time_is_up_has_not_failed(tmp_path: Path, monkeypatch: Any) -> None:
    """A part ends with its time: the running case and the later ones are left out, not failed."""
    monkeypatch.setenv("SCHEDLANG_TROUBLE", "fine hangs fine")
    cases = _run_failing_cases(tmp_path, monkeypatch, 300.0, 5.0)
    assert [case.outcome for case in cases] == ["ok", "late", "late"]
    assert cases[1].note == "the time of its part was up before it was done"
    assert cases[2].note == "no time was left for it"


def test_what_was_not_run_is_no_success(tmp_path: Path, capsys: Any) -> None:
    """If time was up, the command exits with 3, and the page claims nothing of these cases."""
    page_path = tmp_path / "gpu.md"
    arguments = [
        "--device",
        "cpu",
        "--patience",
        "1e-9",
        "--only",
        "offload",
        "--out",
        str(page_path),
    ]
    assert main(arguments) == 3
    assert "1 case was not run for want of time" in capsys.readouterr().out
    assert (
        "Of 0 cases nothing was wrong, and nothing failed. For 1 no time" in page_path.read_text()
    )


def test_half_a_compiled_file_is_left_to_nobody(tmp_path: Path, monkeypatch: Any) -> None:
    """A process that may be killed compiles into a temporary folder."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    environment = driver._environment(PARTS[0], CPU, tmp_path)
    caches = [environment[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    assert all(Path(cache).is_relative_to(tmp_path) for cache in caches)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "there")
    assert driver._environment(PARTS[0], CPU, tmp_path)["TORCHINDUCTOR_CACHE_DIR"] == "there"


def test_a_name_that_no_case_has_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    """A mistyped case name is a failure."""
    (tmp_path / "sitecustomize.py").write_text(FAILURES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (case,) = driver.examine(CPU, [(Part("trouble", "T", "trouble", 99, 99), "fune")], [].append)
    assert (case.outcome, case.note) == ("failed", "no case's name begins so")


def test_a_part_that_cannot_begin_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    """An error at import fails the part, with the error's message."""
    (tmp_path / "sitecustomize.py").write_text(FAILURES.replace("module.cases = ", "module.no = "))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (case,) = driver.examine(CPU, [(Part("trouble", "T", "trouble", 99, 99), "")], [].append)
    assert case.outcome == "failed" and "no attribute 'cases'" in case.note


def test_only() -> None:
    """Parts by name, in order; cases by the start of their names; other names are refused."""
    assert [
        (part.name, selection) for part, selection in driver.chosen(["layers", "kernels:rope"])
    ] == [
        ("kernels", "rope"),
        ("layers", ""),
    ]
    assert len(driver.chosen([])) == len(PARTS)
    with pytest.raises(ValueError, match="there is no part `kernel`: kernels, programs"):
        driver.chosen(["kernel"])
    with pytest.raises(SystemExit):
        main(["--only", "kernel"])


def test_the_page_of_a_gpu() -> None:
    """Device, driver, torch and date; tables of kernels and layers; failures with reasons."""
    here = page.Here(
        device="NVIDIA H100",
        driver="570.1",
        memory="79 GiB",
        torch="2.13.0",
        cuda="CUDA 13.0",
        triton="3.7.1",
        liger="not installed",
        python="3.12.1",
        date="2030-01-02",
        size="full",
        parts=("contests", "layers"),
        seconds=200.0,
        rehearsed=False,
    )
    numbers = {
        "seconds": {"ours": 2e-4, "eager": 4e-4, "compile": 3e-4},
        "floor": 1e-4,
        "peak": {"ours": 2**20, "eager": 2**22},
    }
    layer = {
        "shape": "llama",
        "way": "ours",
        "tokens_per_second": 1234.4,
        "peak_gib": 3.21,
        "mfu": 0.5,
        "loss": 11.7,
    }
    text = page.page(
        here,
        [
            Found("contests", "rms_norm", "ok", "x", numbers),
            Found("contests", "rope", "failed", "a | b"),
            Found("layers", "llama, ours", "ok", "x", layer),
            Found("layers", "llama, liger", "skipped", "`liger_kernel` is not installed"),
        ],
    )
    for line in (
        "| device | NVIDIA H100 79 GiB |",
        "| driver | 570.1 |",
        "| torch | 2.13.0, CUDA 13.0 |",
        "| date | 2030-01-02 |",
        "| cases | 2 ok, 1 failed, 1 skipped |",
        "| rms_norm | 200 | 50% | 2.00 | 1.50 | - | - | 1 of 4 |",
        "| llama | ours | 1234 | 3.2 | 50.0% | 11.7000 |",
        "| contests: rope | failed | a \\| b |",
        "| llama, liger | skipped | `liger_kernel` is not installed |",
        "| run | full shapes, without kernels, programs, ranks, compiled, offload, 200 s |",
    ):
        assert f"{line}\n" in text, line
