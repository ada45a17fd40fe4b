"""Checking a row once per class of equal modules: the plan is that of a check of every module."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.mesh import Mesh
from schedlang.ir.model import ModelFacts
from schedlang.ir.modelfile import load_model_file
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, isolated_registry
from schedlang.ir.sharing import LayeredMapping, values_near
from schedlang.language.kinds import Axis
from schedlang.language.syntax import parse, read
from schedlang.passes.elaborate import legality
from schedlang.passes.elaborate.state import Settings
from schedlang.primitives.shard import shard
from schedlang.schedule import Schedule
from tests.proofs import make_plan
from tests.properties.engine import schedule_of
from tests.properties.schedules import Drawn, legal

ROOT = Path(__file__).parent.parent.parent
FILES = [p for p in sorted((ROOT / "examples").glob("**/*.sched")) if p.stem != "megatron"]
PLAN_MAPS = ("layouts", "boundaries", "computes", "kind_options", "contexts")


class Layer(nn.Module):
    """Two projections and an embedding; `odd` makes the layer differ from others in one respect."""

    def __init__(self, difference: str = "") -> None:
        super().__init__()
        width = 6 if difference == "width" else 8
        self.up = nn.Linear(8, width, bias=difference != "bias")
        self.embed = nn.Embedding(8, 8, max_norm=1.0 if difference == "max_norm" else None)
        self.down = nn.Linear(8, 8, bias=False)
        if difference == "frozen":
            self.up.requires_grad_(False)
        if difference == "own forward":
            self.up.forward = torch.neg  # type: ignore[assignment]
        if difference == "dtype":
            self.down.bfloat16()
        if difference == "class":
            self.up.__class__ = type("Odd", (nn.Linear,), {})
        if difference == "tied":
            self.down.weight = self.up.weight


DIFFERENCES = ("width", "bias", "max_norm", "frozen", "own forward", "dtype", "class", "tied")


def _model(*differences: str) -> nn.Module:
    """A model whose layers differ as said."""
    return nn.ModuleDict({"layers": nn.ModuleList(Layer(difference) for difference in differences)})


def _plan_or_refusal(model: nn.Module, rows: str) -> Plan | str:
    """The plan, or the message of its refusal."""
    try:
        return make_plan(model, rows, "tp=4, dp=2", "dtype, lossy")
    except Refusal as refusal:
        return refusal.render()


def _check_each_module(model: nn.Module, rows: str) -> Plan | str:
    """The plan or message where every module is checked by itself."""
    with patch("schedlang.ir.plan.apply_by_class", lambda plan, action: None):
        return _plan_or_refusal(model, rows)


def _check_equal(left: Plan | str, right: Plan | str) -> None:
    """Check that two plans or messages are equal, also in the order of the plans' mappings."""
    assert left == right
    for name in PLAN_MAPS:
        if not isinstance(left, str) and not isinstance(right, str):
            assert list(getattr(left, name)) == list(getattr(right, name)), name


SCOPES = ("layers.*", "layers[:2]", "layers[1:]", "layers.1")
ROW_FORMS = (
    "{}.up  shard(col, over=tp)",
    "{}.up  shard(col, over=dp)",
    "{}.down  shard(row, over=tp)",
    "{}.{{up,down}}  shard(col, output=R, over=tp)",
    "{}.embed  shard(vocab, over=tp)",
    "{}.up  pad(out, multiple=4)",
    "{}  checkpoint()",
    "{}.*  checkpoint()",
    "{}  offload(activations)",
    "{}.**  offload(parameters)",
    "{}.down  offload(optimizer, to=disk)",
    "{}.down  cast(bf16)",
    "{}.**  cast(bf16)",
    "{}  cast(bf16)",
    "{}.{{up,down}}  cast(bf16)",
    "{}.up  cast(fp32)",
    "{}  compress(activations, int8)",
    "{}.down  split_backward()",
)
ROWS = [
    (place, row) for place in range(len(ROW_FORMS)) for row in map(ROW_FORMS[place].format, SCOPES)
]


@example(["", "", ""], [(0, "layers[1:]  cast(bf16)"), (1, "layers.*.up  cast(bf16)")])
@example(["", "", ""], [(0, "layers[1:].up  cast(bf16)"), (1, "layers.*  cast(bf16)")])
@example(["", "tied", ""], [(0, "layers.*.{up,down}  shard(col, output=R, over=tp)")])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(("", "", "", *DIFFERENCES)), min_size=3, max_size=4),
    st.lists(st.sampled_from(ROWS), min_size=1, max_size=4, unique=True),
)
def test_rows_do_to_many_modules_what_they_do_to_each(
    odd: list[str], rows: list[tuple[int, str]]
) -> None:
    """The plan or refusal is, word for word, that of checking every module by itself."""
    model, text = _model(*odd), "\n".join(row for _, row in sorted(rows))
    _check_equal(_plan_or_refusal(model, text), _check_each_module(model, text))


