"""docs/architecture.md, drawn from the imports: `python -m tests.architecture_page` writes it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from schedlang.doors import SIDE, WAY
from tests.figures import parsed, statements, table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
HEAD = """# Architecture

A schedule goes one way, through a few doors; each gives one immutable value, and the next doors
read that. `schedlang/doors.py` is the list: open it first.

<!-- not played: a picture -->

```
text --read, parse--> File --expand--> Plan --propagate--> layouts --stages_of--> stages, timeline
                                         |                     (prepare: both, and what follows)
                                         |                                  |
                          account, rehearse, static              build, on each rank
                    (costs, memory, proofs: no ranks)                       |
                                                            Program --prove--> Report
```

"""
ROOMS = """
The language (text, names, plans) is read and tested without torch; what runs on ranks (`runtime`,
`kernels`) knows nothing of schedules. A primitive is one file that no pass knows by name: what it
makes of a plan are typed annotations (`ir/facets.py`), which know their row and are executed by
their kind, in one order (`passes/lower/build.py`); what one feature alone asks of a row is a
class that the primitive derives from (`ir/features.py`). `prepare` and `build` look once at what a
plan has of each kind, and enter nothing that it has not: a row that shards a linear layer meets no
cast, store, cut or order (`python -m tests.walk --list` names what it meets).
[How it works](how_it_works.md) follows one schedule through the doors. The command
`python -m schedlang.testing.gpu` stands beside them: it uses any of them, and none uses it.

## A forward, recorded

Whatever is asked of a model before there are ranks is asked of a forward without values:
`runtime/tracing/meta.py` lays the batch on the meta device (`without_values`), one mode runs
beside the model and tells of every call of torch (`runtime/propagation/trace.py`: `Trace`), and
what is followed from tensor to tensor is a lattice over these calls.

| lattice | in | follows | read by |
|---|---|---|---|
| `Recorded` | `propagation/trace.py` | calls, labels, draws | `propagate/original.py` |
| `Follower` | `propagation/follow.py` | how a rank's tensors lie | `propagate/dryrun.py` |
| `Typed` | `adjoint.py` | which differ by rank, both ways | `static_checks/gradients.py` |
| `Wiring` | `propagation/wired.py` | operators and the values between | `planner/operators` |
| `Sums` | `batch_statistics.py` | sums over rows | `propagate/original.py` |
| `_Feeding` | `propagation/feeds.py` | outputs of projections | `complete` |
| `_Naming` | `propagation/feeds.py` | numbers that name rows | `analyze/taking.py` |

`Typed` reads nothing of the layouts that `Follower` finds: the two derive apart what is compared.
Modes that are no lattice, and why: the recorder of units (`tracing/record.py`) follows storages
through operators, since what flows between stages by views and writes in place no function shows;
`Watched` of `rng` and the `Ambient` modes of `sequence_pipelining` and `context_parallel` open
functions that are composed of others, and change what these are given while a model really runs;
`activation_memory/second_run.py` runs each module twice and compares the two.

A step of each kind of rank is played once (`simulate/played_step.py`), and memory, time, what is
parked on a peer and the static proofs are read off such steps. Traffic is not: one forward of a
microbatch shows all stages together, on a rank of a job too, in 0.06 s of processor for `gpt2/3d`
where the played steps take 0.8 (0.08 and 1.1 for `llama/3d`, 0.03 and 0.17 for `mixtral/ep`), and
tests compare it with real ranks.

`rehearse` plays one rank of each kind with its kernels, slices and storages; the proofs play every
rank of a small world as bare as it sends, since they compare what two ranks send each other. Both
are built by `alone` and run by `runtime/played.py`. Which gradients are partial is derived beside
them, by `Typed`, for a proof may not read what it proves. Stand-ins for units of other stages
(`pipeline/stage.py: Stub`) run these for their shapes when a batch of a new shape comes, for which
nothing was recorded; programs of one preparation share what is found.

Whole tensors come of parts in one way for what has a holding (`checkpointing/holding.py:
assemble`), and are handed over as values where nothing tells beforehand how they lie: outputs, and
gradients of inputs (`runtime/whole.py`). `runtime/assembly.py` only names the parts of a program.

Text is parsed where somebody else may have written it, or will read it: a schedule, a plan that was
saved, a call that a help offers, a schedule that `init` proposes; these two are tried as they will
be pasted. Rows that are only tried are calls of the language (`elaborate/expand.py: of_calls`).

## Rooms

A file imports only from its own floor and from those below; `runtime` and `passes` have floors of
their own. import-linter holds the code to them, and `python -m tests.architecture_page` draws these
tables from the files.

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


def imported(tree: ast.AST, within: str = "schedlang") -> Iterator[str]:
    """What a file imports of a package; what only the type checker reads is left out."""
    for node in statements(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and module == within:
            yield from (name.name for name in node.names)
        elif module.startswith(f"{within}."):
            yield module.removeprefix(f"{within}.").split(".")[0]
        else:
            yield from imported(node, within)


@cache
def uses() -> Mapping[str, frozenset[str]]:
    """The other rooms that each room's files import."""
    rooms = {room for floor in floors() for room in floor}
    found = {}
    for room in rooms:
        named = {name for file in files(room) for name in imported(parsed(file.resolve()))}
        found[room] = frozenset(named & rooms - {room})
    return found


def doors() -> str:
    """The table of doors, in their order."""
    text = "| door | takes | gives | |\n|---|---|---|---|\n"
    for door in (*WAY, *SIDE):
        takes = ", ".join(door.takes)
        text += f"| `{door.module}.{door.name}` | {takes} | `{door.gives}` | {door.about} |\n"
    return text


def rooms(within: str = "") -> str:
    """A table of rooms, the top floor first."""
    inside = floors(within)
    text = "| floor | room | files | does |\n|---|---|---|---|\n"
    for number, floor in enumerate(inside):
        for part in sorted(floor):
            path = f"{within}/{part}" if within else part
            row = (str(len(inside) - number - 1), f"`{part}`", str(len(files(path))), said(path))
            text += f"| {' | '.join(row)} |\n"
    return text + "\n"


def page() -> str:
    """The text of docs/architecture.md."""
    inside = "".join(f"Inside `{room}`:\n\n{rooms(room)}" for room in ("passes", "runtime"))
    return HEAD + doors() + ROOMS + rooms() + inside + table()


if __name__ == "__main__":
    PAGE.write_text(page())
