"""Units of pipelines: calls between which a model may be cut, and checks of later forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.partition import stage_assignment as cuts
from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.pipeline.stage import Stage, Stub
from schedlang.runtime.tracing.meta_runs import meta_model
from schedlang.runtime.tracing.module_calls import record_calls
from schedlang.runtime.tracing.recording import record_forward
from schedlang.runtime.tracing.stage_graph import split_graph, unit_labels
from schedlang.runtime.tracing.units import CallSwitch, is_in_trunk, units_of
from tests.single_process import compare_stages, cut_evenly, run_stages

WIDTH = 4


class Calls(nn.Module):
    """Two lists and a further module, called in the order of the text `way`."""

    def __init__(self, calls: str = "b0 b1 m a0 m a1", branch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.b = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.m, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way, self.branch = calls, branch
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for call in self.way.split():
            if self.branch and len(x) == 2 and call == "a0":
                continue  # batches of two rows skip this unit
            x = torch.tanh(getattr(self, call[0])[int(call[1])](x) if call[1:] else self.m(x))
        return x.square().mean()


BATCH = {"x": torch.rand(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def test_units_stand_in_the_order_of_calls() -> None:
    """Neither the order of lists in the model nor the order of the row matters."""
    model = Calls("b0 b1 a0 a1")
    for trunks in (["a", "b"], ["b", "a"]):
        names = units_of(model, BATCH, trunks=trunks)
        assert names == ("b.0", "b.1", "a.0", "a.1")
        assert is_in_trunk(model, names, trunks) == (True,) * 4
    assert is_in_trunk(model, names, ["a"]) == (False, False, True, True)


def test_a_module_stands_beside_lists() -> None:
    """A module that is no list is one unit of the trunk."""
    model = Calls("b0 b1 m a0 a1")
    names = units_of(model, BATCH, trunks=["a", "b", "m"])
    assert names == ("b.0", "b.1", "m", "a.0", "a.1")
    assert is_in_trunk(model, names, ["a", "b", "m"]) == (True,) * 5


def test_what_is_not_called_is_left_out() -> None:
    """Elements that are not called are no units; the others are cut and equal the full model."""
    model = Calls("b0 b1 a1")
    assert units_of(model, BATCH, trunks=["a", "b"]) == ("b.0", "b.1", "a.1")
    assert compare_stages(model, cut_evenly(model, BATCH, 3, ["a", "b"]), BATCH).ok


def test_calls_in_different_gaps_are_units() -> None:
    """A module called once in each of two gaps of the trunk is a unit in each."""
    model = Calls("b0 b1 m a0 m a1")
    stage_split = cut_evenly(model, BATCH, 4, ["a", "b"])
    assert stage_split.graph.labels == ("b.0", "b.1", "m#0", "a.0", "m#1", "a.1")
    assert stage_split.graph.glue_parameters == () and stage_split.shared == {
        "m.bias": (1, 2),
        "m.weight": (1, 2),
    }
    assert compare_stages(model, stage_split, BATCH).ok


def test_calls_in_one_gap_are_glue() -> None:
    """A module outside the trunk that is called in a loop belongs to the code between units."""
    model = Calls("b0 b1 m m m a0 a1")
    stage_split = cut_evenly(model, BATCH, 2, ["a", "b"])
    assert "m" not in stage_split.graph.units and stage_split.graph.glue_parameters == (
        "m.bias",
        "m.weight",
    )
    assert compare_stages(model, stage_split, BATCH).ok


def test_a_loop_in_the_trunk_is_refused_with_its_place() -> None:
    """S601 gives the number of calls, the line of the loop, and a help."""
    with pytest.raises(Refusal) as caught:
        units_of(Calls("b0 b0 b0 b1"), BATCH, trunks=["b"])
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "S601" and "`b.0` is called 3 times" in diagnostic.title
    assert "in a loop at test_stage_units.py:" in diagnostic.notes[0]
    assert "`for call in self.way.split():`" in diagnostic.notes[0]
    assert "`b.0  unroll(3)`" in diagnostic.helps[1]


def test_the_place_is_where_both_calls_part() -> None:
    """Of nested loops the message names the one that causes the second call."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def once(self, x: Tensor) -> Tensor:
            for layer in self.inner:
                x = layer(x)
            return x

        def forward(self, x: Tensor) -> Tensor:
            for _turn in range(2):
                x = self.once(x)
            return x

    calls = record_calls(Nested().double(), BATCH, True)
    assert "`for _turn in range(2):`" in calls.describe_repeat("inner.0")
    assert calls.describe_repeat("") == ""


def test_unrolled_calls_are_units() -> None:
    """With `unroll` each call is a unit; stages share parameters, and gradients are right."""
    model = Calls("b0 b0 a0 b0 b1")
    stage_split = cut_evenly(model, BATCH, 4, ["b"], {"b.0": 3})
    assert stage_split.graph.labels == ("b.0#0", "b.0#1", "a.0", "b.0#2", "b.1")
    assert stage_split.shared["b.0.weight"] == (0, 1, 2)
    assert compare_stages(model, stage_split, BATCH).ok


@pytest.mark.parametrize("times", [1, 2, 4])
def test_another_number_of_calls_is_refused(times: int) -> None:
    """A wrong number in `unroll` is refused."""
    with pytest.raises(Refusal, match="called 3 times in one forward, not"):
        units_of(Calls("b0 b0 b0 b1"), BATCH, trunks=["b"], unrolled={"b.0": times})


