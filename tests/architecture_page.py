"""docs/architecture.md, drawn from the files: `python -m tests.architecture_page` writes it."""

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

A schedule goes one way, through a few doors; each gives one immutable value, and the next doors
read that. `schedlang/doors.py` is the list: open it first.

<!-- not played: a picture -->

```
path --read--> Source --parse--> File --expand--> Plan --propagate--> Traced --stages_of--> Staged
                                                   |                layouts       stages, timeline
                                                   |
                                                   |-prepare (both, and what follows)-> Prepared
                                                   |                                       |
                                       account, rehearse, static                 build, on each rank
                                    (costs, memory, proofs: no ranks)                      |
                                                                          Program --prove--> Report
```

"""
ROOMS = """
The language (text, names, plans) is read and tested without torch. What runs on ranks (`runtime`,
`kernels`) knows nothing of schedules. A primitive is one file, and no pass knows it by name: its
`transform` adds layouts and annotations to the plan (`ir/annotations.py`), each with the number of
its row. `passes/lower/build.py` executes them by kind, in one fixed order. Some features need more
of a row, to rewrite a module or to recompute it: each has a class in `ir/features.py`, from which
the primitive derives. A feature that a plan does not use costs it nothing
(`python -m tests.walk --list` names the functions that a row meets).
[How it works](how_it_works.md) follows two rows through the doors, and says how a forward is
[recorded](how_it_works.md#a-forward-recorded) before there are ranks;
[contributing](../CONTRIBUTING.md) shows how to add a primitive.

## Rooms

A file imports only from its own floor and from those below; `runtime` and `passes` have floors of
their own. import-linter holds the code to them, and `python -m tests.architecture_page` draws these
tables from the files.

"""
STATE = """## State that no argument carries

A step also reads state of its thread or process. Each stands where torch calls what asks for it,
so that no argument reaches it: in backward, under saved-tensor hooks, inside the model's code.

* `scope` (step, microbatch, slice, module), by thread: a model's own calls ask for it, and a
  recomputation in backward takes it along (`scope.capture`).
* `modes`, by thread: torch keeps its stack of function modes by thread; a recomputation enters
  them again. `mixed_precision` imitates torch's autocast, which lies there too.
* `storage/saved` (policies around a module), by thread: torch has one slot of saved-tensor hooks,
  and asks the innermost.
* `rng/native` (calls that draw), by thread, in a value of the program: the model calls dropout.
* `storage/tiers`, `storage/copies` (where storages lie, streams), by process: a storage outlives
  the call that has moved it, and streams are a device's.
* `comm/world` (the job, or the part of it that is at work) and `comm/collectives` (who listens),
  by process: torch's groups are a process's, and backward sends too.
* `fusion`, `rowwise_kernels` (regions by name, graphs counted), by process: torch registers
  operators by name, and shares a compiled graph between modules of one code.

What a proof asks of a program (`everything_moves`, `watched`, `noting`) is read where the program
is built or where numbers are drawn, and by no other step.

"""

TWICE = """## One idea in two places

Probes of kernels share `kernels/probe.py`, those of split sequences
`sequence_pipelining/trial.py`; what autograd saves has one slot (`storage/saved.py`); every
time of a step is played by `pipeline/timeline/simulation.py`. Two engines stand for one idea
where each sees what the other cannot:

* A forward without values: operators and storages are seen below autograd (`tracing/record.py`),
  dims by name in calls of torch above it (`propagation/trace.py`); `initial/recorded.py` records
  how a model is made.
* Which tensors differ by rank: `adjoint.py` proves what `propagation/follow.py` found, and knows
  none of its layouts.
* What is sent: modules say whose a collective is (`comm/collectives.py`); `comm/tap.py` plays one
  rank without the others; `launch/recorded_calls.py` watches ranks of a job that may be stuck.
* A norm: by hand (`kernels/norm.py`), generated (`rowwise_kernels`), compiled (`fusion`): nobody
  has measured yet on a GPU which is quicker. `sharding/norms.py` has norms of parts of rows.
"""


@cache
def floors(room: str = "") -> list[list[str]]:
    """The rooms of each floor, the top floor first; those inside a room, where it has floors."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    within = ".".join(filter(None, ("schedlang", room)))
    contracts = told["tool"]["importlinter"]["contracts"]
    layers = next((c["layers"] for c in contracts if c["containers"] == [within]), [])
    return [[name.strip() for name in re.split("[:|]", floor)] for floor in layers]


@cache
def apart() -> tuple[Path, ...]:
    """Folders of commands that use any room and that none uses: import-linter leaves them out."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = (
        line
        for c in told["tool"]["importlinter"]["contracts"]
        for line in c.get("ignore_imports", ())
    )
    return tuple(ROOT / line.partition(".*")[0].replace(".", "/") for line in found)


def files(room: str) -> list[Path]:
    """The Python files of a room; links to the folders beside the package are followed."""
    folder = ROOT / "schedlang" / room
    found = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    return [path for path in found if not any(path.is_relative_to(one) for one in apart())]


def said(room: str) -> str:
    """The first sentence of a room about itself."""
    path = ROOT / "schedlang" / room
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    first = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return first.removeprefix(f"{room}: ").removesuffix(".").replace("|", "\\|")


def doors() -> str:
    """The table of doors, in their order."""
    text = "| door | takes | gives | |\n|---|---|---|---|\n"
    for door in (*MAIN_DOORS, *SIDE_DOORS):
        takes = ", ".join(door.takes)
        text += f"| `{door.module}.{door.name}` | {takes} | `{door.gives}` | {door.about} |\n"
    return text


def row() -> str:
    """The table of what happens to one row, in its order."""
    lines = (f"| `{module}.{name}` | {about} |\n" for module, name, about in ROW_STEPS)
    return "\nOne row on this way, `shard(col, over=tp)`:\n\n| | |\n|---|---|\n" + "".join(lines)


def rooms(within: str = "") -> str:
    """A table of rooms, the top floor first; inside a room, single files stand below it."""
    inside, alone = floors(within), []
    text = "| floor | room | files | does |\n|---|---|---|---|\n"
    for number, floor in enumerate(inside):
        for part in sorted(floor):
            path = f"{within}/{part}" if within else part
            if within and not (ROOT / "schedlang" / path).is_dir():
                alone.append(f"`{part}` ({len(inside) - number - 1})")
                continue
            row = (str(len(inside) - number - 1), f"`{part}`", str(len(files(path))), said(path))
            text += f"| {' | '.join(row)} |\n"
    single = f"\nSingle files, with their floors: {', '.join(alone)}.\n" if alone else ""
    return f"{text}{single}\n"


def page() -> str:
    """The text of docs/architecture.md."""
    inside = "".join(f"Inside `{room}`:\n\n{rooms(room)}" for room in ("passes", "runtime"))
    return (HEAD + doors() + row() + ROOMS + rooms() + inside + STATE + TWICE).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
