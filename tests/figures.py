"""Size of the code, by room: files, lines, functions, and the share that is typed."""

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
    """Lines of each file and function of a room, and numbers of public and typed functions."""

    files: Sequence[int]
    functions: Sequence[int]
    public: int
    typed: int


@cache
def parsed(path: Path) -> ast.Module:
    """Parse a file; the garbage collector never visits the result."""
    with without_collector():
        tree = ast.parse(path.read_text())
    gc.freeze()
    return tree


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file in the order of `ast.walk`, cached for all tests."""
    return tuple(ast.walk(parsed(path)))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The direct children of a node that are statements or may contain some."""
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, HOLDS))


def paths(room: str) -> Iterator[Path]:
    """The Python files of a room; the language is every file outside of the other rooms."""
    package = ROOT / "schedlang"
    folder = {"the language": package, "runtime": package / room, "kernels": package / room}
    for path in sorted(folder.get(room, ROOT / room).rglob("*.py")):
        names = path.relative_to(ROOT).parts
        separate_rooms = ("runtime", "kernels", "primitives", "passes")
        if room != "the language" or names[1] not in separate_rooms:
            yield path


def count_room(room: str) -> Figures:
    """Count the files and functions of a room."""
    all_paths = list(paths(room))
    code_paths = all_paths if room != "tests" else ()  # their functions are none of the product's
    all_nodes = [node for path in code_paths for node in nodes(path.resolve())]
    functions = [node for node in all_nodes if isinstance(node, Function)]
    public = [node for node in functions if not node.name.startswith("_")]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    files = [len(path.read_text().splitlines()) for path in all_paths]
    return Figures(files, lengths, len(public), sum(map(is_typed, public)))


def is_typed(node: Function) -> bool:
    """Whether the result and all arguments (without `self`) have types."""
    arguments = node.args
    all_arguments = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    typed_arguments = [
        argument
        for argument in all_arguments
        if argument is not None and argument.arg not in ("self", "cls", "ctx")
    ]
    return node.returns is not None and all(
        argument.annotation is not None for argument in typed_arguments
    )


def figures_table() -> str:
    """The table of all rooms; counts are rounded to tens, the longest up to tens.

    Lines count comments and blanks; `typed` is the share of public functions whose every argument
    and result has a type (Triton's own have none).
    """
    text = "| room | files | lines | file: median, longest | function: median, longest |"
    text += " typed |\n|---|---|---|---|---|---|\n"
    for room in ROOMS:
        counts = count_room(room)
        lines = f"{round(sum(counts.files), -3):,}".replace(",", " ")
        cells = [room, str(_round_tens(len(counts.files))), lines]
        cells.append(f"{_round_tens(median(counts.files))}, {_round_up(max(counts.files))}")
        if counts.functions:
            cells.append(f"{round(median(counts.functions))}, {_round_up(max(counts.functions))}")
            cells.append(f"{100 * counts.typed // counts.public} %")
        text += f"| {' | '.join([*cells, '', ''][:6])} |\n"
    return text


def _round_tens(count: float) -> int:
    return round(count / 10) * 10


def _round_up(count: int) -> int:
    return -(-count // 10) * 10


if __name__ == "__main__":
    print(figures_table())
