"""Tables that the code of a model keeps in globals, classes and caches stay as they were."""

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
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.tracing.units import default_units
from schedlang.schedule import create_schedule
from tests.proofs import planned

WIDTH, ROWS = 6, 8
TABLES: dict[Any, Any] = {"by length": {}}
LISTED: list[Tensor] = []
VARIABLE: Tensor | None = None
CONSTANT = torch.linspace(0.5, 1.5, WIDTH)


def table() -> Tensor:
    """A table in a dict of a dict."""
    if WIDTH not in TABLES["by length"]:
        TABLES["by length"][WIDTH] = torch.sin(torch.arange(float(WIDTH)))
    found: Tensor = TABLES["by length"][WIDTH]
    return found


def listed() -> Tensor:
    """A table at the end of a list."""
    if not LISTED:
        LISTED.append(torch.cos(torch.arange(float(WIDTH))))
    return LISTED[-1]


def variable() -> Tensor:
    """A table in a global variable."""
    global VARIABLE
    if VARIABLE is None:
        VARIABLE = torch.linspace(-1, 1, WIDTH)
    return VARIABLE


@functools.cache
def cached(width: int) -> Tensor:
    """A table that `functools` keeps."""
    return torch.tanh(torch.arange(float(width)))


def _closed() -> Callable[[], Tensor]:
    made: dict[int, Tensor] = {}

    def inner() -> Tensor:
        if WIDTH not in made:
            made[WIDTH] = torch.exp(-torch.arange(float(WIDTH)))
        return made[WIDTH]

    return inner


closed = _closed()


class Making(dict[str, Any]):
    """Makes a value whenever one is asked for, as transformers' table of activations does."""

    made = 0

    def __getitem__(self, key: str) -> Any:
        Making.made += 1
        return nn.Linear(1, 1)

    def __iter__(self) -> Any:  # by which `dict` takes it for no plain one
        return iter([*self.keys()])


MAKING = Making(one=nn.Linear, two=nn.ReLU)


class Classed(nn.Module):
    """A table that the class keeps, and one constant that is there from the beginning."""

    kept: Tensor | None = None

    def forward(self) -> Tensor:
        cls = type(self)
        if cls.kept is None:
            cls.kept = torch.ones(WIDTH) / 3
        return cls.kept * CONSTANT


def new() -> Tensor:
    """A table in an attribute that the class has not had."""
    if not hasattr(Classed, "later"):
        Classed.later = torch.full((WIDTH,), 0.25)  # type: ignore[attr-defined]
    found: Tensor = Classed.later  # type: ignore[attr-defined]
    return found


WAYS: dict[str, Callable[[], Tensor]] = {
    "a dict": table,
    "a list": listed,
    "a variable": variable,
    "lru_cache": functools.partial(cached, WIDTH),
    "a closure": closed,
    "a class": Classed(),
    "a new attribute": new,
}


class Tabled(nn.Module):
    """Adds a table before each block."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.classed, self.way = Classed(), way

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + torch.tanh(block(x + WAYS[self.way]()))
        return {"loss": x.square().mean()}


def _batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))}


def _empty() -> None:
    global VARIABLE
    TABLES["by length"].clear()
    LISTED.clear()
    cached.cache_clear()
    VARIABLE = Classed.kept = None
    if "later" in vars(Classed):
        del Classed.later  # type: ignore[attr-defined]
    (cell,) = closed.__closure__ or ()
    cell.cell_contents.clear()


@pytest.mark.parametrize("before", [False, True], ids=["scheduled first", "run first"])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_with_a_table_trains_as_it_is(way: str, before: bool) -> None:
    """Neither a plan nor a check in float64 leaves a table behind; one of before is met by none."""
    _empty()
    model = Tabled(way)
    if before:
        model(**_batch(9))
    schedule = create_schedule(Tabled(way))
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
    assert WAYS[way]().dtype == torch.float32 and WAYS[way]().device.type == "cpu"


@pytest.mark.parametrize("way", WAYS)
def test_a_proof_leaves_no_table(way: str, pool: Pool) -> None:
    """Stages, float64 and the working dtype each make tables of their own."""
    _empty()
    rows = 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    report = prove(Case(planned(Tabled(way), rows, "pp=2"), (_batch(0), _batch(1))), pool=pool)
    assert report.ok, str(report)
    assert WAYS[way]().dtype == torch.float32 and WAYS[way]().device.type == "cpu"


def test_whoever_proposes_or_proves_statically_leaves_none() -> None:
    """`init` follows a model without values, and so do the proofs that need no rank."""
    _empty()
    batch = _batch(0)
    with pytest.raises(Refusal, match="nothing of this model can be split"):
        propose(Tabled("a dict"), batch, {"tp": 2})
    assert not TABLES["by length"]
    static(planned(Tabled("a dict"), "zero(stage=0, over=dp)", "dp=2"), batch)
    assert not TABLES["by length"]
    default_units(Tabled("a dict"), batch)
    assert not TABLES["by length"]


def test_what_is_no_table_stays() -> None:
    """Numbers that are counted, and tables that were there before, are as the code made them."""
    _empty()
    first = table()
    with restore_global_state(Tabled("a dict")):
        assert table() is first
        TABLES["count"], TABLES["more"] = 3, torch.zeros(1)
        TABLES["by length"][WIDTH] = first.double()
    assert table() is first and TABLES.pop("count") == 3 and "more" not in TABLES


def test_nothing_is_asked_of_a_table_that_makes_what_it_is_asked_for() -> None:
    """Its entries are looked at as they lie."""
    before = Making.made
    with restore_global_state(Classed()):
        pass
    assert Making.made == before and dict.keys(MAKING) == {"one", "two"}
