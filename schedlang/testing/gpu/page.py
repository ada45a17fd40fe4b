"""The examination as a page: the device and its versions, the failures, each part as a table."""

from __future__ import annotations

import importlib.util
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from schedlang.testing.gpu.case import OUTCOMES, PARTS, Found, Setup

_MAX_NOTE = 160  # characters of a note in a table
_WAYS = ("ours", "eager", "compile", "liger", "sdpa")


@dataclass(frozen=True)
class Here:
    """The machine and the time of an examination."""

    device: str
    driver: str
    memory: str
    torch: str
    cuda: str
    triton: str
    liger: str
    python: str
    date: str
    size: str
    parts: tuple[str, ...]
    seconds: float
    rehearsed: bool


def here(setup: Setup, parts: Sequence[str], seconds: float) -> Here:
    """Return the properties of this machine."""
    import torch

    name, driver, memory = setup.device, "none", ""
    if setup.timed:
        properties = torch.cuda.get_device_properties(0)
        name, memory = properties.name, f"{properties.total_memory / 2**30:.0f} GiB"
        driver = _driver()
    return Here(
        device=name,
        driver=driver,
        memory=memory,
        torch=str(torch.__version__),
        cuda=f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA",
        triton=_version("triton"),
        liger=_version("liger_kernel"),
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        size=setup.size,
        parts=tuple(parts),
        seconds=round(seconds, 1),
        rehearsed=not setup.timed,
    )


def _driver() -> str:
    import subprocess

    try:
        process = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "not told"
    return process.stdout.strip().splitlines()[0] if process.stdout.strip() else "not told"


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "installed"


def counted(results: Sequence[Found]) -> str:
    """Count cases by outcome."""
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name]) or "none"


def untold() -> str:
    """Return the page before any GPU has run the examination."""
    return f"""{_HEAD}
This page shows how to test schedlang on your GPU. **No GPU has run this yet**, so the page makes no
claims. What ran where:

| | |
|---|---|
| CPUs, with gloo | all tests, proofs and figures of this book; kernels in Triton's interpreter |
| [simulated accelerators](accelerator.md) | training in every kind of parallelism, for races |
| GPUs, with NCCL | nothing yet |

{_HOW}
| part | what it shows |
|---|---|
{_contents()}"""


_HEAD = "# On a GPU\n"
_HOW = """<!-- not played: it needs a GPU -->

```
python -m schedlang.testing.gpu
```

This command examines your GPU in at most ten minutes (`--quick`: three) and writes this page. Each
part runs in its own processes with a time limit. If a part crashes or hangs, the page reports it,
and the other parts go on.

- `--only kernels` runs one part, `--only kernels:rms_norm` only its cases whose names begin so.
- `--json` prints all numbers. `--out FILE` writes the page elsewhere.
- `--device cpu` and `--device sim` rehearse it on tiny shapes, with ten times the time limits:
  everything except the times, and except what is compiled for GPUs.

The exit code is 1 if something is wrong or failed, 3 if there was no time left for some case, and
2 if there is no GPU; then nothing is written.
"""
_DESCRIPTIONS = {
    "kernels": "each kernel's results and gradients, in three dtypes, also for ragged shapes and"
    " for queries that see no key: at most twice the error of eager against float64",
    "programs": "schedules of one rank in a group of NCCL, equal to the untouched model there",
    "ranks": "data, tensor, pipeline and context parallelism on one device, through gloo",
    "compiled": "training with regions that inductor compiles, and that they were compiled",
    "offload": "copies to pinned memory and back, what they cost, and what they save",
    "contests": "each kernel's forward and backward compared with eager, torch.compile and Liger,"
    " and with the least time that its bytes or multiplications need on this GPU",
    "layers": "tokens per second and peak bytes of as many layers of Llama-8B as fit in memory",
}


def _contents() -> str:
    return "\n".join(f"| `{part.name}` | {_DESCRIPTIONS[part.name]} |" for part in PARTS) + "\n"


def page(env: Here, results: Sequence[Found]) -> str:
    """Return the whole page."""
    summary = "\n".join(_summary_lines(env, results))
    parts = [
        _part_section(
            part.name,
            part.title,
            part.timed and not env.rehearsed,
            [result for result in results if result.part == part.name],
        )
        for part in PARTS
        if any(result.part == part.name for result in results)
    ]
    return f"{_HEAD}\n{summary}\n{_failures(results)}{''.join(parts)}\n## How it is run\n\n{_HOW}"


