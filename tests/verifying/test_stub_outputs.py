"""Tests of outputs: what stages take for units of earlier ones is found before there are ranks."""

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
from schedlang.passes.verify.stage_outputs import add_stage_outputs
from schedlang.runtime.pipeline.stage import RecordedOutputs, Stub
from schedlang.runtime.tracing.meta_runs import meta_model
from schedlang.runtime.tracing.recording import record_forward
from schedlang.runtime.tracing.stage_graph import split_graph
from schedlang.runtime.tracing.units import CallSwitch
from tests import models
from tests.engine import Threads
from tests.proofs import planned

ROWS = '{}  pipeline_split(over=pp)\n{}\npipeline(order="1F1B", micro=2)'
ZERO = "zero(stage=0, over=dp)"
BATCHES = tuple(models.tokens(rows=rows, seed=seed) for rows, seed in ((8, 0), (7, 1), (8, 2)))


def _case(rows: str, mesh: str) -> tuple[Case, Case | None, tuple[Condition, ...]]:
    case = prepare_case(Case(planned(models.gpt2(2), rows, mesh), BATCHES))
    working, case = working_case(case), randomised_float64(case)
    return case, working, standard_conditions(case.batches, 1.0)


def _met(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The units that ranks run for their shapes from now on."""
    met: list[int] = []
    real = Stub._run_on_meta

    def shapes(stub: Stub, unit: int, *given: Any) -> Any:
        met.append(unit)
        return real(stub, unit, *given)

    monkeypatch.setattr(Stub, "_run_on_meta", shapes)
    return met


def test_ranks_find_nothing_more(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ranks ask for in training and evaluation is known to them, and the same results."""
    case, working, told = _case(ROWS.format("transformer.h", ZERO), "dp=2, pp=2")
    knowing, _, sent = add_stage_outputs(case, working, told)
    met = _met(monkeypatch)
    right = threads.run(observe_on_rank, 4, case, told)[0]
    assert met  # else nothing is shown
    met.clear()
    found = threads.run(observe_on_rank, 4, knowing, sent)[0]
    assert not met
    assert found.tensors.keys() == right.tensors.keys()
    for key, value in right.tensors.items():
        other = found.tensors[key]
        assert value is other or (other is not None and torch.equal(value, other)), key


def test_the_model_is_copied_only_where_something_is_not_known(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has all outputs needs no copy without values; who has some finds the others the same."""
    case, _, told = _case(ROWS.format("transformer.h", ZERO), "dp=2, pp=2")
    knowing, _, sent = add_stage_outputs(case, None, told)
    assert knowing.prepared is not None
    some = dict(list(knowing.prepared.outputs.items())[:1])
    less = replace(knowing, prepared=replace(knowing.prepared, outputs=some))
    copies: list[object] = []
    real = step_parts.local_skeleton

    def skeleton(*given: Any) -> nn.Module:
        copies.append(given)
        return real(*given)

    monkeypatch.setattr(step_parts, "local_skeleton", skeleton)
    right = threads.run(observe_on_rank, 4, knowing, sent)[0]
    assert not copies
    found = threads.run(observe_on_rank, 4, less, sent)[0]
    assert copies and found.tensors.keys() == right.tensors.keys()
    for key, value in right.tensors.items():
        other = found.tensors[key]
        assert value is other or (other is not None and torch.equal(value, other)), key


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_one_rank_for_a_stage_finds_them_itself(mesh: str) -> None:
    """Where nobody else asks alike, this process would only do the work of a rank."""
    rows = ROWS.format("transformer.h", "") if "pp" in mesh else ZERO
    knowing, _, _ = add_stage_outputs(*_case(rows, mesh))
    assert knowing.prepared is not None and not knowing.prepared.outputs


class Choosy(nn.Module):
    """A model whose forward raises between its units for one number of rows."""

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
    """Then nothing is known, and nothing is said here."""
    plan = planned(Choosy(), ROWS.format("blocks", ZERO), "dp=2, pp=2")
    batches = tuple({"x": torch.ones(rows, 4)} for rows in (8, 4, 8))
    case = prepare_case(Case(plan, batches))
    knowing, _, _ = add_stage_outputs(case, None, standard_conditions(case.batches, 1.0))
    assert knowing.prepared is not None and not knowing.prepared.outputs


class Remembering(nn.Module):
    """Layers that in evaluation write into a state that is handed on from one to the next."""

    def __init__(self, state: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.state, self.layers = state, nn.ModuleList(_Layer(k) for k in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = None if self.training or not self.state else torch.zeros(len(x), 4)
        for layer in self.layers:
            x, kept = layer(x, kept)
        return {"loss": x.square().mean(), "x": x}


class _Layer(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(6, 6)

    def forward(self, x: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
        h = self.linear(x).tanh()
        if kept is not None:
            kept[:, self.place] = h.sum(-1) + kept[:, self.place]
            h = h + kept[:, self.place, None]
        return h, kept


@pytest.mark.parametrize("state", [False, True])
def test_state_that_evaluation_alone_writes(threads: Threads, state: bool) -> None:
    """What layers of other stages write into is not there: refused, and never NaN in the output."""
    model, batch = Remembering(state), {"x": torch.ones(4, 6)}
    rows = 'layers[2]  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    plan = planned(model, rows, "pp=2")

    def evaluated() -> Tensor:
        out: Tensor = build(plan, batch).eval_step(batch)["x"]
        return out

    if state:
        with pytest.raises(Refusal) as refusal:
            threads.run(evaluated, 2)
        assert refusal.value.diagnostic.code == "S610"
    else:
        found = threads.run(evaluated, 2)
        assert all(torch.allclose(one, model.eval()(**batch)["x"]) for one in found)


class _Pair(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return {"x": x * 2, "ids": (ids, None, 3)}


class _Written(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return x.add_(1), x.mean()


class _Picked(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x[ids > 0]


class _Asked(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x * 2 if ids.max().item() > 1 else x[:, :1]


class _Dropped(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p, self.training)


class _Chain(nn.Module):
    """Units of each kind, all given alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        kinds = (_Pair(), _Dropped(0.0), _Dropped(0.5), _Dropped(1.0), _Written())
        self.each = nn.ModuleList([*kinds, _Picked(), _Asked()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for unit in self.each:
            unit(x.clone(), ids)
        return x.sum()


NAMES = ("embed", *(f"each.{place}" for place in range(7)))


def _told_of(made: Any) -> Any:
    leaves, spec, *rest = made
    tensors = [(t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves]
    return tensors, spec, *rest


def test_the_record_shows_what_stand_ins_find() -> None:
    """It tells of units that neither draw nor look at values, and the same as a run for shapes."""
    model, batch = _Chain(), {"ids": torch.tensor([[0, 1, 2], [3, 0, 1]])}
    recorded = RecordedOutputs(model, NAMES)
    made = split_graph(record_forward(model, NAMES, batch, met=recorded), [0] * 7 + [1])
    stub = Stub(meta_model(model, {}), made)
    stub.find_outputs(CallSwitch(model, NAMES), model, batch, len(NAMES))
    known = recorded.outputs_for(model)
    assert sorted(key[0] for key in known) == [0, 1, 2, 5]
    assert {key: _told_of(one) for key, one in known.items()} == {
        key: _told_of(stub.portable_outputs[key]) for key in known
    }
    assert not recorded.outputs_for(_Chain().eval())
    assert not recorded.outputs_for(_Chain().bfloat16())


def test_what_nothing_reads_is_made_once() -> None:
    """It is NaN that nobody can write into, and is made anew where modes follow tensors."""
    model, ids = _Chain(), torch.tensor([[0, 1, 2], [3, 0, 1]])
    made = split_graph(record_forward(model, NAMES, {"ids": ids}), [0] * 7 + [1])
    stub = Stub(meta_model(model, {}), made)

    def output() -> Tensor:
        found: Tensor = stub(0, (ids,), {}, {}, ids.device, model.embed)
        return found

    one, other = output(), output()
    assert one is not other and one.data_ptr() == other.data_ptr() and one.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        one.add_(1)
    for mode in (torch.inference_mode(), FlopCounterMode(display=False)):
        with mode:
            assert output().data_ptr() != one.data_ptr()
    assert output().data_ptr() == one.data_ptr()


def test_who_was_told_by_the_record_looks_for_nothing(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the recorded model, for the recorded shapes, runs no unit for its shapes."""
    batch, optimizer = {"x": torch.ones(4, 6)}, partial(torch.optim.SGD, lr=0.1)
    plan = planned(Remembering(False), ROWS.format("layers", ""), "pp=2")
    met = _met(monkeypatch)
    threads.run(lambda: build(plan, batch, optimizer=optimizer).train_step(batch), 2)
    assert not met
    monkeypatch.setattr(RecordedOutputs, "outputs_for", lambda *_: {})
    threads.run(lambda: build(plan, batch, optimizer=optimizer).train_step(batch), 2)
    assert met  # else nothing is shown
