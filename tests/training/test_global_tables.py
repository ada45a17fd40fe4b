"""Global state of a model's code (tables in globals, classes, caches) is restored after checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.autoshard.propose import propose
from schedlang.passes.prove import Case, prove
from schedlang.passes.static_checks.static import static
from schedlang.runtime.global_state import _spaces, restore_global_state
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.module_state import LIBRARY_TOOLS
from schedlang.runtime.tracing.units import default_units
from schedlang.schedule import create_schedule
from tests import models
from tests.proofs import make_plan

WIDTH, ROWS = 6, 8
TABLES: dict[Any, Any] = {"by length": {}}
LISTED: list[Tensor] = []
VARIABLE: Tensor | None = None
CONSTANT = torch.linspace(0.5, 1.5, WIDTH)


def dict_table() -> Tensor:
    """Return a table stored in a dict of a dict."""
    if WIDTH not in TABLES["by length"]:
        TABLES["by length"][WIDTH] = torch.sin(torch.arange(float(WIDTH)))
    table: Tensor = TABLES["by length"][WIDTH]
    return table


def list_table() -> Tensor:
    """Return a table stored at the end of a list."""
    if not LISTED:
        LISTED.append(torch.cos(torch.arange(float(WIDTH))))
    return LISTED[-1]


def variable_table() -> Tensor:
    """Return a table stored in a global variable."""
    global VARIABLE
    if VARIABLE is None:
        VARIABLE = torch.linspace(-1, 1, WIDTH)
    return VARIABLE


@functools.cache
def cached_table(width: int) -> Tensor:
    """Return a table that `functools` stores."""
    return torch.tanh(torch.arange(float(width)))


def make_closure() -> Callable[[], Tensor]:
    tables: dict[int, Tensor] = {}

    def inner() -> Tensor:
        if WIDTH not in tables:
            tables[WIDTH] = torch.exp(-torch.arange(float(WIDTH)))
        return tables[WIDTH]

    return inner


closure_table = make_closure()


class LazyDict(dict[str, Any]):
    """A dict that creates a value whenever one is read, as transformers' activation table does."""

    made = 0

    def __getitem__(self, key: str) -> Any:
        LazyDict.made += 1
        return nn.Linear(1, 1)

    def __iter__(self) -> Any:  # so that `dict` does not copy it as a plain dict
        return iter([*self.keys()])


LAZY = LazyDict(one=nn.Linear, two=nn.ReLU)


class ClassTable(nn.Module):
    """Stores a table in the class, beside a constant that was always there."""

    kept: Tensor | None = None

    def forward(self) -> Tensor:
        cls = type(self)
        if cls.kept is None:
            cls.kept = torch.ones(WIDTH) / 3
        return cls.kept * CONSTANT


def attribute_table() -> Tensor:
    """Return a table stored in a new attribute of a class."""
    if not hasattr(ClassTable, "later"):
        ClassTable.later = torch.full((WIDTH,), 0.25)  # type: ignore[attr-defined]
    table: Tensor = ClassTable.later  # type: ignore[attr-defined]
    return table


STORES: dict[str, Callable[[], Tensor]] = {
    "a dict": dict_table,
    "a list": list_table,
    "a variable": variable_table,
    "lru_cache": functools.partial(cached_table, WIDTH),
    "a closure": closure_table,
    "a class": ClassTable(),
    "a new attribute": attribute_table,
}


class TableModel(nn.Module):
    """Adds a table before each block."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.classed, self.way = ClassTable(), way

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + torch.tanh(block(x + STORES[self.way]()))
        return {"loss": x.square().mean()}


def _batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))}


def clear_tables() -> None:
    global VARIABLE
    TABLES["by length"].clear()
    LISTED.clear()
    cached_table.cache_clear()
    VARIABLE = ClassTable.kept = None
    if "later" in vars(ClassTable):
        del ClassTable.later  # type: ignore[attr-defined]
    (cell,) = closure_table.__closure__ or ()
    cell.cell_contents.clear()


@pytest.mark.parametrize("before", [False, True], ids=["scheduled first", "run first"])
@pytest.mark.parametrize("way", STORES)
def test_a_model_with_a_table_trains_as_it_is(way: str, before: bool) -> None:
    """Neither a plan nor a float64 check leaves a table behind, or reads an earlier one."""
    clear_tables()
    model = TableModel(way)
    if before:
        model(**_batch(9))
    schedule = create_schedule(TableModel(way))
    schedule["blocks.*"].checkpoint()
    schedule.pipeline(order="GPipe", micro=2)
    program = schedule.build(
        batch=_batch(0), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        expected = model(**_batch(step))["loss"]
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(program.train_step(_batch(step)), expected.detach())
    assert STORES[way]().dtype == torch.float32 and STORES[way]().device.type == "cpu"


@pytest.mark.parametrize("way", STORES)
def test_a_proof_leaves_no_table(way: str, pool: Pool) -> None:
    """Stages, float64 and the working dtype each create their own tables."""
    clear_tables()
    rows = 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    report = prove(
        Case(make_plan(TableModel(way), rows, "pp=2"), (_batch(0), _batch(1))), pool=pool
    )
    assert report.ok, str(report)
    assert STORES[way]().dtype == torch.float32 and STORES[way]().device.type == "cpu"


def test_whoever_proposes_or_proves_statically_leaves_none() -> None:
    """`init` and static checks trace a model without values, and leave no table."""
    clear_tables()
    batch = _batch(0)
    with pytest.raises(Refusal, match="nothing of this model can be split"):
        propose(TableModel("a dict"), batch, {"tp": 2})
    assert not TABLES["by length"]
    propose(TableModel("a dict"), batch, {"dp": 2})
    assert not TABLES["by length"]
    static(make_plan(TableModel("a dict"), "zero(stage=0, over=dp)", "dp=2"), batch)
    assert not TABLES["by length"]
    default_units(TableModel("a dict"), batch)
    assert not TABLES["by length"]


def test_what_is_no_table_stays() -> None:
    """Counters and earlier tables are as the code made them."""
    clear_tables()
    original = dict_table()
    with restore_global_state(TableModel("a dict")):
        assert dict_table() is original
        TABLES["count"], TABLES["more"] = 3, torch.zeros(1)
        TABLES["by length"][WIDTH] = original.double()
    assert dict_table() is original and TABLES.pop("count") == 3 and "more" not in TABLES


def test_nothing_is_asked_of_a_table_that_makes_what_it_is_asked_for() -> None:
    """Its stored entries are read without calling its own methods."""
    count = LazyDict.made
    with restore_global_state(ClassTable()):
        pass
    assert LazyDict.made == count and dict.keys(LAZY) == {"one", "two"}


def test_of_a_library_the_modules_of_its_classes_are_searched() -> None:
    """Modules with which it loads models store nothing of a forward."""
    classes = {cls for module in models.gpt2(1).modules() for cls in type(module).__mro__}
    library = frozenset(cls for cls in classes if cls.__module__.startswith("transformers."))
    names = {space.get("__name__") for space, _ in _spaces(library) if isinstance(space, dict)}
    assert "transformers.models.gpt2.modeling_gpt2" in names
    packages = {name.partition(".")[0] for name in names if isinstance(name, str)}
    assert packages.isdisjoint(LIBRARY_TOOLS), packages
