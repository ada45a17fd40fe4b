"""Features of primitives: what each demands of a class; no pass tests a primitive by its name."""

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

FOLDERS = ("passes", "schedlang/runtime", "schedlang/kernels", "schedlang/viz")


def test_a_row_has_what_its_features_ask_for() -> None:
    """A class without a method that its feature requires is refused when it is defined."""
    with isolated_registry(), pytest.raises(Refusal, match="no check\\s+and no rewrite"):

        class idle(Rewrite):  # noqa: N801
            pass

    with isolated_registry(), pytest.raises(Refusal, match="`still` has no lower"):

        class still(Recomputing):  # noqa: N801
            """Recomputes."""

            example = "still()"

            def check(self, site: object, plan: object) -> None: ...


def test_the_base_is_what_every_verb_needs() -> None:
    """`Primitive` has only what every primitive needs: its facets, check and transform."""
    public = {name for name in vars(Primitive) if not name.startswith("_")}
    data_attributes = {"reads", "writes", "takes", "foremost", "gives_up"}
    assert public == data_attributes | {"agree", "along", "changes", "check", "transform"}


def test_an_annotation_knows_its_row() -> None:
    """An annotation's row is found even after other rows were inserted, as completion does."""
    plan = Plan.empty(ModelFacts(torch.nn.Linear(2, 2)))
    plan = plan.add(verify(steps=1), [""]).add(pipeline(order="GPipe", micro=2), [""])
    first, second = plan.actions
    reordered = replace(plan, actions=(second, first)).add(verify(steps=3), [""])
    assert [reordered.origin(check) for check in reordered.checks] == [first, reordered.actions[-1]]
    assert reordered.order is not None and reordered.origin(reordered.order) == second
    assert replace(reordered, actions=()).origin(reordered.order) is None


def _names_a_verb(node: ast.AST) -> bool:
    """Whether code compares a primitive's name, probes its attributes, or reads its facets."""
    match node:
        case ast.Compare(left, _, operands):
            sides = [left, *operands]
            constants = {
                part.value for s in sides for part in ast.walk(s) if isinstance(part, ast.Constant)
            }
            is_name = any(isinstance(s, ast.Attribute) and s.attr in NAME_ATTRIBUTES for s in sides)
            is_facet = any(ast.unparse(s).endswith(("writes", "reads")) for s in sides)
            return bool(is_name and constants & set(registry()) or is_facet and constants & FACETS)
        case ast.Call(ast.Name("hasattr" | "getattr"), [row, ast.Constant(), *_]):
            return ast.unparse(row).endswith(("primitive", "row"))
        case ast.Attribute(row, "reads" | "writes"):
            return ast.unparse(row).endswith("primitive")
        case ast.ImportFrom(str(module)):
            return module.startswith("schedlang.primitives")
    return False


NAME_ATTRIBUTES = ("name", "__name__", "text")


def _verb_checks(text: str) -> list[str]:
    """The expressions of a text that test for a primitive."""
    load_all()
    return [ast.unparse(node) for node in ast.walk(ast.parse(text)) if _names_a_verb(node)]


@pytest.mark.parametrize("room", FOLDERS)
def test_no_pass_knows_a_verb(room: str) -> None:
    """Passes ask rows for features and annotations, never for a primitive by name."""
    files = sorted(path for path in (ROOT / room).rglob("*.py"))
    checks = {path.relative_to(ROOT): _verb_checks(path.read_text()) for path in files}
    assert files and not {path: lines for path, lines in checks.items() if lines}


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
    """The check finds each form that passes once used."""
    assert _verb_checks(text)
