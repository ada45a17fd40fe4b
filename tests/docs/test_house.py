"""Rules of the repository: docstrings, lengths, packages, imports, help texts."""

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
from tests.tiers import in_part, parse_part

ROOT = Path(__file__).parents[2]
FOLDERS = ("schedlang", "primitives", "passes")
FILE_LIMIT, FUNCTION_LIMIT, LINE_LIMIT = 600, 60, 100
TEXT_SUFFIXES = {
    ".py",
    ".sched",
    ".lark",
    ".md",
    ".toml",
    ".txt",
    ".cfg",
    ".json",
    ".yml",
    ".yaml",
    ".svg",
}
MAY_IMPORT_TORCH = (
    *("schedlang/runtime/", "schedlang/kernels/", "schedlang/ir/model.py"),
    *("passes/verify/", "passes/localize/", "passes/judge/", "passes/prove.py"),
    "schedlang/ir/pytree.py",
    "schedlang/lightning.py",  # who asks for it has imported Lightning
    "schedlang/testing/accelerator/",
    "schedlang/testing/gpu/",
)

# every command of the design; a help text may only name those that exist
VERBS = {"fmt", "check", "tree", "plan", "diff", "verify", "simulate", "init", "run", "tune"}

# split in two, so that this file does not break its own rule
MACHINE_PATHS = ("/wo" + "rk/", "/tm" + "p/v/", "/ho" + "me/", "/ro" + "ot/", "/Us" + "ers/")
PACKAGE_INDEXES = (
    "py" + "pi.",
    "pythonho" + "sted",
    "index" + "-url",
    "/sim" + "ple/",
    "download.py" + "torch",
)


@cache
def tracked_files() -> tuple[Path, ...]:
    """All files that git tracks or would add, without links."""
    result = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True
    )
    if result.returncode:
        pytest.skip("not a clone: git does not list its files")
    paths = (ROOT / name for name in result.stdout.decode().split("\0") if name)
    return tuple(sorted(p for p in paths if p.is_file() and not p.is_symlink()))


def python_files(*folders: str) -> list[Path]:
    """The Python files in some folders, or all."""
    return [
        p
        for p in tracked_files()
        if p.suffix == ".py" and (not folders or path_parts(p)[0] in folders)
    ]


def path_parts(path: Path) -> tuple[str, ...]:
    """The parts of a path below the repository."""
    return path.relative_to(ROOT).parts


def relative_path(path: Path) -> str:
    """A path below the repository, as text."""
    return path.relative_to(ROOT).as_posix()


@cache
def project_settings() -> dict[str, Any]:
    """The settings in pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def definitions(path: Path) -> tuple[tuple[str, Definition, bool], ...]:
    """Every function and class of a file: its dotted name, its node, and whether it is public."""

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
    """A Python file begins with a docstring, a grammar or script with a comment."""
    missing = []
    for path in tracked_files():
        lines = (
            path.read_text().split("\n")
            if path.suffix in TEXT_SUFFIXES or path_parts(path)[0] == ".ci"
            else []
        )
        if path.suffix == ".py":
            docstring = lines[0].startswith('"""') and (ast.get_docstring(parsed(path)) or "")
            missing += (
                [relative_path(path)] if not docstring or len(docstring.split("\n")[0]) < 12 else []
            )
        elif path.suffix == ".lark" or path_parts(path)[0] == ".ci":
            first = lines[1] if lines[0].startswith("#!") else lines[0]
            missing += [relative_path(path)] if not first.startswith(("#", "//")) else []
    assert not missing, "\n".join(missing)


def test_public_names_have_docstrings() -> None:
    """Every public function and class has a docstring."""
    missing = [
        f"{relative_path(path)}:{node.lineno} {dotted}"
        for path in python_files(*FOLDERS)
        for dotted, node, public in definitions(path)
        if public and not ast.get_docstring(node)
    ]
    assert not missing, "\n".join(missing)


