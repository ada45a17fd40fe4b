"""Whole weights in safetensors: what a program of any layout exports, others load by themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from schedlang import create_schedule
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.runtime import weight_export
from tests import models, small_models
from tests.engine import Threads
from tests.layouts import Odd, points, program_of
from tests.proofs import planned, sgd

VOCAB = "transformer.wte  pad(vocab, multiple=4)\ntransformer.wte, lm_head  shard(vocab, over=tp)\n"
STAGES = 'pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "tied embeddings, split, in stages": (
        lambda: models.gpt2(2),
        f"{VOCAB}transformer.h  {STAGES}",
        "pp=2, tp=2",
    ),
    "fused experts, spread and sliced": (
        lambda: small_models.mixtral(2),
        "model.layers.*.mlp.experts  expert_parallel(over=dp)\nzero(stage=3, over=dp)",
        "dp=2",
    ),
}


def exported(plan: Plan, path: str, model: nn.Module) -> dict[str, Tensor]:
    """On this rank: a step, and the state that has been exported."""
    batch = models.tokens(8)
    program = build(plan, batch, optimizer=sgd)
    program.train_step(batch)
    program.export(path, model)
    program.export(path, model)  # in the place of the first
    return program.state_dict()


@pytest.mark.parametrize("name", CASES)
def test_from_pretrained_loads_it(name: str, tmp_path: Path, threads: Threads) -> None:
    """Every weight is the trained one to the last bit, and what was tied is tied."""
    make, rows, mesh = CASES[name]
    model, folder = make(), tmp_path / "out"
    before = str(model.config)
    plan = planned(model, rows, mesh)
    state = threads.run(exported, plan.mesh.world, plan, str(folder), model)[0]
    assert str(model.config) == before
    found: Any = type(model).from_pretrained(folder, dtype=torch.float64)
    own = found.state_dict()
    assert own.keys() == state.keys()
    assert not [key for key in own if not torch.equal(own[key], state[key])]
    assert any(not torch.equal(own[key], value) for key, value in model.state_dict().items())
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert (found.lm_head.weight is found.get_input_embeddings().weight) == tied == ("tied" in name)


def in_shards(plan: Plan, path: str, model: nn.Module, most: int) -> tuple[int, dict[str, Tensor]]:
    """Export in several files; the most bytes of whole tensors that came here, and the state."""
    program = build(plan, models.tokens(8), optimizer=sgd)
    program.train_step(models.tokens(8))
    held, largest = weight_export.GatheredTensors.gather_box, 0

    def counted(self: weight_export.GatheredTensors, *given: Any) -> Tensor:
        nonlocal largest
        found = held(self, *given)
        here = self.cached[self.writer].values()
        largest = max(largest, sum(one.nbytes for one in here if one is not None))
        return found

    program_shards = type("Counting", (weight_export.GatheredTensors,), {"gather_box": counted})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weight_export, "GatheredTensors", program_shards)
        program.export(path, model, shard=most)
    return largest, program.state_dict()


def contents(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, each in the file that the index names, and in no other."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        there = load_file(file)
        assert all(index[name] == file.name for name in there) and not found.keys() & there.keys()
        found.update(there)
    assert found.keys() == index.keys()
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_rank_writes_files_of_its_own(name: str, tmp_path: Path, pool: Any) -> None:
    """All that `save_pretrained` itself writes of the whole weights is there, bit by bit, and where
    nothing is laid out anew the files are the same; no rank ever has more than two whole
    parameters."""
    make, rows, mesh = CASES[name]
    model, folder, most = make(), tmp_path / "out", 12_000
    plan = planned(model, rows, mesh)
    told = pool.run(in_shards, plan.mesh.world, plan, str(folder), model, most)
    state = told[0][1]
    make().save_pretrained(tmp_path / "whole", state_dict=dict(state), max_shard_size=most)
    ours, theirs = contents(folder), contents(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(one, theirs[key]) for key, one in ours.items())
    files = [one for one in folder.iterdir() if one.suffix == ".safetensors"]
    assert len(files) > 2 and max(one.stat().st_size for one in files) < 2 * most
    if "tied" in name:
        same = {one.name: one.read_bytes() for one in folder.iterdir()}
        assert same == {one.name: one.read_bytes() for one in (tmp_path / "whole").iterdir()}
    sizes = sorted(value.nbytes for value in state.values())
    assert all(0 < largest <= sum(sizes[-2:]) < sum(sizes) / 2 for largest, _ in told)


def test_any_module(tmp_path: Path) -> None:
    """A module of no library, with a buffer of two names, is one file that safetensors loads."""
    from safetensors.torch import load_model

    program = program_of(Odd())
    program.train_step(points(0))
    program.export(tmp_path / "out", Odd())
    fresh = Odd()
    load_model(fresh, tmp_path / "out" / "model.safetensors")
    state = program.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
    assert "head.also_shift" in state and fresh.head.also_shift is fresh.shift


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    """An untied head would be tied again on loading; another model, or a folder of other things."""
    model, batch = models.gpt2(1), models.tokens(4)
    plan = planned(model, "lm_head  untie(weight)", relax="model")
    program = build(plan, batch, optimizer=sgd)
    program.train_step(batch)
    with pytest.raises(Refusal, match="were trained separately") as caught:
        program.export(tmp_path / "out", model)
    assert caught.value.diagnostic.code == "S631" and not (tmp_path / "out").exists()
    program.export(tmp_path / "out", models.gpt2(1, tied=False))
    with pytest.raises(Refusal, match="not the model that was scheduled") as caught:
        program.export(tmp_path / "out", Odd())
    assert caught.value.diagnostic.code == "S634"
    facts: Any = create_schedule(models.gpt2(1)).model
    with pytest.raises(Refusal, match="give the module that was passed") as caught:
        program.export(tmp_path / "out", facts)
    assert caught.value.diagnostic.code == "S634"
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "mine").write_text("")
    with pytest.raises(Refusal, match="exists, and is not a checkpoint") as caught:
        program.export(tmp_path / "else", models.gpt2(1, tied=False))
    assert caught.value.diagnostic.code == "S632"
