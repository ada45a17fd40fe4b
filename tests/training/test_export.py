"""Exported weights in safetensors: a program of any layout writes files that `transformers`
loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
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
from tests.layouts import OddModel, points, program_of
from tests.proofs import make_plan, run_prepared, sgd

VOCAB_SPLIT = (
    "transformer.wte  pad(vocab, multiple=4)\ntransformer.wte, lm_head  shard(vocab, over=tp)\n"
)
STAGES = 'pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "tied embeddings, split, in stages": (
        lambda: models.gpt2(2),
        f"{VOCAB_SPLIT}transformer.h  {STAGES}",
        "pp=2, tp=2",
    ),
    "fused experts, spread and sliced": (
        lambda: small_models.mixtral(2),
        "model.layers.*.mlp.experts  expert_parallel(over=dp)\nzero(stage=3, over=dp)",
        "dp=2",
    ),
}


def export_step(plan: Plan, prepared: Any, path: str, model: nn.Module) -> dict[str, Tensor]:
    """On this rank: export, train a step, export again, and return the state."""
    batch = models.tokens(8)
    program = build(plan, batch, optimizer=sgd, prepared=prepared)
    program.train_step(batch)
    program.export(path, model)
    program.export(path, model)  # replaces the first export
    return program.state_dict()


@pytest.mark.parametrize("name", CASES)
def test_from_pretrained_loads_it(name: str, tmp_path: Path, threads: Threads) -> None:
    """Every weight equals the trained one to the last bit, and tied weights are tied."""
    make, rows, mesh = CASES[name]
    model, folder = make(), tmp_path / "out"
    config = str(model.config)
    plan = make_plan(model, rows, mesh)
    state = run_prepared(threads, export_step, plan, models.tokens(8), str(folder), model)[0]
    assert str(model.config) == config
    loaded: Any = type(model).from_pretrained(folder, dtype=torch.float64)
    values = loaded.state_dict()
    assert values.keys() == state.keys()
    assert not [key for key in values if not torch.equal(values[key], state[key])]
    assert any(not torch.equal(values[key], value) for key, value in model.state_dict().items())
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert (
        (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied == ("tied" in name)
    )


def export_shards(
    plan: Plan, prepared: Any, path: str, model: nn.Module, most: int
) -> tuple[int, dict[str, Tensor]]:
    """Export in several files: return the most bytes of full tensors on this rank, and the
    state."""
    program = build(plan, models.tokens(8), optimizer=sgd, prepared=prepared)
    program.train_step(models.tokens(8))
    gather_box, largest = weight_export.GatheredTensors.gather_box, 0

    def counted(self: weight_export.GatheredTensors, *args: Any) -> Tensor:
        nonlocal largest
        tensor = gather_box(self, *args)
        tensors = self.cached[self.writer].values()
        largest = max(
            largest, sum(tensor_held.nbytes for tensor_held in tensors if tensor_held is not None)
        )
        return tensor

    program_shards = type("Counting", (weight_export.GatheredTensors,), {"gather_box": counted})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weight_export, "GatheredTensors", program_shards)
        program.export(path, model, shard=most)
    return largest, program.state_dict()


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, each from the one file that the index names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        file_tensors = load_file(file)
        assert (
            all(index[name] == file.name for name in file_tensors)
            and not tensors.keys() & file_tensors.keys()
        )
        tensors.update(file_tensors)
    assert tensors.keys() == index.keys()
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_every_rank_writes_files_of_its_own(name: str, tmp_path: Path, pool: Any) -> None:
    """The tensors equal those of `save_pretrained`, bit by bit; with tied weights the files do too.
    No rank ever has more than two full parameters."""
    make, rows, mesh = CASES[name]
    model, folder, most = make(), tmp_path / "out", 12_000
    plan = make_plan(model, rows, mesh)
    ranks = run_prepared(pool, export_shards, plan, models.tokens(8), str(folder), model, most)
    state = ranks[0][1]
    make().save_pretrained(tmp_path / "whole", state_dict=dict(state), max_shard_size=most)
    exported, expected = read_shards(folder), read_shards(tmp_path / "whole")
    assert exported.keys() == expected.keys() and len(exported) > 20
    assert all(torch.equal(file_path, expected[key]) for key, file_path in exported.items())
    files = [file_path for file_path in folder.iterdir() if file_path.suffix == ".safetensors"]
    assert len(files) > 2 and max(file_path.stat().st_size for file_path in files) < 2 * most
    if "tied" in name:
        file_bytes = {file_path.name: file_path.read_bytes() for file_path in folder.iterdir()}
        assert file_bytes == {
            file_path.name: file_path.read_bytes() for file_path in (tmp_path / "whole").iterdir()
        }
    sizes = sorted(value.nbytes for value in state.values())
    assert all(0 < largest <= sum(sizes[-2:]) < sum(sizes) / 2 for largest, _ in ranks)


def test_any_module(tmp_path: Path) -> None:
    """A module of no library, with a buffer of two names, is one file that safetensors loads."""
    from safetensors.torch import load_model

    program = program_of(OddModel())
    program.train_step(points(0))
    program.export(tmp_path / "out", OddModel())
    fresh = OddModel()
    load_model(fresh, tmp_path / "out" / "model.safetensors")
    state = program.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
    assert "head.also_shift" in state and fresh.head.also_shift is fresh.shift


class WithFiles(OddModel):
    """A model with a `save_pretrained` that is not transformers'."""

    def save_pretrained(self, folder: Any, state_dict: Any = None, **_: Any) -> None:
        values = {key: value for key, value in state_dict.items() if "also" not in key}
        safetensors.torch.save_file(values, f"{folder}/model.safetensors")