def test_a_start_may_be_a_container() -> None:
    """A stage may start at a container: it then starts at the container's first unit."""
    units = [cuts.ChainUnit(name, 1) for name in ("h.0", "h.1.a", "h.1.b", "h.2#0", "h.2#1")]
    assert cuts.stages_starting_at(units, ["h.1", "h.2"]) == (0, 1, 1, 2, 2)
    assert unit_labels(("x", "y", "x")) == ("x#0", "y", "x#1")


def _stage(model: nn.Module, index: int) -> Stage:
    names = units_of(model, BATCH, trunks=["b", "a"])
    stage_split = split_graph(record_forward(model, names, BATCH), [0, 1, 1, 2][: len(names)])
    stub = Stub(meta_model(model, {}), stage_split)
    return Stage(model, stage_split, index, switch=CallSwitch(model, names), stub=stub)


@pytest.mark.parametrize(("index", "rows"), [(1, 2), (2, 2)])
def test_another_way_through_the_model_is_refused(index: int, rows: int) -> None:
    """A batch for which a recorded unit is not called is refused (S614)."""
    stage = _stage(Calls("b0 b1 a0 a1", branch=True), index)
    zeros = torch.zeros(rows, WIDTH, dtype=torch.float64)
    received = {token: zeros for tokens in stage.incoming.values() for token in tokens}
    with pytest.raises(Refusal, match=r"`a\.0` is not called") as caught:
        stage.forward({"x": zeros}, received)
    assert caught.value.diagnostic.code == "S614"


def test_a_further_call_is_refused() -> None:
    """A unit that is called more often than recorded is refused."""
    model = Calls("b0 b1 a0 a1")
    stage = _stage(model, 1)
    model.way = "b0 b1 b1 a0 a1"
    received = {(0, 0): torch.zeros(3, WIDTH, dtype=torch.float64)}
    with pytest.raises(Refusal, match=r"`b\.1` is called again"):
        stage.forward(BATCH, received)


class Joining(nn.Module):
    """Joins the first block's output to the end for large batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first_output = h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(h)
        return (h + first_output if len(x) > 3 else h).square().mean()


def test_a_value_that_was_never_sent_is_no_number() -> None:
    """Code between units that reads an unrecorded value gives a NaN loss."""
    model = Joining().double()
    stage_split = cut_evenly(model, BATCH, 3, ["layers"])
    assert stage_split.edges == ((0, 1), (1, 2)) and compare_stages(model, stage_split, BATCH).ok
    large_batch = {"x": torch.rand(5, WIDTH, dtype=torch.float64)}
    (result,) = run_stages(model, stage_split, [large_batch])
    assert result.loss.isnan()


class Asking(nn.Module):
    """Reads values of tensors that it creates from constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if 0 in ids[:, [-1, 0]]:  # a list as an index
            x = x * 2
        for layer in self.layers:
            x = layer(x)
        if torch.tensor([2, 3]).sum().item() == 5:
            x = x + 1
        return x.square().mean()


def test_spelt_numbers_are_known_without_data() -> None:
    """Constant tensors and lists as indices keep their values on the meta device."""
    model: Any = Asking().double()
    for token in (0, 7):
        batch = {**BATCH, "ids": torch.tensor([[token, 1, 2], [3, 4, 5], [3, 4, 5]])}
        stage_split = cut_evenly(model, batch, 2, ["layers"])
        assert compare_stages(model, stage_split, batch).ok


def test_calls_that_were_seen_are_not_asked_for_again() -> None:
    """If counts show that each module is called once, calls need not be recorded again."""
    from schedlang.runtime.tracing.module_calls import calls_from_counts

    model = Calls("b0 b1")
    calls = calls_from_counts(model, {"b": 1, "b.0": 1, "b.1": 1})
    assert calls is not None and calls.order == ("b", "b.0", "b.1")
    assert units_of(model, BATCH, trunks=["b"], calls=calls) == units_of(model, BATCH, trunks=["b"])
    assert calls_from_counts(model, {"b.0": 2}) is None and calls_from_counts(model, {}) is None


GROUP = Group(("tp",), (0, 1), 0)
COLLECTIVES: list[Callable[[Tensor], Tensor]] = [
    lambda x: collectives.gather(x, 1, GROUP, consumers_differ=True),
    lambda x: collectives.reduce(x, GROUP),
    lambda x: collectives.scatter_sum(x, 1, GROUP),
    lambda x: collectives.split(x, 1, GROUP),
    lambda x: collectives.exchange_rows(x, GROUP),
    lambda x: collectives.switch_sharded_dim(x, 1, 2, GROUP),
]


@pytest.mark.parametrize(
    "move", COLLECTIVES, ids=["gather", "reduce", "scatter", "split", "all", "dims"]
)
def test_what_a_unit_gets_through_a_collective_alone_is_read(move: Any) -> None:
    """A unit that reads its input only through a collective is recorded as its reader."""

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return move(x) * self.weight

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), Moved()

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.second(self.first(x)).sum())

    graph = record_forward(Two(), ("first", "second"), {"x": torch.ones(2, 4, 4)})
    assert graph.reads[1].tokens == {(0, 0)}
