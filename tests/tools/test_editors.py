"""Completion, hover, definitions and colours, on texts that are still being written."""

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pygments.token import Error

from schedlang.editors import rules as colours
from schedlang.editors.lexer import SchedLexer
from schedlang.editors.rules import rules
from schedlang.editors.services import Outline, complete_at, find_definition, hover_text

ROOT = Path(__file__).parents[2]
SCHEDULES = sorted((ROOT / "examples").rglob("*.sched"))
HEAD = (
    'schedule 1 for M\nuse "lib.sched" as lib\nknob tp: int = 2 in [1, 2]\n'
    "mesh(dp=_, tp=tp)\npattern act(x, b) { gelu(x + b) }\n"
)
STEP = HEAD + 'step "s" {\n'


def node(
    path: str, kind: str, *children: dict[str, object], **shapes: list[int]
) -> dict[str, object]:
    """A module as `tree --json` tells it."""
    tensors = [{"name": name, "dtype": "float32", "shape": shape} for name, shape in shapes.items()]
    return {"path": path, "class": kind, "parameters": 0, "tensors": tensors, "children": children}


def layer(i: int) -> dict[str, object]:
    up, down = (node(f"h.{i}.mlp.{n}", "Linear", weight=[4, 8]) for n in ("up", "down"))
    return node(f"h.{i}", "Block", node(f"h.{i}.attn", "Attn"), node(f"h.{i}.mlp", "MLP", up, down))


MODEL = Outline(node("", "M", node("wte", "Embedding"), node("h", "List", layer(0), layer(1))))


def offered(text: str) -> list[str]:
    """What is offered at the bar."""
    before, after = text.split("|")
    return [offer.text for offer in complete_at(before + after, len(before), MODEL)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("schedule 1 for |", ["M"]),
        (STEP + "  h.|", ["*", "0", "1"]),
        (STEP + "  h.*.mlp.|", ["up", "down"]),
        (STEP + "  at h.*.|", ["attn", "mlp"]),
        (STEP + "  at h[:tp] {\n    mlp.|", ["up", "down"]),
        (STEP + "  at h.* { at mlp { |", ["up", "down"]),
        (STEP + "  wte, h.1.|", ["attn", "mlp"]),
        (STEP + "  at h.* except h.1.|", ["attn", "mlp"]),
        (STEP + "  wte  shard(col, over=|", ["dp", "tp"]),
        (STEP + "  wte  fuse(|", ["act"]),
        (HEAD + "require |", ["tp", "dp"]),
    ],
)
def test_what_may_stand_here(text: str, wanted: list[str]) -> None:
    """Exactly the names that have a meaning at the place stand first."""
    assert offered(text)[: len(wanted)] == wanted
    if not text.endswith(("{ |", "(|", "require |")):
        assert [one for one in offered(text) if one not in colours.verbs()] == wanted


def test_verbs_follow_a_selector() -> None:
    """After a selector come the verbs, and no modules; inside a call they do not."""
    assert offered(STEP + "  h.*.mlp  |") == list(colours.verbs())
    assert "shard" not in offered(STEP + "  wte  shard(|")
    assert {"col", "row", "over=", "blocks="} <= set(offered(STEP + "  wte  shard(|"))
    assert "over=" not in offered(STEP + "  wte  shard(over=tp, |")


def test_unknown_paths_offer_nothing() -> None:
    """A selector that matches nothing is followed by nothing, and is no error."""
    assert offered(STEP + "  nothing.here.|") == []
    assert [offer.text for offer in complete_at(STEP + "  h.", len(STEP) + 4, None)] == []