def test_tests_state_their_property() -> None:
    """Every test has a docstring."""
    missing = [
        f"{relative_path(path)}:{node.lineno} {dotted}"
        for path in python_files("tests")
        for dotted, node, _ in definitions(path)
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not missing, "\n".join(missing)


def test_no_machine_and_no_index_is_named() -> None:
    """No file names a folder of a developer's machine, or a package index."""
    problems = [
        f"{relative_path(path)}:{number}: {line.strip()[:80]}"
        for path in tracked_files()
        if path.suffix in TEXT_SUFFIXES or not path.suffix
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if any(word in line for word in (*MACHINE_PATHS, *PACKAGE_INDEXES))
    ]
    assert not problems, "\n".join(problems)


# first words of docstrings that are neither a verb nor the name of a thing
VAGUE_WORDS = {
    *("What", "Of", "That", "Which", "Those", "Where", "How", "Whatever", "Why", "Who", "Whose"),
    *("When", "Its", "It", "So", "There", "Into", "Until", "Unless", "Meanwhile"),
    *("Is", "Does", "Has", "May", "Can", "Was", "Are", "If", "And", "To"),
    *("As", "By", "From", "For", "With", "Without", "Inside", "Within", "In", "At", "On", "Over"),
    *("After", "Before", "Under", "Around", "While", "Between", "Beside", "Along", "Through"),
}


def test_docstrings_begin_with_a_verb_or_a_thing() -> None:
    """The first word of a docstring is a verb or names a thing."""
    vague = [
        f"{relative_path(path)} {dotted}: {summary}"
        for path in python_files(*FOLDERS)
        for dotted, node in [("", parsed(path)), *((d, n) for d, n, _ in definitions(path))]
        if (summary := (ast.get_docstring(node) or "").split("\n")[0])
        if re.split(r"\W", summary, maxsplit=1)[0] in VAGUE_WORDS
    ]
    assert not vague, "\n".join(vague)


# ---- how long it is -------------------------------------------------------------------------


def test_files_are_short() -> None:
    """No file is longer than the limit; `pytest -s` shows the longest."""
    lengths = {relative_path(p): len(p.read_text().splitlines()) for p in python_files(*FOLDERS)}
    longest = sorted(lengths.items(), key=lambda item: -item[1])[:10]
    print("\n" + "\n".join(f"{length:4}  {path}" for path, length in longest))
    assert longest[0][1] <= FILE_LIMIT, longest[0]


def test_functions_are_short() -> None:
    """No function is longer than the limit, without its signature and docstring."""
    too_long = [
        f"{relative_path(path)}:{node.lineno} {dotted}: {node.end_lineno - first_line(node) + 1}"
        for path in python_files(*FOLDERS, "examples")
        for dotted, node, _ in definitions(path)
        if not isinstance(node, ast.ClassDef) and node.end_lineno is not None
        if node.end_lineno - first_line(node) + 1 > FUNCTION_LIMIT
    ]
    assert not too_long, "\n".join(too_long)


def first_line(node: Definition) -> int:
    """The line of a definition's first statement after the docstring."""
    has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
    return node.body[has_docstring].lineno


def test_lines_are_short() -> None:
    """Lines of programs and schedules have at most 100 columns."""
    too_long = [
        f"{relative_path(path)}:{number}"
        for path in tracked_files()
        if path.suffix in (".py", ".sched") or path_parts(path)[0] == ".ci"
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if len(line.partition("  # type: ")[0].partition("  # noqa")[0]) > LINE_LIMIT
    ]
    assert not too_long, "\n".join(too_long)


# ---- packages -------------------------------------------------------------------------------


def test_packages_are_listed() -> None:
    """pyproject.toml lists exactly the folders that have code of the package."""
    inside = {".".join(path_parts(path)[:-1]) for path in python_files(*FOLDERS)}
    expected = {p if p.startswith("schedlang") else f"schedlang.{p}" for p in inside}
    assert set(project_settings()["tool"]["setuptools"]["packages"]) == expected


def test_links_resolve() -> None:
    """`schedlang/primitives` and `schedlang/passes` are links to the top-level folders."""
    for folder in ("primitives", "passes"):
        link = ROOT / "schedlang" / folder
        assert link.is_symlink() and link.readlink() == Path("..") / folder
        assert link.resolve() == (ROOT / folder).resolve() and link.is_dir()
        mapped = project_settings()["tool"]["setuptools"]["package-dir"][f"schedlang.{folder}"]
        assert mapped == folder


def test_types_are_for_users_too() -> None:
    """py.typed and the grammar are package data."""
    assert (ROOT / "schedlang" / "py.typed").is_file()
    assert set(project_settings()["tool"]["setuptools"]["package-data"]["schedlang"]) >= {
        "py.typed",
        "*.lark",
    }


# ---- imports --------------------------------------------------------------------------------


def test_imports_go_down_the_floors() -> None:
    """import-linter's layers are kept."""
    result = forks.run_interpreter(
        "-c", "from importlinter.cli import lint_imports_command as c; c()", cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr


def import_statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements that run when a file is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for statement in child.orelse:
                yield from import_statements(statement)
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from import_statements(child)


def test_torch_waits_for_whoever_needs_it() -> None:
    """Outside of the listed files no file imports torch, or a package that does, when imported."""
    early = []
    for path in python_files(*FOLDERS):
        if relative_path(path).startswith(MAY_IMPORT_TORCH):
            continue
        for node in import_statements(parsed(path)):
            if isinstance(node, ast.ImportFrom):
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                imported = [alias.name for alias in node.names]
            heavy = ("torch", "triton", "transformers")
            if any(w.startswith(heavy) for w in imported):
                early.append(f"{relative_path(path)}:{node.lineno}")
    assert not early, "\n".join(early)


# ---- words ----------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """The commands of schedlang, by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_help_names_verbs_that_exist() -> None:
    """Help texts name only existing commands."""
    existing = commands()
    absent = []
    for verb, command in existing.items():
        texts = [command.help or "", *(getattr(p, "help", None) or "" for p in command.params)]
        mentioned = {word for text in texts for word in re.findall(r"`(\w+)[^`]*`", text)}
        absent += [f"{verb}: {word}" for word in sorted(mentioned & VERBS - set(existing))]
    assert not absent, "\n".join(absent)


def test_messages_name_verbs_that_exist() -> None:
    """Every `schedlang COMMAND` in a message or docstring exists."""
    absent = [
        f"{relative_path(path)}: schedlang {word}"
        for path in python_files(*FOLDERS, "examples")
        for word in re.findall(r"`schedlang (\w+)", path.read_text())
        if word not in commands()
    ]
    assert not absent, "\n".join(absent)


# ---- parts of a tier ------------------------------------------------------------------------


def test_parts_of_a_tier_are_the_whole() -> None:
    """Each test is in exactly one part of `--part K/N`; wrong values are refused."""
    names = [f"tests/a/test_b.py::test_c[{n}]" for n in range(500)]
    for count in (1, 3, 8):
        parts_of_tests = [
            [k for k in range(1, count + 1) if in_part(name, k, count)] for name in names
        ]
        assert all(len(parts) == 1 for parts in parts_of_tests)
        assert {parts[0] for parts in parts_of_tests} == set(range(1, count + 1))
    for text in ("0/8", "9/8", "3", "a/b"):
        with pytest.raises(ArgumentTypeError):
            parse_part(text)
