"""Stub outputs of pipeline stages: shapes of earlier units are found before ranks start."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower import step_parts
from schedlang.passes.lower.build import build
from schedlang.passes.verify.observe import Condition, standard_conditions
from schedlang.passes.verify.proof_case import (
    Case,
    observe_on_rank,
    prepare_case,
    randomised_float64,
    working_case,
)
from schedlang.passes.verify.stage_state import add_stage_outputs
from schedlang.runtime.pipeline.stage import RecordedOutputs, Stub
from schedlang.runtime.tracing.meta_runs import meta_model
from schedlang.runtime.tracing.recording import record_forward
from schedlang.runtime.tracing.stage_graph import split_graph
from schedlang.runtime.tracing.units import CallSwitch
from tests import models
from tests.engine import Threads
from tests.proofs import make_plan

ROWS = '{}  pipeline_split(over=pp)\n{}\npipeline(order="1F1B", micro=2)'
ZERO = "zero(stage=0, over=dp)"
BATCHES = tuple(models.tokens(rows=rows, seed=seed) for rows, seed in ((8, 0), (7, 1), (8, 2)))


def _proof_cases(rows: str, mesh: str) -> tuple[Case, Case | None, tuple[Condition, ...]]:
    case = prepare_case(Case(make_plan(models.gpt2(2), rows, mesh), BATCHES))
    working, case = working_case(case), randomised_float64(case)
    return case, working, standard_conditions(case.batches, 1.0)


def _record_meta_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the units that ranks run on the meta device to find shapes."""
    units: list[int] = []
    run_on_meta = Stub._run_on_meta

    def shapes(stub: Stub, unit: int, *args: Any) -> Any:
        units.append(unit)
        return run_on_meta(stub, unit, *args)

    monkeypatch.setattr(Stub, "_run_on_meta", shapes)
    return units


