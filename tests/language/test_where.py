"""`where` conditions on modules: attributes, params, dtype, fqn, index; and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.language import nodes as n
from schedlang.language.selector import Selector
from schedlang.language.syntax import parse
from schedlang.language.value import Names


class Part(nn.Module):
    """A block with data attributes, a config, a child, and a property that must never run."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.place, self.kind, self.sizes = index, "wide" if index > 1 else "narrow", [1, index]
        self.last, self.rate, self._secret = index == 3, index / 2, index
        self.config = SimpleNamespace(heads=2 * index, inner=SimpleNamespace(name=f"part{index}"))
        self.up = nn.Linear(2, 4 * (index + 1), bias=index % 2 == 0)
        if index == 2:
            self.gate = nn.Linear(2, 2)

    @property
    def computed(self) -> int:
        raise RuntimeError("code of the model has run")


class PartsModel(nn.Module):
    """Four parts; the last is in half precision, one has two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(index) for index in range(4))
        self.parts[3].bfloat16()
        self.parts[2].gate.to(torch.float64)
        self.idle = nn.Tanh()


SELECTOR = Selector(ModelFacts(PartsModel()))


def select_where(condition: str, paths: str = "parts.*") -> str:
    """The indices of the selected parts, or the names of other selected modules."""
    item = parse(Source("x.sched", f"schedule 1\nat {paths} where {condition} {{}}\n")).items[0]
    assert isinstance(item, n.At)
    names = Names(knobs={"few": 2}, axes={"tp": 2}, model=SELECTOR.tree)
    selected = SELECTOR.select_scope(item, ("",), names)
    return " ".join(fqn.removeprefix("parts.") for fqn in selected)


@pytest.mark.parametrize(
    "test, places",
    [
        ("place == 2", "2"),
        ("place != 2", "0 1 3"),
        ("rate < 1", "0 1"),
        ('kind == "wide"', "2 3"),
        ("kind == wide", "2 3"),
        ("last", "3"),
        ("not last", "0 1 2"),
        ("last == true", "3"),
        ("training", "0 1 2 3"),
        ("place % 2 == 1 and not last", "1"),
        ("place == 0 or last", "0 3"),
        ("(place + 1) * few >= 6", "2 3"),
        ("place // tp == 0", "0 1"),
        ("config.heads >= 4", "2 3"),
        ("config.inner.name == part1", "1"),
        ("up.out_features > 8", "2 3"),
        ("gate.in_features == 2", "2"),
        ("params > 24", "2 3"),
        ("params == 12", "0"),
        ("dtype == float32", "0 1"),
        ("dtype == bfloat16", "3"),
        ("dtype == mixed", "2"),
        ('fqn == "parts.1"', "1"),
        ("index >= few", "2 3"),
        ("index % 2 == 0", "0 2"),
        ("model.training and index == 0", "0"),
    ],
)
def test_what_a_test_keeps(test: str, places: str) -> None:
    """Conditions may use attributes, nested ones too, params, dtype, fqn, index, knobs and axes."""
    assert select_where(test) == places


def test_the_index_is_that_of_the_selection() -> None:
    """`index` counts the selected modules, not the positions in their list."""
    assert select_where("index == 1", "parts[2:]") == "3"
    assert select_where("index == 1", "parts.3, parts.0") == "3"
    assert select_where("dtype == none", "**") == "idle"


def test_except_takes_away_what_where_keeps() -> None:
    """`where` and `except` on one `at`."""
    item = parse(Source("x", "schedule 1\nat parts.* where place > 0 except parts.2 {}\n")).items[0]
    assert isinstance(item, n.At)
    selected = SELECTOR.select_scope(item, ("",), Names(model=SELECTOR.tree))
    assert selected == ("parts.1", "parts.3")


@pytest.mark.parametrize(
    "test, code, said",
    [
        ("plce == 2", "S208", "did you mean `place`?"),
        ("param > 2", "S208", "did you mean `params`?"),
        ("config.head == 2", "S208", "no selected module has an attribute `config.head`"),
        ("computed == 1", "S208", "no selected module has an attribute `computed`"),
        ("_secret == 1", "S208", "no selected module has an attribute `_secret`"),
        ("forward == 1", "S208", "no selected module has an attribute `forward`"),
        ("config == 1", "S208", "no selected module has an attribute `config`"),
        ("config.__class__ == 1", "S208", "attribute `config.__class__`"),
        ("place", "S304", "`where` needs a condition: true or false"),
        ("place > 3", "S207", "`where` is false for all of them"),
        ('place == "2"', "S304", "cannot compare"),
        ("place / (place - place) > 1", "S107", "division by zero"),
    ],
)
def test_what_is_no_test(test: str, code: str, said: str) -> None:
    """An unknown attribute is refused with a similar one; conditions run no code of the model."""
    with pytest.raises(Refusal) as caught:
        select_where(test)
    assert f"[{code}]" in caught.value.render() and said in caught.value.render()
