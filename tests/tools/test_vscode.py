"""The VS Code extension, run by node: what it starts, and how its grammar colours a schedule."""

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
# where `npm install` put the packages of the extension
PACKAGES = Path(os.environ.get("SCHEDLANG_NODE_MODULES", FOLDER / "node_modules"))
NODE = shutil.which("node") or ""

needs_node = pytest.mark.skipif(not NODE, reason="node is not installed")
needs_packages = pytest.mark.skipif(
    not NODE or not (PACKAGES / "vscode-textmate").is_dir(),
    reason="`npm install` has not been run in editors/vscode",
)
SETTINGS = {"schedlang.command": "schedlang", "schedlang.model": True}


def node(script: str, argument: Path, text: str) -> Any:
    """What a script prints."""
    done = subprocess.run(
        [NODE, SCRIPTS / script, argument],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, "NODE_PATH": str(PACKAGES)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def activated(*events: Any, trusted: bool = True, **settings: Any) -> list[Any]:
    """What the extension starts and stops, from its activation to its end."""
    given = {"trusted": trusted, "settings": SETTINGS | settings, "events": events}
    found = node("start_extension.js", FOLDER / "extension.js", json.dumps(given))
    assert found["subscriptions"] == 2
    return list(found["said"])


@needs_node
def test_starts_the_language_server() -> None:
    """`schedlang lsp` is started for schedules, and stopped at the end."""
    server = {"command": "schedlang", "args": ["lsp", "--model"]}
    files = [{"scheme": "file", "language": "sched"}]
    assert activated() == [{"start": server, "for": files}, {"stop": server}]
    package = json.loads((FOLDER / "package.json").read_text())
    assert package["contributes"]["languages"][0]["id"] == "sched"
    declared = package["contributes"]["configuration"]["properties"]
    assert {name: one["default"] for name, one in declared.items()} == SETTINGS


@needs_node
@pytest.mark.parametrize(
    ("trusted", "model", "said"),
    [(True, True, "--model"), (False, True, "--no-model"), (True, False, "--no-model")],
)
def test_models_are_imported_where_it_is_allowed(trusted: bool, model: bool, said: str) -> None:
    """No model file is imported in a folder that is not trusted, or against the setting."""
    first = activated(trusted=trusted, **{"schedlang.model": model})[0]
    assert first["start"]["args"] == ["lsp", said]


@needs_node
def test_starts_anew_when_settings_or_trust_change() -> None:
    """Trust and settings of ours restart the server with what holds now; others' do not."""
    own = {
        "name": "settings",
        "of": "schedlang",
        "then": {"settings": SETTINGS | {"schedlang.command": "other"}},
    }
    foreign = {"name": "settings", "of": "editor"}
    trust = {"name": "trust", "then": {"trusted": True}}
    said = activated(trust, foreign, own, trusted=False)
    steps = [(next(iter(one)), one.get("start", one.get("stop"))) for one in said]
    assert [(kind, server["command"], server["args"][1]) for kind, server in steps] == [
        ("start", "schedlang", "--no-model"),
        ("stop", "schedlang", "--no-model"),
        ("start", "schedlang", "--model"),
        ("stop", "schedlang", "--model"),
        ("start", "other", "--model"),
        ("stop", "other", "--model"),
    ]


def test_the_options_it_gives_exist() -> None:
    """The server takes the words that the extension starts it with."""
    from typer.testing import CliRunner

    from schedlang.cli import app

    shown = CliRunner().invoke(app, ["lsp", "--help"], env={"COLUMNS": "200"}).output
    assert "--model" in shown and "--no-model" in shown


def test_the_package_holds_what_it_names() -> None:
    """Every file that the manifest speaks of is there, and is among those that are packed."""
    package = json.loads((FOLDER / "package.json").read_text())
    own = [pattern for pattern in package["files"] if not pattern.startswith("node_modules")]
    assert package["dependencies"] and len(own) < len(package["files"]), "its client is packed, too"
    packed = {path for pattern in own for path in FOLDER.glob(pattern)}
    named = [package["main"], *(one["path"] for one in package["contributes"]["grammars"])]
    named += [one["configuration"] for one in package["contributes"]["languages"]]
    assert {(FOLDER / name).resolve() for name in named} <= {path.resolve() for path in packed}
    assert "onLanguage:sched" in package["activationEvents"]


@needs_packages
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_editors_engine_colours_as_pygments_does(name: str) -> None:
    """VS Code's own engine gives every piece of a schedule the scope of its kind."""
    from schedlang.editors.lexer import TOKENS

    text = SAMPLES[name]
    kinds = {token: kind for kind, token in TOKENS.items()}
    wanted: list[list[list[str]]] = [[]]
    for token, piece in SchedLexer(stripnl=False, ensurenl=False).get_tokens(text):
        for number, part in enumerate(piece.split("\n")):
            wanted += [[]] if number else []
            if part.strip():
                wanted[-1].append([part, f"{SCOPES[kinds[token]]}.sched"])
    found = node("tokens.js", FOLDER / "syntaxes" / "sched.tmLanguage.json", text)
    told = [[piece for piece in line if piece[0].strip()] for line in found]
    assert told == wanted