def test_ranks_find_nothing_more(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find all shapes precomputed, and results are equal."""
    case, working, conditions = _proof_cases(ROWS.format("transformer.h", ZERO), "dp=2, pp=2")
    with_outputs, _, new_conditions = add_stage_outputs(case, working, conditions)
    units = _record_meta_runs(monkeypatch)
    expected = threads.run(observe_on_rank, 4, case, conditions)[0]
    assert units  # otherwise nothing is tested
    units.clear()
    result = threads.run(observe_on_rank, 4, with_outputs, new_conditions)[0]
    assert not units
    assert result.tensors.keys() == expected.tensors.keys()
    for key, value in expected.tensors.items():
        result_value = result.tensors[key]
        assert value is result_value or (
            result_value is not None and torch.equal(value, result_value)
        ), key


def test_the_model_is_copied_only_where_something_is_not_known(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all outputs no meta copy is made; with some, the others are found equal."""
    case, _, conditions = _proof_cases(ROWS.format("transformer.h", ZERO), "dp=2, pp=2")
    with_outputs, _, new_conditions = add_stage_outputs(case, None, conditions)
    assert with_outputs.prepared is not None
    first_output = dict(list(with_outputs.prepared.outputs.items())[:1])
    with_fewer = replace(
        with_outputs, prepared=replace(with_outputs.prepared, outputs=first_output)
    )
    copies: list[object] = []
    local_skeleton = step_parts.local_skeleton

    def skeleton(*args: Any) -> nn.Module:
        copies.append(args)
        return local_skeleton(*args)

    monkeypatch.setattr(step_parts, "local_skeleton", skeleton)
    expected = threads.run(observe_on_rank, 4, with_outputs, new_conditions)[0]
    assert not copies
    result = threads.run(observe_on_rank, 4, with_fewer, new_conditions)[0]
    assert copies and result.tensors.keys() == expected.tensors.keys()
    for key, value in expected.tensors.items():
        result_value = result.tensors[key]
        assert value is result_value or (
            result_value is not None and torch.equal(value, result_value)
        ), key


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_one_rank_for_a_stage_finds_them_itself(mesh: str) -> None:
    """With one rank per stage nothing is precomputed: it would only do the rank's work."""
    rows = ROWS.format("transformer.h", "") if "pp" in mesh else ZERO
    with_outputs, _, _ = add_stage_outputs(*_proof_cases(rows, mesh))
    assert with_outputs.prepared is not None and not with_outputs.prepared.outputs


class RaisingModel(nn.Module):
    """A model whose forward raises between its units for a batch of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if len(x) == 1:
                raise ValueError("one row")
            x = block(x)
        return x.square().mean()


def test_what_the_model_raises_is_left_to_the_ranks() -> None:
    """If the model raises, nothing is precomputed and the error is left to the ranks."""
    plan = make_plan(RaisingModel(), ROWS.format("blocks", ZERO), "dp=2, pp=2")
    batches = tuple({"x": torch.ones(rows, 4)} for rows in (8, 4, 8))
    case = prepare_case(Case(plan, batches))
    with_outputs, _, _ = add_stage_outputs(case, None, standard_conditions(case.batches, 1.0))
    assert with_outputs.prepared is not None and not with_outputs.prepared.outputs


class StatefulModel(nn.Module):
    """Layers that write into a shared state, in evaluation only."""

    def __init__(self, state: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.state, self.layers = state, nn.ModuleList(_StatefulLayer(k) for k in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        memory = None if self.training or not self.state else torch.zeros(len(x), 4)
        for layer in self.layers:
            x, memory = layer(x, memory)
        return {"loss": x.square().mean(), "x": x}


class _StatefulLayer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.place, self.linear = index, nn.Linear(6, 6)

    def forward(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        h = self.linear(x).tanh()
        if memory is not None:
            memory[:, self.place] = h.sum(-1) + memory[:, self.place]
            h = h + memory[:, self.place, None]
        return h, memory


@pytest.mark.parametrize("state", [False, True])
def test_state_that_evaluation_alone_writes(threads: Threads, state: bool) -> None:
    """State written by layers of other stages is missing: refused, instead of NaN outputs."""
    model, batch = StatefulModel(state), {"x": torch.ones(4, 6)}
    rows = 'layers[2]  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    plan = make_plan(model, rows, "pp=2")

    def evaluated() -> Tensor:
        output: Tensor = build(plan, batch).eval_step(batch)["x"]
        return output

    if state:
        with pytest.raises(Refusal) as refusal:
            threads.run(evaluated, 2)
        assert refusal.value.diagnostic.code == "S610"
    else:
        outputs = threads.run(evaluated, 2)
        assert all(torch.allclose(output, model.eval()(**batch)["x"]) for output in outputs)


class _DictUnit(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return {"x": x * 2, "ids": (ids, None, 3)}


class _InPlaceUnit(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return x.add_(1), x.mean()


class _MaskedUnit(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x[ids > 0]


class _ValueUnit(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x * 2 if ids.max().item() > 1 else x[:, :1]


class _DropoutUnit(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p, self.training)


class _Chain(nn.Module):
    """Units of each kind with equal inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        kinds = (
            _DictUnit(),
            _DropoutUnit(0.0),
            _DropoutUnit(0.5),
            _DropoutUnit(1.0),
            _InPlaceUnit(),
        )
        self.each = nn.ModuleList([*kinds, _MaskedUnit(), _ValueUnit()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for unit in self.each:
            unit(x.clone(), ids)
        return x.sum()


NAMES = ("embed", *(f"each.{place}" for place in range(7)))


def _signature(entry: Any) -> Any:
    leaves, spec, *others = entry
    tensors = [(t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves]
    return tensors, spec, *others


def test_the_record_shows_what_stand_ins_find() -> None:
    """The record contains units without random draws and value checks, with correct shapes."""
    model, batch = _Chain(), {"ids": torch.tensor([[0, 1, 2], [3, 0, 1]])}
    recorded = RecordedOutputs(model, NAMES)
    graph = split_graph(record_forward(model, NAMES, batch, met=recorded), [0] * 7 + [1])
    stub = Stub(meta_model(model, {}), graph)
    stub.find_outputs(CallSwitch(model, NAMES), model, batch, len(NAMES))
    outputs = recorded.outputs_for(model)
    assert sorted(key[0] for key in outputs) == [0, 1, 2, 5]
    assert {key: _signature(entry) for key, entry in outputs.items()} == {
        key: _signature(stub.portable_outputs[key]) for key in outputs
    }
    assert not recorded.outputs_for(_Chain().eval())
    assert not recorded.outputs_for(_Chain().bfloat16())


def test_what_nothing_reads_is_made_once() -> None:
    """An unread output is one shared read-only NaN tensor, but new under tensor-following modes."""
    model, ids = _Chain(), torch.tensor([[0, 1, 2], [3, 0, 1]])
    graph = split_graph(record_forward(model, NAMES, {"ids": ids}), [0] * 7 + [1])
    stub = Stub(meta_model(model, {}), graph)

    def output() -> Tensor:
        result: Tensor = stub(0, (ids,), {}, {}, ids.device, model.embed)
        return result

    first, second = output(), output()
    assert first is not second and first.data_ptr() == second.data_ptr() and first.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        first.add_(1)
    for mode in (torch.inference_mode(), FlopCounterMode(display=False)):
        with mode:
            assert output().data_ptr() != first.data_ptr()
    assert output().data_ptr() == first.data_ptr()


def test_who_was_told_by_the_record_looks_for_nothing(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recorded outputs a program runs no unit to find shapes."""
    batch, optimizer = {"x": torch.ones(4, 6)}, partial(torch.optim.SGD, lr=0.1)
    plan = make_plan(StatefulModel(False), ROWS.format("layers", ""), "pp=2")
    units = _record_meta_runs(monkeypatch)
    threads.run(lambda: build(plan, batch, optimizer=optimizer).train_step(batch), 2)
    assert not units
    monkeypatch.setattr(RecordedOutputs, "outputs_for", lambda *_: {})
    threads.run(lambda: build(plan, batch, optimizer=optimizer).train_step(batch), 2)
    assert units  # otherwise nothing is tested
