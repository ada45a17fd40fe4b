"""Folders that DeepSpeed has written: weights and optimizer state of ZeRO, for any layout."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.runtime.transfer.transfer import transfer
from tests.layouts import assert_equal
from tests.proofs import make_plan
from tests.ranks import run_ranks

LAYOUTS = {
    "tp": ("blocks.*.0  shard(col, over=tp)\nblocks.*.2  shard(row, over=tp)", "tp=2"),
    "pp": ('blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2"),
    "z3": ("zero(stage=3, over=dp)", "dp=2"),
}
CLOSE = dict(rtol=1e-4, atol=1e-6)  # DeepSpeed computes in float32


class Tied(nn.Module):
    """Blocks between a table and itself, a frozen layer, a buffer; widths that no rank divides."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 9)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(9, 14), nn.Tanh(), nn.Linear(14, 9)) for _ in range(2)
        )
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(1.0 + seed))
        self.head = nn.Linear(9, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(words)
        x = x * self.scale.to(x.dtype)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.frozen(x)).flatten(0, 1).float(), labels.flatten())


def batch(seed: int, rows: int = 12) -> dict[str, Tensor]:
    words = torch.randint(7, (rows, 5), generator=torch.Generator().manual_seed(seed))
    return {"words": words, "labels": (words * 5 + 1) % 7}


def groups_of(named: Any) -> list[dict[str, Any]]:
    """Return two groups: biases without weight decay, at another rate."""
    pairs = [(name, p) for name, p in named if p.requires_grad]
    biases = [p for name, p in pairs if name.endswith("bias")]
    others = [p for name, p in pairs if not name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.1}]
    return groups + [{"params": biases, "lr": 0.01, "weight_decay": 0.0}] * bool(biases)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(named), lr=0.02, eps=1e-4)


