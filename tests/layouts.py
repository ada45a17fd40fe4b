"""Small programs under several layouts, for tests of checkpoints and exports."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from schedlang import last_checkpoint
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.mesh import Mesh
from schedlang.ir.model import ModelFacts
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import Prepared, prepare
from schedlang.passes.lower.build import build
from schedlang.primitives.pad import pad
from schedlang.primitives.pipeline import pipeline
from schedlang.primitives.pipeline_split import pipeline_split
from schedlang.primitives.shard import shard
from schedlang.primitives.zero import zero
from schedlang.runtime.batch import largest_part
from schedlang.runtime.launch.pickling import dump_job
from schedlang.runtime.program import Program
from tests.models import gpt2, tokens

SEED = 3


class OddModel(nn.Module):
    """A model with odd sizes, one row, a scalar, a frozen weight, and a buffer with two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.row = nn.Parameter(torch.randn(1, 7))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 5)
        self.head.bias.requires_grad_(False)
        self.register_buffer("shift", torch.randn(7))
        self.register_buffer("unsaved", torch.ones(7), persistent=False)
        self.double()
        self.head.register_buffer("also_shift", self.shift)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x + self.shift * self.unsaved
        for block in self.blocks:
            h = torch.tanh(block(h)) * self.gain + self.row
        return ((self.head(h).sum(-1) - y) ** 2).mean()


def points(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 7, generator=g, dtype=torch.float64)
    return {"x": x, "y": x.sum(1)}


def ids(seed: int) -> dict[str, Tensor]:
    return tokens(rows=8, seed=seed)


def _gpt2_tp(plan: Plan) -> Plan:
    """Tensor parallel, the fused q, k, v in three blocks, the vocabulary of 61 padded."""
    t = "transformer"
    h = [f"{t}.h.{k}" for k in range(2)]
    plan = plan.add(pad("vocab", multiple=4), [f"{t}.wte"])
    plan = plan.add(shard("vocab", over="tp"), [f"{t}.wte", "lm_head"])
    plan = plan.add(shard("col", over="tp", blocks=3), [f"{x}.attn.c_attn" for x in h])
    plan = plan.add(shard("col", over="tp"), [f"{x}.mlp.c_fc" for x in h])
    return plan.add(
        shard("row", over="tp"), [f"{x}.{y}.c_proj" for x in h for y in ("attn", "mlp")]
    )


LAYOUTS: dict[str, tuple[tuple[tuple[str, int], ...], dict[str, Any]]] = {
    "one": ((), {}),
    "tp2": ((("tp", 2),), {}),
    "dp2": ((("dp", 2),), {"stage": 0}),
    "dp2z1": ((("dp", 2),), {"stage": 1}),
    "dp2z3": ((("dp", 2),), {"stage": 3}),
    "pp2": ((("pp", 2),), {}),
    "dp2tp2": ((("dp", 2), ("tp", 2)), {"stage": 3}),
    "pp2dp2": ((("pp", 2), ("dp", 2)), {"stage": 1}),
}


