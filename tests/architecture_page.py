"""docs/architecture.md, drawn from the imports: `python -m tests.architecture_page` writes it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.figures import parsed, table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
HEAD = """# Architecture

The floors of the house, from the top down. A file imports only from its own floor and from those
below; `runtime` and `passes` have floors of their own. import-linter holds the code to these
tables, and `python -m tests.architecture_page` draws them from the imports: what each room uses is
what its files import, inside functions too.

Why it is so: the language (text, names, plan) can be read and tested without torch; a primitive is
one file that no pass knows by name; what runs on ranks (`runtime`, `kernels`) knows nothing of
schedules. [How it works](how_it_works.md) follows one schedule through the floors. The command
`python -m schedlang.testing.gpu` stands beside them: it uses any of them, and none uses it.

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
    found = (line for c in told["tool"]["importlinter"]["contracts"]
             for line in c.get("ignore_imports", ()))  # fmt: skip
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
    for node in ast.iter_child_nodes(tree):
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


def inner(room: str) -> str:
    """The rooms inside a room by floors, and which of the others each imports."""
    inside = floors(room)
    if not inside:
        return ""
    every = {name for floor in inside for name in floor}
    text = f"Inside `{room}`, from the top down:\n\n"
    text += "| floor | room | does | uses |\n|---|---|---|---|\n"
    for number, floor in enumerate(inside):
        for part in floor:
            paths = files(f"{room}/{part}")
            named = {n for p in paths for n in imported(parsed(p.resolve()), f"schedlang.{room}")}
            below = ", ".join(f"`{name}`" for name in sorted(named & every - {part}))
            name = f"`{part}`" + (f", {len(paths)} files" if len(paths) > 1 else "")
            row = (str(len(inside) - number - 1), name, said(f"{room}/{part}"), below)
            text += f"| {' | '.join(row)} |\n"
    return text + "\n"


def page() -> str:
    """The text of docs/architecture.md."""
    text = HEAD
    for number, floor in enumerate(floors()):
        text += f"## Floor {len(floors()) - number - 1}\n\n"
        text += "| room | does | uses |\n|---|---|---|\n"
        for room in sorted(floor):
            below = ", ".join(f"`{name}`" for name in sorted(uses()[room]))
            count = len(files(room))
            name = f"`{room}`" + (f", {count} files" if count > 1 else "")
            text += f"| {name} | {said(room)} | {below} |\n"
        text += "\n" + "".join(inner(room) for room in sorted(floor))
    return text + table()


if __name__ == "__main__":
    PAGE.write_text(page())
