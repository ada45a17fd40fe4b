"""A row at many modules is checked once for equal ones, and nobody can tell from the plan."""

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
from tests.proofs import planned
from tests.properties.engine import schedule_of
from tests.properties.schedules import Drawn, legal

ROOT = Path(__file__).parent.parent.parent
FILES = [p for p in sorted((ROOT / "examples").glob("**/*.sched")) if p.stem != "megatron"]
MAPS = ("layouts", "boundaries", "computes", "kind_options", "contexts")


class Layer(nn.Module):
    """Two projections and what is between; `odd` makes it unlike others in one way."""

    def __init__(self, odd: str = "") -> None:
        super().__init__()
        width = 6 if odd == "width" else 8
        self.up = nn.Linear(8, width, bias=odd != "bias")
        self.embed = nn.Embedding(8, 8, max_norm=1.0 if odd == "max_norm" else None)
        self.down = nn.Linear(8, 8, bias=False)
        if odd == "frozen":
            self.up.requires_grad_(False)
        if odd == "own forward":
            self.up.forward = torch.neg  # type: ignore[assignment]
        if odd == "dtype":
            self.down.bfloat16()
        if odd == "class":
            self.up.__class__ = type("Odd", (nn.Linear,), {})
        if odd == "tied":
            self.down.weight = self.up.weight


ODD = ("width", "bias", "max_norm", "frozen", "own forward", "dtype", "class", "tied")


def _model(*odd: str) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(Layer(one) for one in odd)})


def _outcome(model: nn.Module, rows: str) -> Plan | str:
    """The plan, or the message of its refusal."""
    try:
        return planned(model, rows, "tp=4, dp=2", "dtype, lossy")
    except Refusal as refusal:
        return refusal.render()


def _alone(model: nn.Module, rows: str) -> Plan | str:
    """The same where every module is checked by itself."""
    with patch("schedlang.ir.plan.apply_by_class", lambda plan, action: None):
        return _outcome(model, rows)


def _same(one: Plan | str, other: Plan | str) -> None:
    """Equal, also in the order of what plans hold."""
    assert one == other
    for name in MAPS:
        if not isinstance(one, str) and not isinstance(other, str):
            assert list(getattr(one, name)) == list(getattr(other, name)), name


PLACES = ("layers.*", "layers[:2]", "layers[1:]", "layers.1")
AT = (
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
ROWS = [(place, row) for place in range(len(AT)) for row in map(AT[place].format, PLACES)]


@example(["", "", ""], [(0, "layers[1:]  cast(bf16)"), (1, "layers.*.up  cast(bf16)")])
@example(["", "", ""], [(0, "layers[1:].up  cast(bf16)"), (1, "layers.*  cast(bf16)")])
@example(["", "tied", ""], [(0, "layers.*.{up,down}  shard(col, output=R, over=tp)")])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(("", "", "", *ODD)), min_size=3, max_size=4),
    st.lists(st.sampled_from(ROWS), min_size=1, max_size=4, unique=True),
)
def test_rows_do_to_many_modules_what_they_do_to_each(
    odd: list[str], rows: list[tuple[int, str]]
) -> None:
    """Plan or refusal, word by word, is that of a check of every module by itself."""
    model, text = _model(*odd), "\n".join(row for _, row in sorted(rows))
    _same(_outcome(model, text), _alone(model, text))


def test_what_made_equal_modules_unlike_is_seen() -> None:
    """A verb without the promise may split one of two equal modules: the next row sees both."""
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
        _same(plan.add(row, sites), _each(plan, row, sites))


def _each(plan: Plan, row: Primitive, sites: tuple[str, ...]) -> Plan:
    with patch("schedlang.ir.plan.apply_by_class", lambda plan, action: None):
        return plan.add(row, sites)


@pytest.mark.deep
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_examples_have_the_plans_of_single_checks(path: Path) -> None:
    """Every schedule that ships, on its own model."""
    model = load_model_file(None, path).model(meta=True)

    def outcome() -> Plan | str:
        try:
            return Schedule(model, parse(read(path)), Settings()).plan()
        except Refusal as refusal:
            return refusal.render()

    together = outcome()
    with patch("schedlang.ir.plan.apply_by_class", lambda plan, action: None):
        _same(together, outcome())


@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.deep)])
def test_drawn_schedules_have_the_plans_of_single_checks(count: int) -> None:
    """All verbs, on the models of the property tests; and rows meet where they are found to."""
    drawn = settings(max_examples=count, deadline=None, derandomize=True, database=None)
    drawn(given(legal())(_drawn_alike))()


def _drawn_alike(drawn: Drawn) -> None:
    plan = schedule_of(drawn).plan()
    with patch("schedlang.ir.plan.apply_by_class", lambda plan, action: None):
        _same(plan, schedule_of(drawn).plan())
    for place, row in enumerate(plan.actions):
        before = replace(plan, actions=plan.actions[:place])
        met = [a for a in before.actions if any(legality.find_site_pairs(plan, a.sites, row.sites))]
        near = sorted(before.trail.rows_around(row.sites, plan.model.ties))
        assert [before.actions[one] for one in near] == met


def test_a_mapping_with_puts_is_a_dict_with_puts() -> None:
    """Items and their order; older mappings stay, and `own` is what was put since the base."""
    draw, want = Random(7), {"a": 0}
    base: dict[str, int] = dict(want)
    known, older = LayeredMapping(base), []
    for value in range(1, 300):
        items = {draw.choice("abcdefghij") + draw.choice("klmn"): value for _ in range(value % 4)}
        older.append((known, dict(want)))
        known, want = known.put(items), want | items
    for one, items in [*older, (known, want)]:
        assert list(one.items()) == list(items.items())
        assert one == items and [one.get(k, -1) for k in "ab"] == one.get_many("ab", -1)
        assert [one.get(k, -2) for k in "ab"] == one.get_many("ab", -2)  # for another value
        assert one.added_items == {k: v for k, v in items.items() if k != "a"}
        sent = pickle.loads(pickle.dumps(one))
        assert sent == items and sent.get_many("ab", -1) == one.get_many("ab", -1)


def test_values_spread_over_modules_are_those_at_each() -> None:
    """A row's list of very many equal values reads as a tuple, and is asked about one module."""
    plan = planned(_model("", "", ""), "layers.*.{up,down}  offload(activations)", "tp=4, dp=2")
    names = [f"layers.{n}.{m}" for n in range(3) for m in ("up", "down")]
    assert [one.fqn for one in plan.stores] == names and len(plan.stores) == 6
    assert plan.stores == tuple(plan.stores) and plan.stores[1].fqn == names[1]
    assert [one.fqn for one in values_near(plan.stores, "layers.1")] == names[2:4]
    assert [one.fqn for one in values_near(plan.stores, "layers.1.up")] == names[2:3]
    assert [one.fqn for one in values_near(plan.stores, "")] == names
