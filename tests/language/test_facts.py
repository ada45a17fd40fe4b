"""What programs need of a message is a fact of it: none reads it out of a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from schedlang.diagnostics.diagnostic import Refusal, facts_of_unknown
from schedlang.diagnostics.source import Source
from schedlang.ir.placement import find_remedies, first_remedy
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings
from tests.figures import nodes

ROOT = Path(__file__).parents[2]
SENTENCES = {"title", "notes", "helps", "message"}
SAID = re.compile(rf"\.\s*({'|'.join(sorted(SENTENCES))})\b")  # where a file has none, none is read
READING = {
    *("startswith", "endswith", "split", "rsplit", "partition", "rpartition", "splitlines"),
    *("find", "rfind", "index", "count", "replace", "removeprefix", "removesuffix"),
    *("search", "match", "fullmatch", "findall", "finditer", "sub"),
}


def _files() -> list[Path]:
    rooms = (ROOT / "schedlang", ROOT / "passes", ROOT / "primitives")
    found = {path.resolve() for room in rooms for path in room.rglob("*.py")}
    return sorted(found)


def _said(node: ast.AST, names: set[str]) -> bool:
    """Is it, or is it made of, a sentence of a message, or a name for one?"""
    return any(
        (isinstance(one, ast.Attribute) and one.attr in SENTENCES)
        or (isinstance(one, ast.Name) and one.id in names)
        for one in ast.walk(node)
    )


def _names(target: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}


def _read(code: ast.AST) -> Iterator[str]:
    """Where a function searches in a sentence, or takes it apart."""
    every = tuple(ast.walk(code))
    if not any(isinstance(one, ast.Attribute) and one.attr in SENTENCES for one in every):
        return
    names: set[str] = set()
    known = -1
    while known != len(names):  # names of names
        known = len(names)
        for one in every:
            match one:
                case ast.For() | ast.comprehension() if _said(one.iter, names):
                    names |= _names(one.target)
                case ast.Assign() if _said(one.value, names):
                    names |= {name for target in one.targets for name in _names(target)}
                case ast.NamedExpr() if _said(one.value, names):
                    names |= _names(one.target)
    for one in every:
        match one:
            case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in READING:
                found = _said(value, names) or any(_said(arg, names) for arg in one.args)
            case ast.Call():  # map(FORM.findall, helps)
                handed = any(isinstance(a, ast.Attribute) and a.attr in READING for a in one.args)
                found = handed and any(_said(arg, names) for arg in one.args)
            case ast.Compare():
                looks = any(isinstance(op, ast.In | ast.NotIn) for op in one.ops)
                found = looks and any(_said(other, names) for other in one.comparators)
            case _:
                found = False
        if found:
            yield ast.unparse(one)


def _functions(every: Iterable[ast.AST]) -> Iterator[ast.FunctionDef]:
    for one in every:
        if isinstance(one, ast.FunctionDef):
            yield one


def test_no_program_reads_sentences() -> None:
    """Neither a pattern nor `in` nor a part of a title, note or help decides anything."""
    files = _files()
    assert len(files) > 400
    found = [
        f"{path.relative_to(ROOT)} {function.name}: {what}"
        for path in files
        if SAID.search(path.read_text())
        for function in _functions(nodes(path))
        for what in _read(function)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "REMEDY.findall(refusal.diagnostic.helps[0])",
        "any('did you mean' in text for text in first.helps)",
        "map(REMEDY.findall, (text for d in every for text in d.helps))",
        "said = ' '.join(d.title for d in every)\n    re.findall('`([^`]+)`', said)",
        "said = f'{problem.title} {more}'\n    return '`a`' in said",
        "told = one.message\n    return told.partition('`')[1]",
    ],
)
def test_the_walk_sees_what_it_looks_for(text: str) -> None:
    """Each of the ways in which sentences have been read."""
    (function,) = _functions(ast.walk(ast.parse(f"def f():\n    {text}\n")))
    assert list(_read(function))


def test_who_guesses_tells_it_as_a_fact() -> None:
    """A function that asks `did you mean` gives the two words to programs, too."""
    helpers = {
        "suggest_name",
        "_suggest_choice",
        "_suggest_keyword",
    }  # of texts, for those who refuse
    lacking, found = [], 0
    for path in _files():
        text = path.read_text()
        imports = re.search(
            r"diagnostic import [^\n]*\bsuggest_name\b", text
        )  # and no function of a probe
        ours = {"_suggest_choice", *(["suggest_name"] if imports else [])}
        for function in _functions(nodes(path)):
            every = list(ast.walk(function))
            asks = any(
                (isinstance(one, ast.Constant) and "did you mean" in str(one.value))
                or (
                    isinstance(one, ast.Call)
                    and isinstance(one.func, ast.Name)
                    and one.func.id in ours
                )
                for one in every
            )
            if not asks or function.name in helpers:
                continue
            found += 1
            words = {one.id for one in every if isinstance(one, ast.Name)}
            words |= {one.value for one in every if isinstance(one, ast.Constant)}
            if not words & {"facts_of_unknown", "meant"}:
                lacking.append(f"{path.relative_to(ROOT)} {function.name}")
    assert not lacking and found > 20, lacking


def test_the_words_of_a_guess() -> None:
    """What nothing knows, and what was meant where something is near."""
    assert facts_of_unknown("atention", ["mlp", "attention"]) == (
        ("unknown", "atention"),
        ("meant", "attention"),
    )
    assert facts_of_unknown("x", ["mlp", "attention"]) == (("unknown", "x"),)


MISTAKES = {
    "knob tpp: int = 2\nmesh(tp=tqp)": ("tqp", "tpp"),
    "mesh(tp=2)\nlayers  shrad(col, over=tp)": ("shrad", "shard"),
    "mesh(tp=2)\nzero(stge=1, stage=1, over=tp)": ("stge", "stage"),
    "mesh(tp=2)\nlayers  shard(col, over=tpp)": ("tpp", "tp"),
    "mesh(tp=2)\nlayers  zero(stage=1, over=tpp)": ("tpp", "tp"),
    "mesh(dp=2)\nview all of (dpp)": ("dpp", "dp"),
    'step "s" relax(dtyp) {\n  cast(bf16)\n}': ("dtyp", "dtype"),
    "expect peak_memry < 1GiB": ("peak_memry", "peak_memory"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_the_facts_of_mistakes(text: str) -> None:
    """They stand in what the editor is told, and where it marks, the unknown word stands."""
    with pytest.raises(Refusal) as raised:
        expand(parse(Source("a.sched", f"schedule 1\n{text}\n")), None, Settings())
    told = raised.value.diagnostic
    assert (told.fact("unknown"), told.fact("meant")) == MISTAKES[text], told.facts
    assert ["unknown", MISTAKES[text][0]] in told.to_json()["facts"]  # type: ignore[operator]


@pytest.mark.parametrize("splits_out", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("heads", [None, 1, 2, 3, 6])
def test_a_remedy_is_the_first_of_the_helps(
    heads: int | None, ranks: int, splits_out: bool
) -> None:
    """The arguments that a program adds are those that a person is offered."""
    offered = find_remedies("q shard(col, over=tp", heads, ranks, splits_out)
    arguments = "".join(
        f", {name}={value}" for name, value in first_remedy(heads, ranks, splits_out)
    )
    assert bool(arguments) == bool(offered)
    assert not offered or offered[0].endswith(f"`q shard(col, over=tp{arguments})`")