def test_what_made_equal_modules_unlike_is_seen() -> None:
    """After a primitive changed one of two equal modules, the next row checks both."""
    model, sites = _model("", ""), ("layers.0.up", "layers.1.up")
    with isolated_registry():

        class lopsided(Primitive):  # noqa: N801
            """Splits the weight of the second layer."""

            example = "layers.*.up  lopsided()"

            def check(self, site: Any, plan: Plan) -> None: ...

            def transform(self, site: Any, plan: Plan) -> Plan:
                """At one of them."""
                layout = plan.layout(f"{site}.weight").split("tp", 0)
                return plan.with_layout(f"{site}.weight", layout) if "1" in str(site) else plan

        start = Plan.empty(ModelFacts(model), Mesh((("tp", 4), ("dp", 2))))
        plan = start.add(lopsided(), sites)
        row = shard("col", over=Axis("dp"))
        _check_equal(plan.add(row, sites), _add_to_each(plan, row, sites))


def _add_to_each(plan: Plan, row: Primitive, sites: tuple[str, ...]) -> Plan:
    """The plan with a row added, where every module is checked by itself."""
    with patch("schedlang.ir.plan.apply_by_class", lambda plan, action: None):
        return plan.add(row, sites)


@pytest.mark.deep
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_examples_have_the_plans_of_single_checks(path: Path) -> None:
    """Every shipped schedule has the same plan, on its own model."""
    model = load_model_file(None, path).model(meta=True)

    def outcome() -> Plan | str:
        try:
            return Schedule(model, parse(read(path)), Settings()).plan()
        except Refusal as refusal:
            return refusal.render()

    together = outcome()
    with patch("schedlang.ir.plan.apply_by_class", lambda plan, action: None):
        _check_equal(together, outcome())


@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.deep)])
def test_drawn_schedules_have_the_plans_of_single_checks(count: int) -> None:
    """Random schedules of all primitives have the same plans, and overlapping rows are all
    found."""
    repeat = settings(max_examples=count, deadline=None, derandomize=True, database=None)
    repeat(given(legal())(_check_drawn))()


def _check_drawn(drawn: Drawn) -> None:
    """Check the plan of a random schedule, and the rows that overlap each of its rows."""
    plan = schedule_of(drawn).plan()
    with patch("schedlang.ir.plan.apply_by_class", lambda plan, action: None):
        _check_equal(plan, schedule_of(drawn).plan())
    for index, row in enumerate(plan.actions):
        before = replace(plan, actions=plan.actions[:index])
        overlapping = [
            a for a in before.actions if any(legality.find_site_pairs(plan, a.sites, row.sites))
        ]
        nearby = sorted(before.trail.rows_around(row.sites, plan.model.ties))
        assert [before.actions[position] for position in nearby] == overlapping


def test_a_mapping_with_puts_is_a_dict_with_puts() -> None:
    """`LayeredMapping` has the items and order of a dict; older versions stay unchanged."""
    random, expected = Random(7), {"a": 0}
    base: dict[str, int] = dict(expected)
    mapping, older = LayeredMapping(base), []
    for value in range(1, 300):
        items = {
            random.choice("abcdefghij") + random.choice("klmn"): value for _ in range(value % 4)
        }
        older.append((mapping, dict(expected)))
        mapping, expected = mapping.put(items), expected | items
    for mapping_then, items in [*older, (mapping, expected)]:
        assert list(mapping_then.items()) == list(items.items())
        assert mapping_then == items and [
            mapping_then.get(k, -1) for k in "ab"
        ] == mapping_then.get_many("ab", -1)
        assert [mapping_then.get(k, -2) for k in "ab"] == mapping_then.get_many(
            "ab", -2
        )  # for another value
        assert mapping_then.added_items == {k: v for k, v in items.items() if k != "a"}
        sent = pickle.loads(pickle.dumps(mapping_then))
        assert sent == items and sent.get_many("ab", -1) == mapping_then.get_many("ab", -1)


def test_values_spread_over_modules_are_those_at_each() -> None:
    """A value repeated for many modules reads as a tuple, and can be read near one module."""
    plan = make_plan(_model("", "", ""), "layers.*.{up,down}  offload(activations)", "tp=4, dp=2")
    names = [f"layers.{n}.{m}" for n in range(3) for m in ("up", "down")]
    assert [store.fqn for store in plan.stores] == names and len(plan.stores) == 6
    assert plan.stores == tuple(plan.stores) and plan.stores[1].fqn == names[1]
    assert [store.fqn for store in values_near(plan.stores, "layers.1")] == names[2:4]
    assert [store.fqn for store in values_near(plan.stores, "layers.1.up")] == names[2:3]
    assert [store.fqn for store in values_near(plan.stores, "")] == names