def plan_of(name: str, model: nn.Module) -> Plan:
    axes, options = LAYOUTS[name]
    plan, names = Plan.empty(ModelFacts(model), Mesh(axes)), dict(axes)
    trunk = "transformer.h" if hasattr(model, "transformer") else "blocks"
    if "tp" in names:
        plan = _gpt2_tp(plan)
    if "pp" in names:
        plan = plan.add(pipeline_split(over="pp"), [trunk])
    if "dp" in names:
        plan = plan.add(zero(over=("dp",), **options), [""])
    return plan.add(pipeline(order="GPipe", micro=2), [""]) if "pp" in names else plan


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with two parameter groups, each with its own learning rate."""
    flat = [p for _, p in parameters if p.ndim < 2]
    full = [p for _, p in parameters if p.ndim >= 2]
    groups = [{"params": flat, "lr": 2e-2}, {"params": full, "weight_decay": 0.1}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)


_prepared: dict[tuple[str, bool], bytes] = {}


def prepared_for(name: str, plan: Plan, odd: bool = False) -> Prepared:
    """The plan of a layout prepared: once in this process, and a copy for each program, as `verify`
    sends it to each rank."""
    if (name, odd) not in _prepared:
        sample = largest_part(batch_of(odd)(0), plan.share_weights, plan.micro)
        _prepared[name, odd] = dump_job(prepare(plan, sample, trains=False))
    prepared: Prepared = pickle.loads(_prepared[name, odd])
    return prepared


def program_under(
    name: str, odd: bool = False, *, fresh: bool = False, optimizer: Any = adamw
) -> Program:
    """A program under a layout; `fresh`: all values differ, and loading must replace them."""
    model = OddModel() if odd else gpt2(layers=2)
    if fresh:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor))
        if odd:
            model.unsaved.fill_(1.0)
    plan = plan_of(name, model)
    program = build(
        plan,
        batch_of(odd)(0),
        optimizer=optimizer,
        clip=1.0,
        seed=SEED,
        prepared=prepared_for(name, plan, odd),
    )
    if fresh and program.optimizer is not None:
        for group in program.optimizer.param_groups:
            group["lr"] = 7.0
    return program


def batch_of(odd: bool) -> Callable[[int], dict[str, Tensor]]:
    return points if odd else ids


def program_state(program: Program) -> dict[str, Any]:
    groups = {}
    if program.optimizer is not None:
        names = {id(p): n for n, p in program.assembly.parameters.items()}
        for group in program.optimizer.param_groups:
            hyper = {k: v for k, v in group.items() if k != "params"}
            groups.update({names[id(p)]: hyper for p in group["params"]})
    state = {n: t.clone() for n, t in program.state_dict().items()}
    moments = copy.deepcopy(program.optimizer_state())
    return {"state": state, "moments": moments, "groups": groups, "step": program.step}


def assert_equal(actual: Any, expected: Any, path: str = "") -> None:
    """Assert that both have the same names and bitwise equal values."""
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys(), path
        for key in actual:
            assert_equal(actual[key], expected[key], f"{path}/{key}")
    elif isinstance(actual, Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), path
    else:
        assert actual == expected, path


def odd_program() -> Program:
    return program_under("one", True)


def assert_refused(act: Callable[[], Any], code: str, *texts: str) -> None:
    with pytest.raises(Refusal) as caught:
        act()
    assert caught.value.diagnostic.code == code
    for text in texts:
        assert text in caught.value.render()


def trained_program() -> Program:
    program = odd_program()
    program.train_step(points(0))
    return program


def newest_checkpoint(folder: Path) -> Path:
    """The last complete checkpoint of a folder."""
    checkpoint = last_checkpoint(folder)
    assert checkpoint is not None
    return checkpoint


def save_old_format(step: Path, folder: Path) -> Path:
    """Write a checkpoint in the former format: by torch alone, in the folder itself."""
    torch_file = folder.with_name("whole.pt")
    dcp_to_torch_save(step, torch_file)
    contents = torch.load(torch_file)
    flat: dict[str, Any] = {"schedlang": contents["schedlang"]}
    flat |= {f"model.{name}": tensor for name, tensor in contents["model"].items()}
    for name, state in contents.get("optim", {}).get("state", {}).items():
        flat |= {f"optim.state.{name}.{key}": tensor for key, tensor in state.items()}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(flat, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    torch_file.unlink()
    return folder


def index_table(step: Path) -> dict[str, Any]:
    """The index of a checkpoint as one table with its head, as former versions stored it."""
    head, table_line, *lines = (step / "schedlang.json").read_bytes().splitlines()
    index = json.loads(table_line)
    names = list(index["lengths"])
    for entry, line in zip(index["tensors"].values(), lines, strict=True):
        del entry["bytes"]
        dims = len(entry["shape"])
        entry["boxes"] = [
            [row[:dims], row[dims : 2 * dims], [names[row[-4]], *row[-3:]]]
            for row in json.loads(line)["boxes"]
        ]
    return {"head": json.loads(head), **index}


def write_index(step: Path, index: dict[str, Any], version: int) -> None:
    """Write such a table as an index of a former version, with a correct checksum."""
    head = index.pop("head")
    body = json.dumps(index).encode()
    head |= {"schedlang": version, "bytes": len(body)}
    sums = head["checksums"] if version > 2 else head.pop("checksums") and ""
    head["crc32"] = zlib.crc32(body, zlib.crc32(sums.encode()))
    (step / "schedlang.json").write_bytes(json.dumps(head).encode() + b"\n" + body)


def program_of(model: nn.Module, optimizer: Any = adamw) -> Program:
    return build(Plan.empty(ModelFacts(model)), points(0), optimizer=optimizer)
