"""Write docs/architecture.md from the files: `python -m tests.architecture_page`."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

from schedlang.doors import MAIN_DOORS, ROW_STEPS, SIDE_DOORS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
HEAD = """# Architecture

Find the code that does something: which function, in which package, and what it reads.

schedlang processes a schedule in one direction, through a few functions: the *doors*. Each door
returns one immutable value, which the next doors read. `schedlang/doors.py` lists the doors: open
it first.

<!-- not played: a picture -->

```
path --read--> Source --parse--> File --expand--> Plan --propagate--> Traced --stages_of--> Staged
                                                   |                layouts       stages, timeline
                                                   |
                                                   |-prepare (both, and what follows)-> Prepared
                                                   |                                       |
                                       account, simulate_ranks, static           build, on each rank
                                    (costs, memory, proofs: no ranks)                      |
                                                                          Program --prove--> Report
```

"""
ROOMS = """
**Boundaries.** The language (text, names, plans) runs without torch, and so do its tests. The code
that runs on ranks (`runtime`, `kernels`) does not use schedules.

**Primitives.** A primitive is one file, and no pass refers to it by name. Its `transform` adds
layouts and annotations to the plan (`ir/annotations.py`), each with the number of its row.
`passes/lower/build.py` executes them by kind, in one fixed order. Some features need more from a
row, for example to rewrite a module or to recompute it. Each such feature has a class in
`ir/features.py`, and the primitive derives from it. A feature that a plan does not use costs
nothing: `python -m tests.door_calls --list` lists the functions that run for a row.

[How it works](how_it_works.md) follows two rows through the doors, and explains how a forward is
[recorded](how_it_works.md#a-forward-recorded) before ranks exist.
[Contributing](../CONTRIBUTING.md) shows how to add a primitive.

## Rooms

A *room* is a package or file of `schedlang`. Each room has a *floor*: a file imports only from its
own floor and from lower floors. `runtime` and `passes` have inner floors. import-linter checks
this, and `python -m tests.architecture_page` draws these tables from the files.

"""
STATE = """## State that no argument carries

A step also reads state of its thread or process. No argument can carry this state, because torch
calls the code that reads it: in backward, in saved-tensor hooks, inside the model's code.

* `scope` (step, microbatch, slice, module), per thread: calls of the model read it, and a
  recomputation in backward restores it (`scope.capture_scope`).
* `modes`, per thread: torch keeps its stack of function modes per thread, and a recomputation
  enters the modes again. `mixed_precision` imitates torch's autocast, which is also per thread.
* `storage/saved_tensors_slot` (policies around a module), per thread: torch has one slot of
  saved-tensor hooks, and calls the innermost hooks.
* `rng/native_dropout` (calls that draw random numbers), per thread, in a value of the program: the
  model calls dropout.
* `storage/tiers`, `storage/copies` (locations of storages, streams), per process: a storage
  outlives the call that moved it, and streams belong to a device.
* `comm/world` (the job, or its active part) and `comm/collectives` (observers), per process:
  torch's groups belong to a process, and backward sends, too.
* `fusion`, `rowwise_kernels` (regions by name, number of graphs), per process: torch registers
  operators by name, and shares a compiled graph between modules with the same code.

A proof sets options of a program (`offload_all_sizes`, `listen_to_stores`, `record_near_ties`).
They are read only where the program is built or where random numbers are drawn.

"""

TWICE = """## One idea in two places

Most ideas have one implementation. All probes of kernels use `kernels/probe.py`. All probes of
split sequences use `sequence_pipelining/trial.py`. Tensors that autograd saves go through
`storage/saved_tensors_slot.py`, and `pipeline/timeline/simulation.py` computes every time of a
step.

An idea has several implementations only if each one sees what the others cannot see:

* **A forward without values.** `tracing/recording.py` sees operators and storages, below autograd.
  `propagation/trace.py` sees named dims in calls of torch, above autograd.
  `initial/recorded_init.py` records how a model is created.
* **Tensors that differ by rank.** `propagation/follower.py` finds them. `gradient_proof.py` proves
  the result without the layouts of `follower.py`.
* **Communication.** In `comm/collectives.py` modules report whose collective it is.
  `comm/fake_rank.py` runs one rank without the others. `launch/recorded_calls.py` watches ranks of
  a job that may be stuck.
* **Norms.** They are written by hand (`kernels/norm.py`), generated (`rowwise_kernels`) or compiled
  (`fusion`). Nobody has measured yet on a GPU which is faster. `sharding/norms.py` has norms over
  sharded rows.
"""


@cache
def floors(room: str = "") -> list[list[str]]:
    """The rooms of each floor, the top floor first; with `room`, of the floors inside it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    within = ".".join(filter(None, ("schedlang", room)))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next((c["layers"] for c in contracts if c["containers"] == [within]), [])
    return [[name.strip() for name in re.split("[:|]", floor)] for floor in layers]


@cache
def excluded_folders() -> tuple[Path, ...]:
    """Folders that import-linter ignores: commands, which no room imports."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    imports = (
        line
        for c in settings["tool"]["importlinter"]["contracts"]
        for line in c.get("ignore_imports", ())
    )
    return tuple(ROOT / line.partition(".*")[0].replace(".", "/") for line in imports)


def files(room: str) -> list[Path]:
    """The Python files of a room; links to the folders beside the package are followed."""
    folder = ROOT / "schedlang" / room
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    return [
        path
        for path in paths
        if not any(path.is_relative_to(folder_path) for folder_path in excluded_folders())
    ]


def first_sentence(room: str) -> str:
    """The first sentence of a room's docstring."""
    path = ROOT / "schedlang" / room
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    sentence = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return sentence.removeprefix(f"{room}: ").removesuffix(".").replace("|", "\\|")


def doors_table() -> str:
    """The table of doors, in their order."""
    text = "| door | takes | gives | |\n|---|---|---|---|\n"
    for door in (*MAIN_DOORS, *SIDE_DOORS):
        arguments = ", ".join(door.takes)
        text += f"| `{door.module}.{door.name}` | {arguments} | `{door.gives}` | {door.about} |\n"
    return text


def row_table() -> str:
    """The table of the steps that one row takes, in order."""
    lines = (f"| `{module}.{name}` | {about} |\n" for module, name, about in ROW_STEPS)
    return "\nOne row on this way, `shard(col, over=tp)`:\n\n| | |\n|---|---|\n" + "".join(lines)


def rooms_table(within: str = "") -> str:
    """The table of rooms, the top floor first; inside a room, single files are listed below it."""
    floor_list, single_files = floors(within), []
    text = "| floor | room | files | does |\n|---|---|---|---|\n"
    for number, floor in enumerate(floor_list):
        for name in sorted(floor):
            path = f"{within}/{name}" if within else name
            if within and not (ROOT / "schedlang" / path).is_dir():
                single_files.append(f"`{name}` ({len(floor_list) - number - 1})")
                continue
            row = (
                str(len(floor_list) - number - 1),
                f"`{name}`",
                str(len(files(path))),
                first_sentence(path),
            )
            text += f"| {' | '.join(row)} |\n"
    single = (
        f"\nSingle files, with their floors: {', '.join(single_files)}.\n" if single_files else ""
    )
    return f"{text}{single}\n"


def page() -> str:
    """The text of docs/architecture.md."""
    inside = "".join(f"Inside `{room}`:\n\n{rooms_table(room)}" for room in ("passes", "runtime"))
    return (
        HEAD + doors_table() + row_table() + ROOMS + rooms_table() + inside + STATE + TWICE
    ).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