def test_hover() -> None:
    """A verb's manual; a selector's modules with shapes; a name's declaration; the plan's words."""

    def shown(text: str, *rows: dict[str, object]) -> str:
        before, after = text.split("|")
        return hover_text(before + after, len(before), MODEL, rows)

    row = {
        "pattern": "h.*",
        "do": "shard",
        "said": "f32[4@tp, 8]",
        "collectives": [{"count": 2, "kind": "all-reduce", "axes": ["tp"], "what": "output"}],
    }
    assert "over=axis" in shown(STEP + "  wte  sha|rd(col, over=tp)")
    found = shown(STEP + "  at h.* {\n  mlp.u|p  shard(col, over=tp)", row)
    assert "2 modules" in found and "`h.1.mlp.up`: Linear, weight float32[4, 8]" in found
    assert "`f32[4@tp, 8]`; 2 all-reduce over tp (output)" in found
    assert "knob tp: int = 2" in shown(STEP + "  wte  shard(col, over=t|p)")
    assert shown(STEP + "  # noth|ing") == ""


def test_definitions(tmp_path: Path) -> None:
    """Names lead to their declarations, dotted ones into the file that is used."""
    (tmp_path / "lib.sched").write_text("schedule 1\n\ndef block(over: axis) {\n}\n")
    here = tmp_path / "a.sched"

    def target(text: str) -> tuple[str, str] | None:
        before, after = text.split("|")
        found = find_definition(before + after, len(before), here)
        return found and (found.file.name if found.file else "", found.text[found.offset :][:5])

    assert target(STEP + "  wte  shard(col, over=t|p)") == ("", "tp: i")
    assert target(STEP + "  wte  fuse(a|ct)") == ("", "act(x")
    assert target(STEP + "  lib.blo|ck(over=tp)") == ("lib.sched", "block")
    assert target(HEAD.replace("lib.sched", "lib|.sched")) == ("lib.sched", "sched")
    assert target(STEP + "  wte  sha|rd(col, over=tp)") is None


@pytest.mark.parametrize("file", SCHEDULES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_colours_lose_nothing(file: Path) -> None:
    """Every character of every example has a colour, and the text comes out as it went in."""
    text = file.read_text()
    found = list(SchedLexer().get_tokens(text))
    assert "".join(piece for _, piece in found) == text
    assert [piece for kind, piece in found if kind is Error] == []


def test_pygments_finds_it() -> None:
    """The package tells Pygments, and all that use it, of the language."""
    (found,) = entry_points(group="pygments.lexers", name="sched")
    assert found.load() is SchedLexer and {"sched", "schedlang"} <= set(SchedLexer.aliases)


def test_words_are_what_they_stand_for() -> None:
    """A keyword is one only where it stands alone: a module or an argument may have its name."""
    text = 'step "a" {\n  a.step.b:Linear  shard(S(out), at=tp)  # h\n}\nknob x: int = 4GiB\n'
    found = [
        (str(kind).removeprefix("Token."), piece) for kind, piece in SchedLexer().get_tokens(text)
    ]
    for pair in [
        ("Keyword.Declaration", "step"),
        ("Name", "step"),
        ("Name.Class", ":Linear"),
        ("Name.Function", "shard"),
        ("Name.Attribute", "at"),
        ("Comment.Single", "# h"),
        ("Keyword.Type", "int"),
        ("Literal", "4GiB"),
    ]:
        assert pair in found, pair


def test_the_grammar_of_editors_is_the_language() -> None:
    """The extension's TextMate grammar is the one made from the language's own grammar."""
    kept = ROOT / "editors" / "vscode" / "syntaxes" / "sched.tmLanguage.json"
    assert kept.read_text() == colours.textmate_json(), (
        "python -m schedlang.editors.rules > " + str(kept)
    )
    assert {kind for _, kind in rules()} == set(colours.SCOPES)
    package = json.loads((ROOT / "editors" / "vscode" / "package.json").read_text())
    named = [package["main"], *(g["path"] for g in package["contributes"]["grammars"])]
    named += [one["configuration"] for one in package["contributes"]["languages"]]
    assert all((ROOT / "editors" / "vscode" / name).is_file() for name in named)