class OwnValues(OddModel):
    """One that writes the values of the module, which a program does not train."""

    def save_pretrained(self, folder: Any, **_: Any) -> None:
        safetensors.torch.save_model(self, f"{folder}/model.safetensors")


def test_files_of_another_library(tmp_path: Path) -> None:
    """Its files hold the trained values, or the export is refused (S631): it must neither write
    those of before the training, nor read memory that is not there."""
    program = program_of(WithFiles())
    program.train_step(points(0))
    for _ in range(2):
        program.export(tmp_path / "out", WithFiles())
    state = program.state_dict()
    for key, value in safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(state[key], value)
    program = program_of(OwnValues())
    with pytest.raises(Refusal, match="writes other values than it is given") as caught:
        program.export(tmp_path / "own", OwnValues())
    assert caught.value.diagnostic.code == "S631" and not (tmp_path / "own").exists()


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    """An untied head that loading would tie again; another model; a folder of other files."""
    model, batch = models.gpt2(1), models.tokens(4)
    plan = make_plan(model, "lm_head  untie(weight)", relax="model")
    program = build(plan, batch, optimizer=sgd)
    program.train_step(batch)
    with pytest.raises(Refusal, match="were trained separately") as caught:
        program.export(tmp_path / "out", model)
    assert caught.value.diagnostic.code == "S631" and not (tmp_path / "out").exists()
    program.export(tmp_path / "out", models.gpt2(1, tied=False))
    with pytest.raises(Refusal, match="not the model that was scheduled") as caught:
        program.export(tmp_path / "out", OddModel())
    assert caught.value.diagnostic.code == "S634"
    not_a_module: Any = create_schedule(models.gpt2(1)).model
    with pytest.raises(Refusal, match="give the module that was passed") as caught:
        program.export(tmp_path / "out", not_a_module)
    assert caught.value.diagnostic.code == "S634"
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "mine").write_text("")
    with pytest.raises(Refusal, match="exists, and is not a checkpoint") as caught:
        program.export(tmp_path / "else", models.gpt2(1, tied=False))
    assert caught.value.diagnostic.code == "S632"


def test_a_weight_that_rows_have_tied(tmp_path: Path, threads: Threads) -> None:
    """A model that does not tie the two finds the one value under both names."""
    model = models.gpt2(2, tied=False)
    rows = (
        "transformer.wte, lm_head  tie(weight)\n"
        'transformer.h  pipeline_split(over=pp)\npipeline(order="GPipe", micro=2)'
    )
    plan = make_plan(model, rows, "pp=2", "model")
    state = run_prepared(
        threads, export_step, plan, models.tokens(8), str(tmp_path / "out"), model
    )[0]
    loaded: Any = type(model).from_pretrained(tmp_path / "out", dtype=torch.float64)
    values = loaded.state_dict()
    assert not [key for key in state if not torch.equal(values[key], state[key])]


class Waves(nn.Module):
    """Complex parameters, as no safetensors file has them."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.ones(4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.waves).abs().mean()


def export_waves(plan: Plan, path: str) -> None:
    build(plan, {"x": torch.ones(4, 4)}, optimizer=sgd).export(path, Waves())


def test_a_dtype_that_no_file_has(tmp_path: Path, threads: Threads) -> None:
    """It is refused by name before a rank writes (S631): ranks would wait for the first one."""
    plan = make_plan(Waves(), "zero(stage=0, over=dp)", "dp=2")
    with pytest.raises(Refusal, match="`waves` is complex128") as caught:
        threads.run(export_waves, 2, plan, str(tmp_path / "out"))
    assert caught.value.diagnostic.code == "S631" and not (tmp_path / "out").exists()
