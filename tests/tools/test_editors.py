"""Editor support: completion, hover, definitions and colours, on incomplete texts too."""

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
    """A module in the form of `tree --json`."""
    tensors = [{"name": name, "dtype": "float32", "shape": shape} for name, shape in shapes.items()]
    return {"path": path, "class": kind, "parameters": 0, "tensors": tensors, "children": children}


def layer(i: int) -> dict[str, object]:
    """A block with attention and an MLP, as in `tree --json`."""
    up, down = (node(f"h.{i}.mlp.{n}", "Linear", weight=[4, 8]) for n in ("up", "down"))
    return node(f"h.{i}", "Block", node(f"h.{i}.attn", "Attn"), node(f"h.{i}.mlp", "MLP", up, down))


MODEL = Outline(node("", "M", node("wte", "Embedding"), node("h", "List", layer(0), layer(1))))


def offers_at(text: str) -> list[str]:
    """The completions at the `|` in a text."""
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
    """The names that are legal at the position come first, and no others but verbs."""
    assert offers_at(text)[: len(wanted)] == wanted
    if not text.endswith(("{ |", "(|", "require |")):
        assert [offer for offer in offers_at(text) if offer not in colours.verbs()] == wanted


def test_verbs_follow_a_selector() -> None:
    """After a selector primitives are offered; inside a call, its arguments."""
    assert offers_at(STEP + "  h.*.mlp  |") == list(colours.verbs())
    assert "shard" not in offers_at(STEP + "  wte  shard(|")
    assert {"col", "row", "over=", "blocks="} <= set(offers_at(STEP + "  wte  shard(|"))
    assert "over=" not in offers_at(STEP + "  wte  shard(over=tp, |")


def test_unknown_paths_offer_nothing() -> None:
    """A selector that matches nothing offers nothing, without an error."""
    assert offers_at(STEP + "  nothing.here.|") == []
    assert [offer.text for offer in complete_at(STEP + "  h.", len(STEP) + 4, None)] == []


def test_hover() -> None:
    """Hover shows a verb's manual, a selector's modules, a name's declaration, the plan's facts."""

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
    hover = shown(STEP + "  at h.* {\n  mlp.u|p  shard(col, over=tp)", row)
    assert "2 modules" in hover and "`h.1.mlp.up`: Linear, weight float32[4, 8]" in hover
    assert "`f32[4@tp, 8]`; 2 all-reduce over tp (output)" in hover
    assert "knob tp: int = 2" in shown(STEP + "  wte  shard(col, over=t|p)")
    assert shown(STEP + "  # noth|ing") == ""


def test_definitions(tmp_path: Path) -> None:
    """Names lead to their declarations, dotted ones to the used file."""
    (tmp_path / "lib.sched").write_text("schedule 1\n\ndef block(over: axis) {\n}\n")
    file = tmp_path / "a.sched"

    def target(text: str) -> tuple[str, str] | None:
        before, after = text.split("|")
        definition = find_definition(before + after, len(before), file)
        return definition and (
            definition.file.name if definition.file else "",
            definition.text[definition.offset :][:5],
        )

    assert target(STEP + "  wte  shard(col, over=t|p)") == ("", "tp: i")
    assert target(STEP + "  wte  fuse(a|ct)") == ("", "act(x")
    assert target(STEP + "  lib.blo|ck(over=tp)") == ("lib.sched", "block")
    assert target(HEAD.replace("lib.sched", "lib|.sched")) == ("lib.sched", "sched")
    assert target(STEP + "  wte  sha|rd(col, over=tp)") is None


@pytest.mark.parametrize("file", SCHEDULES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_colours_lose_nothing(file: Path) -> None:
    """The lexer covers every character of every example, without errors."""
    text = file.read_text()
    tokens = list(SchedLexer().get_tokens(text))
    assert "".join(text_piece for _, text_piece in tokens) == text
    assert [text_piece for kind, text_piece in tokens if kind is Error] == []


def test_pygments_finds_it() -> None:
    """Pygments finds the lexer by the package's entry point."""
    (entry_point,) = entry_points(group="pygments.lexers", name="sched")
    assert entry_point.load() is SchedLexer and {"sched", "schedlang"} <= set(SchedLexer.aliases)


def test_words_are_what_they_stand_for() -> None:
    """A keyword is one only in its position; modules and arguments may have the same name."""
    text = 'step "a" {\n  a.step.b:Linear  shard(S(out), at=tp)  # h\n}\nknob x: int = 4GiB\n'
    tokens = [
        (str(kind).removeprefix("Token."), part) for kind, part in SchedLexer().get_tokens(text)
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
        assert pair in tokens, pair


def test_the_grammar_of_editors_is_the_language() -> None:
    """The extension's TextMate grammar is the one generated from the language's."""
    grammar = ROOT / "editors" / "vscode" / "syntaxes" / "sched.tmLanguage.json"
    assert grammar.read_text() == colours.textmate_json(), (
        "python -m schedlang.editors.rules > " + str(grammar)
    )
    assert {kind for _, kind in rules()} == set(colours.SCOPES)
    package = json.loads((ROOT / "editors" / "vscode" / "package.json").read_text())
    paths = [package["main"], *(g["path"] for g in package["contributes"]["grammars"])]
    paths += [language["configuration"] for language in package["contributes"]["languages"]]
    assert all((ROOT / "editors" / "vscode" / name).is_file() for name in paths)
