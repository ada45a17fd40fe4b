"""The rules of the house: what every file says, how long it may be, and what it may import."""

import ast
import re
import subprocess
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from schedlang.cli import app
from tests import forks
from tests.figures import parsed, statements
from tests.tiers import in_part, part

ROOT = Path(__file__).parents[2]
FOLDERS = ("schedlang", "primitives", "passes")
FILE_LIMIT, FUNCTION_LIMIT, LINE_LIMIT = 600, 60, 100
TEXT = {".py", ".sched", ".lark", ".md", ".toml", ".txt", ".cfg", ".json", ".yml", ".yaml", ".svg"}
AT_TORCH = (
    *("schedlang/runtime/", "schedlang/kernels/", "schedlang/ir/model.py"),
    *("passes/verify/", "passes/localize/", "passes/judge/", "passes/prove.py"),
    "schedlang/ir/pytree.py",
    "schedlang/lightning.py",  # who asks for it has imported Lightning
    "schedlang/testing/accelerator/",
    "schedlang/testing/gpu/",
)

# every verb that the design knows; a help text may only name those that exist
VERBS = {"fmt", "check", "tree", "plan", "diff", "verify", "simulate", "init", "run", "tune"}

# spelled apart, so that this file does not break its own rule
MACHINES = ("/wo" + "rk/", "/tm" + "p/v/", "/ho" + "me/", "/ro" + "ot/", "/Us" + "ers/")
INDEXES = (
    "py" + "pi.",
    "pythonho" + "sted",
    "index" + "-url",
    "/sim" + "ple/",
    "download.py" + "torch",
)


@cache
def files() -> tuple[Path, ...]:
    """Everything that git tracks or would add, links left out."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True
    )
    if done.returncode:
        pytest.skip("not a clone: git does not list its files")
    paths = (ROOT / name for name in done.stdout.decode().split("\0") if name)
    return tuple(sorted(p for p in paths if p.is_file() and not p.is_symlink()))


def sources(*folders: str) -> list[Path]:
    """The Python files below some folders, or all of them."""
    return [p for p in files() if p.suffix == ".py" and (not folders or name(p)[0] in folders)]


def name(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parts


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def definitions(path: Path) -> tuple[tuple[str, Definition, bool], ...]:
    """Every function and class of a file: its dotted name, and whether users can reach it."""

    def below(node: ast.AST, prefix: str, public: bool) -> Iterator[tuple[str, Definition, bool]]:
        for child in statements(node):
            if isinstance(child, Definition):
                dotted, reached = prefix + child.name, public and not child.name.startswith("_")
                yield dotted, child, reached
                inside = reached and isinstance(child, ast.ClassDef)
                yield from below(child, f"{dotted}.", inside)
            else:
                yield from below(child, prefix, public)

    return tuple(below(parsed(path), "", True))


# ---- what a file says -----------------------------------------------------------------------


def test_first_line_says_what_the_file_does() -> None:
    """A Python file begins with its docstring, a grammar or a program with a comment."""
    silent = []
    for path in files():
        lines = (
            path.read_text().split("\n") if path.suffix in TEXT or name(path)[0] == ".ci" else []
        )
        if path.suffix == ".py":
            said = lines[0].startswith('"""') and (ast.get_docstring(parsed(path)) or "")
            silent += [shown(path)] if not said or len(said.split("\n")[0]) < 12 else []
        elif path.suffix == ".lark" or name(path)[0] == ".ci":
            first = lines[1] if lines[0].startswith("#!") else lines[0]
            silent += [shown(path)] if not first.startswith(("#", "//")) else []
    assert not silent, "\n".join(silent)


def test_public_names_have_docstrings() -> None:
    """Whatever users or other rooms can reach says what it does."""
    bare = [
        f"{shown(path)}:{node.lineno} {dotted}"
        for path in sources(*FOLDERS)
        for dotted, node, public in definitions(path)
        if public and not ast.get_docstring(node)
    ]
    assert not bare, "\n".join(bare)


