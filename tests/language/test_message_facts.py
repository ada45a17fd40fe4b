"""Programs read the facts of a message, and never search in its sentences."""

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
SENTENCE_ACCESS = re.compile(
    rf"\.\s*({'|'.join(sorted(SENTENCES))})\b"
)  # a file without a match reads no sentence
SEARCH_METHODS = {
    *("startswith", "endswith", "split", "rsplit", "partition", "rpartition", "splitlines"),
    *("find", "rfind", "index", "count", "replace", "removeprefix", "removesuffix"),
    *("search", "match", "fullmatch", "findall", "finditer", "sub"),
}


def _source_files() -> list[Path]:
    """All Python files of the library."""
    folders = (ROOT / "schedlang", ROOT / "passes", ROOT / "primitives")
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    return sorted(files)


def _is_sentence(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression contains a sentence of a message, or a name that is bound to one."""
    return any(
        (isinstance(part, ast.Attribute) and part.attr in SENTENCES)
        or (isinstance(part, ast.Name) and part.id in names)
        for part in ast.walk(node)
    )


def _names_in(target: ast.AST) -> set[str]:
    """The names in an assignment target."""
    return {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}


def _sentence_searches(code: ast.AST) -> Iterator[str]:
    """Yield every expression of a function that searches in a sentence or splits one."""
    all_nodes = tuple(ast.walk(code))
    if not any(isinstance(item, ast.Attribute) and item.attr in SENTENCES for item in all_nodes):
        return
    names: set[str] = set()
    known_count = -1
    while known_count != len(names):  # names of names
        known_count = len(names)
        for item in all_nodes:
            match item:
                case ast.For() | ast.comprehension() if _is_sentence(item.iter, names):
                    names |= _names_in(item.target)
                case ast.Assign() if _is_sentence(item.value, names):
                    names |= {name for target in item.targets for name in _names_in(target)}
                case ast.NamedExpr() if _is_sentence(item.value, names):
                    names |= _names_in(item.target)
    for item in all_nodes:
        match item:
            case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in SEARCH_METHODS:
                searches = _is_sentence(value, names) or any(
                    _is_sentence(arg, names) for arg in item.args
                )
            case ast.Call():  # map(FORM.findall, helps)
                passes_search = any(
                    isinstance(a, ast.Attribute) and a.attr in SEARCH_METHODS for a in item.args
                )
                searches = passes_search and any(_is_sentence(arg, names) for arg in item.args)
            case ast.Compare():
                is_membership = any(isinstance(op, ast.In | ast.NotIn) for op in item.ops)
                searches = is_membership and any(
                    _is_sentence(operand, names) for operand in item.comparators
                )
            case _:
                searches = False
        if searches:
            yield ast.unparse(item)


def _functions(all_nodes: Iterable[ast.AST]) -> Iterator[ast.FunctionDef]:
    """Yield the functions among these nodes."""
    for item in all_nodes:
        if isinstance(item, ast.FunctionDef):
            yield item


def test_no_program_reads_sentences() -> None:
    """No code of the library searches in a title, note or help to decide something."""
    files = _source_files()
    assert len(files) > 400
    problems = [
        f"{path.relative_to(ROOT)} {function.name}: {code}"
        for path in files
        if SENTENCE_ACCESS.search(path.read_text())
        for function in _functions(nodes(path))
        for code in _sentence_searches(function)
    ]
    assert not problems, "\n".join(problems)


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
    """The check finds each way in which sentences were once read."""
    (function,) = _functions(ast.walk(ast.parse(f"def f():\n    {text}\n")))
    assert list(_sentence_searches(function))


def test_who_guesses_tells_it_as_a_fact() -> None:
    """A function that suggests "did you mean" also gives both words as facts."""
    helpers = {
        "suggest_name",
        "_suggest_choice",
        "_suggest_keyword",
    }  # they return texts to functions that refuse
    missing, count = [], 0
    for path in _source_files():
        text = path.read_text()
        imports = re.search(
            r"diagnostic import [^\n]*\bsuggest_name\b", text
        )  # and no function of a probe
        suggesters = {"_suggest_choice", *(["suggest_name"] if imports else [])}
        for function in _functions(nodes(path)):
            all_nodes = list(ast.walk(function))
            suggests = any(
                (isinstance(item, ast.Constant) and "did you mean" in str(item.value))
                or (
                    isinstance(item, ast.Call)
                    and isinstance(item.func, ast.Name)
                    and item.func.id in suggesters
                )
                for item in all_nodes
            )
            if not suggests or function.name in helpers:
                continue
            count += 1
            used = {item.id for item in all_nodes if isinstance(item, ast.Name)}
            used |= {item.value for item in all_nodes if isinstance(item, ast.Constant)}
            if not used & {"facts_of_unknown", "meant"}:
                missing.append(f"{path.relative_to(ROOT)} {function.name}")
    assert not missing and count > 15, missing


def test_the_words_of_a_guess() -> None:
    """The facts are the unknown word, and the similar one if there is one."""
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
    """Refusals have the facts `unknown` and `meant`, also in JSON for editors."""
    with pytest.raises(Refusal) as caught:
        expand(parse(Source("a.sched", f"schedule 1\n{text}\n")), None, Settings())
    diagnostic = caught.value.diagnostic
    assert (diagnostic.fact("unknown"), diagnostic.fact("meant")) == MISTAKES[text], (
        diagnostic.facts
    )
    assert ["unknown", MISTAKES[text][0]] in diagnostic.to_json()["facts"]  # type: ignore[operator]


@pytest.mark.parametrize("splits_out", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("heads", [None, 1, 2, 3, 6])
def test_a_remedy_is_the_first_of_the_helps(
    heads: int | None, ranks: int, splits_out: bool
) -> None:
    """The arguments that a program adds are those in the first help for people."""
    remedies = find_remedies("q shard(col, over=tp", heads, ranks, splits_out)
    arguments = "".join(
        f", {name}={value}" for name, value in first_remedy(heads, ranks, splits_out)
    )
    assert bool(arguments) == bool(remedies)
    assert not remedies or remedies[0].endswith(f"`q shard(col, over=tp{arguments})`")
