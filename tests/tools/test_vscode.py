"""The VS Code extension, run by node: the server that it starts, and its grammar's colours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from schedlang.editors.lexer import SchedLexer
from schedlang.editors.rules import SCOPES
from tests.samples import SAMPLES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "editors" / "vscode"
SCRIPTS = ROOT / "tests" / "node"
# the folder in which `npm install` put the extension's packages
PACKAGES = Path(os.environ.get("SCHEDLANG_NODE_MODULES", FOLDER / "node_modules"))
NODE = shutil.which("node") or ""

needs_node = pytest.mark.skipif(not NODE, reason="node is not installed")
needs_packages = pytest.mark.skipif(
    not NODE or not (PACKAGES / "vscode-textmate").is_dir(),
    reason="`npm install` has not been run in editors/vscode",
)
SETTINGS = {"schedlang.command": "schedlang", "schedlang.model": True}


def run_node(script: str, argument: Path, text: str) -> Any:
    """The JSON that a script prints."""
    result = subprocess.run(
        [NODE, SCRIPTS / script, argument],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, "NODE_PATH": str(PACKAGES)},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def run_extension(*events: Any, trusted: bool = True, **settings: Any) -> list[Any]:
    """The events of the extension, from activation to its end."""
    state = {"trusted": trusted, "settings": SETTINGS | settings, "events": events}
    record = run_node("start_extension.js", FOLDER / "extension.js", json.dumps(state))
    assert record["subscriptions"] == 2
    return list(record["said"])


@needs_node
def test_starts_the_language_server() -> None:
    """`schedlang lsp` is started for schedules, and stopped at the end."""
    server = {"command": "schedlang", "args": ["lsp", "--model"]}
    files = [{"scheme": "file", "language": "sched"}]
    assert run_extension() == [{"start": server, "for": files}, {"stop": server}]
    package = json.loads((FOLDER / "package.json").read_text())
    assert package["contributes"]["languages"][0]["id"] == "sched"
    declared = package["contributes"]["configuration"]["properties"]
    assert {name: setting["default"] for name, setting in declared.items()} == SETTINGS


@needs_node
@pytest.mark.parametrize(
    ("trusted", "model", "said"),
    [(True, True, "--model"), (False, True, "--no-model"), (True, False, "--no-model")],
)
def test_models_are_imported_where_it_is_allowed(trusted: bool, model: bool, said: str) -> None:
    """No model file is imported in an untrusted folder, or against the setting."""
    first = run_extension(trusted=trusted, **{"schedlang.model": model})[0]
    assert first["start"]["args"] == ["lsp", said]


@needs_node
def test_starts_anew_when_settings_or_trust_change() -> None:
    """Changed trust or schedlang settings restart the server; other settings do not."""
    own_settings = {
        "name": "settings",
        "of": "schedlang",
        "then": {"settings": SETTINGS | {"schedlang.command": "other"}},
    }
    foreign = {"name": "settings", "of": "editor"}
    trust = {"name": "trust", "then": {"trusted": True}}
    events = run_extension(trust, foreign, own_settings, trusted=False)
    steps = [(next(iter(event)), event.get("start", event.get("stop"))) for event in events]
    assert [(kind, server["command"], server["args"][1]) for kind, server in steps] == [
        ("start", "schedlang", "--no-model"),
        ("stop", "schedlang", "--no-model"),
        ("start", "schedlang", "--model"),
        ("stop", "schedlang", "--model"),
        ("start", "other", "--model"),
        ("stop", "other", "--model"),
    ]


def test_the_options_it_gives_exist() -> None:
    """`lsp` has the options that the extension uses."""
    from typer.testing import CliRunner

    from schedlang.cli import app

    output = CliRunner().invoke(app, ["lsp", "--help"], env={"COLUMNS": "200"}).output
    assert "--model" in output and "--no-model" in output


def test_the_package_holds_what_it_names() -> None:
    """Every file in the manifest exists, and is packed."""
    package = json.loads((FOLDER / "package.json").read_text())
    patterns = [pattern for pattern in package["files"] if not pattern.startswith("node_modules")]
    assert package["dependencies"] and len(patterns) < len(package["files"]), (
        "its client is packed, too"
    )
    packed = {path for pattern in patterns for path in FOLDER.glob(pattern)}
    paths = [package["main"], *(entry["path"] for entry in package["contributes"]["grammars"])]
    paths += [entry["configuration"] for entry in package["contributes"]["languages"]]
    assert {(FOLDER / name).resolve() for name in paths} <= {path.resolve() for path in packed}
    assert "onLanguage:sched" in package["activationEvents"]


@needs_packages
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_editors_engine_colours_as_pygments_does(name: str) -> None:
    """VS Code's engine gives every token the scope that Pygments gives it."""
    from schedlang.editors.lexer import TOKENS

    text = SAMPLES[name]
    kinds = {token: kind for kind, token in TOKENS.items()}
    expected: list[list[list[str]]] = [[]]
    for token, piece in SchedLexer(stripnl=False, ensurenl=False).get_tokens(text):
        for number, part in enumerate(piece.split("\n")):
            expected += [[]] if number else []
            if part.strip():
                expected[-1].append([part, f"{SCOPES[kinds[token]]}.sched"])
    lines = run_node("tokens.js", FOLDER / "syntaxes" / "sched.tmLanguage.json", text)
    tokens = [[piece for piece in line if piece[0].strip()] for line in lines]
    assert tokens == expected