def test_tests_state_their_property() -> None:
    """The docstring of a test is the property that it tests."""
    bare = [
        f"{shown(path)}:{node.lineno} {dotted}"
        for path in sources("tests")
        for dotted, node, _ in definitions(path)
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not bare, "\n".join(bare)


def test_no_machine_and_no_index_is_named() -> None:
    """Nothing here is about the machine on which it was written, or where packages come from."""
    told = [
        f"{shown(path)}:{number}: {line.strip()[:80]}"
        for path in files()
        if path.suffix in TEXT or not path.suffix
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if any(word in line for word in (*MACHINES, *INDEXES))
    ]
    assert not told, "\n".join(told)


# a docstring that begins so names no thing, and says no deed
VAGUE = {
    *("What", "Of", "That", "Which", "Those", "Where", "How", "Whatever", "Why", "Who", "Whose"),
    *("When", "Its", "It", "So", "There", "Into", "Until", "Unless", "Meanwhile"),
    *("Is", "Does", "Has", "May", "Can", "Was", "Are", "If", "And", "To"),
    *("As", "By", "From", "For", "With", "Without", "Inside", "Within", "In", "At", "On", "Over"),
    *("After", "Before", "Under", "Around", "While", "Between", "Beside", "Along", "Through"),
}


def test_docstrings_begin_with_a_verb_or_a_thing() -> None:
    """The first word of a docstring says what is done, or names what the thing is."""
    vague = [
        f"{shown(path)} {dotted}: {said}"
        for path in sources(*FOLDERS)
        for dotted, node in [("", parsed(path)), *((d, n) for d, n, _ in definitions(path))]
        if (said := (ast.get_docstring(node) or "").split("\n")[0])
        if re.split(r"\W", said, maxsplit=1)[0] in VAGUE
    ]
    assert not vague, "\n".join(vague)


# ---- how long it is -------------------------------------------------------------------------


def test_files_are_short() -> None:
    """A file does one thing, and fits; `pytest -s` shows the longest."""
    lengths = {shown(p): len(p.read_text().splitlines()) for p in sources(*FOLDERS)}
    longest = sorted(lengths.items(), key=lambda item: -item[1])[:10]
    print("\n" + "\n".join(f"{length:4}  {path}" for path, length in longest))
    assert longest[0][1] <= FILE_LIMIT, longest[0]


def test_functions_are_short() -> None:
    """A function fits on a screen, without its signature and docstring."""
    long = [
        f"{shown(path)}:{node.lineno} {dotted}: {node.end_lineno - begin(node) + 1}"
        for path in sources(*FOLDERS, "examples")
        for dotted, node, _ in definitions(path)
        if not isinstance(node, ast.ClassDef) and node.end_lineno is not None
        if node.end_lineno - begin(node) + 1 > FUNCTION_LIMIT
    ]
    assert not long, "\n".join(long)


def begin(node: Definition) -> int:
    """The line of its first statement after the docstring."""
    told = ast.get_docstring(node) is not None and len(node.body) > 1
    return node.body[told].lineno


def test_lines_are_short() -> None:
    """Lines of programs and schedules end at column 100."""
    long = [
        f"{shown(path)}:{number}"
        for path in files()
        if path.suffix in (".py", ".sched") or name(path)[0] == ".ci"
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if len(line.partition("  # type: ")[0].partition("  # noqa")[0]) > LINE_LIMIT
    ]
    assert not long, "\n".join(long)


# ---- packages -------------------------------------------------------------------------------


def test_packages_are_listed() -> None:
    """pyproject lists by hand every folder that holds code of the package, and no other."""
    inside = {".".join(name(path)[:-1]) for path in sources(*FOLDERS)}
    found = {p if p.startswith("schedlang") else f"schedlang.{p}" for p in inside}
    assert set(project()["tool"]["setuptools"]["packages"]) == found


def test_links_resolve() -> None:
    """`schedlang/primitives` and `schedlang/passes` are links to the folders at the top."""
    for folder in ("primitives", "passes"):
        link = ROOT / "schedlang" / folder
        assert link.is_symlink() and link.readlink() == Path("..") / folder
        assert link.resolve() == (ROOT / folder).resolve() and link.is_dir()
        mapped = project()["tool"]["setuptools"]["package-dir"][f"schedlang.{folder}"]
        assert mapped == folder


def test_types_are_for_users_too() -> None:
    """py.typed and the grammar travel with the package."""
    assert (ROOT / "schedlang" / "py.typed").is_file()
    assert set(project()["tool"]["setuptools"]["package-data"]["schedlang"]) >= {
        "py.typed",
        "*.lark",
    }


# ---- imports --------------------------------------------------------------------------------


def test_imports_go_down_the_floors() -> None:
    """import-linter keeps its contract, which places every file on a floor."""
    done = forks.anew("-c", "from importlinter.cli import lint_imports_command as c; c()", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def at_import(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a file is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for rest in child.orelse:
                yield from at_import(rest)
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_import(child)


def test_torch_waits_for_whoever_needs_it() -> None:
    """Outside of runtime, kernels and model.py no file imports torch, or what does, on import."""
    early = []
    for path in sources(*FOLDERS):
        if shown(path).startswith(AT_TORCH):
            continue
        for node in at_import(parsed(path)):
            if isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                whole = [alias.name for alias in node.names]
            heavy = ("torch", "triton", "transformers")
            if any(w.startswith(heavy) for w in whole):
                early.append(f"{shown(path)}:{node.lineno}")
    assert not early, "\n".join(early)


# ---- words ----------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """The verbs that exist."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_help_names_verbs_that_exist() -> None:
    """No help of a verb or an option speaks of a verb that is not there."""
    found = commands()
    absent = []
    for verb, command in found.items():
        texts = [command.help or "", *(getattr(p, "help", None) or "" for p in command.params)]
        named = {word for text in texts for word in re.findall(r"`(\w+)[^`]*`", text)}
        absent += [f"{verb}: {word}" for word in sorted(named & VERBS - set(found))]
    assert not absent, "\n".join(absent)


def test_messages_name_verbs_that_exist() -> None:
    """Where a message or a docstring tells what to type, `schedlang VERB` can be typed."""
    absent = [
        f"{shown(path)}: schedlang {word}"
        for path in sources(*FOLDERS, "examples")
        for word in re.findall(r"`schedlang (\w+)", path.read_text())
        if word not in commands()
    ]
    assert not absent, "\n".join(absent)


# ---- parts of a tier ------------------------------------------------------------------------


def test_parts_of_a_tier_are_the_whole() -> None:
    """Each test belongs to one of the parts of `--part K/N`; what is no part is refused."""
    names = [f"tests/a/test_b.py::test_c[{n}]" for n in range(500)]
    for of in (1, 3, 8):
        homes = [[k for k in range(1, of + 1) if in_part(name, k, of)] for name in names]
        assert all(len(found) == 1 for found in homes)
        assert {found[0] for found in homes} == set(range(1, of + 1))
    for wrong in ("0/8", "9/8", "3", "a/b"):
        with pytest.raises(ArgumentTypeError):
            part(wrong)
