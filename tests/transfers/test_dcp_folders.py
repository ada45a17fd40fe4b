"""Folders that programs of torch have written with torch.distributed.checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.runtime.program import Program
from schedlang.runtime.transfer.folders import find_head
from schedlang.runtime.transfer.transfer import transfer
from tests.layouts import assert_equal
from tests.proofs import make_plan
from tests.ranks import run_ranks

LAYOUTS = {
    "tp": ("blocks.*.0  shard(col, over=tp)\nblocks.*.2  shard(row, over=tp)", "tp=2"),
    "pp": ('blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2"),
    "z3": ("zero(stage=3, over=dp)", "dp=2"),
}


class Tied(nn.Module):
    """Blocks between a table and itself; widths that two ranks do not divide equally."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 10)) for _ in range(2)
        )
        self.head = nn.Linear(10, 7, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(seed: int) -> dict[str, Tensor]:
    words = torch.randint(7, (8, 5), generator=torch.Generator().manual_seed(seed))
    return {"words": words, "labels": (words * 5 + 1) % 7}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Return AdamW in two groups: biases without weight decay, at another rate."""
    pairs = list(named)
    biases = [p for name, p in pairs if name.endswith("bias")]
    others = [p for name, p in pairs if not name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.1}]
    groups += [{"params": biases, "lr": 0.01, "weight_decay": 0.0}] if biases else []
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-4)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.02, momentum=0.9)


def train_plainly(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    model = Tied()
    optimizer, losses = adamw(model.named_parameters()), []
    for step in range(steps):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.state_dict(), losses


def make_sliced() -> tuple[Any, torch.optim.Optimizer]:
    model: Any = Tied()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model.named_parameters())


def train_sliced(rank: int, model: Any, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        model(**{name: value.chunk(2)[rank] for name, value in batch(step).items()}).backward()
        optimizer.step()
        optimizer.zero_grad()


def go_back(rank: int, program: Program) -> dict[str, Tensor]:
    """Take the full state of a program into FSDP2, and train two more steps there."""
    state, moments = program.state_dict(), program.optimizer_state()
    model, optimizer = make_sliced()
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state, options=options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    saved: Any = {"state": moments, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    train_sliced(rank, model, optimizer, 2, 3)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def save_sliced(rank: int, folder: Path) -> None:
    """Train two steps under FSDP2, and save them as torch's tutorial and as torchtitan do."""
    model, optimizer = make_sliced()
    train_sliced(rank, model, optimizer, 0, 1)
    weights, flat = get_model_state_dict(model), StateDictOptions(flatten_optimizer_state_dict=True)
    listed = {"model": weights, "optim": get_optimizer_state_dict(model, optimizer)}
    dcp_save({"app": listed}, checkpoint_id=folder / "app")
    flattened = get_optimizer_state_dict(model, optimizer, options=flat)
    dcp_save({**weights, "optimizer": flattened}, checkpoint_id=folder / "flat")
    dcp_save({"a": weights, "b": weights}, checkpoint_id=folder / "two")


def go_on(rank: int, folder: Path) -> dict[str, Any]:
    """Save, then train on in three layouts: return the losses, and refusals, by name."""
    torch.set_num_threads(1)
    save_sliced(rank, folder)
    results: dict[str, Any] = {}
    for layout, (rows, mesh) in LAYOUTS.items():
        program = build(make_plan(Tied(), rows, mesh), batch(0), optimizer=adamw)
        transfer(folder / ("flat" if layout == "z3" else "app"), program, optimizer=True)
        if layout == "tp":
            results["back"] = go_back(rank, program)
        losses = [float(program.train_step(batch(step))) for step in (2, 3)]
        results[layout] = program.step, losses, program.state_dict()
    rows, mesh = LAYOUTS["z3"]
    program = build(make_plan(Tied(), rows, mesh), batch(0), optimizer=sgd)
    before = program.state_dict()
    (folder / "app" / "__1_0.distcp").unlink(missing_ok=True)
    for name in ("flat", "two", "app"):
        with pytest.raises(Refusal) as caught:
            transfer(folder / name, program, optimizer=name == "flat")
        results[name] = caught.value.render()
    assert_equal(program.state_dict(), before)
    return results


def test_training_goes_on_where_fsdp_stopped(tmp_path: Path) -> None:
    """Under tensor, pipeline and data parallelism, two more steps are those of one process; another
    optimizer, weights twice and missing files are refused before anything is changed."""
    state, losses = train_plainly(4)
    for results in run_ranks(2, go_on, tmp_path):
        assert "S636" in results["flat"] and "`momentum`" in results["flat"]
        assert "S634" in results["two"]
        assert "S633" in results["app"] and "__1_0.distcp" in results["app"]
        torch.testing.assert_close(results["back"], state, rtol=1e-9, atol=1e-12)
        for layout in LAYOUTS:
            step, further_losses, further_state = results[layout]
            assert step == 4
            assert further_losses == pytest.approx(losses[2:], rel=1e-9)
            for key, value in state.items():
                torch.testing.assert_close(further_state[key], value, rtol=1e-9, atol=1e-12)


def test_which_prefix_names_have() -> None:
    """The model's own names or `model.` first; else another, if the rest is optimizer state."""
    names = {"a.weight", "b.weight"}
    assert find_head(names, ["a.weight", "model.a.weight", "model.b.weight"]) == "model."
    assert find_head(names, ["model.a.weight", "ema.a.weight", "ema.b.weight"]) == "model."
    state = "app.optim.state.a.weight.exp_avg"
    assert find_head(names, ["app.model.a.weight", "app.model.b.weight", state]) == "app.model."
    assert find_head(names, ["x.a.weight", "y.a.weight"]) == find_head(names, ["c"]) == ""
    assert find_head({"weight"}, ["up.weight", "down.scale"]) == ""


@pytest.mark.parametrize(
    "name, help_",
    [
        ("zero_to_fp32.py", "`python zero_to_fp32.py . weights`"),
        ("latest_checkpointed_iteration.txt", "of Megatron"),
        ("pytorch_model.bin", 'torch.load("pytorch_model.bin"'),
    ],
)
def test_folders_of_other_systems(tmp_path: Path, name: str, help_: str) -> None:
    """The message names the system, and how full weights come from its folder."""
    (tmp_path / name).write_text("")
    program = build(make_plan(Tied(), ""), batch(0))
    for read in (partial(transfer, tmp_path, program), partial(program.load, tmp_path)):
        with pytest.raises(Refusal) as caught:
            read()
        assert caught.value.diagnostic.code == "S633" and help_ in caught.value.render()