def train(model: Any, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- the format, as DeepSpeed 0.19.8 writes it -----------------------------------------------------


class LossScaler:
    """Stands for DeepSpeed's class of this name."""

    def __init__(self) -> None:
        self.cur_scale, self.dynamic, self.dtype = 1.0, False, torch.float32


class ZeroStageEnum(int, enum.Enum):
    """Stands for DeepSpeed's class of this name."""

    optimizer_states, gradients, weights = 1, 2, 3


@dataclass
class fragment_address:  # noqa: N801
    """Stands for DeepSpeed's class of this name."""

    numel: int
    start: int


ITS_CLASSES = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextlib.contextmanager
def its_modules() -> Iterator[None]:
    """Context in which the classes above are written as DeepSpeed's."""
    before = {kind: kind.__module__ for kind in ITS_CLASSES}
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ITS_CLASSES.items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                patch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
            setattr(sys.modules[name], kind.__name__, kind)
            kind.__module__ = name
        yield
    for kind, name in before.items():
        kind.__module__ = name


def cut(flat: Tensor, world: int, padded: int) -> list[Tensor]:
    """Cut a flat tensor, padded to a multiple of `padded`, into equal parts."""
    size = -(-len(flat) // padded) * padded
    return list(F.pad(flat, (0, size - len(flat))).chunk(world))


def write_zero(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, world: int
) -> None:
    """Write the checkpoint that ZeRO of a stage has after two steps, on `world` ranks."""
    tag = folder / "global_step2"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step2")
    names = {p: name for name, p in model.named_parameters()}
    groups = [[p for p in group["params"]] for group in optimizer.param_groups]
    ranks: list[dict[str, Any]] = [{"flat": [], "state": {}, "addresses": []} for _ in range(world)]
    for number, parameters in enumerate(groups):

        def parts_of(values: list[Tensor], padded: bool = True) -> list[Tensor]:
            if stage == 3:
                columns = [cut(v.detach().flatten().clone(), world, world) for v in values]
                return [torch.cat(rank_parts) for rank_parts in zip(*columns)]
            flat = torch.cat([v.detach().flatten() for v in values])
            parts = cut(flat, world, 2 * world)
            if not padded:  # the last rank's weights are without padding
                parts[-1] = parts[-1][: len(parts[-1]) - sum(map(len, parts)) + len(flat)]
            return [part.clone() for part in parts]

        states = [optimizer.state[p] for p in parameters]
        moments = {k: parts_of([s[k] for s in states]) for k in ("exp_avg", "exp_avg_sq")}
        for rank, part in enumerate(parts_of(parameters, padded=False)):
            state = {k: parts[rank] for k, parts in moments.items()}
            ranks[rank]["flat"].append(part)
            ranks[rank]["state"][number] = {"step": states[0]["step"].clone(), **state}
            ranks[rank]["addresses"].append({"x": fragment_address(len(part), 0)})
    hypers = [{**g, "params": [k]} for k, g in enumerate(optimizer.param_groups)]
    shapes = [{names[p]: p.shape for p in parameters} for parameters in groups]
    frozen = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
    module = {n: v.bfloat16() if n == "frozen.bias" else v for n, v in model.state_dict().items()}
    for rank, shards in enumerate(ranks):
        base = {"state": shards["state"], "param_groups": hypers}
        common = {"zero_stage": ZeroStageEnum(stage), "loss_scaler": LossScaler()}
        if stage == 3:
            mine = {"fp32_flat_groups": shards["flat"], "optimizer_state_dict": base}
        else:
            mine = {"single_partition_of_fp32_groups": shards["flat"], "base_optimizer_state": base}
            mine["param_slice_mappings"] = shards["addresses"]
        with its_modules():
            path = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": {**common, **mine}}, path)
        chunks = {n: cut(module[n].flatten(), world, world)[rank].clone() for n in frozen}
        held = {n: v.new_empty(0) if v.dim() else v for n, v in module.items()}
        described = {
            "module": held if stage == 3 else module,
            "buffer_names": ["scale"],
            "param_shapes": shapes,
            "frozen_param_shapes": {n: p.shape for n, p in frozen.items()},
            "frozen_param_fragments": chunks if stage == 3 else frozen,
            "shared_params": {} if rank else {"head.weight": "embed.weight"},
            **{"dp_world_size": world, "mp_world_size": 1, "global_steps": 2},
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        if stage == 3 or not rank:
            torch.save(described, tag / f"{name}_model_states.pt")


def go_on(rank: int, folder: Path, cases: list[str], clip: float | None) -> dict[str, Any]:
    """Train on in three layouts from each folder: return steps, losses and states by name."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for case in cases:
        for layout, (rows, mesh) in LAYOUTS.items():
            plan = make_plan(Tied(1), rows, mesh)
            program = build(plan, batch(0), optimizer=adamw, clip=clip)
            transfer(folder / case, program, optimizer=True)
            losses = [float(program.train_step(batch(step))) for step in (2, 3)]
            results[f"{case} {layout}"] = program.step, losses, program.state_dict()
    return results


@pytest.fixture
def trained() -> tuple[Tied, torch.optim.Optimizer]:
    """A model after two steps, whose frozen bias is one of bfloat16."""
    model = Tied()
    model.frozen.bias.data = model.frozen.bias.data.bfloat16().float()
    optimizer = adamw(model.named_parameters())
    train(model, optimizer, 0, 1)
    return model, optimizer


def test_training_goes_on_where_zero_stopped(
    tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]
) -> None:
    """Under tensor, pipeline and data parallelism, two more steps are those of one process."""
    model, optimizer = trained
    cases = {"two": (2, 3), "one": (1, 2), "three": (3, 4)}
    for case, (stage, world) in cases.items():
        write_zero(tmp_path / case, model, optimizer, stage, world)
    losses = train(model, optimizer, 2, 3)
    for results in run_ranks(2, go_on, tmp_path, list(cases), None):
        assert len(results) == len(cases) * len(LAYOUTS)
        for step, further_losses, state in results.values():
            assert step == 4
            assert further_losses == pytest.approx(losses, rel=1e-5)
            torch.testing.assert_close(state, model.state_dict(), **CLOSE)


def test_dtypes_and_names(tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]) -> None:
    """A model in the dtype of the run gets rounded weights; names may be below a prefix; a model
    without values is filled."""
    model, optimizer = trained
    write_zero(tmp_path / "saved", model, optimizer, 3, 2)
    whole = model.state_dict()
    taken = Tied(1)
    transfer(tmp_path / "saved" / "global_step2", taken)
    assert_equal(taken.state_dict(), whole)
    with torch.device("meta"):
        empty = Tied()
    filled = build(make_plan(empty, ""), batch(0), weights=tmp_path / "saved" / "global_step2")
    assert_equal(filled.state_dict(), whole)
    inner = nn.ModuleDict({"net": model})
    write_zero(tmp_path / "below", inner, optimizer, 2, 2)
    for file in (tmp_path / "below" / "global_step2").glob("mp_rank*"):
        states = torch.load(file)
        states["module"] = {n: v.bfloat16() for n, v in states["module"].items()}
        states["buffer_names"] = ["net.scale"]
        states["shared_params"] = {"net.head.weight": "net.embed.weight"}
        torch.save(states, file)
    low = Tied(1).bfloat16()
    transfer(tmp_path / "below", low)
    assert_equal(low.state_dict(), {n: v.bfloat16() for n, v in whole.items()})


class Runs:
    """An object whose reading would run a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def change(file: Path, **entries: Any) -> None:
    with its_modules():
        states = torch.load(file, weights_only=False)
        torch.save({**states, **entries}, file)


def as_its_own_adam(file: Path, **entries: Any) -> None:
    """Write the groups and steps of DeepSpeed's own Adam."""
    with its_modules():
        states = torch.load(file, weights_only=False)
        base = states["optimizer_state_dict"]["base_optimizer_state"]
        own = ("lr", "betas", "eps", "weight_decay", "params")
        base["param_groups"] = [
            {**{k: g[k] for k in own}, "bias_correction": True, **entries}
            for g in base["param_groups"]
        ]
        for state in base["state"].values():
            state["step"] = int(state["step"])
        torch.save(states, file)


def test_the_adam_of_deepspeed(tmp_path: Path, trained: tuple[Tied, torch.optim.Optimizer]) -> None:
    """Its groups and steps become those of torch's AdamW; another kind of decay is refused."""
    model, optimizer = trained
    write_zero(tmp_path / "saved", model, optimizer, 2, 2)
    tag = tmp_path / "saved" / "global_step2"
    for file in tag.glob("*optim_states.pt"):
        as_its_own_adam(file)
    program = build(make_plan(Tied(1), ""), batch(0), optimizer=adamw)
    transfer(tmp_path / "saved", program, optimizer=True)
    losses = train(model, optimizer, 2, 3)
    assert [float(program.train_step(batch(s))) for s in (2, 3)] == pytest.approx(losses, rel=1e-5)
    settings = {"type": "Adam", "params": {"adam_w_mode": False}}
    change(tag / "mp_rank_00_model_states.pt", ds_config={"optimizer": settings})
    with pytest.raises(Refusal) as caught:
        transfer(tmp_path / "saved", program, optimizer=True)
    assert caught.value.diagnostic.code == "S636" and "not decoupled" in caught.value.render()
    for file in tag.glob("*optim_states.pt"):
        as_its_own_adam(file, bias_correction=False)
    with pytest.raises(Refusal) as caught:
        transfer(tmp_path / "saved", program, optimizer=True)
    assert "without bias correction" in caught.value.render()


def test_what_is_refused(
    tmp_path: Path,
    trained: tuple[Tied, torch.optim.Optimizer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is refused before anything is changed, and no code in a file is run."""
    model, optimizer = trained
    monkeypatch.chdir(tmp_path)
    numbers = count()

    def refused(note: str, code: str = "S633", optimizer: Any = None, seed: int = 1) -> None:
        plan = make_plan(Tied(seed).bfloat16() if seed == 2 else Tied(seed), "")
        program = build(plan, batch(0), optimizer=optimizer)
        before = {n: v.clone() for n, v in program.state_dict().items()}
        with pytest.raises(Refusal) as caught:
            transfer(folder, program, optimizer=optimizer is not None)
        assert caught.value.diagnostic.code == code and note in caught.value.render()
        assert_equal(program.state_dict(), before)

    def written(stage: int, world: int) -> Path:
        folder = tmp_path / str(next(numbers))
        write_zero(folder, model, optimizer, stage, world)
        return folder

    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "latest").write_bytes(b"global\0step2")
    folder = damaged
    refused("`latest` is damaged")
    folder = written(2, 3)
    tag, file = folder / "global_step2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    refused("and the program's `dampening`", "S636", lambda n: torch.optim.SGD([p for _, p in n]))
    refused("own copy of `embed.weight` is float32", "S636", adamw, seed=2)
    (tag / "expp_rank_0_mp_rank_00_optim_states.pt").touch()
    refused("expert parallelism")
    (tag / "expp_rank_0_mp_rank_00_optim_states.pt").rename(tag / "layer_00-model_states.pt")
    refused("pipeline")
    (tag / "layer_00-model_states.pt").unlink()
    change(tag / "mp_rank_00_model_states.pt", client=Runs())
    refused("an object of `posix.mkdir`")
    assert not (tmp_path / "ran").exists()
    (tag / file).unlink()
    refused("of rank 1 is missing")
    folder = written(3, 2)
    tag = folder / "global_step2"
    (tag / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    refused("1 of the 2 ranks have a file of the model")
    (tag / file).unlink()
    refused("it is of 2 x 1 ranks")
    folder = written(3, 2)
    tag = folder / "global_step2"
    state = torch.load(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    shapes = {n: torch.Size([8, *s[1:]]) for n, s in state["param_shapes"][0].items()}
    change(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", param_shapes=[shapes])
    refused("group 0 of rank 0 has")


# -- written by DeepSpeed itself -------------------------------------------------------------------


def train_zero(rank: int, folder: Path, port: int) -> None:
    """Train four steps under each stage of ZeRO, and save after two."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in environment.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for stage in (1, 2, 3):
        model = Tied()
        zero = {"stage": stage, "round_robin_gradients": stage == 2, "sub_group_size": 150}
        config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": zero}
        config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 1.0}
        optimizer = torch.optim.AdamW(groups_of(model.named_parameters()), lr=0.02, eps=1e-4)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for step in range(4):
            if step == 2:
                engine.save_checkpoint(str(folder / str(stage)))
            rows = {name: value.chunk(2)[rank] for name, value in batch(step).items()}
            engine.backward(engine(**rows))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            whole = {n: p.data.clone() for n, p in engine.module.named_parameters()}
        if not rank:
            torch.save(whole, folder / f"{stage}.pt")


@pytest.mark.others
def test_folders_that_deepspeed_writes(tmp_path: Path) -> None:
    """Two more steps in each layout give the weights of two more steps of DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    mp.spawn(train_zero, (tmp_path, 29581), nprocs=2)
    for results in run_ranks(2, go_on, tmp_path, ["1", "2", "3"], 1.0):
        for name, (step, _, state) in results.items():
            right = torch.load(tmp_path / f"{name[0]}.pt")
            assert step == 4 and len(right) == 11
            torch.testing.assert_close({n: state[n] for n in right}, right, **CLOSE)
