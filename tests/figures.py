"""How large the code is: files, lines, functions and what of it is typed, room by room."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from schedlang.garbage_collection import without_collector

ROOT = Path(__file__).parent.parent
ROOMS = ("the language", "primitives", "passes", "runtime", "kernels", "tests")
Function = ast.FunctionDef | ast.AsyncFunctionDef
HOLDS = (ast.stmt, ast.excepthandler, ast.match_case)


@dataclass(frozen=True)
class Figures:
    """Lines of each file and function of a room, and how many public functions are typed."""

    files: Sequence[int]
    functions: Sequence[int]
    public: int
    typed: int


@cache
def parsed(path: Path) -> ast.Module:
    """A file as syntax: very many objects, which the garbage collector does not look at."""
    with without_collector():
        found = ast.parse(path.read_text())
    gc.freeze()
    return found


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, as `ast.walk` orders them, for all tests that look for some."""
    return tuple(ast.walk(parsed(path)))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands right inside a node and is, or may hold, a statement: no expression does."""
    return (one for one in ast.iter_child_nodes(node) if isinstance(one, HOLDS))


def paths(room: str) -> Iterator[Path]:
    """The Python files of a room; the language is what is in none of the others."""
    inside = ROOT / "schedlang"
    folder = {"the language": inside, "runtime": inside / room, "kernels": inside / room}
    for path in sorted(folder.get(room, ROOT / room).rglob("*.py")):
        names = path.relative_to(ROOT).parts
        others = ("runtime", "kernels", "primitives", "passes")
        if room != "the language" or names[1] not in others:
            yield path


def figures(room: str) -> Figures:
    """What is counted in a room."""
    every = list(paths(room))
    read = every if room != "tests" else ()  # their functions are none of the product's
    found = [node for path in read for node in nodes(path.resolve())]
    functions = [node for node in found if isinstance(node, Function)]
    public = [node for node in functions if not node.name.startswith("_")]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    files = [len(path.read_text().splitlines()) for path in every]
    return Figures(files, lengths, len(public), sum(map(is_typed, public)))


def is_typed(node: Function) -> bool:
    """Have the result and all arguments but the first of a method a type?"""
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    named = [one for one in every if one is not None and one.arg not in ("self", "cls", "ctx")]
    return node.returns is not None and all(one.annotation is not None for one in named)


def table() -> str:
    """The figures of all rooms, rounded: counts to tens, the longest upwards to tens.

    Lines count comments and blanks; `typed` is the share of public functions whose every argument
    and result has a type (Triton's own have none).
    """
    text = "| room | files | lines | file: median, longest | function: median, longest |"
    text += " typed |\n|---|---|---|---|---|---|\n"
    for room in ROOMS:
        found = figures(room)
        lines = f"{round(sum(found.files), -3):,}".replace(",", " ")
        cells = [room, str(_tens(len(found.files))), lines]
        cells.append(f"{_tens(median(found.files))}, {_up(max(found.files))}")
        if found.functions:
            cells.append(f"{round(median(found.functions))}, {_up(max(found.functions))}")
            cells.append(f"{100 * found.typed // found.public} %")
        text += f"| {' | '.join([*cells, '', ''][:6])} |\n"
    return text


def _tens(count: float) -> int:
    return round(count / 10) * 10


def _up(count: int) -> int:
    return -(-count // 10) * 10


if __name__ == "__main__":
    print(table())