def _summary_lines(env: Here, results: Sequence[Found]) -> Iterator[str]:
    if env.rehearsed:
        yield (f"**A rehearsal on `{env.device}`, on tiny shapes: it says nothing of a GPU.**\n")
    device = f"{env.device} {env.memory}".strip()
    yield f"| | |\n|---|---|\n| device | {device} |"
    yield f"| driver | {env.driver} |"
    yield f"| torch | {env.torch}, {env.cuda} |"
    yield f"| Triton | {env.triton} |"
    yield f"| Liger | {env.liger} |"
    yield f"| Python | {env.python} |"
    yield f"| date | {env.date} |"
    omitted = [part.name for part in PARTS if part.name not in env.parts]
    suffix = f", without {', '.join(omitted)}" if omitted else ""
    yield f"| run | {env.size} shapes{suffix}, {env.seconds:.0f} s |"
    yield f"| cases | {counted(results)} |"


def _failures(results: Sequence[Found]) -> str:
    bad = [result for result in results if result.bad]
    late = sum(result.outcome == "late" for result in results)
    if not bad:
        scope = f"Of {len(results) - late} cases nothing" if late else "Nothing"
        late_text = f" For {late} no time was left: they show nothing." if late else ""
        return f"\n{scope} was wrong, and nothing failed.{late_text}\n"
    rows = "".join(
        f"| {result.part}: {_cell(result.name)} | {result.outcome} | {_cell(result.note)} |\n"
        for result in bad
    )
    return f"\n## Wrong or failed\n\n| case | | |\n|---|---|---|\n{rows}"


def _part_section(name: str, title: str, timed: bool, results: Sequence[Found]) -> str:
    table = _TABLES[name](results) if timed else ""
    others = [result for result in results if not (timed and result.outcome == "ok")]
    rows = "".join(
        f"| {_cell(result.name)} | {result.outcome} | {_cell(result.note)} |\n" for result in others
    )
    listing = f"| case | | |\n|---|---|---|\n{rows}" if rows else ""
    between = "\n" if table and listing else ""
    return f"\n## {title}\n\n{counted(results)}\n\n{table}{between}{listing}"


def _cell(text: str) -> str:
    """Fit a text into one line of a table's cell."""
    line = " ".join(text.replace("|", "\\|").split())
    return line if len(line) <= _MAX_NOTE else f"{line[: _MAX_NOTE - 3]}..."


def _contest_table(results: Sequence[Found]) -> str:
    """Format microseconds of ours and of the lower bound, and the relative time of others."""
    rows = []
    for result in results:
        if result.outcome != "ok":
            continue
        numbers: dict[str, Any] = dict(result.numbers)
        seconds, peak = numbers["seconds"], numbers["peak"]
        ours = seconds["ours"]
        others = [f"{seconds[way] / ours:.2f}" if way in seconds else "-" for way in _WAYS[1:]]
        mib = f"{peak['ours'] / 2**20:.0f} of {peak.get('eager', 0) / 2**20:.0f}"
        rows.append(
            f"| {result.name} | {ours * 1e6:.0f} | {numbers['floor'] / ours:.0%} "
            f"| {' | '.join(others)} | {mib} |\n"
        )
    head = (
        "| forward and backward, bfloat16 | ours, us | floor / ours | eager / ours "
        "| compile / ours | Liger / ours | torch's own / ours | peak, MiB, of eager's |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(rows) if rows else ""


def _layer_table(results: Sequence[Found]) -> str:
    """Format tokens per second and bytes of each implementation."""
    rows = []
    for result in (result for result in results if result.outcome == "ok"):
        numbers: dict[str, Any] = dict(result.numbers)
        mfu = f"{numbers['mfu']:.1%}" if "mfu" in numbers else "-"
        rows.append(
            f"| {numbers['shape']} | {numbers['way']} | {numbers['tokens_per_second']:.0f} "
            f"| {numbers['peak_gib']:.1f} | {mfu} | {numbers['loss']:.4f} |\n"
        )
    head = (
        "| model | way | tokens/s | peak, GiB | of the peak rate | first loss |\n"
        "|---|---|---|---|---|---|\n"
    )
    return head + "".join(rows) if rows else ""


_TABLES = {"contests": _contest_table, "layers": _layer_table}
