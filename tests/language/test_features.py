"""Features: what a row is asked for beyond what every row is, and that no pass knows a verb."""

import ast
from dataclasses import replace

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.features import Recomputing, Rewrite
from schedlang.ir.model import ModelFacts
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import FACETS, Primitive, isolated_registry, load_all, registry
from schedlang.primitives.pipeline import pipeline
from schedlang.primitives.verify import verify
from tests.docs.test_house import ROOT

ROOMS = ("passes", "schedlang/runtime", "schedlang/kernels", "schedlang/viz")


def test_a_row_has_what_its_features_ask_for() -> None:
    """A class that lacks something that its feature asks for is refused when it is made."""
    with isolated_registry(), pytest.raises(Refusal, match="no check\\s+and no rewrite"):

        class idle(Rewrite):  # noqa: N801
            pass

    with isolated_registry(), pytest.raises(Refusal, match="`still` has no lower"):

        class still(Recomputing):  # noqa: N801
            """Recomputes."""

            example = "still()"

            def check(self, site: object, plan: object) -> None: ...


def test_the_base_is_what_every_verb_needs() -> None:
    """What a row reads, writes, takes and gives up; what it refuses and makes of a plan."""
    public = {name for name in vars(Primitive) if not name.startswith("_")}
    words = {"reads", "writes", "takes", "foremost", "gives_up"}
    assert public == words | {"agree", "along", "changes", "check", "transform"}


def test_an_annotation_knows_its_row() -> None:
    """Also where rows were added between others, as completing does."""
    plan = Plan.empty(ModelFacts(torch.nn.Linear(2, 2)))
    plan = plan.add(verify(steps=1), [""]).add(pipeline(order="GPipe", micro=2), [""])
    first, second = plan.actions
    again = replace(plan, actions=(second, first)).add(verify(steps=3), [""])
    assert [again.origin(check) for check in again.checks] == [first, again.actions[-1]]
    assert again.order is not None and again.origin(again.order) == second
    assert replace(again, actions=()).origin(again.order) is None


def _knows(node: ast.AST) -> bool:
    """Whether code compares a row's word, guesses at its arguments, or reads its facets."""
    match node:
        case ast.Compare(left, _, others):
            sides = [left, *others]
            words = {
                one.value for s in sides for one in ast.walk(s) if isinstance(one, ast.Constant)
            }
            word = any(isinstance(s, ast.Attribute) and s.attr in WORDS for s in sides)
            facet = any(ast.unparse(s).endswith(("writes", "reads")) for s in sides)
            return bool(word and words & set(registry()) or facet and words & FACETS)
        case ast.Call(ast.Name("hasattr" | "getattr"), [row, ast.Constant(), *_]):
            return ast.unparse(row).endswith(("primitive", "row"))
        case ast.Attribute(row, "reads" | "writes"):
            return ast.unparse(row).endswith("primitive")
        case ast.ImportFrom(str(module)):
            return module.startswith("schedlang.primitives")
    return False


WORDS = ("name", "__name__", "text")


def _found(text: str) -> list[str]:
    load_all()
    return [ast.unparse(node) for node in ast.walk(ast.parse(text)) if _knows(node)]


@pytest.mark.parametrize("room", ROOMS)
def test_no_pass_knows_a_verb(room: str) -> None:
    """They ask for features, facets and annotations of rows, and for no row by name."""
    files = sorted(path for path in (ROOT / room).rglob("*.py"))
    found = {path.relative_to(ROOT): _found(path.read_text()) for path in files}
    assert files and not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "text",
    [
        'action.name == "offload"',
        'row.call.name.text != "verify"',
        'type(a.primitive).__name__ in ("shard", "grid")',
        'hasattr(a.primitive, "uneven")',
        'getattr(action.primitive, "over", None)',
        '"placement" in action.primitive.writes',
        '"placement" in writes',
        "from schedlang.primitives.shard import is_plain",
    ],
)
def test_each_way_to_know_a_verb_is_seen(text: str) -> None:
    """What passes once did."""
    assert _found(text)
