"""The command that examines a GPU, rehearsed without one: parts, page, and how it ends."""

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
PATIENCE = "12"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it."""
    # what other tests have compiled is compiled
    kept = {"TORCHINDUCTOR_CACHE_DIR": default_cache_dir(), **os.environ}
    environment = {**kept, "PYTHONPATH": str(ROOT)}
    words = ("-m", "schedlang.testing.gpu", "--patience", PATIENCE, *words)
    return forks.run(*words, env=environment, cwd=ROOT, timeout=1500)


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """By part and case, as the JSON tells."""
    found: dict[str, dict[str, str]] = {}
    for one in json.loads(done.stdout)["found"]:
        found.setdefault(one["part"], {})[one["name"]] = one["outcome"]
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """It says so, ends with 2, and writes nothing, wherever it was told to."""
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2 and main(["--quick", "--json", "--out", "there.md"]) == 2
    told = capsys.readouterr()
    assert "no GPU is here" in told.err and not told.out and not list(tmp_path.iterdir())


def test_the_page_claims_nothing_that_was_not_run() -> None:
    """It says that no GPU has run it, or names the device, its driver, torch and the date."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    if "No GPU has run this yet" in text:
        assert text == page.untold()
    else:
        assert all(f"\n| {name} | " in text for name in ("device", "driver", "torch", "date"))
        assert "rehearsal" not in text


def test_parts_fit_into_ten_minutes_and_three() -> None:
    """Limits of all parts together, with what starting takes."""
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
    """A few cases of each, in its own process; the page says that it is no GPU."""
    where = tmp_path / "inside" / "gpu.md"
    done = command("--device", "cpu", "--json", "--out", str(where), "--only", *CPU_CASES)
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcomes(done)
    assert list(found) == [part.name for part in PARTS]
    for part, cases in found.items():
        free = part in ("compiled", "kernels")  # without a C++ compiler, without Triton
        assert set(cases.values()) <= ({"ok", "skipped"} if free else {"ok"}), (part, cases)
    text = where.read_text()
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
    """The same there: what has streams and memory of its own is copied, and nothing races."""
    where = tmp_path / "gpu.md"
    done = command("--device", "sim", "--json", "--out", str(where), "--only", *SIM_CASES)
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcomes(done)
    assert list(found) == [part.name for part in PARTS]
    for part in ("programs", "ranks", "offload"):
        assert set(found[part].values()) == {"ok"}, found[part]
    for part in ("kernels", "compiled", "contests"):
        assert set(found[part].values()) == {"skipped"}
    assert "compiles nothing for this device" in where.read_text()


@pytest.mark.deep
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_whole_rehearsal(device: str, tmp_path: Path) -> None:
    """Every case of every part."""
    done = command("--device", device, "--json", "--out", str(tmp_path / "gpu.md"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcomes(done)
    assert len(found["programs"]) == len(ONE) + 1 and len(found["ranks"]) == len(SEVERAL)


MUTATED = '''"""A kernel that is a little wrong, in each process that this folder is shown to."""
import schedlang.kernels.norm as home

right = home.norm
home.norm = lambda x, *more: right(x, *more) * 1.01
'''


def test_a_wrong_kernel_is_told(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """By its case and how far it is off, first on the page; and the command ends with 1."""
    pytest.importorskip("triton")
    (tmp_path / "sitecustomize.py").write_text(MUTATED)
    where = tmp_path / "gpu.md"
    only = ("--only", "kernels:rms_norm float32 1x", "--out", str(where))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert main(["--patience", PATIENCE, "--device", "cpu", *only]) == 1
    assert "wrong    kernels: rms_norm float32 1x" in capsys.readouterr().out
    text = where.read_text()
    assert "## Wrong or failed" in text and "output is 0.01 off" in text
    assert text.index("## Wrong or failed") < text.index("## Kernels against")


TROUBLE = '''"""A part in which things go wrong, in each process that this folder is shown to."""
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


def _trouble(tmp_path: Path, monkeypatch: Any, each: float, limit: float) -> list[Found]:
    (tmp_path / "sitecustomize.py").write_text(TROUBLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    part = Part("trouble", "Trouble", "trouble", limit, limit, each)
    said: list[str] = []
    found = driver.examine(CPU, [(part, "")], said.append)
    assert len(said) == 1 + len(found)
    return found


def test_what_ends_a_process_ends_no_part(tmp_path: Path, monkeypatch: Any) -> None:
    """A crash, a hang and a lost device are told, and the cases behind them run in another."""
    found = _trouble(tmp_path, monkeypatch, 4.0, 300.0)
    assert [(one.name.partition(" ")[2], one.outcome) for one in found] == [
        ("fine", "ok"),
        ("off", "wrong"),
        ("crashes", "failed"),
        ("unable", "skipped"),
        ("lost", "failed"),
        ("hangs", "failed"),
        ("raises", "failed"),
        ("fine", "ok"),
    ]
    notes = {one.name.partition(" ")[2]: one.note for one in found}
    assert notes["crashes"] == "its process was ended by SIGSEGV: the last word"
    assert notes["hangs"] == "not done in 4 seconds" and notes["raises"] == "ValueError: what"
    assert sum(one.bad for one in found) == 5


def test_what_there_is_no_time_for_is_late(tmp_path: Path, monkeypatch: Any) -> None:
    """Where all of a part's time is spent the rest is said to be left out, and why."""
    found = _trouble(tmp_path, monkeypatch, 300.0, 0.0)
    assert [one.outcome for one in found] == ["late"]
    assert found[0].note == "no time was left for it"


def test_what_is_not_done_when_time_is_up_has_not_failed(tmp_path: Path, monkeypatch: Any) -> None:
    """A part ends with its time: what was at work is left out, as what was to follow, and is no
    fault."""
    monkeypatch.setenv("SCHEDLANG_TROUBLE", "fine hangs fine")
    found = _trouble(tmp_path, monkeypatch, 300.0, 5.0)
    assert [one.outcome for one in found] == ["ok", "late", "late"]
    assert found[1].note == "the time of its part was up before it was done"
    assert found[2].note == "no time was left for it"


def test_what_was_not_run_is_no_success(tmp_path: Path, capsys: Any) -> None:
    """Where time was up, the command ends with 3, and the page claims nothing of these cases."""
    where = tmp_path / "gpu.md"
    words = ["--device", "cpu", "--patience", "1e-9", "--only", "offload", "--out", str(where)]
    assert main(words) == 3
    assert "1 case was not run for want of time" in capsys.readouterr().out
    assert "Of 0 cases nothing was wrong, and nothing failed. For 1 no time" in where.read_text()


def test_half_a_compiled_file_is_left_to_nobody(tmp_path: Path, monkeypatch: Any) -> None:
    """A process that may be ended at any time compiles into a folder that goes with it."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    told = driver._environment(PARTS[0], CPU, tmp_path)
    caches = [told[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    assert all(Path(one).is_relative_to(tmp_path) for one in caches)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "there")
    assert driver._environment(PARTS[0], CPU, tmp_path)["TORCHINDUCTOR_CACHE_DIR"] == "there"


def test_a_name_that_no_case_has_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    """A mistyped case is no run in which all is well."""
    (tmp_path / "sitecustomize.py").write_text(TROUBLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = driver.examine(CPU, [(Part("trouble", "T", "trouble", 99, 99), "fune")], [].append)
    assert (found.outcome, found.note) == ("failed", "no case's name begins so")


def test_a_part_that_cannot_begin_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    """An error while it is imported: the part has failed, by the error's own words."""
    (tmp_path / "sitecustomize.py").write_text(TROUBLE.replace("module.cases = ", "module.no = "))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = driver.examine(CPU, [(Part("trouble", "T", "trouble", 99, 99), "")], [].append)
    assert found.outcome == "failed" and "no attribute 'cases'" in found.note


def test_only() -> None:
    """Parts by their names, in their order; of one the cases that begin so; others are refused."""
    assert [(part.name, words) for part, words in driver.chosen(["layers", "kernels:rope"])] == [
        ("kernels", "rope"),
        ("layers", ""),
    ]
    assert len(driver.chosen([])) == len(PARTS)
    with pytest.raises(ValueError, match="there is no part `kernel`: kernels, programs"):
        driver.chosen(["kernel"])
    with pytest.raises(SystemExit):
        main(["--only", "kernel"])


def test_the_page_of_a_gpu() -> None:
    """Device, driver, torch and date; kernels and layers as tables; what failed, and why."""
    place = page.Here(
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
        place,
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
